"""The end of a save: rank 0 learns of every rank's files and puts the manifest, or it is told that there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from . import trace
from .control.base import Operation
from .engine.writing.commit import commit, read_manifest, remove_files, replaceable
from .engine.writing.confirmation import Confirmed, pack_written
from .engine.writing.image_write import WrittenFile
from .engine.writing.record import record
from .errors import BytecheckpointError, CommitUnknownError, ControlError, DeadlineError, RankFailedError
from .manifest import Manifest
from .save_options import SaveOptions
from .save_planning import Settled
from .storage_backends.base import StorageBackend
from .version import VERSION

__all__ = ["SaveCommit"]

_BEFORE_COMMIT = trace.SAVE_STEPS[: trace.SAVE_STEPS.index("commit")]

_log = logging.getLogger(__name__)


class SaveCommit:
    """The last steps of one save on one rank, in their order: ``confirm``, ``commit``, ``clean``.

    Where a step fails, the other methods tell what may have come of it: once rank 0 may have put the manifest, this
    rank's files may be part of a checkpoint, and are never removed.
    """

    def __init__(
        self,
        op: Operation,
        backend: StorageBackend,
        options: SaveOptions,
        settled: Settled,
        timings: trace.Timings,
    ) -> None:
        self._op, self._backend, self._options, self._timings = op, backend, options, timings
        self._attempt, self._plan = settled.attempt, settled.plan
        self.chunk_size = options.chunk_size_for(settled.nbytes)
        self._may_stand = False
        self._is_put = False  # by this rank
        self._previous: Manifest | None = None

    def confirm(
        self, written: Sequence[WrittenFile], companions: Sequence[WrittenFile]
    ) -> list[list[WrittenFile]] | None:
        """Tell rank 0 which files this rank wrote, in the order of the plan; on rank 0, those of every rank.
        ``companions`` are rank 0's own, of which no plan knows."""
        self._may_stand = self._op.rank != 0
        everyone = self._op.gather("written", pack_written(written))
        if everyone is None:
            return None
        assert self._plan is not None
        confirmed = Confirmed(self._plan, attempt=self._attempt, chunk_size=self.chunk_size)
        files = [confirmed.unpack(rank, told) for rank, told in enumerate(everyone)]
        files[0] += companions
        return files

    def commit(self, confirmed: list[list[WrittenFile]] | None) -> None:
        """Put the manifest, on rank 0; elsewhere, hear that it was put."""
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
        self._timings.point("commit.before")
        self._op.check()
        self._options.guard()
        self._may_stand = True
        try:
            commit(self._backend, manifest)
        except CommitUnknownError:
            raise
        except Exception:
            self._may_stand = False
            raise
        self._is_put = True
        self._timings.point("commit.after")
        try:
            self._op.broadcast("committed", b"")
        except ControlError as error:
            _log.warning("%s is committed, but not every rank heard so: %s", self._backend.url, error)

    def clean(self) -> None:
        """Housekeeping after the fact: whatever happens here, the checkpoint stands."""
        try:
            with self._timings.step("clean"):
                if self._previous is not None and self._previous.attempt != self._attempt:
                    remove_files(self._backend, self._previous.files.name)
        except BaseException:  # noqa: BLE001 - the checkpoint is committed, housekeeping must not fail it
            _log.warning("%s: removing the overwritten checkpoint's files failed", self._backend.url, exc_info=True)

    def is_ruled_out(self, error: BaseException) -> bool:
        """Whether a save that failed with ``error`` has left no manifest, and never will."""
        return not self._may_stand or _never_committed(error)

    def stands(self, error: BaseException) -> bool:
        """Whether the checkpoint exists for all that: this rank put it, or sees it although rank 0 was lost."""
        if self._op.rank == 0:
            return self._is_put
        if not self._may_stand:
            return False
        if not isinstance(error, ControlError) or _never_committed(error):
            return False
        try:
            return read_manifest(self._backend).attempt == self._attempt
        except BytecheckpointError:
            return False

    def in_doubt(self, error: BaseException) -> BaseException:
        """What to raise: ``error``, or ``CommitUnknownError`` where rank 0 is only late and may commit yet."""
        if not self._may_stand or self._op.rank == 0 or not isinstance(error, DeadlineError):
            return error
        return CommitUnknownError(
            f"{self._backend.url}: everything is written, but rank 0 was not heard to commit it: {error} Open the path "
            f"to find out, or save again"
        )


def _never_committed(error: BaseException) -> bool:
    """Whether this is rank 0's own word that it failed before it could commit."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    return isinstance(failed, RankFailedError) and failed.rank == 0 and failed.phase in _BEFORE_COMMIT
