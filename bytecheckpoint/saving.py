"""The save protocol, top to bottom.

    check      rank 0 looks at the path: writable in principle, and what is committed there now
    describe   adapters list the state's shards and plain values; nothing is copied
    agree      all ranks were called with the same path, step and sections
    plan       replicas are deduplicated, bytes balanced, files laid out
    stage      one copy of this rank's share into the arena; after it the caller may change every tensor
    write      data files, hashed and durable
    confirm    rank 0 learns of every file and checksum
    commit     one atomic put of the manifest: the checkpoint exists from here on
    clean      files that only the overwritten manifest named are removed

An asynchronous save returns after ``stage``. Whatever fails before ``commit`` leaves what was there before, and
every rank raises the same cause (DESIGN laws 1 to 3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack

from . import trace
from .control.base import Operation
from .engine.arena import Slot
from .engine.commit import commit, new_attempt, read_manifest, remove_attempt, remove_files
from .engine.files import FileImage, copy_in, place_images
from .engine.record import record
from .engine.resources import Engine
from .engine.writer import WrittenFile, write_images
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    NotACheckpointError,
    RankFailedError,
    StateError,
)
from .handle import SaveHandle, SaveResult
from .local_state import LocalState
from .manifest import Manifest, pack_metadata
from .planners import Assignment, LocalPlan, SavePlan, plan_save
from .sections import Section, check_state, resolve_sections
from .shards import SectionSource
from .storage_backends.base import StorageBackend
from .version import VERSION

__all__ = ["CHUNK_SIZE", "SaveOptions", "save"]

_BEFORE_COMMIT = trace.SAVE_STEPS[: trace.SAVE_STEPS.index("commit")]
_SWEEP_AFTER_S = 10.0  # how long a failed save waits for the other ranks to stop writing, before it sweeps

CHUNK_SIZE = 1 << 20  # bytes a checksum; the least that a verified partial read fetches

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOptions:
    """What the caller chose. ``deadline_s`` bounds every single wait for another rank."""

    framework: str | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False
    deadline_s: float = 600.0
    chunk_size: int = CHUNK_SIZE


def save(
    engine: Engine,
    backend: StorageBackend,
    op: Operation,
    state: Mapping[str, Any],
    options: SaveOptions,
    *,
    background: bool,
) -> SaveHandle:
    """Run the protocol; with ``background`` the steps after ``stage`` run in the engine's background thread.

    ``op`` is this save among the ranks, and is closed when the save is over, however it ends.
    """
    job = _SaveJob(engine, backend, op, state, options)
    job.prepare()
    if background:
        engine.background.submit(job.finish_in_background)
    else:
        job.finish()
    return job.handle


class _SaveJob:
    """One save on one rank. ``prepare`` runs on the caller's thread, ``finish`` there or in the background."""

    def __init__(
        self,
        engine: Engine,
        backend: StorageBackend,
        op: Operation,
        state: Mapping[str, Any],
        options: SaveOptions,
    ) -> None:
        self.timings = trace.Timings("save")
        self.handle = SaveHandle(backend.url, self.timings)
        self._engine, self._backend, self._state, self._options = engine, backend, state, options
        self._op = op
        self._attempt = ""
        self._images: list[FileImage] = []
        self._slot: Slot | None = None
        self._previous: Manifest | None = None
        self._plan: SavePlan | None = None
        # Once rank 0 may have put the manifest, this rank's files may be part of a checkpoint and are never removed.
        self._may_be_committed = False

    def prepare(self) -> None:
        """From the call to the point where the caller may change the state. Raises what any rank raised."""
        try:
            with self._step("check"):
                self._check()
            with self._step("describe"):
                sections = self._resolve()
                sources = {section.name: section.capture() for section in sections}
            with self._step("agree"):
                self._agree(sources)
            with self._step("plan"):
                local = LocalState(sections, sources, self._op.rank, self._options.allow_pickle)
                assignment = self._exchange_plans(local)
            with self._step("stage"):
                self._stage(local, assignment)
        except BaseException as error:
            self._abandon(error)
            raise
        # The state may go away from here on; only staged bytes are needed.
        self._state = {}
        self.handle._mark_staged()

    def finish_in_background(self) -> None:
        """``finish`` for a thread that nobody waits for: what it raises is on the handle, and in the log."""
        try:
            self.finish()
        except BaseException as error:  # noqa: BLE001 - handed on through the handle
            _log.error("save to %s failed: %s", self._backend.url, error)

    def finish(self) -> None:
        """From staged bytes to a committed checkpoint. Ends the handle; raises what any rank raised."""
        try:
            with self._step("write"):
                written = self._write()
            with self._step("confirm"):
                confirmed = self._confirm(written)
            with self._step("commit"):
                self._commit(confirmed)
        except BaseException as error:
            self._abandon(error)
            self.handle._fail(error)
            raise
        self._clean()
        self._op.close()
        result = SaveResult(
            self._backend.url, self._options.step, self._attempt, sum(i.size for i in self._images), len(self._images)
        )
        _log.info("committed %s (%s)", self._backend.url, self.timings)
        self.handle._succeed(result)

    # -- the steps -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        check_state(self._state)
        if self._options.step is not None and self._options.step < 0:
            raise StateError(f"step must not be negative: {self._options.step}")
        pack_metadata(dict(self._options.metadata))
        if self._op.rank != 0:
            return
        try:
            self._previous = read_manifest(self._backend)
        except (CheckpointNotFoundError, NotACheckpointError):
            pass
        except CheckpointError as error:
            _log.warning(
                "%s: what is there now cannot be read and will be replaced, its files kept: %s",
                self._backend.url,
                error,
            )

    def _resolve(self) -> list[Section]:
        return resolve_sections(
            self._state,
            framework=self._options.framework,
            rank=self._op.rank,
            world_size=self._op.world_size,
            allow_pickle=self._options.allow_pickle,
        )

    def _agree(self, sources: dict[str, SectionSource]) -> None:
        """Same call on every rank; then find plain tensors of trees that are no replicas of each other."""
        self._op.agree(
            "agree",
            {
                "path": self._backend.url,
                "step": str(self._options.step),
                "sections": ", ".join(sorted(sources)),
                "chunk size": str(self._options.chunk_size),
                "library version": VERSION,
            },
        )
        digests = {
            f"{name}.{fqn}": digest for name, source in sources.items() for fqn, digest in source.digests.items()
        }
        everyone = self._op.gather("digests", msgpack.packb(digests))
        differing = self._op.broadcast("differing", None if everyone is None else msgpack.packb(_differing(everyone)))
        for full in msgpack.unpackb(differing):
            section, _, fqn = full.partition(".")
            if fqn in sources[section].metas:
                sources[section].make_per_rank(fqn)

    def _exchange_plans(self, local: LocalState) -> Assignment:
        plans = self._op.gather("plans", local.plan.to_bytes())
        messages = None
        if plans is not None:
            self._plan = plan_save([LocalPlan.from_bytes(plan) for plan in plans])
            attempt = new_attempt()
            messages = [
                msgpack.packb([attempt, self._plan.assignment(r).to_bytes()]) for r in range(self._op.world_size)
            ]
        self._attempt, assignment = msgpack.unpackb(self._op.scatter("assignments", messages))
        return Assignment.from_bytes(assignment, local.plan)

    def _stage(self, local: LocalState, assignment: Assignment) -> None:
        self._images = local.images(assignment, self._attempt)
        self._slot = self._engine.arena.acquire(place_images(self._images), self._options.deadline_s)
        for image in self._images:
            copy_in(image, self._slot)
            self.timings.count("stage", image.size)
            image.release_tensors()

    def _write(self) -> list[WrittenFile]:
        assert self._slot is not None
        written = write_images(
            self._backend, self._images, self._slot, self._options.chunk_size, self._engine.io, self._point
        )
        self.timings.count("write", sum(file.size for file in written))
        self._slot.release()
        return written

    def _confirm(self, written: Sequence[WrittenFile]) -> list[list[WrittenFile]] | None:
        self._may_be_committed = self._op.rank != 0
        everyone = self._op.gather("written", msgpack.packb([file.to_plain() for file in written]))
        if everyone is None:
            return None
        return [[WrittenFile.from_plain(plain) for plain in msgpack.unpackb(part)] for part in everyone]

    def _commit(self, confirmed: list[list[WrittenFile]] | None) -> None:
        if confirmed is not None:
            assert self._plan is not None
            manifest = record(
                self._plan,
                confirmed,
                attempt=self._attempt,
                step=self._options.step,
                metadata=dict(self._options.metadata),
                library_version=VERSION,
            )
            self.timings.point("commit.before")
            self._may_be_committed = True
            try:
                commit(self._backend, manifest)
            except CommitUnknownError:
                raise
            except Exception:
                self._may_be_committed = False
                raise
            self.timings.point("commit.after")
        self._op.broadcast("committed", b"" if confirmed is not None else None)

    def _clean(self) -> None:
        """Housekeeping after the fact: whatever happens here, the checkpoint stands."""
        try:
            with self.timings.step("clean"):
                if self._previous is not None and self._previous.attempt != self._attempt:
                    remove_files(self._backend, self._previous.files.name)
        except Exception:  # noqa: BLE001 - the checkpoint is committed, housekeeping must not fail it
            _log.warning("%s: removing the overwritten checkpoint's files failed", self._backend.url, exc_info=True)

    # -- failure -------------------------------------------------------------------------------------------------

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing behind that no manifest will ever name. Never raises."""
        if self._slot is not None:
            self._slot.release()
        if self._attempt and (not self._may_be_committed or _never_committed(error)):
            if self._op.rank == 0:
                # The others may still be writing; what they write after the sweep would stay for ever.
                self._op.wait_alone(_SWEEP_AFTER_S)
                remove_attempt(self._backend, self._attempt)
            else:
                remove_files(self._backend, [image.key for image in self._images])
        self._op.close()

    def _point(self, name: str) -> None:
        self.timings.point(name)
        self._op.check()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._op.phase(name), self.timings.step(name):
            yield


def _differing(everyone: Sequence[bytes]) -> list[str]:
    """Names whose digest is not the same on all ranks that have them."""
    seen: dict[str, bytes] = {}
    differing = set()
    for part in everyone:
        for name, digest in msgpack.unpackb(part).items():
            if seen.setdefault(name, digest) != digest:
                differing.add(name)
    return sorted(differing)


def _never_committed(error: BaseException) -> bool:
    """Whether this is rank 0's own word that it failed before it could commit."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    return isinstance(failed, RankFailedError) and failed.rank == 0 and failed.phase in _BEFORE_COMMIT
