"""Lease of a root: one job at a time saves below it, and shows that it is alive by rewriting a small object.

Clocks of different hosts are never compared, and modification times are never used. A job that finds another job's
lease watches it. If the holder does not write for three of its own heartbeat intervals, on the watcher's clock, the
watcher takes the lease over. It does so at once if the holder's process ran on this host and has ended. What torchrun
calls a restart of the same job says nothing of a process on another host: two jobs may have one name, and a job whose
network is cut may go on in both halves. A holder that was only suspended finds that the lease was taken, and saves no
more. Stores have no lock that a suspended process loses automatically, so the holder also checks the lease right before
each commit. If the lease changes between that check and the commit, the result may be a checkpoint whose files are
removed; every reader detects that.

Every put replaces exactly the lease that was read before, if the store can decide that (``conditions``): of two jobs
that find the same lease of an ended job, one takes it over. Only a put that the store has refused for this reason is
decided here; any other failure is raised, or logged by a heartbeat.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

import msgpack

from ..control.peers import PeerIdentity
from ..errors import KeyChangedError, KeyExistsError, KeyNotFoundError, RootInUseError, StateError, StorageError
from ..runtime.threads import Threads, is_ending
from ..storage_backends.base import StorageBackend
from .attempts import JOB_MARK_BYTES

LEASE_KEY = "lease.msgpack"

_MAX_BYTES = 1 << 16
HEARTBEATS_PER_LEASE = 3
_MAX_INTERVAL_S = 300.0
_SHORT_INTERVAL_S = 5.0  # of a lease that is held for a few requests only; a busy store delays heartbeats
_SILENT_INTERVAL_S = 60.0  # of one that gets no heartbeats, because the interpreter ends
_POLL_S = 0.05
_PATIENCE_S = 360.0  # for leases that are held for a few requests only
_MAX_TRIES = 16  # to put a lease, which the store refuses: others are faster, or it cannot be read

_open_here: set[bytes] = set()  # the jobs whose leases this process acquires, or holds until they are deleted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseRecord:
    """Content of the lease object. The holder increments ``beat`` every ``interval_s`` seconds."""

    job: bytes
    holder: PeerIdentity
    beat: int
    interval_s: float
    written: str
    is_brief: bool = False  # held for a few requests only, which others wait for

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> LeaseRecord:
        """Raises ``ValueError`` unless ``data`` is a lease."""
        try:
            fields = msgpack.unpackb(data)
            record = cls(**{**fields, "holder": PeerIdentity(**fields["holder"])})
            valid = type(record.beat) is int and 0 < float(record.interval_s) <= _MAX_INTERVAL_S
        except Exception as error:
            raise ValueError(f"not a lease: {error}") from error
        if not valid:
            raise ValueError("not a lease: the beat or the interval is out of range")
        return record

    def __str__(self) -> str:
        return (
            f"job {self.job.hex()} (process {self.holder.pid} on {self.holder.host}, last heartbeat number "
            f"{self.beat}, at {self.written} by its clock)"
        )


class Lease:
    """Held from ``acquire`` to ``close``, or until ``is_unwanted`` returns True, which each heartbeat calls.

    Thread-safe.
    """

    def __init__(
        self, backend: StorageBackend, record: LeaseRecord, version: str | None, is_unwanted: Callable[[], bool]
    ) -> None:
        self._backend, self._record, self._is_unwanted = backend, record, is_unwanted
        # Of the object that this job wrote last; empty if there is none, or it is unknown; None before the first one.
        self._version = version
        self._held_since = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_silent = False  # the store, by the last heartbeat
        self._lost: RootInUseError | None = None
        self._thread = Threads(1, thread_name_prefix="bcp-lease")
        try:
            if self._thread.start():
                self._heartbeat = self._thread.submit(self._send_heartbeats)
        except RuntimeError as error:
            self._delete()
            raise StateError(f"the lease of {backend.display_url} needs a thread: {error}") from error

    @classmethod
    def acquire(
        cls,
        backend: StorageBackend,
        here: PeerIdentity,
        *,
        interval_s: float,
        is_unwanted: Callable[[], bool] = lambda: False,
        is_brief: bool = False,
        patience_s: float = _PATIENCE_S,
        is_deferrable: bool = False,
    ) -> Lease:
        """Acquire the lease of the root that ``backend`` is open on.

        If another job holds it, this waits up to ``3 * interval_s`` of that job to find out whether it is alive. If it
        is, and holds it for a few requests only (``is_brief``), this waits ``patience_s`` for the release.

        If the store fails and this ``is_deferrable``, heartbeats try again, and ``check`` raises until one has done it.

        Returns:
            The lease, whose heartbeat has begun.

        Raises:
            RootInUseError: Another job holds the lease and is alive.
            StateError: The process cannot start a thread.
            StorageError: The store failed.
        """
        record = LeaseRecord(secrets.token_bytes(JOB_MARK_BYTES), here, 1, interval_s, _now(), is_brief)
        _open_here.add(record.job)  # before another thread can read it
        try:
            try:
                version = _claim(backend, record, time.monotonic() + patience_s)
                if not is_brief and not backend.conditions().if_absent:
                    _log.warning(
                        "%s: this store cannot create an object only if there is none, so the lease cannot protect "
                        "from a job that begins at the same moment: start one at a time",
                        backend.display_url,
                    )
            except StorageError as error:
                if not is_deferrable:
                    raise
                _log.warning("%s: the lease cannot be acquired yet: %s", backend.display_url, error)
                version = None
            return cls(backend, record, version, is_unwanted)
        except BaseException:
            _open_here.discard(record.job)
            raise

    @property
    def is_acquired(self) -> bool:
        """Whether the lease was written; if not, the store has failed since ``acquire``."""
        return self._version is not None

    @property
    def held_s(self) -> float:
        """For how many seconds this job has held the lease."""
        return time.monotonic() - self._held_since if self.is_acquired else 0.0

    @property
    def job(self) -> bytes:
        """Identifies this job; it becomes part of the names of its attempts."""
        return self._record.job

    def check(self) -> None:
        """Read the lease. Raise ``RootInUseError`` if another job holds it, ``StorageError`` if it cannot be read."""
        with self._lock:
            if self._lost is None and not self._ended.is_set():
                self._read_own()
            if self._lost is not None:
                raise self._lost

    def raise_if_lost(self) -> None:
        """Raise what the last check or heartbeat found, without reading the lease."""
        if self._lost is not None:
            raise self._lost

    def close(self, *, is_silent: bool = False) -> None:
        """Release the lease. Never raises.

        If the store ``is_silent``, it expires instead: each request would wait for the whole deadline again.
        """
        self._ended.set()
        self._is_silent |= is_silent
        self._thread.shutdown(wait=not self._is_silent)
        self._delete()
        _open_here.discard(self.job)  # from now on, a lease that could not be deleted is that of an ended job

    def _delete(self) -> None:
        try:
            if self._version is None:
                return
            if self._is_silent:  # a heartbeat may still wait for it
                raise StorageError("the store does not answer")
            with self._lock:
                found, _ = _read(self._backend)
                if found is not None and found.job == self.job:
                    self._backend.delete([LEASE_KEY])
        except StorageError as error:
            _log.warning(
                "%s: the lease could not be released; the next job waits until it expires: %s",
                self._backend.display_url,
                error,
            )

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._record.interval_s):
            if self._is_unwanted():
                self._delete()
                return
            with self._lock:
                try:
                    self._send_heartbeat()
                    self._is_silent = False
                except StorageError as error:
                    self._is_silent = error.is_late
                    _log.warning(
                        "%s: the heartbeat of the lease could not be written: %s", self._backend.display_url, error
                    )
                if self._lost is not None:
                    _log.error("%s", self._lost)
                    return

    def _send_heartbeat(self) -> None:
        if self._version is None:
            self._read_own()
            return
        if not (self._version and self._backend.conditions().if_version):
            self._read_own()
        if self._lost is None:
            self._record = replace(self._record, beat=self._record.beat + 1, written=_now())
            try:
                self._version = _put(self._backend, self._record, self._version)
            except (KeyExistsError, KeyChangedError):
                self._read_own()  # lost, or removed, or an earlier heartbeat was written although its reply was lost

    def _read_own(self) -> None:
        if self._version is None:
            try:
                self._version = _claim(self._backend, self._record, time.monotonic())
                self._held_since = time.monotonic()
            except RootInUseError as error:
                self._lost = error
            return
        found, self._version = _read(self._backend)
        if found is not None and found.job != self.job:
            self._lost = RootInUseError(
                f"{self._backend.url}: {found} has taken this root over from job {self.job.hex()}, which sent no "
                f"heartbeat for too long. This job must not save there any more: stop it, or use another root"
            )


def _claim(backend: StorageBackend, record: LeaseRecord, give_up: float) -> str:
    """Write the first lease of a job, and return its version. Raises as ``Lease.acquire``."""
    tries = 0
    while tries < _MAX_TRIES:
        found, version = _read(backend)
        if found is not None and found.job == record.job:  # the reply to the put was lost
            return version
        if found is None and not version and not backend.conditions().if_absent and not _is_free(backend):
            continue
        if found is not None and not _has_died(backend, found, record.holder, give_up):
            time.sleep(_POLL_S)  # a mount that renames by copying has none for a moment
            continue  # released
        tries += 1
        with suppress(KeyExistsError, KeyChangedError):  # another job was faster
            return _put(backend, record, version)
    raise StorageError(
        f"{backend.url}: {LEASE_KEY} can neither be read nor created. It may be a directory or a link to a missing "
        f"file: remove it, or use another root"
    )


@contextmanager
def hold_root(root: StorageBackend, *, patience_s: float) -> Iterator[None]:
    """Hold the lease of a root during the block, for a few requests. Waits for others that do so ``patience_s`` long.

    Raises as ``Lease.acquire``.
    """
    here = PeerIdentity.of_this_process(0)
    interval_s = _SILENT_INTERVAL_S if is_ending() else _SHORT_INTERVAL_S
    lease = Lease.acquire(root, here, interval_s=interval_s, is_brief=True, patience_s=patience_s)
    is_silent = False
    try:
        yield
    except StorageError as error:
        is_silent = error.is_late
        raise
    finally:
        lease.close(is_silent=is_silent)


def holder_of(root: StorageBackend) -> LeaseRecord | None:
    """Return the lease of a root, if a job holds it, not only for a few requests, that is not known to have ended."""
    found, _ = _read(root)
    is_held = found is not None and not found.is_brief and not _has_ended(PeerIdentity.of_this_process(0), found)
    return found if is_held else None


def check_holder(backend: StorageBackend, job: bytes) -> None:
    """Raise ``RootInUseError`` if another job than ``job`` holds the lease. For ranks that do not hold one."""
    found, _ = _read(backend)
    if found is not None and found.job != job:
        raise RootInUseError(f"{backend.url}: {found} has taken this root over from job {job.hex()}")


def _has_died(backend: StorageBackend, found: LeaseRecord, here: PeerIdentity, give_up: float) -> bool:
    """Return whether the holder has ended; False if the lease was released in between.

    Raises ``RootInUseError`` if it is alive; not before ``give_up`` if it holds the lease for a few requests only.
    """
    if _has_ended(here, found):
        _log.info("%s: %s has ended; its lease is taken over", backend.display_url, found)
        return True
    _log.info("%s: waiting for a heartbeat of %s", backend.display_url, found)
    expires = time.monotonic() + HEARTBEATS_PER_LEASE * found.interval_s
    while time.monotonic() < expires:
        time.sleep(_POLL_S if found.is_brief else found.interval_s / 4)
        latest, _ = _read(backend)
        if latest is None:
            return False
        if (latest.job, latest.beat) != (found.job, found.beat):
            if not latest.is_brief or time.monotonic() >= give_up:
                raise _in_use(backend, latest, here)
            found, expires = latest, time.monotonic() + HEARTBEATS_PER_LEASE * latest.interval_s
        if _has_ended(here, found):
            return True
    _log.warning(
        "%s: %s sent no heartbeat for %g s; its lease is taken over",
        backend.display_url,
        found,
        HEARTBEATS_PER_LEASE * found.interval_s,
    )
    return True


def _in_use(backend: StorageBackend, record: LeaseRecord, here: PeerIdentity) -> RootInUseError:
    if _is_same_process(here, record.holder) and not record.is_brief:
        return RootInUseError(
            f"this process already has a CheckpointManager open on {backend.url}: close that one first "
            f"(manager.close(), or a with block), or keep using it"
        )
    return RootInUseError(
        f"{backend.url} is in use by {record}. Two jobs must not save below one root: stop that job, or use another "
        f"root for this one"
    )


def _has_ended(here: PeerIdentity, found: LeaseRecord) -> bool:
    """Whether the holder has certainly ended, although it could not release its lease."""
    if _is_same_process(here, found.holder):
        return found.job not in _open_here
    return here.can_observe(found.holder) and found.holder.has_ended()


def _is_same_process(here: PeerIdentity, other: PeerIdentity) -> bool:
    return here.can_observe(other) and (here.pid, here.start_ticks) == (other.pid, other.start_ticks)


def _read(backend: StorageBackend, *, is_second: bool = False) -> tuple[LeaseRecord | None, str]:
    """Return the lease and the version of the object, which is empty only if there is no object."""
    try:
        content, version = backend.get_versioned(LEASE_KEY, max_size=_MAX_BYTES)
    except KeyNotFoundError:
        return None, ""
    version = version or "unknown"
    try:
        return LeaseRecord.unpack(content), version
    except ValueError as error:
        if not is_second:  # a mount may have cached another size, or there was none for a moment
            time.sleep(_POLL_S)
            return _read(backend, is_second=True)
        _log.warning("%s/%s is %s; it will be replaced", backend.display_url, LEASE_KEY, error)
        return None, version


def _is_free(backend: StorageBackend) -> bool:
    """Whether there is no lease, also a moment later: on some mounts, a rename copies, and it is away meanwhile."""
    time.sleep(_POLL_S)
    return _read(backend)[0] is None


def _put(backend: StorageBackend, record: LeaseRecord, version: str) -> str:
    """Replace the lease of this version, or write the first one if it is empty. Returns the new version.

    Raises ``KeyExistsError`` or ``KeyChangedError`` if the store finds another lease. If the store cannot decide that,
    and two jobs write at once, the slower one finds its lease taken later.
    """
    conditions = backend.conditions()
    if version and conditions.if_version:
        return backend.put(LEASE_KEY, record.pack(), if_version=version)
    if not version and conditions.if_absent:
        return backend.put(LEASE_KEY, record.pack(), if_absent=True)
    return backend.put(LEASE_KEY, record.pack())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
