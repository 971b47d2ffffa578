"""The ``confirm``, ``commit`` and ``clean`` steps of a save, and what a failure in them means for the checkpoint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ..checkpoint.attempts import remove_attempt
from ..checkpoint.manifest_file import adopt, commit, read_manifest, remove_files, rest_of_deadline
from ..checkpoint.sweep import FilesGoneError, admitted, remove_files_of
from ..control.base import Operation
from ..engine.writing import WrittenFile
from ..errors import (
    CheckpointError,
    CommitUnknownError,
    ControlError,
    DeadlineError,
    RankFailedError,
    StorageError,
)
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import encode
from ..storage_backends import parent_url
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from ..telemetry.save_times import PACKED_STEPS, SaveTimes, pack_steps
from ..telemetry.trace import SAVE_STEPS, Timings
from ..transfer.staged import remove_superseded
from ..version import VERSION
from .agreement import SaveShare
from .engine import LastCommit, SharedSaves
from .incremental import Base
from .options import SaveRequest
from .record import Confirmations, WrittenFiles, build_manifest, pack_written
from .uploading import SaveUpload

# How long rank 0 waits after a failed save for the other ranks to stop writing, before it removes the attempt. The
# second limit applies if a rank was late already.
_SWEEP_AFTER_S = 10.0
_SWEEP_AFTER_LATE_S = 0.5

_VISIBLE_S, _VISIBLE_POLL_S = 10.0, 0.1  # for file systems that show a file to other hosts some seconds late

_STEPS_BEFORE_COMMIT = SAVE_STEPS[: SAVE_STEPS.index("commit")]

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class SaveCommit:
    """The attempt of one save on one rank: its last steps, and its removal if they fail.

    Once rank 0 may have written the manifest, this rank's files may be part of a checkpoint and are never removed.
    """

    op: Operation
    backend: StorageBackend
    options: SaveRequest
    saves: SharedSaves
    share: SaveShare
    timings: Timings
    is_new: bool
    is_async: bool
    upload: SaveUpload | None

    def __post_init__(self) -> None:
        self.data = self.backend
        """Where the data files are."""
        self._begun = time.monotonic()
        self.attempt, self._plan = self.share.attempt, self.share.planned.plan
        self.chunk_size = self.options.chunk_size_for(self.share.planned.nbytes)
        self._steps: list[bytes] = []  # by rank, on rank 0
        self.manifest = b""  # once it is committed; with an upload
        self._may_exist = False  # the checkpoint
        self._is_committed = False  # by this rank
        self._is_unknown = False  # whether it exists, to a rank that has failed
        self._replaced: Manifest | None = None
        self.base: Base | None = None
        """The base of an incremental save, on rank 0."""
        self.is_shared = False

    # -- the steps -----------------------------------------------------------------------------------------------

    def confirm(self, written: WrittenFiles) -> list[list[WrittenFile]] | None:
        """Send rank 0 the checksums of this rank's files; on rank 0, return the files of every rank."""
        if self.upload is not None:
            self.upload.prepare(self.attempt)
        self.op.check()  # no manifest is written without this rank's checksums, which it has not sent yet
        self._may_exist = self.op.rank != 0
        received = self.op.gather("written", pack_steps(self.timings) + pack_written(written.planned))
        if received is None:
            return None
        assert self._plan is not None
        confirmations = Confirmations(self._plan, attempt=self.attempt, chunk_size=self.chunk_size)
        self._steps = [message[:PACKED_STEPS] for message in received]
        files = [confirmations.unpack(rank, message[PACKED_STEPS:]) for rank, message in enumerate(received)]
        self._check_visible(files)
        files[0] += written.companions
        return files

    def _check_visible(self, files: Sequence[Sequence[WrittenFile]]) -> None:
        """Raise ``StorageError`` if this rank does not see the files of all ranks, in the first save to a root.

        Their hosts may have different folders at this path, and nothing could be loaded.
        """
        root = parent_url(self.backend)
        is_known = self.op.world_size == 1 or self.upload is not None or root in self.saves.shared_roots
        if is_known or not isinstance(self.backend, LocalBackend):
            return
        give_up = time.monotonic() + _VISIBLE_S
        while True:
            sizes = {stat.key: stat.size for stat in self.data.list(f"{self.attempt}/")}
            unseen = [
                (rank, one.key) for rank, own in enumerate(files) for one in own if sizes.get(one.key) != one.size
            ]
            if not unseen:
                self.saves.shared_roots.add(root)
                return
            if time.monotonic() > give_up:
                break
            time.sleep(_VISIBLE_POLL_S)
        (rank, key), host = unseen[0], self.op.host_of
        others = sorted({host(rank) for rank, _ in unseen})
        raise StorageError(
            f"{self.backend.url} is not the same folder on all hosts: rank 0 on {host(0)} does not see {len(unseen)} "
            f"file(s) that ranks on {', '.join(others[:5])} have written, such as {key} of rank {rank}. Nothing was "
            f"committed; save to a folder that all hosts share, or to local disks as a tier (docs/object-stores.md)"
        )

    def commit(self, confirmed: Sequence[Sequence[WrittenFile]] | None) -> None:
        """Write the manifest, on rank 0; on the other ranks, wait until it is written."""
        if confirmed is None:
            self.manifest = self.op.broadcast("committed", None)
            if self.manifest:
                self._is_unknown = True  # unless it is here, too: another machine has it
                self._replaced = adopt(self.backend, self.manifest)
            return
        assert self._plan is not None
        manifest = build_manifest(
            self._plan,
            confirmed,
            attempt=self.attempt,
            step=self.options.step,
            metadata=dict(self.options.metadata),
            library_version=VERSION,
            is_shared=self.is_shared,
            older=None if self.base is None else self.base.files,
        )
        times = SaveTimes.of(self.timings, self._steps, is_async=self.is_async)
        manifest.save_times = times.to_document()
        data = encode(manifest)
        if self.is_shared:
            self.saves.refer(self.attempt, manifest)
        if self.upload is not None:
            self.manifest = data
        try:
            with ExitStack() as held:
                if self.is_shared and self.upload is None:
                    lock, deadline_s = self.saves.committing if self.options.job else None, self.options.deadline_s
                    held.enter_context(admitted(self.backend, manifest, lock=lock, patience_s=deadline_s))
                self._replaced = commit(self.backend, data, is_new=self.is_new, admit=self._admit)
        except CommitUnknownError:
            raise
        except Exception as error:
            self._may_exist = False
            if isinstance(error, FilesGoneError):
                self.saves.last_commit = None
            raise
        self._is_committed = True
        if self._replaced is not None:
            self.saves.forget(self._replaced.attempt)
        if self.is_shared and self.upload is None:
            self.saves.last_commit = LastCommit.of(self.backend, manifest, data)
        self.timings.point("commit.after")
        try:
            self.op.broadcast("committed", self.manifest)
        except ControlError as error:
            _log.warning("%s is committed, but not every rank was notified: %s", self.backend.display_url, error)

    def _admit(self) -> None:
        self.timings.point("commit.before")
        self.op.check()
        if self.upload is None:  # else the store is not asked before its own commit
            self.options.guard()
        self._may_exist = True

    def clean(self) -> None:
        """Remove the files of an overwritten checkpoint. Never raises: the new checkpoint is committed."""
        try:
            with self.timings.step("clean"):
                if self._replaced is not None and self._replaced.attempt != self.attempt:
                    if self.upload is not None:
                        remove_superseded(self.upload.tier_folder, self._replaced.attempt)
                    elif not (self._replaced.is_shared and self.options.job):  # whose manager sweeps
                        remove_files_of(self.backend, self._replaced)
        except BaseException:  # noqa: BLE001 - the checkpoint is committed; housekeeping must not fail the save
            _log.warning(
                "%s: cannot remove the overwritten checkpoint's files", self.backend.display_url, exc_info=True
            )

    # -- failures ------------------------------------------------------------------------------------------------

    def exists_despite(self, error: BaseException) -> bool:
        """Whether the checkpoint is committed although this rank met ``error``.

        Rank 0 has put the manifest itself. Another rank, which has lost rank 0, reads the path.
        """
        if self.op.rank == 0:
            return self._is_committed
        if not self._may_exist or not isinstance(error, ControlError) or _failed_before_commit(error):
            return False
        if self.upload is not None:  # rank 0 may have committed on another machine
            self._is_unknown = True
            return False
        try:
            return read_manifest(self.backend).attempt == self.attempt
        except CheckpointError:
            return False
        except Exception:  # noqa: BLE001 - a storage plug-in may raise anything
            self._is_unknown = True
            return False

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return ``error``, or a ``CommitUnknownError`` if the checkpoint may exist.

        That is the case if rank 0 is only late and may still commit, or if the manifest cannot be read here, or, with
        a tier, not be written here. Call ``exists_despite`` first.
        """
        if not self._may_exist or self.op.rank == 0 or not (isinstance(error, DeadlineError) or self._is_unknown):
            return error
        unknown = CommitUnknownError(
            f"{self.backend.url}: all data is written, but this rank could not confirm the commit: {error} Open the "
            f"path to find out whether the checkpoint exists, or save again"
        )
        unknown.__cause__ = error
        return unknown

    def may_exist(self, error: BaseException) -> bool:
        """Whether a manifest may refer to the attempt, now or later, although this rank met ``error``."""
        return self._may_exist and not _failed_before_commit(error)

    def remove_files(self, keys: Sequence[str], error: BaseException) -> None:
        """After a failure, remove this rank's files; on rank 0, the whole attempt. Never raises.

        Nothing is removed unless it is certain that no manifest refers to the attempt, now or later.
        """
        if self.may_exist(error):
            return
        if self.op.rank != 0:
            with rest_of_deadline(self.data, self._begun):
                remove_files(self.data, keys)
            self._remove_folder()
            return
        # Other ranks may still be writing. A rank that writes later removes its own files, unless it is killed.
        is_late = isinstance(error, DeadlineError)
        timeout_s = _SWEEP_AFTER_LATE_S if is_late else min(_SWEEP_AFTER_S, self.options.deadline_s)
        self.op.wait_for_others_to_leave(timeout_s)
        with rest_of_deadline(self.data, self._begun):
            remove_attempt(self.data, self.attempt)
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the local folder of the checkpoint if nothing is in it."""
        if isinstance(self.backend, LocalBackend):
            with suppress(OSError):
                os.rmdir(self.backend.url)


def _failed_before_commit(error: BaseException) -> bool:
    """Whether rank 0 itself reported that it failed in a step before ``commit``."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    return isinstance(failed, RankFailedError) and failed.rank == 0 and failed.phase in _STEPS_BEFORE_COMMIT
