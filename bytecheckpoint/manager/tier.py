"""What a manager with a tier does in the folder of its machine: continue uploads, and remove what was uploaded."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..checkpoint.attempts import ATTEMPT_PREFIX, job_mark_of, remove_attempt
from ..checkpoint.location import Location, Tier
from ..checkpoint.manifest_file import adopt, decode_manifest, read_manifest, read_manifest_bytes
from ..checkpoint.nearest import open_tier
from ..engine.objects import OBJECTS, data_of
from ..errors import (
    BytecheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    NotACheckpointError,
    SavePendingError,
    StorageError,
    UploadSkippedError,
    UsageError,
)
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import MANIFEST_KEY
from ..runtime.threads import Threads
from ..saving.engine import SharedSaves
from ..saving.handle import SaveHandle, attempt_of, failure_of
from ..saving.upload_queue import UploadQueue
from ..storage_backends.local.backend import LocalBackend
from ..transfer.journal import JournalHead, find_damaged_journals, find_journals, repair_journals
from ..transfer.staged import continue_upload, is_pending, remove_superseded
from ..transfer.transfer import Stop
from .housekeeping import Cleaner, StepNames

_log = logging.getLogger(__name__)

_MANY_WAITING = 4  # checkpoints for the upload; more is not a peak any more


@dataclass(eq=False)
class TierFolder(Cleaner):
    """The tier of the manager's root, on each rank. Several ranks of a machine may share it.

    ``uploads`` is the thread that uploads what waits in ``queue``, and ``saves`` is what its saves share. The newest
    ``tier.keep`` checkpoints stay, and all that are not uploaded yet. ``job`` marks the attempts of this job; ``guard``
    raises if it has lost the root.
    """

    root: Location
    tier: Tier
    uploads: Threads
    queue: UploadQueue[Any]
    saves: SharedSaves
    names: StepNames
    deadline_s: float
    job: bytes
    guard: Callable[[], None]
    stop: Stop = field(default_factory=Stop)  # ends the uploads of the saves that are made with it
    _unfinished: list[SaveHandle] = field(default_factory=list)
    _continued: set[str] = field(default_factory=set)  # attempts that were uploaded, or left out, later
    _after_earlier: Callable[[], None] = lambda: None
    _next_warning: int = _MANY_WAITING
    _begun: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        super().__init__()
        self._folder = open_tier(self.tier.path, self.root.open())

    def pending(self) -> dict[str, bytes]:
        """Return the manifests of the checkpoints here that are not uploaded, by name."""
        found: dict[str, bytes] = {}
        for name in self._pending_names():
            with suppress(CheckpointError, StorageError):
                found[name] = read_manifest_bytes(self._folder_of(name))
        return found

    def _pending_names(self) -> set[str]:
        paths = [*(path for path, _ in find_journals(self._folder.url)), *find_damaged_journals(self._folder.url)]
        return {os.path.relpath(os.path.dirname(path), self._folder.url) for path in paths}

    def _folder_of(self, name: str) -> LocalBackend:
        return LocalBackend(os.path.join(self._folder.url, name))

    def pending_manifests(self) -> Iterator[Manifest]:
        """Yield the decoded manifests of ``pending``. Raises ``CheckpointError``."""
        for name, data in self.pending().items():
            yield decode_manifest(data, os.path.join(self._folder.url, name))

    def begin(self, manifests: Mapping[str, bytes], superfluous: Sequence[str], uploaded: Callable[[], None]) -> None:
        """Continue, in the background, what earlier jobs have not uploaded from this machine.

        ``manifests`` are ``pending`` on all ranks: one may have been killed before it stored what another had stored.
        Those of the attempts ``superfluous`` are not uploaded. ``uploaded`` is called after others were.
        """
        for attempt in superfluous:
            self.queue.leave_out(attempt)
        self._after_earlier = uploaded
        self._begun = self.uploads.submit(self._begin, manifests)

    def lacks_files(self) -> bool:
        """Whether a checkpoint that is not uploaded has files on other machines, so that no load finds all of it."""
        for folder in map(self._folder_of, self._pending_names()):
            with suppress(CheckpointError, StorageError):
                manifest = read_manifest(folder)
                here = {stat.key for stat in data_of(folder, manifest).list(f"{manifest.attempt}/")}
                if not here.issuperset(manifest.files.name):
                    return True
        return False

    def wait_begun(self, timeout_s: float) -> None:
        """Wait until the uploads of earlier jobs have ended, or ``timeout_s`` have passed."""
        _, unfinished = wait([self._begun], timeout_s)
        if unfinished:
            _log.warning("%s: uploads of earlier jobs continue; they are not waited for any longer", self._folder.url)

    def follow(self, save: SaveHandle, name: str) -> None:
        """Once this save is uploaded, forget it and remove earlier checkpoints from the folder."""
        ended = [one for one in self._unfinished if one.is_uploaded()]
        failed = [one for one in ended if _has_failed(one)][:1]  # the first one is what ``wait`` raises
        self._unfinished = [*failed, *(one for one in self._unfinished if one not in ended), save]
        waiting = sum(not one.is_uploaded() for one in self._unfinished)
        if waiting >= self._next_warning:
            self._next_warning = 2 * waiting
            _log.warning(
                "%s: %d checkpoints wait for their upload, and fill the disk: saves are more frequent than %s can take "
                "them; save less often, choose a codec, or raise upload_rate if it is set",
                self._folder.url,
                waiting,
                self.root,
            )
        save.add_uploaded_callback(partial(self._after_upload, name))

    def is_busy(self) -> bool:
        """Whether a save is not uploaded yet."""
        return any(not save.is_uploaded() for save in self._unfinished)

    def wait(self) -> None:
        """Wait until all saves are uploaded.

        Raises the failure of the first one that failed since the last call, and that was not continued since.
        """
        committed = [save for save in self._unfinished if failure_of(save) is None]
        failed = [(save, failure) for save in committed if (failure := failure_of(save, uploaded=True)) is not None]
        with suppress(RuntimeError):  # the checkpointer is closed, which has waited
            self.uploads.submit(int).result()  # after the removals that follow the uploads
        self._unfinished = []
        for save, failure in failed:
            if attempt_of(save) not in self._continued and not isinstance(failure, UploadSkippedError):
                raise failure

    def leave(self, timeout_s: float) -> None:
        """Wait for uploads for so long, and stop them then: the next job, or ``bcp upload``, continues them."""
        end = time.monotonic() + timeout_s
        saves = self._unfinished
        for save in saves:
            with suppress(SavePendingError):
                failure_of(save, max(0.0, end - time.monotonic()), uploaded=True)
        wait([self._begun], max(0.0, end - time.monotonic()))
        if not all([self._begun.done(), *(save.is_uploaded() for save in saves)]):
            _log.warning("%s: not everything is uploaded; the next job, or bcp upload, continues", self._folder.url)
        self._unfinished = []
        self.stop.set()
        self.stop = Stop()

    def drain(self) -> None:
        """Wait until all uploads have ended. Their failures are logged already."""
        try:
            self.wait()
        except BytecheckpointError:
            return

    # -- in the thread that uploads ------------------------------------------------------------------------------

    def _begin(self, manifests: Mapping[str, bytes]) -> None:
        try:
            for name, data in manifests.items():
                try:
                    manifest = decode_manifest(data, name)
                    repair_journals(self._folder_of(name).url, manifest, [self.root.join(name).open().display_url])
                    self._adopt(self._folder_of(name), manifest, data)
                except BytecheckpointError as error:
                    _log.warning("%s: %s may not be uploaded: %s", self._folder.url, name, error)
            for path in find_damaged_journals(self._folder.url):
                _log.warning("%s is damaged, and not of the checkpoint at its side: nothing is uploaded", path)
            self._continue()
            self._remove_unfinished()
            self._remove_old()
        except Exception as error:  # noqa: BLE001 - training continues without it
            _log.warning("%s: the tier could not be tidied: %s", self._folder.url, error, exc_info=True)

    def _adopt(self, folder: LocalBackend, manifest: Manifest, data: bytes) -> None:
        if not is_pending(folder.url, manifest.attempt):
            return
        try:
            is_later = read_manifest(folder).created >= manifest.created
        except CheckpointError:
            is_later = False
        if not is_later:
            adopt(folder, data)

    def _continue(self, *, gives_up: bool = False) -> None:
        """Continue every upload that no process is working on, the newest first, unless a save of this job waits."""
        stop, has_failed, has_uploaded = self.stop, False, False
        found = sorted(find_journals(self._folder.url), key=lambda one: _created(*one), reverse=True)
        for path, head in sorted(found, key=lambda one: self.queue.is_left_out(one[1].attempt)):
            if stop.is_set or self.is_busy():
                break
            name = os.path.relpath(os.path.dirname(path), self._folder.url)
            if head.rank is None or head.direction != "to" or not self.names.is_managed(name):
                continue
            is_superfluous = self.queue.is_left_out(head.attempt)
            if is_superfluous and has_failed:
                break  # a later one is not uploaded yet
            store = self.root.join(name).open(self.deadline_s)
            try:
                report = continue_upload(
                    LocalBackend(os.path.dirname(path)),
                    store,
                    head,
                    rate_limit=self.tier.upload_rate,
                    admit=self.guard,
                    gives_up=gives_up,
                    is_superfluous=is_superfluous,
                    stop=stop,
                    lock=self.saves.committing,
                )
            except UsageError:
                continue  # another rank of this machine does it
            except BytecheckpointError as error:
                has_failed = True
                _log.warning("%s: an earlier job's upload could not be continued: %s", path, error)
            else:
                if report is not None:
                    _log.info("%s: this machine's part of an earlier upload is complete", os.path.dirname(path))
                    has_uploaded = True
                if report is not None or is_superfluous:
                    self._continued.add(head.attempt)
        if has_uploaded:
            self._after_earlier()

    def _after_upload(self, name: str, save: SaveHandle) -> None:
        self.forget(name)
        try:
            failure = failure_of(save, uploaded=True)
            if isinstance(failure, UploadSkippedError):
                return
            if failure is not None:
                raise failure
            self._continue(gives_up=True)  # the checkpoint that is uploaded now is later than all of them
            self._remove_old()
        except (BytecheckpointError, OSError) as error:
            _log.warning("%s: nothing was removed: %s", self._folder.url, error)

    def _remove_old(self) -> None:
        found = []
        for name in self._staged():
            folder = self._folder_of(name)
            try:
                manifest = read_manifest(folder)
            except (CheckpointError, StorageError):
                continue  # it was never committed, or another rank has removed it
            found.append((manifest.created, name, manifest.attempt))
        for _, name, attempt in sorted(found)[: -self.tier.keep]:
            folder = self._folder_of(name)
            try:
                with self.removing(name) as is_free:
                    if not is_free or name in self._pending_names():
                        continue
                    _log.info("removing %s, which is uploaded", folder.url)
                    self._folder.delete([f"{name}/{MANIFEST_KEY}"])
            except StorageError as error:
                _log.warning("%s could not be removed: %s", folder.url, error)
                continue
            remove_superseded(folder, attempt)

    def _remove_unfinished(self) -> None:
        """Remove attempts of ended jobs that were never committed, or whose checkpoints were replaced."""
        needed = {head.attempt for _, head in find_journals(self._folder.url)}
        known = [OBJECTS]
        for name in self._staged():
            try:
                needed.add(read_manifest(self._folder_of(name)).attempt)
            except (CheckpointNotFoundError, NotACheckpointError):
                pass
            except (CheckpointError, StorageError) as error:  # it is unknown what is needed
                _log.warning("not touched, because it cannot be read: %s", error)
                known = [one for one in known if one != OBJECTS]
                continue
            known.append(name)
        for name in known:
            for child in self._folder.list_children(f"{name}/"):
                attempt = child.rstrip("/")
                is_of_job = job_mark_of(attempt, also_staged=True) in (b"", self.job)
                if child.startswith(ATTEMPT_PREFIX) and not is_of_job and attempt not in needed:
                    remove_attempt(self._folder, f"{name}/{attempt}")

    def _staged(self) -> list[str]:
        children = (child for child in self._folder.list_children("") if child.endswith("/"))
        return [child[:-1] for child in children if self.names.is_managed(child[:-1])]


def _created(path: str, head: JournalHead) -> str:
    """Return when the save of a journal was begun; empty if its checkpoint is not at its side."""
    with suppress(CheckpointError, StorageError):
        manifest = read_manifest(LocalBackend(os.path.dirname(path)))
        return manifest.created if manifest.attempt == head.attempt else ""
    return ""


def _has_failed(save: SaveHandle) -> bool:
    return not isinstance(failure_of(save, uploaded=True), (UploadSkippedError, type(None)))
