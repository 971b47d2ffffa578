"""Remove checkpoints that no retention rule keeps, and unfinished attempts of ended jobs, after each commit."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ..checkpoint.attempts import ATTEMPT_PREFIX, attempts_among, has_expired, job_mark_of, remove_attempt
from ..checkpoint.discovery import is_exception_save, metric_of, milestone_of
from ..checkpoint.lease import Lease
from ..checkpoint.lineage import OrderKey, order_key, trailing_number
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import decode_manifest, find_manifest, read_manifest
from ..checkpoint.rollback import complete_rollback
from ..checkpoint.sweep import remove_files_of, sweep
from ..engine.objects import OBJECTS, files_of
from ..errors import (
    BytecheckpointError,
    CheckpointError,
    KeyNotFoundError,
    StorageError,
    UploadSkippedError,
    UsageError,
)
from ..format.manifest.document import Manifest, seconds_of
from ..format.manifest.envelope import MANIFEST_KEY
from ..runtime.threads import Threads
from ..saving.engine import SharedSaves
from ..saving.handle import SaveHandle, attempt_of, failure_of
from ..storage_backends import StorageBackend, check_key
from .options import Retention

_ON_EXCEPTION = "-exception"
_UPLOAD_GRACE_S = 24 * 3600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint. ``metric`` is None if it was saved without the metric; NaN counts as None."""

    name: str
    step: int
    metric: float | None = None
    is_milestone: bool = False
    is_exception_save: bool = False
    is_abandoned: bool = False
    created: float = 0.0
    """When it was saved, in seconds since the epoch; 0 if that is not known."""
    number: int = 0
    """Counts the saves of this job; 0 if an earlier one has saved it."""


class StepNames:
    """The folder names of checkpoints, such as ``checkpoint-{step}`` or ``step-{step:08d}``."""

    def __init__(self, template: str) -> None:
        """Raises ``UsageError`` unless the step can be read off the end of every name."""
        self._template = template
        try:
            check_key(self.of(1))
            is_plain = "/" not in self.of(1) and self.of(1) == self.of(1).strip()
            is_valid = is_plain and all(self.step_of(self.of(step)) == step for step in (0, 7, 8_000_123))
        except (BytecheckpointError, LookupError, TypeError, ValueError, AttributeError):
            is_valid = False
        if not is_valid or self.of(1).startswith((".", ATTEMPT_PREFIX)):
            raise UsageError(
                f"name_template must be the name of a folder that ends in {{step}}, such as 'checkpoint-{{step}}' or "
                f"'step-{{step:08d}}', not {template!r}"
            )

    def of(self, step: int) -> str:
        """Return the name of the checkpoint of ``step``."""
        return self._template.format(step=step)

    def on_exception(self, step: int) -> str:
        """Return the name of a checkpoint that is saved on an exception, after ``step``."""
        return self.of(step) + _ON_EXCEPTION

    def is_managed(self, name: str) -> bool:
        """Return whether the manager uses this name."""
        return self.step_of(name.removesuffix(_ON_EXCEPTION)) is not None

    def step_of(self, name: str) -> int | None:
        """Return the step of a checkpoint's name; None if the manager does not use this name."""
        step = trailing_number(name)
        return step if step >= 0 and name == self.of(step) else None


def expendable(
    retention: Retention, committed: Sequence[Committed], *, keep_exception_saves: int | None = None
) -> list[Committed]:
    """Return the checkpoints that no rule keeps. ``committed`` lists all of them, from the oldest to the newest.

    The rules of ``retention`` do not see checkpoints that were saved on an exception; of these, the last ones are kept.
    """
    regular = [one for one in committed if not one.is_exception_save]
    on_exception = [one for one in committed if one.is_exception_save]
    expendable_ones = _expendable(retention, regular)
    return expendable_ones if keep_exception_saves is None else on_exception[:-keep_exception_saves] + expendable_ones


