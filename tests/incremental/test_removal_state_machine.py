"""Copy into and out of a root of incremental checkpoints, upload into it, and let days pass: nothing is lost or left.

What else happens to the root is in ``shared_files``. Copies and uploads fail, are killed and continued; removals, saves
and the housekeeping of new jobs run in the middle of copies.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import sampling
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from shared_files import CHANGES, CHUNK, GRACE_S, STEPS, Crash, Saved, SharedFiles, check, number_at
from sorted_arguments import save_in_job

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.nearest import open_tier
from bytecheckpoint.checkpoint.sweep import FilesGoneError
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.convert.copy import copy, finish_upload, remove, unfinished_uploads
from bytecheckpoint.engine.objects import OBJECTS
from bytecheckpoint.errors import BytecheckpointError, CheckpointError, KeyExistsError, StorageError
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, decode
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.memory import MemoryBackend

pytestmark = pytest.mark.sampled(2, of="long searches")

OUTSIDE = ("out/a", "out/b")
PLACES = st.sampled_from([*OUTSIDE, *(f"root/step-{step}" for step in range(1, 5))])
OF_A_TRANSFER = st.integers(1, 18)  # its storage operations
ENDS = st.sampled_from(["", "kill", "fail", "fail once"])


class Transfers(SharedFiles):
    """``outside`` is what copies out of the root have made; ``uploads`` is what staged saves have not uploaded.

    ``begun`` are copies that were interrupted: source, number of its save, and target.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole = MemoryBackend(self.store)
        self.folder = Path(tempfile.mkdtemp())
        self.outside: dict[str, Saved] = {}
        self.begun: list[tuple[str, int, str]] = []
        self.uploads: dict[str, tuple[Saved, float, list[str]]] = {}

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.folder)

    @contextmanager
    def _ending(self, how: str, at: int) -> Iterator[None]:
        """Let storage operations of the block fail from number ``at`` on, or only that one."""
        if not how:
            yield
            return
        error = Crash() if how == "kill" else StorageError("the store failed")
        with suppress(Crash, BytecheckpointError), self.fuse.lit(at, error=error, is_once=how == "fail once"):
            yield
        if how == "kill":
            self._begin_process()

    def _url(self, place: str) -> str:
        return f"memory://{self.store}/{place}"

    def _places(self) -> dict[str, Saved]:
        return {**self.outside, **{f"root/{name}": saved for name, saved in self.seen.items()}}

    def _is_at(self, place: str, saved: Saved) -> None:
        name = place.removeprefix("root/")
        if place in OUTSIDE:
            self.outside[place] = saved
        elif name not in self.seen or self.seen[name].number != saved.number:
            self.seen[name] = saved
            self.abandoned.discard((name, saved.number))  # a copy is another attempt

    def _target(self, source: str, to: str) -> str:
        """Where to copy: below the root, names state the step."""
        return to if to in OUTSIDE else f"root/step-{self._places()[source].step}"

    # -- copies --------------------------------------------------------------------------------------------------

    def _copy(self, source: str, target: str) -> None:
        opened = bcp.open(self._url(source))
        copy(opened, self._url(target), window=1, journal=self.folder / "journals")  # in the same order every time

    @precondition(lambda self: self.seen or self.outside)
    @rule(data=st.data(), to=PLACES, how=ENDS, at=OF_A_TRANSFER)
    def copy(self, data: st.DataObject, to: str, how: str, at: int) -> None:
        source = data.draw(st.sampled_from(sorted(self._places())))
        self._copy_and_check(source, self._target(source, to), how, at)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), how=ENDS, at=OF_A_TRANSFER)
    def continue_copy(self, data: st.DataObject, how: str, at: int) -> None:
        source, number, target = data.draw(st.sampled_from(self.begun))
        self.begun.remove((source, number, target))
        saved = self._places().get(source)
        if saved is not None and saved.number == number:
            self._copy_and_check(source, target, how, at)

    def _copy_and_check(self, source: str, target: str, how: str, at: int) -> None:
        saved, before = self._places()[source], self._places().get(target)
        with self._ending(how, at):
            try:
                self._copy(source, target)
            except KeyExistsError:
                assert before is not None
        number = number_at(self.whole, target)
        if before is not None:
            assert number == before.number
        elif number is not None or not how:
            assert number == saved.number
            self._is_at(target, saved)
        else:
            self.begun.append((source, saved.number, target))

    @precondition(lambda self: self.seen or self.outside)
    @rule(
        data=st.data(),
        to=PLACES,
        at=OF_A_TRANSFER,
        what=st.sampled_from(["remove", "save", "clean up", "clean up later"]),
        step=STEPS,
        changes=CHANGES,
    )
    def act_during_a_copy(
        self, data: st.DataObject, to: str, at: int, what: str, step: int, changes: set[tuple[str, int]]
    ) -> None:
        """Of another process: it removes a checkpoint, saves one, or begins a job, also after a day."""
        source = data.draw(st.sampled_from(sorted(self._places())))
        name = data.draw(st.sampled_from(sorted(self.seen))) if what == "remove" and self.seen else ""
        if what == "clean up later" and source == f"root/step-{step}":
            return  # what was removed during a copy that takes longer than a day cannot be sent again
        to = self._target(source, to)
        saved, before = self._places()[source], self._places().get(to)
        changed: list[str] = []  # a name below the root

        def act() -> None:
            if what == "remove":
                if name and self._number_of(name) is not None:
                    changed.append(name)
                    remove(f"{self.root}/{name}")
                return
            self._change(changes)
            if what == "save":
                self._save(step, "auto")
                changed.append(f"step-{step}")
                return
            if what == "clean up later":
                self.passed_s += GRACE_S + 1
            self._begin_process()
            changed.append(f"step-{step}")
            self._manage_once(step)

        failure: BytecheckpointError | None = None
        with self.fuse.lit(at, act):
            try:
                self._copy(source, to)
            except (CheckpointError, KeyExistsError) as error:
                failure = error
        for one in changed:
            if what == "remove":
                self._gone(one)
            else:
                if what != "save":
                    self._went_back(step)
                self._committed(one)
        is_source_changed = changed == [source.removeprefix("root/")]
        number = number_at(self.whole, to)
        if isinstance(failure, CheckpointError):
            assert is_source_changed
        if changed == [to.removeprefix("root/")]:  # before the copy, or after it
            assert number == self.number if what != "remove" else number in (None, saved.number)
        elif before is not None or failure is not None:
            assert number == (before and before.number)
        elif is_source_changed and what != "remove" and number == self.number:
            saved = self._saved(step)
        else:
            assert number == saved.number
        if number == saved.number:
            self._is_at(to, saved)

    def _manage_once(self, step: int) -> None:
        with bcp.CheckpointManager(self.root, preemption=None, save=bcp.SaveOptions(base="auto")) as manager:
            manager.save(step, {"tree": dict(self.tensors)}, force=True, metrics={"n": self.number})

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def remove_outside(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.outside)))
        remove(self._url(place))
        del self.outside[place]

    @invariant()
    def every_copy_loads(self) -> None:
        for place, saved in self.outside.items():
            check(self._url(place), saved.tensors)

    # -- saves to a local disk, and uploads ------------------------------------------------------------------------

    @rule(
        step=STEPS,
        changes=CHANGES,
        base=st.sampled_from(["auto", None]),
        how=st.sampled_from(["", "fail", "fail", "fail once"]),
        at=OF_A_TRANSFER,
    )
    def save_with_tier(self, step: int, changes: set[tuple[str, int]], base: str | None, how: str, at: int) -> None:
        self._change(changes)
        name = f"step-{step}"
        location = bcp.Location(f"{self.root}/{name}", tier=bcp.Tier(self.folder / "tier"))
        state = {"tree": dict(self.tensors)}
        with self._ending(how, at):
            handle = save_in_job(
                location,
                state,
                step=step,
                metadata={"metrics": {"n": self.number}},
                base=base,
                chunk_size=CHUNK,
            )
            with suppress(FilesGoneError):  # another program has removed what the last upload left
                handle.uploaded()
        session_of().engine.uploads.submit(int).result()  # the failed upload has ended
        staged = open_tier(self.folder / "tier", open_backend(f"{self.root}/{name}"))
        is_staged = number_at(staged) == self.number
        references = decode(staged.get(MANIFEST_KEY)).references.name if is_staged else ()
        self.uploads.pop(name, None)
        if is_staged:
            self.uploads[name] = self._saved(step), self.passed_s, references
        if self._number_of(name) == self.number:
            self._committed(name)
            self._end_upload(name, self._unfinished())
        else:
            stored = {stat.key for stat in self.raw.list(f"{OBJECTS}/")}
            assert how or any(f"{OBJECTS}/{reference}" not in stored for reference in references)

    @precondition(lambda self: self.uploads)
    @rule(how=st.sampled_from(["", "", "fail", "fail once", "kill"]), at=OF_A_TRANSFER)
    def upload(self, how: str, at: int) -> None:
        with self._ending(how, at):
            for one in unfinished_uploads(str(self.folder / "tier")):
                finish_upload(one)
        self._end_uploads(is_complete=not how)

    @precondition(lambda self: self.uploads)
    @rule(step=STEPS, changes=CHANGES)
    def upload_by_a_job(self, step: int, changes: set[tuple[str, int]]) -> None:
        self._begin_process()
        self._change(changes)
        tier = self.folder / "tier"
        with bcp.CheckpointManager(
            bcp.Location(self.root, tier=bcp.Tier(tier)), preemption=None, save=bcp.SaveOptions(base="auto")
        ) as manager:
            manager.save(step, {"tree": dict(self.tensors)}, force=True, metrics={"n": self.number})
        self._went_back(step)
        self.abandoned |= {(name, saved.number) for name, (saved, _, _) in self.uploads.items() if saved.step > step}
        self._committed(f"step-{step}")
        self.uploads.pop(f"step-{step}", None)
        self._end_uploads(is_complete=True)

    @precondition(lambda self: any(references for _, _, references in self.uploads.values()))
    @rule(step=STEPS, changes=CHANGES)
    def remove_what_uploads_refer_to(self, step: int, changes: set[tuple[str, int]]) -> None:
        """A job on another machine, without a record of uploads, keeps its own checkpoint only. The uploads go on."""
        self.manage([step], changes, 1)
        for one in unfinished_uploads(str(self.folder / "tier")):
            finish_upload(one)
        self._end_uploads(is_complete=True)

    def _end_upload(self, name: str, unfinished: set[str]) -> None:
        """One that could not remove its record is continued. If the checkpoint was removed since, it may be uploaded
        again."""
        upload = self.uploads.pop(name, None)
        if upload and name in unfinished:
            self.uploads[name] = upload[0], -math.inf, upload[2]

    def _unfinished(self) -> set[str]:
        return {Path(one.path).name for one in unfinished_uploads(str(self.folder / "tier"))}

    def _end_uploads(self, *, is_complete: bool) -> None:
        unfinished = self._unfinished()
        assert not is_complete or not unfinished
        stored = {stat.key for stat in self.raw.list(f"{OBJECTS}/")}
        # One that was repeated may have brought files back that another one had missed.
        is_repeated = any(when == -math.inf for _, when, _ in self.uploads.values())
        for name, (saved, when, references) in [*self.uploads.items()]:
            before, number = self.seen.get(name), self._number_of(name)
            is_replaced = before is not None and before.number > saved.number
            if number == saved.number:
                assert not is_replaced
                self.seen[name] = saved
                self._end_upload(name, unfinished)
            else:
                assert number == (before and before.number)
                if name not in unfinished:
                    has_lost = any(f"{OBJECTS}/{reference}" not in stored for reference in references)
                    assert is_replaced or has_lost or is_repeated or self.passed_s > when
                    del self.uploads[name]

    # ----------------------------------------------------------------------------------------------------------------

    @rule()
    def a_day_passes(self) -> None:
        self.passed_s += GRACE_S + 1


TestTransfers = seed(sampling.seed())(Transfers).TestCase
TestTransfers.settings = settings(
    max_examples=sampling.examples(800, 20),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
