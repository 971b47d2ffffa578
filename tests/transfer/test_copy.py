"""Copies between stores: equal bytes, and what a later copy does after one that failed."""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from counting_backend import CountingBackend
from sorted_arguments import saving

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import attempts
from bytecheckpoint.convert.copy import copy, remove, unfinished_uploads
from bytecheckpoint.errors import CommitUnknownError, CorruptionError, KeyExistsError, StorageError, UsageError
from bytecheckpoint.storage_backends import ObjectWriter, base, open_backend
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend
from bytecheckpoint.transfer import source as transfer_source
from bytecheckpoint.transfer import transfer
from bytecheckpoint.transfer.copying import copy_checkpoint
from bytecheckpoint.transfer.journal import Journal, JournalHead, find_journals
from bytecheckpoint.transfer.transfer import Transfer, TransferReport
from tests.support.killed_copies import contents

SIZES = (100_003, 5, 300_001, 0, 4_000)
PART = 256 << 10


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._PiecewiseWriter, "part_bytes", PART)
    monkeypatch.setattr(transfer_source, "_PIECE_BYTES", 50_000)


def save(path: str, seed: int = 0, **arguments: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = {f"t{i}": torch.randn(size, generator=generator) for i, size in enumerate(SIZES)}
    bcp.save(path, {"model": model, "extra": {"text": "x" * 5000, "seed": seed}}, **saving(**arguments))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(str(tmp_path / "source"))
    return tmp_path / "source"


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend(uuid.uuid4().hex)


@pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 1000}, {"chunk_size": 700_000}, {"chunk_size": 1 << 30}, {"codec": "zstd"}], ids=str
)
@pytest.mark.parametrize("middle", ["memory", "local", "dir"])
def test_bytes_are_equal_there_and_back(tmp_path: Path, middle: str, options: dict[str, Any]) -> None:
    """Parts begin and end inside chunks, inside heads, and at their edges."""
    path = str(tmp_path / "source")
    save(path, **options)
    urls = {"memory": f"memory://{uuid.uuid4().hex}", "local": str(tmp_path / "b"), "dir": f"dir::file://{tmp_path}/b"}
    report = copy(bcp.open(path), urls[middle])
    assert report.sent == report.size == bcp.open(path).manifest.file_bytes
    copy(bcp.open(urls[middle]), str(tmp_path / "back"))
    assert contents(open_backend(urls[middle])) == contents(open_backend(path))
    assert contents(open_backend(tmp_path / "back")) == contents(open_backend(path))
    assert bcp.open(str(tmp_path / "back")).verify().ok
    assert list(find_journals(str(tmp_path))) == []


@pytest.mark.parametrize("options", [{}, {"codec": "zstd"}, {"chunk_size": 1 << 30}], ids=str)
@pytest.mark.parametrize("where", ["head", "first", "edge", "last", "values", "short", "missing"])
def test_damaged_bytes_are_not_sent(tmp_path: Path, memory: MemoryBackend, where: str, options: dict[str, Any]) -> None:
    source = tmp_path / "source"
    save(str(source), **options)
    manifest, original = bcp.open(str(source)).manifest, contents(open_backend(source))
    values = next(row for row, kind in enumerate(manifest.files.kind) if kind == "values")
    tensors = next(row for row, kind in enumerate(manifest.files.kind) if kind == "tensors")
    path = source / manifest.files.name[values if where == "values" else tensors]
    data = bytearray(path.read_bytes())
    at = {"head": 20, "first": 4096, "edge": PART - 1, "last": len(data) - 1, "values": 100}.get(where, 0)
    data[at] ^= 1
    if where == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if where == "short" else data)
    sent = {}

    class Recording(CountingBackend):
        def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
            writer = super().create(key, size, at_most=at_most)
            write = writer.write

            def record(offset: int, part: Any) -> None:
                sent[key, offset] = bytes(part)
                write(offset, part)

            writer.write = record  # type: ignore[method-assign]
            return writer

    with pytest.raises(CorruptionError, match=path.name):
        copy_checkpoint(open_backend(source), Recording(memory))
    assert list(memory.list()) == []
    assert list(find_journals(str(source))) == []
    for (key, offset), part in sent.items():
        assert part == original[key][offset : offset + len(part)]


