"""Copy a checkpoint to another store, or remove one. A copy writes the manifest last; a removal deletes it first."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.manifest_file import read_manifest
from ..checkpoint.sweep import remove_checkpoint
from ..errors import HIDDEN_PASSWORD, CheckpointError, UsageError
from ..storage_backends import open_backend
from ..storage_backends.local.backend import LocalBackend
from ..transfer.copying import copy_checkpoint
from ..transfer.journal import JournalHead, find_damaged_journals, find_journals, repair_journals
from ..transfer.staged import continue_upload
from ..transfer.transfer import WINDOW, TransferReport
from .rewriter import Progress


@dataclass(frozen=True)
class RemoveReport:
    """The result of ``remove``.

    Attributes:
        url: URL of the removed checkpoint.
        files: Number of removed data files.
        size: Bytes of all removed data files.
        left: Keys that remain, because they were not part of the checkpoint.
        problem: Why files that no incremental checkpoint needs any more may remain; empty if none do.
    """

    url: str
    files: int
    size: int
    left: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True)
class UnfinishedUpload:
    """A copy that was begun and not completed.

    Attributes:
        path: The checkpoint on this machine.
        url: URL of the copy; empty if it is unknown.
        head: What its journal is about; None if it is damaged, or its URL is not complete.
        problem: Why it cannot be continued; empty if it can.
    """

    path: str
    url: str
    head: JournalHead | None
    problem: str = ""

    @property
    def size(self) -> int:
        """Bytes of the files that it copies; 0 if the checkpoint is gone."""
        try:
            manifest = read_manifest(LocalBackend(self.path))
        except CheckpointError:
            return 0
        if self.head is None or self.head.rank is None:
            return manifest.flattened().file_bytes
        return int(manifest.files.size[manifest.files.rank == self.head.rank].sum())


def copy(
    checkpoint: Checkpoint,
    target: AnyLocation,
    *,
    rate_limit: float | None = None,
    window: int = WINDOW,
    progress: Progress = lambda nbytes: None,
    journal: str | os.PathLike[str] | None = None,
) -> TransferReport:
    """Copy a checkpoint exactly, and check every byte before it is written.

    The manifest is written when all files are durable. A journal records what is done: after a failed or killed copy,
    call it again, and what is done is not done again. Objects in S3 continue after their last confirmed part, all
    others after their last complete file. If the source is damaged, or the journal cannot be written, nothing remains
    at the target after a failure. If the target holds this checkpoint already, nothing is written.

    Args:
        checkpoint: The checkpoint to copy.
        target: Where to put the copy, on any store.
        rate_limit: Bytes per second, on average; None for no limit.
        window: Parts that are read, checked and written at the same time, of 16 MiB for S3 (more for files above
            140 GB) and 8 MiB for other stores. The copy needs memory for that many.
        progress: Called with the number of bytes done since the last call, in another thread.
        journal: A local directory for the journal, which ``unfinished_uploads`` does not look at. By default, the
            journal is in the target or the source, if one of them is a local directory; of a copy between two other
            stores, it is in ``$XDG_STATE_HOME/bytecheckpoint/copies``, by default below ``~/.local/state``.

    Returns:
        A report.

    Raises:
        KeyExistsError: The target holds another checkpoint.
        UsageError: The checkpoint was opened with rules, an argument is invalid, or another process makes this copy.
        StateError: Another library wrote the files, which have no checksums.
        CorruptionError: Stored bytes are damaged or missing.
        CommitUnknownError: The store failed while it stored the manifest.
        StorageError: A store failed.
    """
    if checkpoint.index.views is not None:
        raise UsageError(f"{checkpoint.url} was opened with rules; use reshard, or copy it without rules")
    if window < 1 or (rate_limit is not None and not rate_limit > 0):
        raise UsageError(f"window must be at least 1 and rate_limit above 0, got {window} and {rate_limit}")
    checkpoint.require_checksums()
    journals = None if journal is None else open_backend(journal)
    if not isinstance(journals, LocalBackend | None):
        raise UsageError(f"journal must be a local directory, not {journals.display_url}")
    return copy_checkpoint(
        checkpoint.backend,
        Location.of(target).open(),
        window=window,
        rate_limit=rate_limit,
        progress=progress,
        journals=None if journals is None else journals.url,
    )


def unfinished_uploads(root: str | os.PathLike[str], destination: AnyLocation | None = None) -> list[UnfinishedUpload]:
    """List the copies from checkpoints below a local directory to other stores that were begun and not completed.

    Args:
        root: The directory.
        destination: List only copies to this location, or below it.

    Returns:
        The uploads, for ``finish_upload``.

    Raises:
        UsageError: ``root`` is not a local directory.
    """
    backend = open_backend(root)
    if not isinstance(backend, LocalBackend) or not os.path.isdir(backend.url):
        raise UsageError(f"{root} is not a local directory; give the one that holds the checkpoints to upload")
    found: list[UnfinishedUpload] = []
    given = None if destination is None else Location.of(destination).open()
    shown = None if given is None else given.display_url.rstrip("/")
    if shown is not None:
        for folder in {os.path.dirname(path) for path in find_damaged_journals(backend.url)}:
            with suppress(CheckpointError):
                urls = [shown, f"{shown}/{os.path.basename(folder)}"]
                repair_journals(folder, read_manifest(LocalBackend(folder)), urls)
    for path, head in find_journals(backend.url):
        url = head.url
        if head.direction != "to":
            continue
        problem = ""
        if given is not None and shown is not None:
            if url != shown and not url.startswith(shown + "/"):
                continue
            url = given.url.rstrip("/") + url[len(shown) :]
        elif HIDDEN_PASSWORD in url:
            problem = f"the upload of {os.path.dirname(path)} to {url} needs the URL with user and password"
        found.append(UnfinishedUpload(os.path.dirname(path), url, head, problem))
    for path in find_damaged_journals(backend.url):
        problem = (
            f"{path} is damaged: the checkpoint at its side may not be uploaded, and this does not say where to; "
            f"run bcp upload with the DESTINATION, or start the next job; or remove the file if it is not needed"
        )
        found.append(UnfinishedUpload(os.path.dirname(path), "", None, problem))
    return found


def finish_upload(
    upload: UnfinishedUpload,
    target: AnyLocation | None = None,
    *,
    rate_limit: float | None = None,
    progress: Progress = lambda nbytes: None,
) -> TransferReport | None:
    """Continue an upload where it stopped.

    Of a checkpoint that was saved with a tier, this uploads the files of one rank, and commits the checkpoint if
    those of all ranks are uploaded then.

    Args:
        upload: What ``unfinished_uploads`` has returned.
        target: Where it goes; by default ``upload.url``, without storage options.
        rate_limit: As in ``copy``.
        progress: As in ``copy``.

    Returns:
        A report; None if nothing was uploaded. Then the upload was discarded, because a later save has replaced the
        checkpoint, or an older one to whose files it refers was removed; or another machine may have to do it.

    Raises:
        UsageError: Another process continues the upload, or it has a ``problem``.
        BytecheckpointError: As ``copy``.
    """
    if upload.head is None or (upload.problem and target is None):
        raise UsageError(upload.problem)
    source, store = LocalBackend(upload.path), Location.of(target or upload.url).open()
    if upload.head.rank is None:
        return copy_checkpoint(source, store, rate_limit=rate_limit, progress=progress)
    return continue_upload(source, store, upload.head, rate_limit=rate_limit, progress=progress)


def remove(path: AnyLocation) -> RemoveReport:
    """Remove a checkpoint: first its manifest, so that an incomplete checkpoint is never visible, then its files.

    Only files that the manifest names are removed. Of an incremental checkpoint, that is its manifest, and then all
    objects of its root that no checkpoint needs any more; if a job holds the root, its manager removes these.

    Args:
        path: Where the checkpoint is.

    Returns:
        A report.

    Raises:
        CheckpointError: There is no checkpoint at ``path``. Nothing was removed.
        StorageError: The store failed. Files may remain.
    """
    backend = Location.of(path).open()
    swept = remove_checkpoint(backend, read_manifest(backend))
    left = tuple(stat.key for stat in backend.list())
    return RemoveReport(backend.url, swept.files, swept.size, left, swept.problem)
