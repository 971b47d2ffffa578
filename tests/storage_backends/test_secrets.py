"""Passwords, keys and tokens appear in no error, log, repr or manifest."""

from __future__ import annotations

import base64
import logging
import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from s3_faults import fault_proxy

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import location
from bytecheckpoint.cli import cli
from bytecheckpoint.control.failure import FailureRecord
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.errors import BytecheckpointError, RankFailedError, StorageError
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.telemetry import TraceFiles
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


# -- one secret in every place ----------------------------------------------------------------------------------------

PASSWORD, IN_URL = "Tr0ub4dor&3/x", "Tr0ub4dor%263%2Fx"
ELSEWHERE = {
    "secret": "option-secret-1",
    "headers": {"X-Auth": "header-value-2"},
    "client_kwargs": {"aws_session_token": "nested-token-3", "proxies": ["http://me:proxy-password-4@proxy:1"]},
    "connection_string": "AccountKey=connection-string-5",
}
VARIABLES = {"AWS_SECRET_ACCESS_KEY": "variable-6", "BYTECHECKPOINT_KEY": "variable-of-the-job-7"}
BASIC = base64.b64encode(f"user:{PASSWORD}".encode()).decode()
OPTIONS = ("option-secret-1", "header-value-2", "nested-token-3", "proxy-password-4", "connection-string-5")
EVERY = (PASSWORD, IN_URL, BASIC, *OPTIONS, *VARIABLES.values())
URL = f"talkative://user:{IN_URL}@runs/7b/step-1"


class ClientError(Exception):
    """Keeps what it shows in another attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


class TalkativeFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Keeps files in this process, and shows all credentials in its errors."""

    protocol = "talkative"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fault = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol("memory://" + path.rpartition("@")[2])  # type: ignore[no-any-return]

    def _fail(self) -> None:
        given = [PASSWORD, IN_URL, BASIC, self.storage_options, URL, f"user:{PASSWORD}@runs", *VARIABLES.values()]
        given += [str(self.storage_options.get("connection_string")).partition("=")[2]]
        text = f"cannot log in with {' or '.join(map(str, given))}"
        if self.fault == "its own error":
            raise ClientError(text)
        if self.fault == "errors of the system":
            raise PermissionError(13, text, text)
        if self.fault == "a chain":
            try:
                raise KeyError(text)
            except KeyError as error:
                raise ConnectionError("see above") from error

    def _open(self, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super()._open(*arguments, **options)

    def info(self, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super().info(*arguments, **options)

    def ls(self, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super().ls(*arguments, **options)

    def mv(self, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super().mv(*arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super().cat_file(*arguments, **options)


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> type[TalkativeFileSystem]:
    fsspec.register_implementation("talkative", TalkativeFileSystem, clobber=True)
    monkeypatch.setitem(known_implementations, "talkative", {"class": "TalkativeFileSystem"})
    monkeypatch.setattr(TalkativeFileSystem, "store", {})
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return TalkativeFileSystem


def _texts_of(value: object) -> Iterator[str]:
    """Everything that a caller may print, log or send of a value or an error."""
    yield f"{value} {value!r}"
    if isinstance(value, BaseException):
        yield "".join(traceback.format_exception(value))
        yield "".join(traceback.TracebackException.from_exception(value).format())
        yield pickle.dumps(value).decode("latin-1")
        yield repr(vars(value))
        record = FailureRecord.from_exception(value, "write", PeerIdentity.of_this_process(0))
        yield f"{record} {record.error()} {record.rank_failed()!r}"
    if isinstance(value, (bcp.SaveHandle, bcp.Checkpoint)):
        yield repr(value.stats if isinstance(value, bcp.Checkpoint) else value.timings)


def _uses(folder: Path) -> Iterator[Callable[[], object]]:
    options = {"storage_options": ELSEWHERE}
    place = bcp.Location(URL, **options)
    staged = bcp.Location(URL, tier=bcp.Tier(folder / "tier"), **options)
    yield lambda: _save(URL, ELSEWHERE)
    yield lambda: _save_later(URL, ELSEWHERE)
    yield lambda: _load(URL, ELSEWHERE)
    yield lambda: bcp.open(URL, **options)
    yield lambda: bcp.open(place)["model.nothing"]
    yield lambda: bcp.open(place).verify()
    yield lambda: bcp.load(place, {"model": {"other": torch.ones(1)}})
    yield lambda: bcp.latest(URL.rpartition("/")[0], **options)
    yield lambda: place
    yield lambda: staged
    yield lambda: place.open()
    yield lambda: _manage(URL.rpartition("/")[0], ELSEWHERE)
    yield lambda: bcp.save(staged, _state(), options=bcp.SaveOptions(deadline_s=1)).uploaded()
    yield lambda: bcp.save(place, _state(), options=bcp.SaveOptions(deadline_s=1, base=f"{URL}-base"))
    yield lambda: bcp.save(f"{URL}\0", _state(), **options)
    yield lambda: bcp.save(URL, _state(), storage_options={**ELSEWHERE, "unknown": object()})
    yield lambda: bcp.Location(URL, storage_options=[*ELSEWHERE.values()])  # type: ignore[arg-type]


def _command_lines(folder: Path) -> Iterator[list[str]]:
    options = ["-o", "secret=option-secret-1", "-o", "connection_string=AccountKey=connection-string-5"]
    root = URL.rpartition("/")[0]
    for words in (
        *(["ls", root], ["clean", root, "--dry-run"], ["latest", root], ["inspect", URL], ["verify", URL]),
        *(["show", URL, "model"], ["diff", URL, f"{URL}-other"], ["copy", URL, str(folder / "copy")]),
        *(
            ["export", URL, str(folder / "export")],
            ["upload", URL],
            ["rm", f"{URL}-other", "--yes"],
            ["rm", URL, "--yes"],
        ),
    ):
        yield [*words, *options]
        yield [*words, *options, "--json"]


@pytest.mark.parametrize("fault", ["", "its own error", "errors of the system", "a chain"])
def test_secrets_of_every_place_appear_in_no_text(
    talkative: type[TalkativeFileSystem], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, fault: str,
) -> None:  # fmt: skip
    """In a URL, in options and in the environment, where a client library repeats all of it in its errors."""
    caplog.set_level(logging.DEBUG, "bytecheckpoint")
    _save(URL, ELSEWHERE)
    monkeypatch.setattr(talkative, "fault", fault)
    seen: list[str] = []
    failed = 0
    with TraceFiles(tmp_path / "trace"):
        for use in _uses(tmp_path):
            try:
                seen += _texts_of(use())
            except BytecheckpointError as error:
                seen += _texts_of(error)
                failed += 1
    for words in _command_lines(tmp_path):
        result = CliRunner().invoke(cli, words)
        seen.append(f"{result.output} {result.exception!r}")
    formatter = logging.Formatter()  # with tracebacks
    seen += [formatter.format(one) for one in caplog.records if one.name.startswith("bytecheckpoint")]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    written += [path for path in Path(os.environ["XDG_STATE_HOME"]).rglob("*") if path.is_file()]
    seen += [f"{path} {path.read_bytes().decode('latin-1')}" for path in written]
    seen += [f"{name} {file.getvalue().decode('latin-1')}" for name, file in talkative.store.items()]
    assert failed > (10 if fault else 2)
    assert any("trace" in text for text in map(str, written))
    for secret in EVERY:
        for text in seen:
            assert secret not in text, text[max(0, text.index(secret) - 2000) :][:4000]
