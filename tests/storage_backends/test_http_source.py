"""Checkpoints on a real HTTP server."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

from aiohttp import web

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    AccessDeniedError,
    CorruptionError,
    KeyNotFoundError,
    StorageError,
    UnsupportedURLError,
)
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.http import HttpBackend
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend
from bytecheckpoint.testing.storage.reading import ReadingTests
from bytecheckpoint.transfer.copying import copy_checkpoint

DATA = bytes(range(256)) * 20_000


class Server:
    """Serves ``root`` at ``url``. ``rule`` returns the reply to a request, or None for that of the server."""

    def __init__(self, root: Path) -> None:
        self.root, self.requests, self.url = root, list[str](), ""
        self.rule: Callable[[Any], Any] = lambda request: None
        self._loop, self._started = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-server")

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        @web.middleware
        async def answer(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            self.requests.append(request.method)
            return self.rule(request) or await handler(request)

        app = web.Application(middlewares=[answer])
        app.router.add_static("/", self.root)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._end = asyncio.Event()
        self._started.set()
        await self._end.wait()
        await runner.cleanup()

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._started.wait(time_limit(30))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


class _Published(HttpBackend):
    """What is written to the server's directory is read from the server."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url)
        self._files = LocalBackend(str(server.root))
        self.put, self.create, self.delete = self._files.put, self._files.create, self._files.delete  # type: ignore[method-assign]


class TestHttpReads(ReadingTests):
    @pytest.fixture
    def backend(self, server: Server) -> HttpBackend:
        return _Published(server)


def _save(root: Path) -> dict[str, Any]:
    state = {"model": {"w": torch.arange(300_000.0).reshape(300, 1000), "b": torch.ones(5)}, "extra": {"step": 3}}
    bcp.save(root / "checkpoint", state)
    return state


def _empty() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(300, 1000), "b": torch.zeros(5)}, "extra": {"step": 0}}


def test_a_checkpoint(server: Server) -> None:
    stored, found = _save(server.root), _empty()
    report = bcp.load(f"{server.url}/checkpoint", found)
    assert torch.equal(found["model"]["w"], stored["model"]["w"])
    assert torch.equal(found["model"]["b"], stored["model"]["b"])
    assert found["extra"] == {"step": 3}
    assert report.bytes_read < 1.1 * report.bytes_requested
    assert set(server.requests) == {"GET"}
    checkpoint = bcp.open(f"{server.url}/checkpoint")
    assert checkpoint.verify().problems == ()
    assert torch.equal(checkpoint["model.w"][7:8, :3], stored["model"]["w"][7:8, :3])


def test_a_safetensors_file(server: Server) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"weight": torch.arange(10.0)}, server.root / "model.safetensors")
    checkpoint = bcp.open(f"{server.url}/model.safetensors")
    (name,) = checkpoint
    assert torch.equal(checkpoint[name].load(), torch.arange(10.0))