def _expendable(retention: Retention, committed: Sequence[Committed]) -> list[Committed]:
    rules = retention.last, retention.last_hours, retention.every_steps, retention.best
    if not committed or all(rule is None for rule in rules):
        return []
    kept = {one.name for one in committed if one.is_milestone}
    kept |= {one.name for one in committed[-(retention.last or 1) :]}
    if retention.last_hours is not None:
        # Not the time now: whatever this host's clock shows, what was saved shortly before the newest one stays.
        since = committed[-1].created - 3600 * retention.last_hours
        kept |= {one.name for one in committed if one.created >= since}
    if retention.every_steps is not None:
        ordered = sorted((one for one in committed if not one.is_abandoned), key=lambda one: one.step, reverse=True)
        first = {one.step // retention.every_steps: one for one in ordered}
        kept |= {one.name for part, one in first.items() if part or not one.step}
    if retention.best is not None:
        sign = 1.0 if retention.mode == "min" else -1.0
        measured = [(one.metric, one) for one in committed if one.metric is not None and not math.isnan(one.metric)]
        # Of equal checkpoints the later one wins: it has seen more data.
        measured.sort(key=lambda pair: (sign * pair[0], -pair[1].step))
        kept |= {one.name for _, one in measured[: retention.best]}
    return [one for one in committed if one.name not in kept]


class Cleaner:
    """Removes checkpoints, but none of a name into which this job is about to save, or is saving."""

    def __init__(self) -> None:
        self._lock, self._removal = threading.Lock(), threading.Lock()
        self._expected: list[str] = []
        self._removing = ""

    def expect(self, name: str) -> None:
        """Protect the folder ``name``, into which this job is about to save, until ``forget``.

        Only the removal of this name is waited for: a store that is slow, or down, holds up no other save.
        """
        with self._lock:
            self._expected.append(name)
            is_removing = name == self._removing
        if is_removing:
            with self._removal:
                pass

    def forget(self, name: str) -> None:
        """End the protection of ``name``: the save into it has failed, or is uploaded."""
        with self._lock:
            self._expected.remove(name)

    def is_expected(self, name: str) -> bool:
        """Whether this job is about to save into the folder ``name``, or is saving."""
        with self._lock:
            return name in self._expected

    @contextmanager
    def removing(self, name: str) -> Iterator[bool]:
        """Remove the manifest of this name in the block, unless that yields False, because the job saves there."""
        with self._removal:
            with self._lock:
                is_free = name not in self._expected
                self._removing = name if is_free else ""
            try:
                yield is_free
            finally:
                self._removing = ""


class _Leaving(Exception):
    """The process ends soon."""


class Housekeeping(Cleaner):
    """Runs on rank 0, in its own thread.

    It touches only folders that the manager's template names, and never files of a committed checkpoint that
    is kept. ``expect``, ``forget`` and ``follow`` are called from the training thread.
    """

    def __init__(
        self,
        root: Location,
        retention: Retention,
        lease: Lease,
        saves: SharedSaves,
        *,
        names: StepNames,
        deadline_s: float,
        keep_exception_saves: int | None = None,
        on_removed: Callable[[str], None] = lambda url: None,
    ) -> None:
        super().__init__()
        self._root, self._names, self._on_removed = root, names, on_removed
        self._deadline_s = deadline_s
        self._backend = self._open()
        self._retention, self._lease, self._saves = retention, lease, saves
        self._staleness_s = self._backend.staleness_s()
        self._has_failed = False  # whether something has to be tried again
        self._is_swept = False  # whether nothing that no checkpoint needs is among the objects
        self._of_earlier_jobs: set[str] = set()
        self.pending: Callable[[], Iterable[Manifest]] = lambda: ()
        """Returns the manifests in the tier that are not uploaded yet."""
        self._keep_exception_saves = keep_exception_saves
        self._awaited: set[str] = set()  # checkpoints of earlier jobs, which any rank may commit in the store
        self._saved = 0  # by this job
        self._numbers: dict[str, int] = {}  # of those that are not removed, by name
        self._staged: dict[str, tuple[SaveHandle, Committed]] = {}  # what is saved and not uploaded
        self._unsent: list[tuple[Committed, str]] = []  # and what earlier jobs, or uploads that failed, have left there
        self._committed: list[Committed] | None = None  # from the oldest to the newest; None: unknown
        self._is_leaving = False
        self._thread = Threads(1, thread_name_prefix="bcp-housekeeping")

    def _open(self, *name: str) -> StorageBackend:
        return self._root.join(*name).open(self._deadline_s)

    def keep_objects(self, manifest: bytes) -> None:
        """Keep what a checkpoint of an earlier job needs, which any rank may upload, as long as this job runs."""
        with suppress(CheckpointError):  # nothing uploads it
            self._of_earlier_jobs.update(files_of(decode_manifest(manifest, str(self._root))))

    def expect_uploads(self, manifests: Mapping[str, bytes]) -> None:
        """Note what earlier jobs have not uploaded, by name."""
        self._awaited = {*manifests}
        try:
            abandoned = complete_rollback(self._root, self._backend).attempts
        except (CheckpointError, StorageError):
            return  # it is unknown which are the newest
        found: list[tuple[OrderKey, Committed, str]] = []
        for name, data in manifests.items():
            with suppress(CheckpointError):
                manifest = decode_manifest(data, name)
                described = self._described(name, manifest, 0, abandoned)
                found.append((order_key(name, manifest, abandoned), described, manifest.attempt))
        self._unsent = [(one, attempt) for _, one, attempt in sorted(found, key=lambda found: found[0])]

    def apply(self) -> None:
        """Remove what no rule keeps, after an upload of an earlier job's checkpoint."""
        with suppress(RuntimeError):  # it is closed
            self._thread.submit(self._apply, None)

    def follow(self, save: SaveHandle, saved: Committed) -> None:
        """Once this save is committed, forget it and remove the checkpoints that no rule keeps. Returns at once."""
        self._saved += 1
        self._numbers[saved.name] = self._saved
        saved = replace(saved, number=self._saved)
        if self._root.tier is None:
            self._thread.submit(self._after_save, save, saved)
            return

        def uploaded(save: SaveHandle) -> None:
            with suppress(RuntimeError):  # it is closed: the save has failed
                self._thread.submit(self._after_save, save, saved)

        self._staged[saved.name] = save, saved
        save.add_uploaded_callback(uploaded)  # not in the order of the saves

    def superfluous(self) -> list[str]:
        """Return the attempts that wait for an upload, and that no rule would keep once all of them are uploaded.

        For any thread. The caller leaves them out.
        """
        found, attempts = [*(self._committed or ())], {}
        staged = [one for one in self._staged.copy().values() if one[0].done() and failure_of(one[0]) is None]
        for one, attempt in [*self._unsent, *((one, attempt_of(save)) for save, one in staged)]:
            if self._numbers.get(one.name, 0) <= one.number:  # else this job has replaced it
                found, attempts[one.name] = _with(found, one), attempt
        names = {one.name for one in expendable(self._retention, found)} & attempts.keys()
        self._awaited -= names
        self._unsent = [one for one in self._unsent if one[0].name not in names]
        return [attempts[name] for name in names]

    def reorder(self) -> None:
        """Find out again, after the next commit, which checkpoints are the oldest: a rollback has abandoned some."""
        self._thread.submit(self._forget_order)

    def _forget_order(self) -> None:
        self._committed, self._unsent = None, []

    def leave(self) -> None:
        """Begin no further removal, because the process has little time left. The next job does the rest."""
        self._is_leaving = True

    def close(self) -> None:
        """Finish all work and end the thread."""
        self._thread.shutdown(wait=True)

    def _after_save(self, save: SaveHandle, saved: Committed) -> None:
        failure = failure_of(save, uploaded=True)
        if self._staged.get(saved.name, (None,))[0] is save:
            del self._staged[saved.name]
        self.forget(saved.name)
        if isinstance(failure, UploadSkippedError):
            if self._numbers.get(saved.name) == saved.number:
                del self._numbers[saved.name]
            return
        if self._is_leaving:
            return
        if failure is not None:
            if self._root.tier is not None and failure_of(save) is None:
                self._unsent.append((saved, attempt_of(save)))
            self._committed = None  # an earlier checkpoint of this name may still be there
            self._is_swept = False
            return
        self._apply(saved)

    def _apply(self, saved: Committed | None) -> None:
        try:
            self._has_failed = not self._sees_all
            if self._committed is None or saved is None or self._awaited:
                self._committed = self._scan_root()
                self._awaited.difference_update(one.name for one in self._committed)
            if saved is not None:
                known, self._committed = self._committed, _with(self._committed, saved)
                self._is_swept &= len(known) < len(self._committed)  # else it has replaced an earlier one
            for one in expendable(self._retention, self._committed, keep_exception_saves=self._keep_exception_saves):
                with self._tolerating(f"{one.name} could not be removed"):
                    self._committed.remove(one)
                    self._remove(one.name)
            self._sweep()
            if self._has_failed:
                self._committed = None
        except _Leaving:
            _log.info("%s: the next job removes the rest", self._root)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed; cleaning up must not fail the save
            _log.warning("%s: old checkpoints could not be removed: %s", self._root, error, exc_info=True)
            self._committed = None

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        """Log that the block failed for one of several independent things. It is done again after the next save."""
        if self._is_leaving:
            raise _Leaving
        try:
            yield
        except (BytecheckpointError, OSError) as error:
            self._has_failed |= not isinstance(error, CheckpointError)  # which is of no use to try again
            _log.warning("%s: %s: %s", self._root, what, error)

    def _scan_root(self) -> list[Committed]:
        """Return what was committed, from the oldest to the newest, and remove unfinished attempts of earlier jobs."""
        found: list[tuple[OrderKey, Committed]] = []
        top = self._backend.list_children("")
        abandoned = complete_rollback(self._root, self._backend).attempts
        for name in (child[:-1] for child in top if child.endswith("/") and self._names.is_managed(child[:-1])):
            # Before the check: the number of a save that begins after it would be that of what it has not replaced yet.
            number = self._numbers.get(name, 0)
            if self.is_expected(name):
                continue
            with self._tolerating(f"{name} could not be looked at"):
                if (one := self._scan(name, abandoned, number)) is not None:
                    found.append(one)
        self._end_uploads()
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def _scan(self, name: str, abandoned: Collection[str], number: int) -> tuple[OrderKey, Committed] | None:
        """Return what was committed in a folder, and remove unfinished attempts of earlier jobs there."""
        children = self._backend.list_children(f"{name}/")
        attempts, manifest = attempts_among(children), find_manifest(self._open(name))
        if manifest is None:
            self._remove_unneeded(name, attempts)
            return None
        self._remove_unneeded(name, [one for one in attempts if one != manifest.attempt])
        return order_key(name, manifest, abandoned), self._described(name, manifest, number, abandoned)

    def _described(self, name: str, manifest: Manifest, number: int, abandoned: Collection[str]) -> Committed:
        marks = milestone_of(manifest) is not None, is_exception_save(manifest), manifest.attempt in abandoned
        metric = metric_of(manifest, self._retention.metric or "")
        created = seconds_of(manifest.created)
        return Committed(name, trailing_number(name), metric, *marks, created=created, number=number)

    def _remove_unneeded(self, name: str, attempts: Sequence[str]) -> None:
        """Remove what jobs that ended, and transfers of the day before, have left in a folder."""
        for attempt in attempts:
            if self._sees_all and (self._is_of_ended_job(attempt) or has_expired(attempt)):
                _log.info("%s: removing what %s has left in %s", self._root, attempt, name)
                with self._tolerating(f"{name}/{attempt} could not be removed"):
                    remove_attempt(self._backend, f"{name}/{attempt}")

    @property
    def _sees_all(self) -> bool:
        """Whether this host certainly sees what earlier jobs have committed."""
        return self._lease.held_s >= self._staleness_s

    def _sweep(self) -> None:
        """Remove the objects that no checkpoint needs."""
        if self._is_swept or self._is_leaving:
            return
        with self._saves.committing:
            running = self._saves.running()
            recent = self._saves.recent(self._staleness_s)
            needed = recent.union(self._of_earlier_jobs, *running.values(), *map(files_of, self.pending()))
            self._lease.check()
            swept = sweep(
                self._backend,
                has_ended=lambda one: (
                    self._is_of_ended_job(one)
                    or (job_mark_of(one, also_staged=True) == self._lease.job and one not in running)
                ),
                needed=needed,
                held_s=self._lease.held_s,
            )
        self._is_swept = not swept.problem

    def _end_uploads(self) -> None:
        """End what killed ranks of ended jobs have begun. An attempt without a complete file is in no listing.

        Young ones remain: a copy that was interrupted may be continued, also by another job.
        """
        ended = []
        for upload in self._backend.incomplete():
            name, _, below = upload.key.partition("/")
            attempt = below.partition("/")[0]
            if name == OBJECTS:
                attempt = below = upload.key.split("/")[1]
            is_attempt = (name == OBJECTS or self._names.is_managed(name)) and attempt.startswith(ATTEMPT_PREFIX)
            if is_attempt and self._is_of_ended_job(attempt) and upload.age_s > _UPLOAD_GRACE_S:
                ended.append(upload)
        if ended:
            _log.info("%s: ending %d uploads, left by jobs that ended", self._root, len(ended))
            self._backend.abort_incomplete(ended)

    def _is_of_ended_job(self, attempt: str) -> bool:
        """This job holds the lease, so any other job that left an attempt has ended. An attempt without a job mark
        belongs to a save without a manager, which may still be running."""
        return job_mark_of(attempt) not in (b"", self._lease.job)

    def _remove(self, name: str) -> None:
        """Remove the manifest first, so that readers never see half a checkpoint."""
        folder = self._open(name)
        # A save into this folder that begins later writes its own files and its own manifest.
        with self.removing(name) as is_free:
            if not is_free:
                return
            try:
                manifest = read_manifest(folder)
            except (CheckpointError, KeyNotFoundError) as error:
                _log.warning("not removed: %s", error)
                return
            _log.info("%s: removing %s", self._root, name)
            self._backend.delete([f"{name}/{MANIFEST_KEY}"])
            self._numbers.pop(name, None)
            self._saves.forget(manifest.attempt)
        if manifest.is_shared:
            self._is_swept = False
        else:
            remove_files_of(folder, manifest)
        self._on_removed(self._root.join(name).url)


def _with(committed: Sequence[Committed], saved: Committed) -> list[Committed]:
    """Insert a checkpoint before those that this job saved later, in the place of one of its name."""
    found = [one for one in committed if one.name != saved.name]
    at = next((index for index, one in enumerate(found) if one.number > saved.number), len(found))
    found.insert(at, saved)
    return found