def test_a_failed_copy_continues_with_the_next_file(source: Path, memory: MemoryBackend) -> None:
    manifest = bcp.open(str(source)).manifest
    last = Path(manifest.files.name[-1]).name
    faulty = FaultyBackend(memory, [FaultRule("put_part", f"*/{last}", times=None, error=StorageError("broken"))])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(source), faulty, window=1)
    keys = [stat.key for stat in memory.list()]
    assert [Path(key).name for key in keys] == sorted(Path(name).name for name in manifest.files.name[:-1])
    assert [(one.path, one.url) for one in unfinished_uploads(str(source.parent))] == [(str(source), memory.url)]
    counting = CountingBackend(memory)
    report = copy_checkpoint(open_backend(source), counting)
    assert {Path(call.key).name for call in counting.matching("create")} == {last}
    assert report.sent == int(manifest.files.size[-1])
    assert contents(memory) == contents(open_backend(source))
    assert unfinished_uploads(str(source.parent)) == []
    again = copy_checkpoint(open_backend(source), memory)
    assert again.sent == 0


def test_a_file_that_has_vanished_from_the_target_is_sent_again(source: Path, memory: MemoryBackend) -> None:
    faulty = FaultyBackend(memory, [FaultRule("put", "manifest*", error=StorageError("broken"), times=None)])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(source), faulty)
    gone = next(stat.key for stat in memory.list())
    memory.delete([gone])
    copy_checkpoint(open_backend(source), memory)
    assert contents(memory) == contents(open_backend(source))


def test_another_checkpoint_was_saved_between_two_copies(source: Path, memory: MemoryBackend) -> None:
    faulty = FaultyBackend(memory, [FaultRule("put", "manifest*", error=StorageError("broken"), times=None)])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(source), faulty)
    save(str(source), seed=1)
    copy_checkpoint(open_backend(source), memory)
    assert contents(memory) == contents(open_backend(source))


def test_the_target_has_a_checkpoint(source: Path, tmp_path: Path, memory: MemoryBackend) -> None:
    copy_checkpoint(open_backend(source), memory)
    before = contents(memory)
    assert copy_checkpoint(open_backend(source), memory).sent == 0
    save(str(tmp_path / "other"), seed=1)
    with pytest.raises(KeyExistsError, match="already holds a checkpoint"):
        copy_checkpoint(open_backend(tmp_path / "other"), memory)
    assert contents(memory) == before
    memory.delete([bcp.open(memory.url).manifest.files.name[0]])
    with pytest.raises(KeyExistsError, match="is missing"):
        copy_checkpoint(open_backend(source), memory)


def test_another_checkpoint_is_committed_during_the_copy(source: Path, tmp_path: Path, memory: MemoryBackend) -> None:
    save(str(tmp_path / "other"), seed=1)
    other = (tmp_path / "other" / "manifest.msgpack").read_bytes()

    class Raced(CountingBackend):
        def put(self, key: str, data: Any, *, if_absent: bool = False, if_version: str = "") -> str:
            memory.put(key, other)
            return super().put(key, data, if_absent=if_absent, if_version=if_version)

    with pytest.raises(KeyExistsError, match="already holds a checkpoint"):
        copy_checkpoint(open_backend(source), Raced(memory))
    assert {stat.key: memory.get(stat.key) for stat in memory.list()} == {"manifest.msgpack": other}


def _commit_first(root: Path) -> None:
    """Run a job below ``root``, which removes what ended jobs have left there."""
    with bcp.CheckpointManager(root, preemption=None) as manager:
        manager.save(1, {"extra": {"x": 1}}, force=True)


