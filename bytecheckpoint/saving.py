"""The save protocol, top to bottom.

    check      the arguments mean something; rank 0 looks whether the path can hold a checkpoint
    describe   adapters list the state's shards and plain values; no tensor is copied
    agree      all ranks were called with the same path, step and sections; rank 0 gets their plans
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

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack

from . import trace
from .control.base import Operation
from .engine.arena import Slot
from .engine.checksums import CHUNK_SIZE
from .engine.commit import commit, read_manifest, remove_attempt, remove_files, replaceable
from .engine.files import FileImage, copy_in, place_images
from .engine.record import record
from .engine.resources import Engine
from .engine.writer import WrittenFile, write_images
from .errors import (
    BytecheckpointError,
    CommitUnknownError,
    ControlError,
    DeadlineError,
    KeyNotFoundError,
    RankFailedError,
    StateError,
)
from .handle import SaveHandle, SaveResult
from .local_state import LocalState
from .manifest import MANIFEST_KEY, Manifest, pack_metadata
from .planners import Assignment, SavePlan
from .save_planning import agree, settle
from .sections import check_state, resolve_sections
from .storage_backends.base import StorageBackend
from .version import VERSION

__all__ = ["SaveOptions", "save"]

_BEFORE_COMMIT = trace.SAVE_STEPS[: trace.SAVE_STEPS.index("commit")]
_SWEEP_AFTER_S = 10.0  # how long a failed save waits for the other ranks to stop writing, before it sweeps


_MAX_CHUNK_SIZE = 1 << 30

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
    """Run the protocol; with ``background`` the steps after ``stage`` run in the engine's background thread
    while the caller goes on.

    ``op`` is this save among the ranks, and is closed when the save is over, however it ends.
    """
    job = _SaveJob(engine, backend, op, state, options, waits=not background)
    job.prepare()
    # Saves are committed in the order in which they were begun, so a synchronous one queues up too.
    ended = job.enqueue(job.finish_in_background if background else job.finish)
    if not background:
        ended.result()
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
        waits: bool,
    ) -> None:
        self.timings = trace.Timings("save")
        self.handle = SaveHandle(backend.url, self.timings)
        self._engine, self._backend, self._state, self._options = engine, backend, state, options
        self._op = op
        self._waits = waits  # the caller does, for the end of the save
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
                self._engine.check_usable(waits=self._waits)
                self._check()
            with self._step("describe"):
                local = self._describe()
            with self._step("agree"):
                everyone = agree(self._op, local, self._facts(local))
            with self._step("plan"):
                settled = settle(self._op, local, everyone)
                self._attempt, self._plan = settled.attempt, settled.plan
            with self._step("stage"):
                self._stage(local, settled.assignment)
        except BaseException as error:
            self._abandon(error)
            raise
        # The state may go away from here on; only staged bytes are needed.
        self._state = {}
        self.handle._mark_staged()

    def enqueue(self, finish: Callable[[], None]) -> Future[None]:
        """Hand ``finish`` to the background thread. Where that takes no more work, the save has failed."""
        try:
            with self._op.phase("write"):
                return self._engine.submit(finish)
        except BaseException as error:
            self._abandon(error)
            self.handle._fail(error)
            raise

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
            if not self._stands(error):
                raised = self._in_doubt(error)
                self._abandon(error)
                self.handle._fail(raised)
                if raised is error:
                    raise
                raise raised from error
            _log.warning("%s is committed, but this rank did not hear so: %s", self._backend.url, error)
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
        step, chunk_size = self._options.step, self._options.chunk_size
        if step is not None and (type(step) is not int or not 0 <= step < 1 << 63):
            raise StateError(f"step must be a whole number from 0 to 2^63-1, not {step!r}")
        if type(chunk_size) is not int or not 1 <= chunk_size <= _MAX_CHUNK_SIZE:
            raise StateError(f"chunk_size must be a number of bytes from 1 to {_MAX_CHUNK_SIZE}, not {chunk_size!r}")
        pack_metadata(dict(self._options.metadata))
        if self._op.rank == 0:
            with contextlib.suppress(KeyNotFoundError):
                self._backend.stat(MANIFEST_KEY)

    def _describe(self) -> LocalState:
        sections = resolve_sections(
            self._state,
            framework=self._options.framework,
            rank=self._op.rank,
            world_size=self._op.world_size,
            allow_pickle=self._options.allow_pickle,
        )
        sources = {section.name: section.capture() for section in sections}
        return LocalState(sections, sources, self._op.rank, self._options.allow_pickle)

    def _facts(self, local: LocalState) -> dict[str, str]:
        """What every rank must have been called with alike."""
        return {
            "path": self._backend.url,
            "step": str(self._options.step),
            "sections": ", ".join(name for name, _ in local.plan.sections),
            "chunk size": str(self._options.chunk_size),
            "library version": VERSION,
        }

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
        if confirmed is None:
            self._op.broadcast("committed", None)
            return
        assert self._plan is not None
        manifest = record(
            self._plan,
            confirmed,
            attempt=self._attempt,
            step=self._options.step,
            metadata=dict(self._options.metadata),
            library_version=VERSION,
        )
        # Looked at only now: an earlier save to this path may have been committed since this one began.
        self._previous = replaceable(self._backend)
        self._point("commit.before")
        self._may_be_committed = True
        try:
            commit(self._backend, manifest)
        except CommitUnknownError:
            raise
        except Exception:
            self._may_be_committed = False
            raise
        self.timings.point("commit.after")
        try:
            self._op.broadcast("committed", b"")
        except ControlError as error:
            _log.warning("%s is committed, but not every rank heard so: %s", self._backend.url, error)

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

    def _stands(self, error: BaseException) -> bool:
        """Whether the checkpoint is seen to exist, although rank 0 was lost before this rank had heard of it."""
        if not self._may_be_committed or self._op.rank == 0:
            return False
        if not isinstance(error, ControlError) or _never_committed(error):
            return False
        try:
            return read_manifest(self._backend).attempt == self._attempt
        except BytecheckpointError:
            return False

    def _in_doubt(self, error: BaseException) -> BaseException:
        """What to raise: ``error``, or ``CommitUnknownError`` where rank 0 is only late and may commit yet."""
        if not self._may_be_committed or self._op.rank == 0 or not isinstance(error, DeadlineError):
            return error
        return CommitUnknownError(
            f"{self._backend.url}: everything is written, but rank 0 was not heard to commit it: {error} Open the path "
            f"to find out, or save again"
        )

    def _point(self, name: str) -> None:
        self.timings.point(name)
        self._op.check()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._op.phase(name), self.timings.step(name):
            yield


def _never_committed(error: BaseException) -> bool:
    """Whether this is rank 0's own word that it failed before it could commit."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    return isinstance(failed, RankFailedError) and failed.rank == 0 and failed.phase in _BEFORE_COMMIT
