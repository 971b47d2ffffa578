"""Who may save below a root: one job at a time, which shows that it lives by rewriting one small object.

No clock is compared with another and no modification time is asked: whoever finds a lease that is not its own watches
it. A holder that does not write for three of its own intervals, on the watcher's clock, is taken for dead, and at once
where its process is on this host and has ended. A holder that was only asleep finds the lease taken, and saves no more.
A store has no lock that a sleeper loses by itself, so the holder also looks right before each commit; what could go
wrong in the moment between look and commit is a checkpoint whose files are removed, which every reader notices.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import msgpack

from ..control.peers import PeerIdentity
from ..engine.writing.commit import JOB_BYTES
from ..errors import KeyExistsError, KeyNotFoundError, RootInUseError, StorageError
from ..storage_backends.base import StorageBackend

__all__ = ["LEASE_KEY", "Lease", "LeaseRecord"]

LEASE_KEY = "lease.msgpack"

_MAX_BYTES = 1 << 16
_SILENT_INTERVALS = 3
_LONGEST_INTERVAL_S = 300.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseRecord:
    """What the object says: ``beat`` counts up as long as the holder lives, every ``interval_s``."""

    job: bytes
    holder: PeerIdentity
    beat: int
    interval_s: float
    written: str

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> LeaseRecord:
        """Raises ``ValueError`` for anything but a lease."""
        try:
            fields = msgpack.unpackb(data)
            record = cls(**{**fields, "holder": PeerIdentity(**fields["holder"])})
            valid = type(record.beat) is int and 0 < float(record.interval_s) <= _LONGEST_INTERVAL_S
        except Exception as error:
            raise ValueError(f"not a lease: {error}") from error
        if not valid:
            raise ValueError("not a lease: no such beat or interval")
        return record

    def __str__(self) -> str:
        return (
            f"job {self.job.hex()} (process {self.holder.pid} on {self.holder.host}, last sign of life number "
            f"{self.beat}, at {self.written} by its clock)"
        )


class Lease:
    """Held from ``acquire`` to ``close``. Thread-safe."""

    def __init__(self, backend: StorageBackend, record: LeaseRecord) -> None:
        self._backend, self._record = backend, record
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost: RootInUseError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcp-lease")
        self._beating = self._thread.submit(self._beat)

    @classmethod
    def acquire(cls, backend: StorageBackend, here: PeerIdentity, *, interval_s: float) -> Lease:
        """Take the lease of the root that ``backend`` is open on. Where another job has it, find out whether that
        lives: raises ``RootInUseError`` if so; if not, that takes ``3 * interval_s`` of that job at most."""
        record = LeaseRecord(secrets.token_bytes(JOB_BYTES), here, 1, interval_s, _now())
        while True:
            found = _read(backend)
            if found is None:
                try:
                    _put_first(backend, record)
                except KeyExistsError:
                    continue
                break
            if _has_died(backend, found, here):
                _put(backend, record)
                break
        return cls(backend, record)

    @property
    def job(self) -> bytes:
        return self._record.job

    def check(self) -> None:
        """Raise ``RootInUseError`` where another job has the lease now, ``StorageError`` where that cannot be seen."""
        with self._lock:
            if self._lost is None and not self._ended.is_set():
                self._look()
            if self._lost is not None:
                raise self._lost

    def raise_if_lost(self) -> None:
        """As ``check``, as of the last look."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Give the lease back. Never raises."""
        self._ended.set()
        self._thread.shutdown(wait=True)
        with self._lock:
            try:
                found = _read(self._backend)
                if found is not None and found.job == self.job:
                    self._backend.delete([LEASE_KEY])
            except StorageError as error:
                _log.warning(
                    "%s: the lease could not be given back, the next job waits for it: %s", self._backend.url, error
                )

    def _beat(self) -> None:
        while not self._ended.wait(self._record.interval_s):
            with self._lock:
                try:
                    self._look()
                    if self._lost is not None:
                        _log.error("%s", self._lost)
                        return
                    self._record = replace(self._record, beat=self._record.beat + 1, written=_now())
                    _put(self._backend, self._record)
                except StorageError as error:
                    _log.warning("%s: no sign of life could be written: %s", self._backend.url, error)

    def _look(self) -> None:
        found = _read(self._backend)
        if found is not None and found.job != self.job:
            self._lost = RootInUseError(
                f"{self._backend.url}: {found} has taken this root over from job {self.job.hex()}, which was silent "
                f"for too long. This job must not save there any more: stop it, or give it another root"
            )


def _has_died(backend: StorageBackend, found: LeaseRecord, here: PeerIdentity) -> bool:
    """Whether the holder is dead; False where the lease is gone or changed hands meanwhile."""
    if here.sees(found.holder) and found.holder.has_ended():
        _log.info("%s: %s has ended; its lease is taken over", backend.url, found)
        return True
    _log.info("%s: waiting for a sign of life of %s", backend.url, found)
    give_up = time.monotonic() + _SILENT_INTERVALS * found.interval_s
    while time.monotonic() < give_up:
        time.sleep(found.interval_s / 4)
        latest = _read(backend)
        if latest is None:
            return False
        if (latest.job, latest.beat) != (found.job, found.beat):
            raise RootInUseError(
                f"{backend.url} is in use by {latest}. Two jobs must not save below one root: stop that job, or give "
                f"this one another root"
            )
        if here.sees(found.holder) and found.holder.has_ended():
            return True
    _log.warning(
        "%s: %s gave no sign of life for %g s and is taken for dead",
        backend.url,
        found,
        _SILENT_INTERVALS * found.interval_s,
    )
    return True


def _read(backend: StorageBackend) -> LeaseRecord | None:
    try:
        return LeaseRecord.unpack(backend.get(LEASE_KEY, max_size=_MAX_BYTES))
    except KeyNotFoundError:
        return None
    except ValueError as error:
        _log.warning("%s/%s is %s; it is replaced", backend.url, LEASE_KEY, error)
        backend.delete([LEASE_KEY])
        return None


def _put_first(backend: StorageBackend, record: LeaseRecord) -> None:
    """Raises ``KeyExistsError`` where the store can tell that another job was quicker."""
    try:
        backend.put(LEASE_KEY, record.pack(), if_absent=True)
    except KeyExistsError:
        raise
    except StorageError:
        # A store without conditional puts. Of two jobs that begin at once the quicker one finds its lease taken later.
        _put(backend, record)


def _put(backend: StorageBackend, record: LeaseRecord) -> None:
    backend.put(LEASE_KEY, record.pack())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