@pytest.fixture
def of_a_job(tmp_path: Path) -> Path:
    """A checkpoint that a job with a manager has saved, so that its attempt has the job's mark."""
    with bcp.CheckpointManager(tmp_path / "old", preemption=None) as manager:
        manager.save(7, {"model": {"t": torch.arange(50_000.0)}, "extra": {"x": 7}}, force=True)
    return tmp_path / "old" / "step-7"


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_copy_into_the_root_of_a_job_that_begins(
    of_a_job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_journal: bool
) -> None:
    """The job takes the copy for no attempt of an ended one."""
    target = LocalBackend(str(tmp_path / "new" / "step-7"))
    rule = FaultRule("put", "manifest*", hook=lambda call: _commit_first(tmp_path / "new"))
    source = open_backend(of_a_job)
    (tmp_path / "file").touch()
    journals = None if has_journal else str(tmp_path / "file")
    copy_checkpoint(source, FaultyBackend(target, [rule]), journals=journals)
    assert rule.matched == 1
    assert "sending them again" not in caplog.text
    assert bcp.open(target.url).verify().ok
    assert contents(target) == contents(source)


def test_a_job_begins_after_a_copy_was_interrupted(
    of_a_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied already remains for a day, from the last try on."""
    target = LocalBackend(str(tmp_path / "new" / "step-7"))
    faulty = FaultyBackend(target, [FaultRule("put", "manifest*", error=StorageError("broken"))])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(of_a_job), faulty)
    _commit_first(tmp_path / "new")
    assert copy_checkpoint(open_backend(of_a_job), faulty).sent == 0
    assert contents(target) == contents(open_backend(of_a_job))
    remove(target.url)
    faulty.rules = [replace(faulty.rules[0])]
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(of_a_job), faulty)
    monkeypatch.setattr(attempts, "_LONGEST_SAVE_S", -2.0)
    _commit_first(tmp_path / "new")
    assert contents(target) == {}


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_copy_that_takes_longer_than_a_day(
    of_a_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_journal: bool
) -> None:
    """A job that begins then takes it for one that was killed. What it removes is sent again."""
    passed_s, run = [0.0], Transfer.run
    clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + passed_s[0]})
    monkeypatch.setattr(attempts, "time", clock)

    def run_for_a_day(transfer: Transfer) -> TransferReport:
        report = run(transfer)
        if not passed_s[0]:
            passed_s[0] = 25 * 3600.0
            _commit_first(tmp_path / "new")
        return report

    monkeypatch.setattr(Transfer, "run", run_for_a_day)
    source, target = open_backend(of_a_job), LocalBackend(str(tmp_path / "new" / "step-7"))
    (tmp_path / "file").touch()
    copy_checkpoint(source, target, journals=None if has_journal else str(tmp_path / "file"))
    assert "sending them again" in caplog.text
    assert contents(target) == contents(source)


def test_a_copy_shares_nothing(tmp_path: Path, memory: MemoryBackend) -> None:
    """It is no base, and removing it takes nothing from others."""
    save(str(tmp_path / "source"), base="auto", chunk_size=10_000)
    target = open_backend(f"{memory.url}/runs/step-1")
    copy_checkpoint(open_backend(tmp_path / "source"), target)
    save(f"{memory.url}/runs/step-2", base="auto", chunk_size=10_000)
    assert bcp.open(f"{memory.url}/runs/step-2").manifest.references.name == []
    remove(target.url)
    assert not [*target.list()]
    assert bcp.open(f"{memory.url}/runs/step-2").verify().ok


def test_the_copy_was_committed_without_a_reply(source: Path, memory: MemoryBackend) -> None:
    """The next one removes the journal."""
    lost = FaultRule("put", "manifest*", error=StorageError("lost"), after=True)
    with pytest.raises(CommitUnknownError):
        copy_checkpoint(open_backend(source), FaultyBackend(memory, [lost]))
    assert copy_checkpoint(open_backend(source), memory).sent == 0
    assert contents(memory) == contents(open_backend(source))
    assert list(find_journals(str(source))) == []


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_damaged_source_and_an_undamaged_one(
    source: Path, tmp_path: Path, memory: MemoryBackend, moment: str
) -> None:
    """A copy from another place was committed ``during`` the one that fails, or begun ``before``: it loses nothing."""
    good, damaged = open_backend(source), open_backend(tmp_path / "damaged")
    copy_checkpoint(good, damaged)
    names = [Path(name).name for name in bcp.open(good.url).manifest.files.name]
    (path,) = (tmp_path / "damaged").rglob(names[-1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if moment == "before":
        broken = FaultRule("put", "manifest*", error=StorageError("broken"), times=None)
        with pytest.raises(StorageError, match="broken"):
            copy_checkpoint(good, FaultyBackend(memory, [broken]))
    rule = FaultRule(
        "put_part", f"*/{names[0]}", hook=lambda call: moment == "during" and copy_checkpoint(good, memory)
    )
    with pytest.raises(CorruptionError):
        copy_checkpoint(damaged, FaultyBackend(memory, [rule]), window=1)
    assert rule.matched
    assert list(find_journals(damaged.url)) == []
    if moment == "before":
        assert copy_checkpoint(good, memory).sent == 0
    assert contents(memory) == contents(good)


@pytest.mark.parametrize("nth", [1, 2])
def test_files_that_vanish_during_the_copy_are_sent_again(source: Path, memory: MemoryBackend, nth: int) -> None:
    """Before the commit, or right after it."""

    def remove_all(call: Call) -> None:
        memory.delete([stat.key for stat in memory.list("attempt-")])

    faulty = FaultyBackend(memory, [FaultRule("list", "attempt-*", nth=nth, hook=remove_all)])
    copy_checkpoint(open_backend(source), faulty)
    assert contents(memory) == contents(open_backend(source))


@pytest.mark.parametrize("damage", ["torn", "flipped", "head", "empty", "long"])
def test_a_damaged_journal(source: Path, memory: MemoryBackend, damage: str) -> None:
    faulty = FaultyBackend(memory, [FaultRule("put", "manifest*", error=StorageError("broken"), times=None)])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(source), faulty)
    [(path, _)] = find_journals(str(source))
    data = bytearray(Path(path).read_bytes())
    if damage == "torn":
        data = data[:-3]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "head":
        data[15] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        data += struct.pack("<IQ", 1 << 31, 0)
    Path(path).write_bytes(data)
    copy_checkpoint(open_backend(source), memory)
    # What an attempt has written of which no record is left remains until it is old.
    manifest = bcp.open(memory.url).manifest
    memory.delete([stat.key for stat in memory.list("attempt-") if not stat.key.startswith(f"{manifest.attempt}/")])
    assert contents(memory) == contents(open_backend(source))
    assert list(find_journals(str(source))) == []


def test_records_that_another_version_may_have_written(tmp_path: Path) -> None:
    """A record of unknown form is skipped; a journal of another version, or another checkpoint, is not continued."""
    head = JournalHead("to", "memory://x", "0")
    with Journal(str(tmp_path), head) as journal:
        journal.add_stored("a")
    [(path, found)] = find_journals(str(tmp_path))
    assert found == head
    for record in (["part", "none", 3, "tag"], ["new"], 7, ["part"], ["file", 1, 2, 3, 4], {}):
        body = msgpack.packb(record)
        with open(path, "ab") as file:
            file.write(struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body)
    with Journal(str(tmp_path), head) as journal:
        assert (journal.stored, journal.uploads, journal.outdated) == ({"a"}, {}, None)
        with pytest.raises(UsageError, match="another process"):
            Journal(str(tmp_path), head)
    with Journal(str(tmp_path), JournalHead("to", "memory://x", "1")) as journal:
        assert journal.outdated is not None
        assert (journal.outdated.stored, journal.stored) == ({"a"}, set())


def test_a_torn_record_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a moment."""
    head, write = JournalHead("to", "memory://x", "0"), os.write
    with Journal(str(tmp_path), head) as journal:
        journal.add_stored("a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
            with pytest.raises(StorageError, match="No space left"):
                journal.add_stored("b")
        journal.add_stored("c")
    with Journal(str(tmp_path), head) as journal:
        assert journal.stored == {"a", "c"}


@pytest.mark.parametrize("nth", [1, 2])
def test_bytes_that_change_on_their_way_are_read_again(source: Path, memory: MemoryBackend, nth: int) -> None:
    """Of the file's head, and of a tensor. As in a load: one wrong reply of a store does not undo a copy."""
    faulty = FaultyBackend(open_backend(source), [FaultRule("read_into", "*model*", nth=nth, cut=100)])
    faulty.is_remote = True
    copy_checkpoint(faulty, memory, window=1)
    assert contents(memory) == contents(open_backend(source))


@pytest.mark.parametrize("at", [100, 100_000])
def test_a_damaged_copy_in_a_tier_is_not_copied(tmp_path: Path, memory: MemoryBackend, at: int) -> None:
    location = bcp.Location(tmp_path / "store" / "step-1", tier=bcp.Tier(tmp_path / "tier"))
    handle = bcp.save(location, {"model": {"t": torch.arange(100_000)}}, async_save=True)
    handle.uploaded(time_limit(60))
    (damaged,) = (tmp_path / "tier").rglob("model*")
    with damaged.open("r+b") as file:
        file.seek(at)
        file.write(b"damage")
    copy(bcp.open(location), memory.url)
    assert contents(memory) == contents(open_backend(location.url))


def test_an_upload_that_cannot_be_recorded_is_ended(
    source: Path, memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later copy would find it, and the store would keep its parts."""
    ended: list[base.PartWriter] = []
    monkeypatch.setattr(base._PiecewiseWriter, "token", "an upload")
    monkeypatch.setattr(base._PiecewiseWriter, "abort", lambda writer: ended.append(writer))
    append = Journal._append

    def full(journal: Journal, record: list[Any], *, durable: bool = False) -> None:
        if record[0] == "file":
            raise StorageError("No space left")
        append(journal, record, durable=durable)

    monkeypatch.setattr(Journal, "_append", full)
    with pytest.raises(StorageError, match="No space left"):
        copy_checkpoint(open_backend(source), memory)
    assert len(ended) == 1


def test_the_rate_is_limited(source: Path, memory: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part waits until the rate allows those before it."""
    waits: list[float] = []

    class RecordingEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return False

    monkeypatch.setattr(transfer, "Event", RecordingEvent)
    report = copy_checkpoint(open_backend(source), memory, window=1, rate_limit=1.0)
    assert waits[0] == 0
    assert max(waits) == pytest.approx(report.size - 5000 - 41, rel=0.2)


def test_bad_arguments(source: Path, tmp_path: Path) -> None:
    checkpoint = bcp.open(str(source))
    with pytest.raises(UsageError, match="window"):
        copy(checkpoint, str(tmp_path / "x"), window=0)
    with pytest.raises(UsageError, match="rate_limit"):
        copy(checkpoint, str(tmp_path / "x"), rate_limit=0)
    with pytest.raises(KeyExistsError, match="both source and target"):
        copy(checkpoint, str(source))
    with pytest.raises(UsageError, match="local directory"):
        unfinished_uploads("memory://x")


def test_a_long_span_is_read_twice(tmp_path: Path, memory: MemoryBackend) -> None:
    """Not once for each of its parts."""
    there = FaultyBackend(MemoryBackend(uuid.uuid4().hex))
    save(there.url, chunk_size=1 << 30)
    counting = CountingBackend(there)
    size = copy_checkpoint(counting, memory).size
    assert contents(memory) == contents(there)
    assert 1.9 * size < counting.bytes_read("*/model*") < 2.1 * size


def test_the_journal_is_removed_with_the_checkpoint(source: Path, memory: MemoryBackend) -> None:
    """No listing shows it, and it keeps no folder."""
    faulty = FaultyBackend(memory, [FaultRule("put", "manifest*", error=StorageError("broken"), times=None)])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(open_backend(source), faulty)
    assert len(list(find_journals(str(source)))) == 1
    root = open_backend(source.parent)
    keys = [stat.key for stat in root.list()]
    assert sorted(keys) == sorted(f"source/{stat.key}" for stat in open_backend(source).list())
    root.delete(keys)
    assert list(source.parent.iterdir()) == []


def test_loads_of_a_copy_are_equal(source: Path, memory: MemoryBackend) -> None:
    copy_checkpoint(open_backend(source), memory)
    state = {f"t{i}": torch.empty(size) for i, size in enumerate(SIZES)}
    bcp.load(memory.url, {"model": state})
    generator = torch.Generator().manual_seed(0)
    for i, size in enumerate(SIZES):
        assert np.array_equal(state[f"t{i}"].numpy(), torch.randn(size, generator=generator).numpy())
