"""One save on one rank: the steps of the protocol, and what happens when one fails or is interrupted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from ..checkpoint.attempts import new_attempt_id
from ..checkpoint.location import Tier
from ..checkpoint.manifest_file import check_replaceable
from ..control.base import Operation
from ..engine.files import FileImage, data_key, tensor_image
from ..engine.merging.merge import MergeResources, MergeWork, merge
from ..engine.objects import objects_next_to
from ..engine.unchanged import find_unchanged
from ..engine.writing import WrittenFile, check_space, write_images, write_whole
from ..errors import StateError, UsageError
from ..frameworks.sections import check_state
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from .agreement import NewPlan, SaveShare, agree
from .codec_choice import choose_codec, note_rate
from .commit import SaveCommit
from .companions import StoredModel, companion_images, find_models, refuse_adapters
from .engine import SaveEngine
from .handle import SaveHandle, SaveResult
from .incremental import BaseShare, find_base, gather_damaged, share_base
from .lifecycle import SaveLifecycle, SaveState
from .local_state import LocalState, describe_state
from .options import AUTO, SaveRequest
from .planning import plan_save
from .record import WrittenFiles
from .staging import CopyMode, StateCopy
from .uploading import SaveUpload

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class SaveRun:
    """What the steps of one save share, and the handling of its failures.

    The caller's thread and the background thread use it one after the other, except while a pipelined copy and the
    write step run at the same time. ``lifecycle`` decides which of them cleans up.
    """

    def __init__(
        self, engine: SaveEngine, backend: StorageBackend, op: Operation, options: SaveRequest, *, is_async: bool
    ) -> None:
        self.engine, self.backend, self.op, self.options, self.is_async = engine, backend, op, options, is_async
        self.timings = Timings("save", op.rank, backend.url)
        self.lifecycle: SaveLifecycle[SaveResult] = SaveLifecycle()
        self.handle = SaveHandle(backend.url, self.timings, self.lifecycle)
        self.upload: SaveUpload | None = None
        self._commit: SaveCommit | None = None
        self._copy: StateCopy | None = None
        self._base: BaseShare | None = None
        self._remark = ""
        self._new_id = partial(new_attempt_id, options.job, is_staged=options.tier is not None)
        self._is_new = False  # there was no checkpoint at the path
        self._keys: list[str] = []  # of the files that this rank may write
        self._models: list[StoredModel] = []  # that may get companions

    def step(self, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run the step of the protocol that has the name of ``run``: time it, and report a failure to all ranks."""
        with self.op.phase(run.__name__), self.timings.step(run.__name__):
            return run(*args, **kwargs)

    # -- the steps on the caller's thread ------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> None:
        """Validate the call. Rank 0 also checks that the path can be read."""
        self.engine.check_usable()
        if not self.is_async and self.engine.is_background_thread:
            raise UsageError(
                "a synchronous save inside the done callback of another save would wait for the thread that runs the "
                "callback; use async_save=True there, or save from another thread"
            )
        check_state(state)
        refuse_adapters(state, self.options)
        if self.options.gate and (not self.is_async or self.engine.is_background_thread):
            raise UsageError("gate=True needs async_save=True and must be called from the training thread")
        self.engine.start_threads()
        if self.options.tier is not None:
            self._save_in(self.options.tier)
        if self.op.rank == 0:
            self._is_new = not check_replaceable(self.backend)

    def describe(self, state: Mapping[str, Any]) -> LocalState:
        """List what this rank holds."""
        return describe_state(self.op, state, self.options, seed=self.handle.url)

    def agree(self, local: LocalState) -> SaveShare | NewPlan:
        """Find out whether all ranks make the same save, and whether an earlier plan is valid for all of them."""
        plans, options = self.engine.plans, self.options
        arguments = options.shared_arguments(self.handle.url, local.section_names)
        agreement = agree(self.op, plans, local, arguments, new_id=self._new_id)
        if isinstance(agreement, SaveShare):
            self._begin_attempt(agreement)  # other ranks continue, even if this one fails before its next step
        return agreement

    def plan(self, local: LocalState, agreement: SaveShare | NewPlan) -> tuple[SaveShare, StateCopy]:
        """Make a new plan if no earlier one is valid, and lay out this rank's files without what a base has of them."""
        share = agreement
        if isinstance(share, NewPlan):
            share = plan_save(self.op, self.engine.plans, local, share, self._new_id)
            self._begin_attempt(share)
        if self.options.base is not None:
            self._find_base(share)
        # How much a codec or an incremental save needs is not known before; a tier holds a part of the checkpoint.
        is_known = self.options.codec in (None, AUTO) and self.commit.base is None and self.upload is None
        if self.op.rank == 0 and is_known:
            check_space(self.backend, share.planned.nbytes)
        return share, self._prepare_copy(local, share)

    def stage(self, state: Mapping[str, Any], copy: StateCopy, complete: Callable[[], None]) -> None:
        """Copy this rank's share, or prepare to. ``complete`` is queued if it has to release memory for the copy."""
        if self.op.rank == 0:
            self._models = find_models(state, self.options)
        with copy.reserved():
            if copy.mode is CopyMode.PIPELINED:
                self.queue(complete)
                if copy.waits_for_merge:
                    self.lifecycle.wait_merged()
            copy.copy(state)

    def queue(self, complete: Callable[[], None]) -> None:
        """Hand the rest of the save to the background thread, which completes saves in the order of their calls."""
        self.lifecycle.queue()
        with self.op.phase("write"):
            self.engine.submit(complete)

    @contextmanager
    def failing_on_caller(self) -> Iterator[None]:
        """End the save if the caller's part raises or is interrupted, and raise the same error."""
        try:
            yield
        except BaseException as error:
            was_queued = self.lifecycle.state is SaveState.QUEUED
            if self.lifecycle.withdraw(error):
                if was_queued:
                    # No phase is active that would report this to the other ranks, which wait for this rank. If a
                    # phase has reported a failure already, that one counts.
                    self.op.fail("write", error)
                self._end_failed(error)
            elif isinstance(error, Exception):
                # The background thread owns the save, and ends it.
                self._stop_copying(error)
                self.lifecycle.wait_final()
            else:
                # The caller was interrupted and may change its tensors. The save continues if all were copied.
                self._stop_copying(StateError("the save was interrupted before the state was copied"))
                with contextlib.suppress(BaseException):
                    self.lifecycle.wait_merged()
                if self._copy is not None:
                    self._copy.staging.wait_copied()
            raise

    # -- on the background thread --------------------------------------------------------------------------------

    def wait_copied(self, copy: StateCopy) -> None:
        """Behind a gate, wait until everything is copied: the last part of ``stage``."""
        with self.op.phase("stage"):
            copy.wait_copied()

    def merge(self, share: SaveShare, copy: StateCopy, work: MergeWork) -> list[WrittenFile]:
        """Send this rank's fragments to their owners; put together and write the tensors that this rank owns."""
        engine = self.engine
        keys = [data_key(share.attempt, file.section, self.op.rank, "tensors") for file in work.files]
        images = [tensor_image(key, file) for key, file in zip(keys, work.files, strict=True)]
        means = MergeResources(engine.merge_arena, engine.helpers, engine.io, self.options.deadline_s)
        chunk_size, timings = self.commit.chunk_size, self.timings
        written = merge(self.op, self.backend, work, images, copy.fragments, means, chunk_size, timings)
        timings.count("merge", sum(file.size for file in written))
        return written

    def write(self, share: SaveShare, copy: StateCopy, merged: Sequence[WrittenFile]) -> WrittenFiles:
        """Write the staged images and the companions, and make them durable."""
        backend, timings, chunk_size = self.commit.data, self.timings, self.commit.chunk_size

        def point(name: str) -> None:
            timings.point(name)
            self.op.check()

        begun = perf_counter()
        planned = write_images(backend, copy.staging, chunk_size, self.engine.io, timings, point)
        note_rate(self.engine, self.backend, planned, perf_counter() - begun)
        images: list[FileImage] = []
        if share.planned.plan is not None and self._models:
            images = companion_images(share.planned.plan, self._models, share.attempt)
        companions = [write_whole(backend, image, chunk_size, timings) for image in images]
        timings.count("write", sum(file.size for file in (*planned, *companions)))
        if merged:
            # In the order of the plan: files of tensors by section, then values.
            planned = [*merged, *planned]
            planned.sort(key=lambda file: (0, file.section) if file.kind == "tensors" else (1, ""))
        return WrittenFiles(planned, companions)

    @property
    def commit(self) -> SaveCommit:
        """The attempt, once it has begun."""
        assert self._commit is not None
        return self._commit

    def is_committed_despite(self, error: BaseException) -> bool:
        """Whether the checkpoint exists although this rank met ``error``; then log it."""
        exists = self.commit.exists_despite(error)
        if exists:
            name = self.backend.display_url
            _log.warning("%s is committed, although this rank met an error: %s", name, error)
        return exists

    def fail(self, error: BaseException) -> None:
        """End a save that failed on the background thread."""
        raised = self.commit.error_to_raise(error)
        self.lifecycle.fail(raised)
        self._end_failed(error)
        if self.is_async:
            _log.error("save to %s failed: %s: %s", self.backend.display_url, type(raised).__name__, raised)

    def succeed(self, written: WrittenFiles) -> None:
        """End a save whose checkpoint is committed."""
        _log.info("committed %s (%s)", self.backend.display_url, self.timings)
        if self.upload is not None:
            self.upload.start(self.commit.manifest)
        else:
            self.engine.shared.end(self.commit.attempt)
        self.op.close()
        nbytes = sum(file.size for file in written.planned)
        result = SaveResult(
            self.handle.url,
            self.options.step,
            self.commit.attempt,
            bytes_written=nbytes,
            files_written=len(written.planned),
            seconds=dict(self.timings.seconds),
            remark=self._remark,
        )
        self.lifecycle.commit(result)

    # -- internals -----------------------------------------------------------------------------------------------

    def _begin_attempt(self, share: SaveShare) -> None:
        """From here on, a failure removes the files of this attempt."""
        self._commit = SaveCommit(
            op=self.op,
            backend=self.backend,
            options=self.options,
            saves=self.engine.shared,
            share=share,
            timings=self.timings,
            is_new=self._is_new,
            is_async=self.is_async,
            upload=self.upload,
        )

    def _find_base(self, share: SaveShare) -> None:
        """Find out what an older checkpoint has of this rank's files."""
        damaged, choice = gather_damaged(self.op), None
        if self.op.rank == 0:
            path = self.backend if self.upload is None else self.upload.store
            choice = find_base(self.engine.shared, path, self.options, share.attempt, damaged)
            self.commit.base = choice.base
        self._base, self._remark = share_base(self.op, choice)
        objects = objects_next_to(self.backend)
        if self._base is not None and objects is not None:
            self.commit.data, self.commit.is_shared = objects, True
        if self._remark and self.op.rank == 0:
            _log.info("%s: this incremental save writes everything: %s", self.backend.display_url, self._remark)

    def _prepare_copy(self, local: LocalState, share: SaveShare) -> StateCopy:
        """Lay this rank's files out in staging memory. Copies nothing yet."""
        planned, merge = share.planned, share.planned.merge
        shards = local.shards(planned.order)
        codec = choose_codec(self.engine, self.backend, self.options, planned.files)
        images = local.images(planned.files, planned.assignment, shards, share.attempt, codec)
        if self._base is not None:
            self._base.apply(images, planned.files, self.commit.chunk_size, self.op.rank)
            if not self.options.gate:  # which is to return before most of the state is read
                chunk_size, engine = self.commit.chunk_size, self.engine
                find_unchanged(images, chunk_size, engine.io, engine.copy_helpers, self.timings)
        merged = [] if merge is None else [file.section for file in merge.files]
        self._keys += [image.key for image in images]
        self._keys += [data_key(share.attempt, section, self.op.rank, "tensors") for section in merged]
        self._copy = StateCopy(
            self.engine,
            images,
            {} if merge is None else {row: shards[row] for row in merge.staged},
            self.timings,
            deadline_s=self.options.deadline_s,
            is_async=self.is_async,
            gate=self.options.gate,
        )
        self.handle._watch(self._copy.staging)
        return self._copy

    def _save_in(self, tier: Tier) -> None:
        """Save to a folder of this machine, and upload from there."""
        self.upload = SaveUpload(self.engine, self.op, self.backend, tier, self.options)
        self.handle._upload = self.upload.lifecycle
        self.handle._uploads_waiting = self.engine.upload_queue.__len__
        self.backend = self.upload.tier_folder

    def _end_failed(self, error: BaseException) -> None:
        """Clean up, and end the save whatever happens: a handle that never ends would block its waiters for ever."""
        may_exist = self._commit is not None and self._commit.may_exist(error)
        try:
            if self._copy is not None:
                self._copy.staging.discard(error)
            if self._commit is not None:
                self._commit.remove_files(self._keys, error)
        except Exception:  # noqa: BLE001 - the save's own error is the one to raise
            _log.warning("%s: cleaning up after a failed save failed", self.backend.display_url, exc_info=True)
        finally:
            if self._commit is not None:
                self.engine.shared.end(self._commit.attempt, is_unknown=may_exist)
            self.op.close()
            self.lifecycle.end_failed()
            if self.upload is not None:  # whose callbacks may ask for the result of the save
                self.upload.cancel(error, may_exist=may_exist)

    def _stop_copying(self, error: Exception) -> None:
        if self._copy is not None:
            self._copy.fail(error)
