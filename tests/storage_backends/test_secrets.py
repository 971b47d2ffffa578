"""Passwords, keys and tokens appear in no error, log, repr or manifest."""

from __future__ import annotations

import logging
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from s3_faults import fault_proxy

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import location
from bytecheckpoint.cli import cli
from bytecheckpoint.control.failure import FailureRecord
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import BytecheckpointError, RankFailedError, StorageError
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend

SECRETS = ("hunter2", "p@ssw0rd", "sessiontoken123")


def _state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}, "extra_state": {"step": 1}}


def _save(url: str, options: dict[str, Any]) -> object:
    return bcp.save(url, _state(), storage_options=options, options=bcp.SaveOptions(deadline_s=1))


def _save_later(url: str, options: dict[str, Any]) -> object:
    return bcp.save(
        url, _state(), storage_options=options, async_save=True, options=bcp.SaveOptions(deadline_s=1)
    ).result()


def _load(url: str, options: dict[str, Any]) -> object:
    return bcp.load(url, _state(), storage_options=options, options=bcp.LoadOptions(deadline_s=1))


def _manage(url: str, options: dict[str, Any]) -> object:
    with bcp.CheckpointManager(url, cadence=1, storage_options=options, job=bcp.JobOptions(deadline_s=1)) as manager:
        manager.save(1, _state())
        return manager.latest()


OPERATIONS: tuple[Callable[[str, dict[str, Any]], object], ...] = (
    _save,
    _save_later,
    _load,
    _manage,
    lambda url, options: bcp.open(url, storage_options=options),
    lambda url, options: bcp.latest(url, storage_options=options),
)


@pytest.fixture
def check(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[Callable[[], object]], str]]:
    """Return a function that calls another one, and checks what can be seen of it."""
    caplog.set_level(logging.DEBUG, "bytecheckpoint")

    def call(function: Callable[[], object]) -> str:
        try:
            result = function()
            seen = f"{result!r} {result}"
        except BytecheckpointError as error:
            seen = f"{error} {error!r} {error.args} {''.join(traceback.format_exception(error))}"
        for secret in SECRETS:
            assert secret not in seen
        return seen

    yield call
    shown = logging.Formatter()  # with tracebacks
    records = [one for one in caplog.get_records("call") if one.name.startswith("bytecheckpoint")]
    text = "\n".join(map(shown.format, records))
    for secret in SECRETS:
        assert secret not in text


Check = Callable[[Callable[[], object]], str]


@pytest.mark.parametrize("url", ["ftp://user:hunter2@127.0.0.1:1/root", "ftp://user:p@ssw0rd@127.0.0.1:1/root"])
def test_a_url_with_a_password_that_cannot_be_opened(check: Check, url: str) -> None:
    for operation in OPERATIONS:
        assert "127.0.0.1" in check(lambda operation=operation: operation(url, {"timeout": 1}))  # type: ignore[misc]
    for arguments in (["ls", url], ["inspect", url], ["rm", url, "--yes"], ["verify", url]):
        result = CliRunner().invoke(cli, [*arguments, "-o", "timeout=1"])
        assert result.exit_code
        assert not any(secret in result.output for secret in SECRETS)


class _Protected(FaultyBackend):
    """A store whose URL has a password."""

    @property
    def url(self) -> str:
        return self.inner.url.replace("memory://", "memory://user:hunter2@")


@pytest.mark.parametrize("fault", [None, *(FaultRule(name, times=None) for name in ("put", "get", "create", "delete"))])
def test_a_store_whose_url_has_a_password(
    check: Check, monkeypatch: pytest.MonkeyPatch, fault: FaultRule | None
) -> None:
    name = uuid.uuid4().hex
    backend = MemoryBackend(name)
    rules: list[FaultRule] = []

    def open_protected(url: object, **options: object) -> _Protected:
        return _Protected(MemoryBackend(name, str(url).partition("/root")[2].strip("/")), rules)

    monkeypatch.setattr(location, "open_backend", open_protected)
    url = f"memory://user:hunter2@{name}/root"
    check(lambda: _save(url, {}))
    if fault is not None:
        fault.error = lambda: StorageError(f"cannot reach {url}")
        rules.append(fault)
    for operation in (_save, _save_later, _load, lambda url, options: bcp.open(url)):
        check(lambda operation=operation: operation(url, {}))  # type: ignore[misc]
    assert not any(secret.encode() in backend.get("manifest.msgpack") for secret in SECRETS)
    MemoryBackend.delete_store(name)


@pytest.mark.s3
@pytest.mark.parametrize("what", [None, "refuse", "reset", "lose", "cut", "userinfo", "closed", "bucket"])
@pytest.mark.sampled(3)
def test_the_credentials_of_s3(check: Check, s3: dict[str, Any], bucket: str, what: str | None) -> None:
    with fault_proxy(s3["endpoint_url"]) as proxy:
        endpoint = {"userinfo": "http://user:hunter2@127.0.0.1:1", "closed": "http://127.0.0.1:1"}.get(
            what or "", proxy.url
        )
        options = {"endpoint_url": endpoint, "key": "visible", "secret": "hunter2", "token": "sessiontoken123"}
        if what in ("refuse", "reset", "lose", "cut"):
            proxy.rule = lambda exchange: what
        path = f"s3://{bucket}{'-missing' if what == 'bucket' else ''}/root"
        seen = [check(lambda operation=operation: operation(path, options)) for operation in OPERATIONS[:4]]  # type: ignore[misc]
        assert len(seen) == 4
        if what is None:
            found = bcp.open(path, storage_options=options).backend.get("manifest.msgpack")
            assert not any(secret.encode() in found for secret in SECRETS)


def test_errors_of_other_ranks(tmp_path: Path) -> None:
    error = StorageError("reading 'k' in s3://user:hunter2@host/x and ftp://user:p@ssw0rd@host: failed")
    assert str(error) == "reading 'k' in s3://***@host/x and ftp://***@host: failed"
    assert "hunter2" not in repr(error)
    assert issubclass(RankFailedError, BytecheckpointError)


def test_the_report_of_another_librarys_error() -> None:
    """Its message and its traceback are sent to the other ranks."""
    try:
        raise ValueError("http://user:hunter2@host/x") from OSError("http://user:hunter2@host/y")
    except ValueError as error:
        record = FailureRecord.from_exception(error, "write", PeerIdentity.of_this_process(0))
    assert "***@host/x" in record.message
    assert "***@host/y" in record.traceback_text
    assert "hunter2" not in f"{record} {record.rank_failed()} {record.rank_failed().traceback_text}"