def test_damage_is_found(server: Server) -> None:
    _save(server.root)
    (file,) = server.root.glob("checkpoint/*/model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="model"):
        bcp.load(f"{server.url}/checkpoint", _empty())


def test_a_file_that_has_grown(server: Server) -> None:
    """The bytes that are read are right; the file is not the one that was saved."""
    _save(server.root)
    [file] = server.root.glob("checkpoint/attempt-*/model-00000.safetensors")
    with file.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(CorruptionError, match=r"model-00000\.safetensors"):
        bcp.load(f"{server.url}/checkpoint", _empty())


def test_it_is_read_only(server: Server) -> None:
    _save(server.root)
    for name in ("checkpoint", "new"):
        with pytest.raises(AccessDeniedError, match="HTTP is read-only"):
            bcp.save(f"{server.url}/{name}", {"tree": {"a": torch.ones(3)}})
    backend = open_backend(server.url)
    with pytest.raises(AccessDeniedError, match="HTTP is read-only"):
        backend.put("key", b"")
    with pytest.raises(AccessDeniedError, match="HTTP is read-only"):
        backend.delete(["key"])
    with pytest.raises(StorageError, match="no listing"):
        backend.list_children()


def test_what_is_not_there(server: Server) -> None:
    backend = open_backend(server.url)
    with pytest.raises(KeyNotFoundError, match="404"):
        backend.get("missing")
    with pytest.raises(KeyNotFoundError, match="404"):
        backend.stat("missing")
    with pytest.raises(StorageError, match=r"no manifest.msgpack"):
        bcp.open(f"{server.url}/nothing")


def test_a_server_without_ranges(server: Server) -> None:
    (server.root / "object").write_bytes(DATA)
    server.rule = lambda request: web.Response(body=DATA)
    backend = open_backend(server.url)
    whole = bytearray(len(DATA))
    backend.read_into("object", 0, whole)
    assert whole == DATA
    with pytest.raises(StorageError, match=r"supports range requests"):
        backend.read_into("object", 0, bytearray(100))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server(server: Server, status: int) -> None:
    (server.root / "object").write_bytes(DATA)
    replies = iter([web.Response(status=status), web.Response(status=status)])
    server.rule = lambda request: next(replies, None)
    backend = open_backend(server.url)
    buffer = bytearray(1000)
    backend.read_into("object", 5, buffer)
    assert buffer == DATA[5:1005]
    assert len(server.requests) == 3
    server.rule = lambda request: web.Response(status=status)
    backend.deadline_s = time_limit(0.5)
    with pytest.raises(StorageError, match=rf"the server replied {status} .*\(\d+ tries in .*\)"):
        backend.get("object")


def test_a_reply_that_ends_early(server: Server) -> None:
    (server.root / "object").write_bytes(DATA)

    def cut(request: Any) -> Any:
        if len(server.requests) > 1:
            return None
        headers = {"Content-Range": f"bytes 0-999999/{len(DATA)}", "Content-Length": "1000000"}
        reply = web.Response(status=206, headers=headers, body=DATA[:1000])
        reply.force_close()
        return reply

    server.rule = cut
    buffer = bytearray(1_000_000)
    open_backend(server.url).read_into("object", 0, buffer)
    assert buffer == DATA[:1_000_000]


def test_a_redirect(server: Server) -> None:
    (server.root / "object").write_bytes(DATA)

    def move(request: Any) -> Any:
        return web.Response(status=302, headers={"Location": "/object"}) if request.path == "/old/object" else None

    server.rule = move
    buffer = bytearray(10)
    open_backend(f"{server.url}/old").read_into("object", 300, buffer)
    assert buffer == DATA[300:310]


def test_credentials(server: Server) -> None:
    (server.root / "object").write_bytes(DATA)

    def check(request: Any) -> Any:
        allowed = request.headers.get("Authorization") in ("Basic dXNlcjpwYXNz", "Bearer token")
        return None if allowed else web.Response(status=401)

    server.rule = check
    host = server.url.removeprefix("http://")
    with pytest.raises(AccessDeniedError, match=r"401 .* pass credentials as headers="):
        open_backend(server.url).get("object")
    assert open_backend(server.url, headers={"Authorization": "Bearer token"}).get("object") == DATA
    with_password = open_backend(f"http://user:pass@{host}")
    assert with_password.get("object") == DATA
    with pytest.raises(KeyNotFoundError) as caught:
        with_password.get("missing")
    assert "pass@" not in str(caught.value)


def test_an_unreachable_server() -> None:
    with pytest.raises(StorageError, match=r"Connection refused \(3 tries"):
        open_backend("http://127.0.0.1:1/root").get("object")


@pytest.mark.parametrize("url", ["http://host/path?sig=secret", "http://host/path#part", "http:///path"])
def test_urls_that_cannot_be_a_root(url: str) -> None:
    with pytest.raises(UnsupportedURLError) as caught:
        open_backend(url)
    assert not re.search("secret", str(caught.value))
    with pytest.raises(UnsupportedURLError, match="headers="):
        open_backend("http://host", key="value")


_FOREVER = {"get": lambda backend: backend.get("k"), "read": lambda backend: backend.read_into("k", 0, bytearray(1000))}


@pytest.mark.parametrize("call", _FOREVER)
def test_a_body_that_never_ends(server: Server, call: str) -> None:
    """A few bytes at a time, so that the server is never silent."""

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.2)

    headers = {"Content-Range": "bytes 0-999/1000"}
    server.rule = lambda request: web.Response(body=drip(), status=206, headers=headers)
    backend = open_backend(server.url)
    backend.deadline_s = 0.5
    with pytest.raises(StorageError, match="did not answer in time") as caught:
        _FOREVER[call](backend)
    assert caught.value.is_late


def test_a_head_that_never_ends() -> None:
    is_over = threading.Event()

    def drip() -> None:
        with listener.accept()[0] as connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not is_over.wait(0.1):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        backend = open_backend(f"http://127.0.0.1:{listener.getsockname()[1]}")
        backend.deadline_s = 0.5
        try:
            with pytest.raises(StorageError, match="did not answer in time"):
                backend.get("k")
        finally:
            is_over.set()
            thread.join()


def test_a_copy_to_another_store_continues(server: Server, tmp_path: Path) -> None:
    """The journal is next to neither side."""
    _save(server.root)
    source, target = bcp.open(f"{server.url}/checkpoint"), MemoryBackend(uuid.uuid4().hex)
    last = source.manifest.files.name[-1]
    broken = FaultRule("put_part", "*" + last.partition("/")[2], error=StorageError("broken"))
    journals = str(tmp_path / "journals")
    with pytest.raises(StorageError, match="broken"):
        copy_checkpoint(source.backend, FaultyBackend(target, [broken]), window=1, journals=journals)
    report = copy_checkpoint(source.backend, target, journals=journals)
    assert report.sent == int(source.manifest.files.size[-1]) < report.size
    assert bcp.open(target.url).verify().ok
