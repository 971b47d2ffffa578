"""One save on one rank: its resources, its lifecycle, and what happens when it fails or is interrupted."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checkpoint.manifest_file import check_replaceable
from ..control.base import Operation
from ..engine.files import FileImage, data_key
from ..engine.resources import IOEngine
from ..engine.unchanged import find_unchanged
from ..engine.writing import check_space
from ..errors import SaveSkippedError, StateError, UsageError
from ..frameworks.sections import check_state
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from .agreement import SaveShare
from .codec_choice import choose_codec
from .commit import SaveCommit
from .companions import refuse_adapters
from .handle import SaveHandle, SaveResult
from .incremental import BaseShare, find_base, share_base
from .lifecycle import SaveLifecycle, SaveState
from .local_state import LocalState
from .options import SaveOptions
from .record import WrittenFiles
from .staging import StateCopy
from .uploading import SaveUpload

__all__ = ["SaveRun"]

_log = logging.getLogger(__name__)


class SaveRun:
    """What the steps of one save share, and the handling of its failures.

    The caller's thread and the background thread use it one after the other, except while a pipelined copy and the
    write step run at the same time. ``lifecycle`` decides which of them cleans up.
    """

    def __init__(
        self, engine: IOEngine, backend: StorageBackend, op: Operation, options: SaveOptions, *, is_async: bool
    ) -> None:
        self.engine, self.backend, self.op, self.options, self.is_async = engine, backend, op, options, is_async
        self.timings = Timings("save", op.rank, backend.url)
        self.lifecycle: SaveLifecycle[SaveResult] = SaveLifecycle()
        self.handle = SaveHandle(backend.url, self.timings, self.lifecycle)
        self.upload: SaveUpload | None = None
        self._commit: SaveCommit | None = None
        self._copy: StateCopy | None = None
        self._base = None if options.base is None else BaseShare()
        self._is_new = False  # there was no checkpoint at the path
        self._keys: list[str] = []  # of the files that this rank may write

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run a step of the protocol: time it, and report a failure to all ranks."""
        with self.op.phase(name), self.timings.step(name):
            yield

    # -- on the caller's thread ----------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> None:
        """Validate the call. Rank 0 also checks that the path can be read."""
        self.engine.check_usable(waits=not self.is_async)
        check_state(state)
        refuse_adapters(state, self.options)
        if self.options.gate and (not self.is_async or self.engine.is_background_thread):
            raise UsageError("gate=True needs async_save=True and must be called from the training thread")
        if self.options.staging is not None:
            self._stage_in(self.options.staging)
        if self.op.rank == 0:
            self._is_new = not check_replaceable(self.backend)

    def begin_attempt(self, share: SaveShare) -> None:
        """From here on, a failure removes the files of this attempt."""
        self._commit = SaveCommit(
            self.op, self.backend, self.options, share, self.timings, is_new=self._is_new, upload=self.upload
        )

    def find_base(self, share: SaveShare) -> None:
        """Find out what an older checkpoint has of this rank's files."""
        if self.op.rank == 0:
            self.commit.base = find_base(self.engine, self.commit.store, self.options, share.attempt)
        self._base = share_base(self.op, self.commit.base)

    def check_space(self, share: SaveShare) -> None:
        """Check on rank 0 that the store has room for the checkpoint, if the store reports its free space.

        How much an incremental save needs is not known before. A staging folder holds only a part of the checkpoint.
        """
        if self.op.rank == 0 and self.commit.base is None and self.upload is None:
            check_space(self.backend, share.planned.nbytes)

    def prepare_copy(self, local: LocalState, share: SaveShare) -> StateCopy:
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
        merge_files = [] if merge is None else merge.files
        merged = [file.section for file in merge_files]
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
        files = [*images, *(FileImage("", one.section, "", one.head, one.offsets, one.nbytes) for one in merge_files)]
        self.handle._watch(self._copy.staging, sum(file.size for file in files))
        return self._copy

    def queue(self, complete: Callable[[], None]) -> None:
        """Hand the rest of the save to the background thread, which completes saves in the order of their calls."""
        self.lifecycle.queue()
        with self.op.phase("write"):
            self.engine.submit(complete)

    def skip(self) -> SaveHandle:
        """End the save without saving anything; all ranks do the same."""
        _log.info("%s: skipped, earlier saves still hold the staging memory", self.backend.display_url)
        self.op.close()
        error = SaveSkippedError(
            f"{self.handle.url} was not saved: earlier saves still hold the staging memory, and the call used "
            f"when_busy='skip'. Save less often, raise the memory budget, or use when_busy='wait'"
        )
        self.lifecycle.skip(error)
        if self.upload is not None:
            self.upload.cancel(error)
        return self.handle

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
                    self._copy.staging.wait_settled()
            raise

    # -- on the background thread --------------------------------------------------------------------------------

    @property
    def commit(self) -> SaveCommit:
        """The attempt, once it has begun."""
        assert self._commit is not None
        return self._commit

    def fail(self, error: BaseException) -> None:
        """End a save that failed on the background thread."""
        raised = self.commit.error_to_raise(error)
        self.lifecycle.fail(raised)
        self._end_failed(error)
        if self.is_async:
            _log.error("save to %s failed: %s: %s", self.backend.display_url, type(raised).__name__, raised)

    def succeed(self, written: WrittenFiles) -> None:
        """End a save whose checkpoint is committed."""
        self.engine.last_commit = self.commit.last_commit or self.engine.last_commit
        _log.info("committed %s (%s)", self.backend.display_url, self.timings)
        if self.upload is not None:
            self.upload.start(self.commit.manifest, {} if self.commit.base is None else self.commit.base.older)
        self.op.close()
        nbytes = sum(file.size for file in written.planned)
        result = SaveResult(
            self.handle.url,
            self.options.step,
            self.commit.attempt,
            bytes_written=nbytes,
            files_written=len(written.planned),
            seconds=dict(self.timings.seconds),
        )
        self.lifecycle.commit(result)

    # -- internals -----------------------------------------------------------------------------------------------

    def _stage_in(self, staging: str | os.PathLike[str]) -> None:
        """Save to a folder of this machine, and upload from there."""
        self.upload = SaveUpload(self.engine, self.op, self.backend, staging, self.options)
        self.handle._upload = self.upload.lifecycle
        self.handle._waits_for_upload = self.options.wait_for == "path"
        if self.op.rank == 0:
            self.upload.check()
        self.backend = self.upload.staging

    def _end_failed(self, error: BaseException) -> None:
        """Clean up, and end the save whatever happens: a handle that never ends would block its waiters for ever."""
        try:
            self._clean_up(error)
        except Exception:  # noqa: BLE001 - the save's own error is the one to raise
            _log.warning("%s: cleaning up after a failed save failed", self.backend.display_url, exc_info=True)
        finally:
            self.lifecycle.end_failed()
            if self.upload is not None:  # whose callbacks may ask for the result of the save
                self.upload.cancel(error, may_exist=self._commit is not None and self._commit.may_exist(error))

    def _clean_up(self, error: BaseException) -> None:
        """Release staging memory and remove the files that no manifest will ever refer to."""
        if self._copy is not None:
            self._copy.staging.discard(error)
        if self._commit is not None:
            self._commit.remove_files(self._keys, error)
        self.op.close()

    def _stop_copying(self, error: Exception) -> None:
        if self._copy is not None:
            self._copy.fail(error)
