"""The save protocol, top to bottom.

    check      the arguments mean something; rank 0 looks whether the path can hold a checkpoint
    describe   adapters list the state's shards and plain values; no tensor is copied
    agree      all ranks were called with the same path, step and sections; rank 0 gets their plans
    plan       replicas are deduplicated, bytes balanced, files laid out
    stage      one copy of this rank's share into the arena; after it the caller may change every tensor
    merge      (where the layout asks for it) fragments travel to one owner for each tensor, which writes it whole
    write      data files, hashed and durable, each piece's memory given back as soon as it is written
    confirm    rank 0 learns of every file and checksum
    commit     one atomic put of the manifest: the checkpoint exists from here on
    clean      files that only the overwritten manifest named are removed

An asynchronous save returns after ``stage``. Where its memory budget is smaller than the state, it stages and writes
at the same time; a synchronous save always does, in a few blocks that go round, and copies a piece just before that is
hashed and written. Whatever fails before ``commit`` leaves what was there before, and every rank raises the same cause
(DESIGN laws 1 to 3).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from . import trace
from .collector import paused
from .control.base import Operation
from .describing import describe_state
from .engine.file_layout import data_key
from .engine.files import FileImage, tensor_image
from .engine.merging.merge import MergeWork, Merging, merge
from .engine.resources import Engine
from .engine.staging.arena import page_round
from .engine.writing.commit import remove_attempt, remove_files
from .engine.writing.free_space import check_space
from .engine.writing.image_write import WrittenFile, write_whole
from .engine.writing.writer import write_images
from .errors import DeadlineError, KeyNotFoundError, StateError
from .handle import SaveHandle, SaveResult
from .hf_index import StoredModel, companions, stored_models
from .latch import Latch
from .local_state import LocalState
from .manifest import MANIFEST_KEY
from .planners import SavePlan
from .save_commit import SaveCommit
from .save_options import SaveOptions
from .save_planning import Settled, agree, settle
from .save_staging import StateCopy
from .sections import check_state
from .shards import Shard
from .storage_backends.base import StorageBackend

__all__ = ["save"]

# How long a failed save waits for the others to stop writing, before it sweeps; the second, for who was late already.
_SWEEP_AFTER_S = 10.0
_SWEEP_AFTER_LATE_S = 0.5

_log = logging.getLogger(__name__)


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
    if not background and not job.handle.done():
        job.wait()
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
        self.timings = trace.Timings("save", op.rank, backend.url)
        self.handle = SaveHandle(backend.url, self.timings)
        self._engine, self._backend, self._state, self._options = engine, backend, state, options
        self._op = op
        self._waits = waits  # the caller does, for the end of the save
        self._attempt = ""
        self._images: list[FileImage] = []
        self._work: MergeWork | None = None  # on all ranks, or on none
        self._gathered: list[FileImage] = []
        self._merged: Future[None] = Future()  # done when no tensor is needed for the merge stage any more
        self._models: list[StoredModel] = []
        self._companions: list[WrittenFile] = []
        self._copy: StateCopy | None = None
        self._owner = threading.Lock()  # taken once, by the thread that ends the save: the background's, or the caller
        self._queued = False
        self._ended = Latch()  # set when the background thread has ended it
        self._plan: SavePlan | None = None
        self._commit: SaveCommit | None = None

    def prepare(self) -> None:
        """From the call to the point where the caller may change the state (or, where it waits, to where the rest is
        on its way). Raises what any rank raised."""
        try:
            with self._step("check"):
                self._engine.check_usable(waits=self._waits)
                self._check()
            with paused():
                settled = self._settle()
            if settled is None:
                self._skip()
                return
            local, share = settled
            if not self._engine.is_background_thread:
                self._engine.pass_gates()
            with self._step("stage"):
                self._stage(local, share)
            if not self._queued:
                self._enqueue()
        except BaseException as error:
            self._give_up(error)
            raise
        # The state may go away from here on; only staged bytes are needed.
        self._state = {}

    def _settle(self) -> tuple[LocalState, Settled] | None:
        """What this rank has, and its share of the save; None where all ranks skip it."""
        with self._step("describe"):
            local = describe_state(self._op, self._state, self._options)
        with self._step("agree"):
            facts = self._options.facts(self._backend.url, local.section_names)
            busy = self._would_wait(local)
            agreed = agree(self._op, self._engine.plans, local, facts, busy=busy, job=self._options.job)
            if agreed.settled is not None:
                # The others go on from here: whatever fails on this rank, it must know what to sweep.
                self._attempt = agreed.settled.attempt
        if agreed.skip:
            return None
        with self._step("plan"):
            settled = settle(self._op, self._engine.plans, local, agreed, job=self._options.job)
            self._attempt, self._plan = settled.attempt, settled.plan
            if self._op.rank == 0:
                check_space(self._backend, settled.nbytes)
            self._commit = SaveCommit(self._op, self._backend, self._options, settled, self.timings)
        return local, settled

    def wait(self) -> None:
        """Wait for the end of the save. Raises what any rank raised."""
        try:
            self._ended.result()
        except BaseException as error:
            if not self._ended.is_set():
                self._give_up(error)  # interrupted
            raise

    def finish(self) -> None:
        """From staged bytes to a committed checkpoint. Ends the handle; raises what any rank raised."""
        last = self._commit
        assert last is not None
        try:
            if self._copy is not None:
                with self._op.phase("stage"):
                    self._copy.wait_copied()
            written: list[WrittenFile] = []
            if self._work is not None:
                with self._step("merge"):
                    written = self._merge(self._work, last.chunk_size)
            with self._step("write"):
                written += self._write(last.chunk_size)
            with self._step("confirm"):
                if self._work is not None:
                    # As the plan has them: files of tensors by section, then values.
                    written.sort(key=lambda file: (0, file.section) if file.kind == "tensors" else (1, ""))
                confirmed = last.confirm(written, self._companions)
            with self._step("commit"):
                last.commit(confirmed)
        except BaseException as error:
            if not self._merged.done():
                self._merged.set_exception(error)
            if not last.stands(error):
                raised = last.in_doubt(error)
                self._abandon(error)
                self.handle._fail(raised)
                if raised is error:
                    raise
                raise raised from error
            _log.warning("%s is committed, although this rank met an error: %s", self._backend.url, error)
        last.clean()
        self._op.close()
        images = [*self._images, *self._gathered]
        result = SaveResult(
            self._backend.url, self._options.step, self._attempt, sum(i.size for i in images), len(images)
        )
        _log.info("committed %s (%s)", self._backend.url, self.timings)
        self.handle._succeed(result)

    def _enqueue(self) -> Future[None]:
        """Hand the rest to the background thread: saves are committed in the order in which they were begun, so a
        synchronous one queues up too. Returns what is done when the merge stage needs no tensor any more."""
        self._queued = True
        with self._op.phase("write"):
            self._engine.submit(self._take_over)
        return self._merged

    def _take_over(self) -> None:
        """Finish, in the background thread, unless the caller has given up before it began."""
        if not self._owner.acquire(blocking=False):
            return
        try:
            self.finish()
        except BaseException as error:  # noqa: BLE001 - handed on through the handle
            if not self._waits:
                _log.error("save to %s failed: %s: %s", self._backend.url, type(error).__name__, error)
            self._ended.set(error)
        else:
            self._ended.set()

    # -- the steps -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        check_state(self._state)
        self._options.check()
        if self._options.gate and (self._waits or self._engine.is_background_thread):
            raise StateError("gate=True is for a save with async_save=True, called by the thread that trains")
        if self._op.rank == 0:
            with contextlib.suppress(KeyNotFoundError):
                self._backend.stat(MANIFEST_KEY)

    def _would_wait(self, local: LocalState) -> bool:
        """Whether the save is to be skipped because this rank would have to wait for staging memory."""
        if self._waits or self._options.when_busy == "wait":
            return False
        known = self._engine.plans.find(local.fingerprint)
        if known is None:
            nbytes = local.nbytes  # the most that this rank may be given to write
        else:
            nbytes = sum(page_round(len(file.head) + sum(file.nbytes)) for file in known.files)
            nbytes += 0 if known.merge is None else page_round(known.merge.staged_nbytes)
        arena = self._engine.arena
        return arena.would_wait(arena.blocks_for(nbytes + sum(page_round(len(data)) for *_, data in local.values)))

    def _skip(self) -> None:
        _log.info("%s: skipped, earlier saves still hold the staging memory", self._backend.url)
        self._op.close()
        self.handle._skip()

    def _stage(self, local: LocalState, settled: Settled) -> None:
        self._images = local.images(settled.files, settled.assignment, self._attempt)
        held = self._prepare_merge(local, settled)
        deadline_s = self._options.deadline_s
        self._copy = StateCopy(self._engine, self._images, held, self.timings, deadline_s, waits=self._waits)
        self.handle._watch(self._copy.staging)
        self._copy.begin(self._state if self._options.gate else None, self._enqueue)

    def _prepare_merge(self, local: LocalState, settled: Settled) -> dict[int, Shard]:
        """What becomes whole tensors on this rank; the shards that it contributes, here or elsewhere, by their row."""
        self._work = settled.merge
        if self._op.rank == 0 and self._options.layout == "whole":
            self._models = stored_models(self._state)
        if self._work is None:
            self._merged.set_result(None)
            return {}
        shards = local.shards
        return {row: shards[row] for row in self._work.staged}

    def _merge(self, work: MergeWork, chunk_size: int) -> list[WrittenFile]:
        assert self._copy is not None
        for file in work.files:
            key = data_key(self._attempt, file.section, self._op.rank, "tensors")
            self._gathered.append(tensor_image(key, file))
        engine = self._engine
        means = Merging(engine.merge_ring, engine.merge_threads, engine.io, self._options.deadline_s)
        written = merge(
            self._op,
            self._backend,
            work,
            self._gathered,
            self._copy.fragments,
            means,
            chunk_size,
            self.timings,
        )
        self._merged.set_result(None)
        self.timings.count("merge", sum(file.size for file in written))
        return written

    def _write(self, chunk_size: int) -> list[WrittenFile]:
        assert self._copy is not None
        written = write_images(
            self._backend, self._copy.staging, chunk_size, self._engine.io, self.timings, self._point
        )
        if self._plan is not None and self._models:
            for image in companions(self._plan, self._models, self._attempt):
                self._companions.append(write_whole(self._backend, image, chunk_size, self.timings))
        self.timings.count("write", sum(file.size for file in (*written, *self._companions)))
        return written

    # -- failure -------------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> None:
        """The caller's part of the save has failed, or its wait was interrupted."""
        if self._owner.acquire(blocking=False):
            if self._queued:
                # Not in a phase any more, and the other ranks wait for this one. Where a phase has told, that stands.
                self._op.fail("write", error)
            if not self._merged.done():
                self._merged.set_exception(error)
            self._abandon(error)
            self.handle._fail(error)
        elif isinstance(error, Exception):
            # The background thread has the save, and ends it.
            assert self._copy is not None
            self._copy.fail(error)
            self._ended.wait()
        else:
            self._stop_copying()

    def _stop_copying(self) -> None:
        """The caller was interrupted, goes on and may change the state. Where it was copied the save goes on too."""
        assert self._copy is not None
        self._copy.fail(StateError("the save was interrupted before the state was copied"))
        wait([self._merged])
        self._copy.staging.wait_settled()

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing behind that no manifest will ever name. Never raises."""
        if self._copy is not None:
            self._copy.staging.release(error)
        if self._attempt and (self._commit is None or self._commit.is_ruled_out(error)):
            if self._op.rank == 0:
                # The others may still be writing. Who writes after the sweep removes that himself, if he lives.
                is_late = isinstance(error, DeadlineError)
                self._op.wait_alone(_SWEEP_AFTER_LATE_S if is_late else min(_SWEEP_AFTER_S, self._options.deadline_s))
                remove_attempt(self._backend, self._attempt)
            else:
                remove_files(self._backend, [image.key for image in (*self._images, *self._gathered)])
        self._op.close()

    def _point(self, name: str) -> None:
        self.timings.point(name)
        self._op.check()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._op.phase(name), self.timings.step(name):
            yield
