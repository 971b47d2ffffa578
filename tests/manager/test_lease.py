"""One job at a time saves below a root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from counting_backend import CountingBackend
from typing_extensions import Buffer

from bytecheckpoint.checkpoint.attempts import attempt_name, job_mark_of, new_attempt, new_attempt_id
from bytecheckpoint.checkpoint.lease import LEASE_KEY, Lease, LeaseRecord, hold_root, holder_of
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import (
    KeyChangedError,
    KeyExistsError,
    KeyNotFoundError,
    RootInUseError,
    StateError,
    StorageError,
)
from bytecheckpoint.storage_backends import Conditions
from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend

INTERVAL_S = 0.1
LIVING_S = time_limit(0.1)  # of a holder that must not seem dead while other processes use the machine

HERE = PeerIdentity.of_this_process(0)
ELSEWHERE = replace(HERE, host="elsewhere", boot_id="another machine")


@pytest.fixture(params=["local", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
    return LocalBackend(tmp_path) if request.param == "local" else MemoryBackend("lease-test" + tmp_path.name)


def _put_foreign_lease(backend: StorageBackend, holder: PeerIdentity) -> LeaseRecord:
    record = LeaseRecord(b"dead", holder, 7, INTERVAL_S, "2026-01-01T00:00:00Z")
    backend.put(LEASE_KEY, record.pack())
    return record


def _read(backend: StorageBackend) -> LeaseRecord:
    return LeaseRecord.unpack(backend.get(LEASE_KEY))


def _wait_for_beat(backend: StorageBackend, beyond: int) -> None:
    for _ in range(1000):
        if _read(backend).beat > beyond:
            return
        threading.Event().wait(INTERVAL_S / 10)
    raise AssertionError("no heartbeat")


def test_no_thread_of_the_process_takes_a_lease_over_that_is_acquired_or_released(backend: StorageBackend) -> None:
    """It is held from the moment that it can be read until it is deleted."""
    found: list[bool] = []

    class Watched(CountingBackend):
        def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
            version = super().put(key, data, if_absent=if_absent, if_version=if_version)
            found.append(holder_of(backend) is not None)
            return version

        def delete(self, keys: Sequence[str]) -> None:
            found.append(holder_of(backend) is not None)
            super().delete(keys)

    Lease.acquire(Watched(backend), HERE, interval_s=60.0).close()
    assert found == [True, True]
    assert holder_of(backend) is None


def test_a_held_lease_is_refused_until_it_is_released(backend: StorageBackend) -> None:
    first = Lease.acquire(backend, ELSEWHERE, interval_s=LIVING_S)
    with pytest.raises(RootInUseError, match=rf"in use by job {first.job.hex()} \(process {HERE.pid} on elsewhere"):
        Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    first.check()
    first.close()
    assert list(backend.list()) == []
    second = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    assert second.job != first.job
    second.close()


@pytest.mark.parametrize("here", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.sampled(1)
def test_a_job_waits_for_those_who_need_the_root_for_a_few_requests(
    backend: StorageBackend, here: PeerIdentity
) -> None:
    """Such as a removal, or a save without a manager, however long the store takes."""
    counting, acquired = CountingBackend(backend), list[Lease]()
    thread = threading.Thread(target=lambda: acquired.append(Lease.acquire(counting, here, interval_s=60.0)))
    with hold_root(backend, patience_s=0):
        thread.start()
        while counting.count("get") < 2:  # it has found this lease
            time.sleep(0)
        with pytest.raises(RootInUseError, match="is in use by job"):  # after its next heartbeat
            Lease.acquire(backend, here, interval_s=60.0, patience_s=0)
        assert thread.is_alive()
        assert acquired == []
    thread.join(time_limit(60))
    acquired[0].check()
    acquired[0].close()


def test_no_one_waits_for_the_end_of_a_job(backend: StorageBackend) -> None:
    job = Lease.acquire(backend, ELSEWHERE, interval_s=0.5)
    begun = time.monotonic()
    with pytest.raises(RootInUseError), hold_root(backend, patience_s=3600):
        pass
    assert time.monotonic() - begun < time_limit(30)
    job.close()


def test_a_process_that_may_start_no_thread_releases_the_lease(
    backend: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StateError, match="needs a thread: can't start new thread"):
            Lease.acquire(backend, ELSEWHERE, interval_s=INTERVAL_S)
    Lease.acquire(backend, HERE, interval_s=INTERVAL_S).close()


class Unconditional(FaultyBackend):
    """A store that cannot refuse a put, as a mount without hard links."""

    def conditions(self) -> Conditions:
        return Conditions()


@pytest.mark.parametrize("nth", [1, 2], ids=["the first read", "a later read"])
def test_a_lease_that_is_away_for_a_moment_is_not_released(backend: StorageBackend, nth: int) -> None:
    """A mount renames a heartbeat into its place by removing the old one, and copying."""
    away = FaultRule("get", LEASE_KEY, nth=nth, error=KeyNotFoundError("no such object"))
    with closing(Lease.acquire(backend, ELSEWHERE, interval_s=LIVING_S)) as first:
        with pytest.raises(RootInUseError, match="in use by job"):
            Lease.acquire(Unconditional(backend, [away]), HERE, interval_s=INTERVAL_S).close()
        assert away.matched > nth
        first.check()


def test_a_lease_is_read_again_before_it_counts_as_damaged(
    backend: StorageBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Lease.acquire(backend, ELSEWHERE, interval_s=60.0)):
        assert holder_of(FaultyBackend(backend, [FaultRule("get", LEASE_KEY, cut=20)]))
        assert "not a lease" not in caplog.text


def test_where_nothing_refuses_a_second_job_the_log_says_so(
    backend: StorageBackend, caplog: pytest.LogCaptureFixture
) -> None:
    Lease.acquire(backend, HERE, interval_s=60.0).close()
    assert "cannot protect" not in caplog.text
    Lease.acquire(Unconditional(backend), HERE, interval_s=60.0).close()
    assert "the lease cannot protect from a job that begins at the same moment" in caplog.text


def test_the_holder_sends_heartbeats(backend: StorageBackend) -> None:
    lease = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    try:
        _wait_for_beat(backend, 2)
    finally:
        lease.close()


def test_a_lease_without_heartbeats_is_taken_over(backend: StorageBackend) -> None:
    _put_foreign_lease(backend, ELSEWHERE)
    lease = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    assert _read(backend).job == lease.job
    lease.close()


def test_the_lease_of_an_ended_process_of_this_host_is_taken_over_at_once(backend: StorageBackend) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = replace(HERE, pid=child.pid, start_ticks=_start_ticks(child.pid))
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    # Waiting for three of these intervals would be longer than a test may take.
    record = LeaseRecord(b"dead", holder, 7, 300.0, "2026-01-01T00:00:00Z")
    backend.put(LEASE_KEY, record.pack())
    Lease.acquire(backend, HERE, interval_s=INTERVAL_S).close()


def test_a_job_of_the_same_name_does_not_take_a_living_holder_over(
    backend: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs may have one ``--rdzv-id``, and a later restart of one of them on another host means nothing."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    held = Lease.acquire(backend, ELSEWHERE, interval_s=LIVING_S)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with pytest.raises(RootInUseError, match="is in use by"):
        Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    held.check()
    held.close()


@pytest.mark.parametrize(("missed", "keeps"), [(0, True), (2, True), (3, False)])
def test_a_holder_that_misses_two_heartbeats_keeps_its_root(
    backend: StorageBackend, monkeypatch: pytest.MonkeyPatch, missed: int, *, keeps: bool
) -> None:
    """Time passes only when the watcher sleeps, and the holder writes one interval after the missed heartbeats."""
    record = LeaseRecord(b"slow", ELSEWHERE, 7, 60.0, "2026-01-01T00:00:00Z")
    backend.put(LEASE_KEY, record.pack())
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now >= (missed + 1) * record.interval_s - seconds:  # a heartbeat arrives just before the interval is over
            backend.put(LEASE_KEY, replace(record, beat=8).pack())

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr("bytecheckpoint.checkpoint.lease.time", clock)
    if keeps:
        with pytest.raises(RootInUseError, match="heartbeat number 8"):
            Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
        assert _read(backend).job == b"slow"
    else:
        Lease.acquire(backend, HERE, interval_s=INTERVAL_S).close()


def _start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def test_a_suspended_holder_finds_its_lease_taken(backend: StorageBackend, caplog: pytest.LogCaptureFixture) -> None:
    suspended = Lease.acquire(backend, ELSEWHERE, interval_s=60.0)
    record = _put_foreign_lease(backend, HERE)
    with pytest.raises(RootInUseError, match=f"job {record.job.hex()} .* has taken this root over from job"):
        suspended.check()
    with pytest.raises(RootInUseError):
        suspended.raise_if_lost()
    suspended.close()
    assert _read(backend) == record, "the other job's lease is not touched"


def test_the_heartbeat_detects_a_lost_lease(backend: StorageBackend) -> None:
    suspended = Lease.acquire(backend, ELSEWHERE, interval_s=INTERVAL_S)
    record = _put_foreign_lease(backend, HERE)
    suspended._heartbeat.result(time_limit(30))
    with pytest.raises(RootInUseError):
        suspended.raise_if_lost()
    assert _read(backend) == record
    suspended.close()


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80", b"\xc0", b"\x81\xa3job\x01"])
def test_an_invalid_lease_is_replaced(backend: StorageBackend, content: bytes) -> None:
    backend.put(LEASE_KEY, content)
    lease = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    assert _read(backend).job == lease.job
    lease.close()


def test_an_excessive_interval_is_rejected(backend: StorageBackend) -> None:
    with pytest.raises(ValueError, match="interval"):
        LeaseRecord.unpack(LeaseRecord(b"long", ELSEWHERE, 1, 1e6, "").pack())


def test_a_removed_lease_is_written_again(backend: StorageBackend) -> None:
    lease = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    backend.delete([LEASE_KEY])
    lease.check()
    for _ in range(1000):
        if list(backend.list()):
            break
        threading.Event().wait(INTERVAL_S / 10)
    assert _read(backend).job == lease.job
    lease.close()


def test_a_temporary_storage_failure_does_not_end_the_lease(tmp_path: Path) -> None:
    inner = LocalBackend(tmp_path)
    seen = threading.Event()
    rule = FaultRule(
        "put", LEASE_KEY, nth=2, times=2, error=StorageError("out for a moment"), hook=lambda _: seen.set()
    )
    lease = Lease.acquire(FaultyBackend(inner, [rule]), HERE, interval_s=INTERVAL_S)
    assert seen.wait(time_limit(30))
    _wait_for_beat(inner, 2)
    lease.check()
    lease.close()
    assert list(inner.list()) == []


def _silence() -> StorageError:
    error = StorageError("no reply")
    error.is_late = True
    return error


def test_a_silent_store_is_not_asked_to_release_the_lease(backend: StorageBackend) -> None:
    """Each request would wait for the whole deadline. The lease expires instead."""
    deleted: list[str] = []
    seen = threading.Event()
    release = FaultRule("delete", LEASE_KEY, times=None, hook=lambda call: deleted.append(call.key))
    beat = FaultRule("put", LEASE_KEY, nth=2, times=None, error=_silence, hook=lambda call: seen.set())
    lease = Lease.acquire(FaultyBackend(backend, [release, beat]), HERE, interval_s=INTERVAL_S)
    assert seen.wait(time_limit(30))
    lease.close()
    assert deleted == []
    assert _read(backend).job == lease.job

    with pytest.raises(StorageError, match="no reply"), hold_root(FaultyBackend(backend, [release]), patience_s=1):
        raise _silence()
    assert deleted == []
    with hold_root(FaultyBackend(backend, [release]), patience_s=1):
        pass
    assert deleted == [LEASE_KEY]
    assert not list(backend.list())


def test_a_silent_store_is_not_waited_for_in_a_heartbeat(backend: StorageBackend) -> None:
    """One that is under way when the block of a lease fails for the same reason."""
    begun, go_on = threading.Event(), threading.Event()
    beat = FaultRule("put", LEASE_KEY, nth=2, hook=lambda call: begun.set(), wait=go_on)
    lease = Lease.acquire(FaultyBackend(backend, [beat]), HERE, interval_s=INTERVAL_S)
    assert begun.wait(time_limit(30))
    lease.close(is_silent=True)
    assert _read(backend).beat == 1
    go_on.set()


class _WithoutConditions(FaultyBackend):
    def conditions(self) -> Conditions:
        return Conditions()

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        assert not if_absent
        assert not if_version
        super().put(key, data)
        return ""


def test_a_store_without_conditional_puts(tmp_path: Path) -> None:
    backend = _WithoutConditions(LocalBackend(tmp_path))
    _put_foreign_lease(backend, ELSEWHERE)
    lease = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    _wait_for_beat(backend, 2)
    lease.check()
    lease.close()
    suspended = Lease.acquire(backend, HERE, interval_s=INTERVAL_S)
    record = _put_foreign_lease(backend, ELSEWHERE)
    suspended._heartbeat.result(time_limit(30))
    assert _read(backend) == record
    suspended.close()


def test_a_store_that_fails_is_not_one_without_conditions(backend: StorageBackend) -> None:
    rule = FaultRule("put", LEASE_KEY, error=StorageError("503 slow down"))
    with pytest.raises(StorageError, match="503 slow down"):
        Lease.acquire(FaultyBackend(backend, [rule]), HERE, interval_s=INTERVAL_S)
    assert rule.matched == 1
    assert list(backend.list()) == []


def test_a_store_that_refuses_every_put_is_given_up(backend: StorageBackend) -> None:
    _put_foreign_lease(backend, replace(HERE, start_ticks=0))  # of a process that has ended
    rule = FaultRule("put", LEASE_KEY, times=None, error=KeyChangedError("refused"))
    with pytest.raises(StorageError, match="can neither be read nor created"):
        Lease.acquire(FaultyBackend(backend, [rule]), HERE, interval_s=INTERVAL_S)


@pytest.mark.parametrize("is_new", [False, True], ids=["taken over", "new"])
def test_of_two_jobs_at_the_same_moment_one_gets_the_lease(backend: StorageBackend, is_new: bool) -> None:
    if not is_new:
        _put_foreign_lease(backend, ELSEWHERE)
    winners = []
    rule = FaultRule(
        "put", LEASE_KEY, hook=lambda call: winners.append(Lease.acquire(backend, HERE, interval_s=INTERVAL_S))
    )
    with pytest.raises(RootInUseError):
        Lease.acquire(FaultyBackend(backend, [rule]), ELSEWHERE, interval_s=INTERVAL_S)
    winners[0].check()
    winners[0].close()


def test_a_put_whose_reply_was_lost_is_recognized(backend: StorageBackend) -> None:
    lost = FaultRule("put", LEASE_KEY, error=KeyExistsError("refused the repetition"), after=True)
    missed = FaultRule("put", LEASE_KEY, nth=3, error=StorageError("timed out"), after=True)
    lease = Lease.acquire(FaultyBackend(backend, [lost, missed]), HERE, interval_s=INTERVAL_S)
    _wait_for_beat(backend, 5)
    lease.check()
    lease.close()
    assert list(backend.list()) == []


def test_a_heartbeat_is_one_request(backend: StorageBackend) -> None:
    counting = CountingBackend(backend)
    lease = Lease.acquire(counting, HERE, interval_s=INTERVAL_S)
    _wait_for_beat(backend, 4)
    assert counting.count("get") == 1
    lease.close()


def test_attempt_names_contain_the_job() -> None:
    name = attempt_name(new_attempt_id(b"\x01\x02\xfe\xff"))
    assert job_mark_of(name) == b"\x01\x02\xfe\xff"
    assert job_mark_of(new_attempt()) == b""
    assert job_mark_of("attempt-golden-single") == b""
    assert job_mark_of("attempt-x-zzzzzzzz-1") == b""
