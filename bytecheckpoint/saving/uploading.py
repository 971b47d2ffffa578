"""The upload of a save with a tier: it begins when the checkpoint is committed in the tier.

Each rank uploads its own files, in a background thread that serves one upload after the other: the newest one that
waits (``upload_queue``). Rank 0 writes the manifest when all ranks are done. A failure leaves the checkpoint in the
tier, with the journals from which another process can continue.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from functools import partial

import msgpack

from ..checkpoint.location import Tier
from ..checkpoint.manifest_file import check_replaceable, decode_manifest
from ..checkpoint.nearest import open_tier
from ..checkpoint.sweep import FilesGoneError
from ..control.base import Operation
from ..errors import StorageError, UploadSkippedError
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from ..transfer.journal import Journal, JournalHead
from ..transfer.staged import commit_upload, remove_superseded, upload_files
from ..transfer.transfer import TransferReport
from .engine import LastCommit, SaveEngine
from .lifecycle import SaveLifecycle
from .options import SaveRequest

_log = logging.getLogger(__name__)


class SaveUpload:
    """The upload of one save on one rank.

    Attributes:
        store: Where the checkpoint is uploaded to.
        tier_folder: The folder of this machine in which the checkpoint is committed.
        lifecycle: Whether the upload has ended. Its result counts what this rank sent.
    """

    def __init__(
        self,
        engine: SaveEngine,
        op: Operation,
        store: StorageBackend,
        tier: Tier,
        options: SaveRequest,
    ) -> None:
        self._engine, self._op, self.store, self._options = engine, op, store, options
        self.tier_folder, self._rate_limit = open_tier(tier.path, store), tier.upload_rate
        self.tier_folder.deadline_s = options.deadline_s
        self.lifecycle: SaveLifecycle[TransferReport] = SaveLifecycle()
        self._attempt, self._manifest, self._begun = "", b"", 0.0
        self._journal: Journal | None = None

    def prepare(self, attempt: str) -> None:
        """Record on disk that this rank's files must be uploaded. Call it before the commit in the folder."""
        self._attempt = attempt
        try:
            self._journal = Journal(
                self.tier_folder.url, JournalHead("to", self.store.display_url, attempt, self._op.rank)
            )
        except StorageError as error:
            _log.warning("%s; an upload that is interrupted cannot be continued", error)

    def start(self, manifest: bytes) -> None:
        """Upload in the background. The save is committed in the folder."""
        try:
            if self._journal is not None:
                self._journal.add_committed()
        except StorageError as error:
            _log.warning("%s", error)
        self.lifecycle.queue()
        self._manifest, self._begun = manifest, time.monotonic()
        if not self._engine.upload_queue.add(self._attempt, self):
            self._skip()
        try:
            self._engine.uploads.submit(self._take_turn)
        except RuntimeError as error:
            self._engine.upload_queue.refuse(self._attempt)
            self._fail(StorageError(f"the upload cannot begin: {error}; run bcp upload to make it"))

    def cancel(self, error: BaseException, *, may_exist: bool = False) -> None:
        """The save has failed: there is nothing to upload, unless the checkpoint ``may_exist`` on another machine."""
        self._engine.upload_queue.refuse(self._attempt)
        if self.lifecycle.withdraw(error):
            if may_exist:
                self._report(error)
            elif self._journal is not None:
                self._journal.remove()
            self._end_failed()

    def _take_turn(self) -> None:
        """Upload the checkpoint that rank 0 chooses of those that wait; not necessarily this one."""
        queue = self._engine.upload_queue
        try:
            with self._follow() as op, self._failing_when_stopped(op):
                with op.phase("choose"):
                    answer = msgpack.packb(queue.choose(self._options.superfluous())) if op.rank == 0 else None
                attempt, *skipped = msgpack.unpackb(op.broadcast("choose", answer))
        except BaseException as error:  # noqa: BLE001 - the handle raises it
            found: SaveUpload | None = queue.take_any(self._attempt)
            if found is not None:
                found._fail(error)
            return
        for one in skipped:
            if (found := queue.leave_out(one)) is not None:
                found._skip()
        if attempt and (found := queue.take(attempt)) is not None:
            found._run()

    def _skip(self) -> None:
        """End without an upload. The checkpoint remains in the tier as long as it is one of the newest there."""
        name = self.store.display_url
        _log.info("%s is not uploaded, because later checkpoints wait, and retention would remove it", name)
        if self._journal is not None:
            self._journal.remove()
        self._engine.shared.end(self._attempt)
        self.lifecycle.withdraw(
            UploadSkippedError(f"{name} was not uploaded: later checkpoints were saved meanwhile, and it is not kept")
        )
        self._end_failed()

    def _fail(self, error: BaseException) -> None:
        """End without an upload, before this rank has begun it."""
        self._log_failure(error)
        if self.lifecycle.withdraw(error):
            self._report(error)
            self._engine.shared.end(self._attempt)
            self._end_failed()

    def _log_failure(self, error: BaseException) -> None:
        _log.error(
            "the upload from %s to %s failed; bcp upload continues it: %s",
            self.tier_folder.url,
            self.store.display_url,
            error,
        )

    def _failing_when_stopped(self, op: Operation) -> AbstractContextManager[None]:
        stopped = StorageError(f"the upload to {self.store.display_url} was stopped")
        return self._options.upload_stop.calling(partial(op.fail, "transfer", stopped))

    def _run(self) -> None:
        data = self._manifest
        if not self.lifecycle.start():
            return
        self.lifecycle.finish_merge()
        store, rank = self.store, self._op.rank
        timings = Timings("upload", rank, store.url)
        failure: BaseException | None = None
        try:
            manifest = decode_manifest(data, self.tier_folder.url)
            try:
                with timings.step("transfer"):
                    if rank == 0:
                        check_replaceable(store)
                    report = upload_files(
                        self.tier_folder,
                        store,
                        manifest,
                        self._journal,
                        rank=rank,
                        rate_limit=self._rate_limit,
                        stop=self._options.upload_stop,
                    )
                    timings.count("transfer", report.sent)
            except BaseException as error:  # noqa: BLE001 - raised below, where the other ranks learn of it
                failure = error
            with self._follow() as op, self._failing_when_stopped(op):
                with op.phase("transfer"):
                    if failure is not None:
                        raise failure
                op.gather("transferred", b"")
                if rank == 0:
                    with op.phase("commit"), timings.step("commit"):
                        admit, lock = partial(self._admit, timings), self._engine.shared.committing
                        commit_upload(store, manifest, data, admit=admit, lock=lock if self._options.job else None)
                op.broadcast("uploaded", b"" if rank == 0 else None)
            last = self._engine.shared.last_commit
            if rank == 0 and manifest.is_shared and (last is None or last.manifest.created < manifest.created):
                self._engine.shared.last_commit = LastCommit.of(store, manifest, data)
            if self._journal is not None:
                self._journal.remove()
        except BaseException as error:  # noqa: BLE001 - the handle raises it
            self._log_failure(error)
            if isinstance(error, FilesGoneError):
                self._engine.shared.last_commit = None
            self.lifecycle.fail(error)
            self._end_failed()
        else:
            lag_s, waiting = time.monotonic() - self._begun, len(self._engine.upload_queue)
            _log.info("uploaded %s, %.1f s after its commit; %d wait (%s)", store.display_url, lag_s, waiting, timings)
            self._close()
            self.lifecycle.commit(report)
        finally:
            del failure
            self._engine.shared.end(self._attempt)
        remove_superseded(self.tier_folder, self._attempt)

    def _report(self, error: BaseException) -> None:
        """Report to ranks that may wait for this one that it does not upload its files."""
        for _ in range(2):  # its turn, and the upload
            with self._follow() as op:
                op.fail("transfer", error)

    def _follow(self) -> Operation:
        # Another rank may still upload its files of earlier saves.
        return self._op.follow("upload", deadline_s=self._options.deadline_s, is_patient=True)

    def _admit(self, timings: Timings) -> None:
        timings.point("commit.before")
        self._options.guard()

    def _end_failed(self) -> None:
        self._close()
        self.lifecycle.end_failed()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
