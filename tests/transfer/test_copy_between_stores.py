"""Copies between two stores of which neither is a local directory: where their journal is, and what it is about."""

from __future__ import annotations

import logging
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from counting_backend import CountingBackend

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import copy, unfinished_uploads
from bytecheckpoint.errors import CorruptionError, KeyExistsError, StorageError, UsageError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend
from bytecheckpoint.transfer.copying import copy_checkpoint
from bytecheckpoint.transfer.journal import Journal, JournalHead, find_journals, user_directory
from tests.support.killed_copies import contents


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"model": {f"t{i}": torch.randn(20_000, generator=generator) for i in range(3)}, "extra": {"seed": seed}}


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def source(root: str) -> StorageBackend:
    bcp.save(f"{root}/source", state())
    return open_backend(f"{root}/source")


@pytest.fixture
def target(root: str) -> StorageBackend:
    return open_backend(f"{root}/runs/step-1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the journals are if no directory is given."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "bytecheckpoint" / "copies"


def data_keys(backend: StorageBackend) -> list[str]:
    return [stat.key for stat in backend.list("attempt-")]


def fail(source: StorageBackend, target: StorageBackend, where: str = "manifest*", **arguments: Any) -> None:
    """Copy, and fail when everything is stored but the objects ``where``."""
    operation, where = ("put", where) if where.startswith("manifest") else ("put_part", f"*/{Path(where).name}")
    faulty = FaultyBackend(target, [FaultRule(operation, where, error=StorageError("broken"), times=None)])
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(source, faulty, window=1, **arguments)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_failed_copy_continues_with_the_next_file(
    source: StorageBackend, target: StorageBackend, home: Path, tmp_path: Path, is_given: bool
) -> None:
    folder = tmp_path / "journals" if is_given else home
    arguments = {"journals": str(folder)} if is_given else {}
    names = bcp.open(source.url).manifest.files.name
    fail(source, target, names[-1], **arguments)
    assert [key.partition("/")[2] for key in data_keys(target)] == sorted(Path(name).name for name in names[:-1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len([*folder.iterdir()]) == 1
    counting = CountingBackend(target)
    copy_checkpoint(source, counting, **arguments)
    assert {Path(call.key).name for call in counting.matching("create")} == {Path(names[-1]).name}
    assert contents(target) == contents(source)
    assert [*folder.iterdir()] == []


def test_a_given_directory_is_also_used_next_to_local_files(target: StorageBackend, tmp_path: Path) -> None:
    """Such as those of a read-only file system."""
    bcp.save(tmp_path / "source", state())
    source = open_backend(tmp_path / "source")
    fail(source, target, journals=str(tmp_path / "journals"))
    assert [*find_journals(str(tmp_path))] == []
    assert len([*(tmp_path / "journals").iterdir()]) == 1
    assert copy_checkpoint(source, target, journals=str(tmp_path / "journals")).sent == 0


def test_every_pair_has_its_journal(root: str, source: StorageBackend, home: Path) -> None:
    """Different sources of one target, and different targets of one source, also at the same moment."""
    bcp.save(f"{root}/other", state(1))
    other = open_backend(f"{root}/other")
    targets = [open_backend(f"{root}/{name}") for name in ("a", "b")]
    for one in (source, other):
        for each in targets:
            fail(one, each)
    assert len([*home.iterdir()]) == 4
    assert len({key.partition("/")[0] for key in data_keys(targets[0])}) == 2
    copy_checkpoint(source, targets[0])
    assert copy_checkpoint(other, targets[1]).sent == 0
    for one, each in ((source, targets[1]), (other, targets[0])):
        with pytest.raises(KeyExistsError):
            copy_checkpoint(one, each)
    assert bcp.open(f"{root}/a").verify().ok
    assert bcp.open(f"{root}/b").verify().ok


class _Named(FaultyBackend):
    """A store with another URL, or endpoint."""

    def __init__(self, inner: StorageBackend, url: str, endpoint: str = "") -> None:
        super().__init__(inner)
        self._named, self._endpoint = url, endpoint

    @property
    def url(self) -> str:
        return self._named

    def endpoint(self) -> str:
        return self._endpoint


def test_what_the_journal_names(root: str, source: StorageBackend, tmp_path: Path, caplog: Any) -> None:
    """No user or password, but the endpoint: of the source, of the target, of both."""
    url, folder = "memory://user:secret@bucket/step-1", str(tmp_path / "journals")
    pairs = [(one, other) for one in ("", "http://a", "http://b") for other in ("", "http://a", "http://b")]
    for at, (one, other) in enumerate(pairs):
        names = _Named(source, "memory://user:secret@from/x", one), _Named(open_backend(f"{root}/{at}"), url, other)
        fail(*names, journals=folder)
    found = [path.read_bytes() for path in (tmp_path / "journals").iterdir()]
    assert len(found) == len(pairs)
    assert not any(b"secret" in data or b"user" in data for data in found)
    assert sum(b"memory://***@bucket/step-1 at http://b" in data for data in found) == 3
    assert sum(b"memory://***@from/x at http://b" in data for data in found) == 3
    assert "secret" not in caplog.text


def test_one_url_at_two_endpoints(source: StorageBackend, target: StorageBackend, home: Path) -> None:
    named = _Named(source, target.url, "http://a")
    copy_checkpoint(named, _Named(target, target.url, "http://b"))
    assert contents(target) == contents(source)
    with pytest.raises(KeyExistsError, match="both source and target"):
        copy_checkpoint(named, _Named(target, target.url, "http://a"))


def test_it_is_no_upload(source: StorageBackend, target: StorageBackend, tmp_path: Path) -> None:
    """Neither ``bcp upload`` nor what reads a tier finds the journal, even if it is there."""
    bcp.save(tmp_path / "step-1", state(2))
    before = contents(open_backend(tmp_path))
    fail(source, target, journals=str(tmp_path / "step-1"))
    assert len([*(tmp_path / "step-1").glob("copy-*.journal")]) == 1
    assert [*find_journals(str(tmp_path))] == []
    assert unfinished_uploads(str(tmp_path)) == []
    copy_checkpoint(source, target, journals=str(tmp_path / "step-1"))
    assert contents(open_backend(tmp_path)) == before


def test_two_copies_at_once(source: StorageBackend, target: StorageBackend, home: Path) -> None:
    def again(call: Call) -> None:
        with pytest.raises(UsageError, match=f"from {source.url} to {target.url}: it has locked {home}"):
            copy_checkpoint(source, target)

    rule = FaultRule("put", "manifest*", hook=again)
    copy_checkpoint(source, FaultyBackend(target, [rule]))
    assert rule.matched == 1
    assert contents(target) == contents(source)


@pytest.mark.parametrize("why", ["is a file", "no home"])
def test_a_journal_that_cannot_be_written(
    source: StorageBackend,
    target: StorageBackend,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    """A warning; then a failure removes everything, and the next copy begins again."""
    (tmp_path / "file").touch()
    journals = str(tmp_path / "file") if why == "is a file" else None
    if why == "no home":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    fail(source, target, journals=journals)
    assert "if the copy fails, it begins again: choose a directory with --journal" in caplog.text
    assert contents(target) == {}
    assert copy_checkpoint(source, target, journals=journals).sent > 0
    assert contents(target) == contents(source)


def test_where_the_journals_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert user_directory() == "/home/user/.local/state/bytecheckpoint/copies"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert user_directory() == "/state/bytecheckpoint/copies"


def test_the_target_has_lost_the_files(source: StorageBackend, target: StorageBackend, home: Path) -> None:
    """As that of a process that has ended, or that another program has removed."""
    fail(source, target)
    target.delete([stat.key for stat in target.list()])
    copy_checkpoint(source, target)
    assert contents(target) == contents(source)


def test_another_checkpoint_was_saved_at_the_source(source: StorageBackend, target: StorageBackend, home: Path) -> None:
    """What the earlier copy has written is removed."""
    fail(source, target)
    bcp.save(source.url, state(1))
    copy_checkpoint(source, target)
    assert contents(target) == contents(source)


def test_a_damaged_source(source: StorageBackend, target: StorageBackend, home: Path) -> None:
    """Nothing remains, also of what an earlier copy has written."""
    names = bcp.open(source.url).manifest.files.name
    fail(source, target, names[-1])
    data = bytearray(source.get(names[-1]))
    data[-1] ^= 1
    source.put(names[-1], data)
    assert contents(target)
    with pytest.raises(CorruptionError):
        copy_checkpoint(source, target)
    assert contents(target) == {}
    assert [*home.iterdir()] == []


def test_urls_with_spaces(tmp_path: Path) -> None:
    heads = [JournalHead("between", url, "attempt-1", source=one) for one, url in (("a b", "c"), ("a", "b c"))]
    with Journal(str(tmp_path), heads[0]), Journal(str(tmp_path), heads[1]):
        assert len([*tmp_path.iterdir()]) == 2


def test_on_the_command_line(root: str, source: StorageBackend, home: Path, tmp_path: Path) -> None:
    bad = CliRunner().invoke(cli, ["copy", source.url, f"{root}/x", "--journal", "memory://journals"])
    assert bad.exit_code == 2
    assert "journal must be a local directory, not memory://journals" in bad.stderr
    with Journal(str(tmp_path), JournalHead("between", f"{root}/x", "0", source=source.url)):
        arguments = ["copy", source.url, f"{root}/x"]
        busy = CliRunner().invoke(cli, [*arguments, "--journal", str(tmp_path)])
        assert busy.exit_code == 2
        assert f"it has locked {tmp_path}/copy-" in busy.stderr
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert contents(open_backend(f"{root}/x")) == contents(source)


def test_from_python(root: str, source: StorageBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        copy(bcp.open(source.url), f"{root}/x", journal=tmp_path / "journals")
    assert not caplog.records
    assert [*(tmp_path / "journals").iterdir()] == []
    with pytest.raises(UsageError, match="journal"):
        copy(bcp.open(source.url), f"{root}/y", journal="memory://journals")
    assert isinstance(open_backend(f"{root}/y"), MemoryBackend)
