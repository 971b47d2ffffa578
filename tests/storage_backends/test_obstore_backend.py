"""The backend on obstore, as ``gs://`` on a real S3 server behind a proxy that translates headers.

tests/stores tests it on Azurite, too.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

pytest.importorskip("obstore")
from google_front import GoogleFront
from obstore.exceptions import GenericError
from s3_faults import Exchange

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    AccessDeniedError,
    KeyChangedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UnansweredError,
)
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.obstore.backend import ObstoreBackend, explain
from bytecheckpoint.storage_backends.remote import parts
from bytecheckpoint.storage_backends.remote.parts import PARTS_IN_FLIGHT
from bytecheckpoint.storage_backends.remote.session import EndpointSession
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.storage import StorageConformance

pytestmark = [pytest.mark.s3, pytest.mark.sampled(43, of=__name__)]

_PART = 5 << 20  # the smallest that S3 accepts
_DATA = np.random.default_rng(0).bytes(4 * _PART + 17)


@pytest.fixture
def front(s3: dict[str, Any]) -> Iterator[GoogleFront]:
    running = GoogleFront(s3["endpoint_url"])
    yield running
    running.close()


@pytest.fixture
def backend(front: GoogleFront, bucket: str) -> StorageBackend:
    backend = open_backend(f"gs://{bucket}/{uuid.uuid4().hex}", token="anon", endpoint_url=front.url)
    assert isinstance(backend, ObstoreBackend)
    backend.deadline_s = time_limit(20)
    return backend


def _is_unused() -> bool:
    """Whether the window of parts is, at the latest soon: obstore drops parts in its own threads."""
    window, end = parts.window(), time.monotonic() + time_limit(20)
    with window._changed:
        return window._changed.wait_for(
            lambda: window._taken == window._in_flight == window._sent == window._writers == 0,
            timeout=end - time.monotonic(),
        )


def _uploads(bucket: str, s3: dict[str, Any]) -> list[Any]:
    found: list[Any] = fsspec.filesystem("s3", **s3, skip_instance_cache=True).list_multipart_uploads(bucket)
    return found


class TestObstoreBackend(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    sequences = 5

    @pytest.fixture
    def backend(self, front: GoogleFront, bucket: str) -> Iterator[StorageBackend]:
        backend = open_backend(f"gs://{bucket}/{uuid.uuid4().hex}", token="anon", endpoint_url=front.url)
        yield backend
        backend.close()


# Requests


def test_reads_look_nothing_up(backend: StorageBackend, front: GoogleFront) -> None:
    backend.put("object", _DATA)
    buffers = [bytearray(10), bytearray(20)]
    backend.get("object")
    backend.get_versioned("object")
    backend.read_into("object", 5, buffers[0])
    with backend.open_object("object") as reader:
        reader.read(7, buffers)
    assert front.kinds == ["put", "get", "get", "get", "get"]


def test_an_object_that_is_replaced_between_reads(backend: StorageBackend) -> None:
    backend.put("object", b"one")
    with backend.open_object("object") as reader:
        reader.read(0, [bytearray(1)])
        backend.put("object", b"two")
        with pytest.raises(StorageError, match="replaced"):
            reader.read(1, [bytearray(1)])


# Conditional puts


def test_the_reply_to_a_conditional_put_is_an_error(backend: StorageBackend, front: GoogleFront) -> None:
    """The put was successful, and the store refuses its repetition: its mark shows that the object is its own."""
    front.rule = lambda exchange: "applied" if exchange.kind == "put" and exchange.number in (1, 3) else None
    first = backend.put("object", b"one", if_absent=True)
    second = backend.put("object", b"two", if_version=first)
    assert front.kinds == ["put", "put", "head"] * 2
    assert backend.get_versioned("object") == (b"two", second)


def test_the_reply_is_an_error_and_the_object_is_of_another_writer(
    backend: StorageBackend, front: GoogleFront, bucket: str
) -> None:
    other = open_backend(backend.url, **backend.options)

    def rule(exchange: Exchange) -> str | None:
        if (exchange.kind, exchange.number) == ("put", 2):
            front.rule = lambda exchange: None
            other.put("object", b"of another writer")
            return None
        return "refuse" if exchange.kind == "put" else None

    front.rule = rule
    with pytest.raises(UnansweredError, match="another program"):
        backend.put("object", b"one", if_absent=True)
    assert backend.get("object") == b"of another writer"


def test_a_put_whose_reply_is_lost(backend: StorageBackend, front: GoogleFront) -> None:
    """It is never taken for one that was refused."""
    front.rule = lambda exchange: "lose" if exchange.kind == "put" and exchange.number in (1, 3) else None
    with suppress(UnansweredError):  # obstore repeats it only if it seems not to have arrived
        assert backend.put("object", b"one", if_absent=True) == backend.stat("object").version
    assert backend.get("object") == b"one"
    backend.put("object", b"two")
    assert backend.get("object") == b"two"


@pytest.mark.parametrize("version", ["0", "00", "", "no number"])
def test_versions_that_are_no_generations(backend: StorageBackend, version: str) -> None:
    """GCS would create the object for generation 0."""
    error = KeyChangedError if version else KeyExistsError
    backend.put("there", b"x")
    with pytest.raises(error):
        backend.put("object" if version else "there", b"y", if_version=version, if_absent=not version)
    assert [found.key for found in backend.list()] == ["there"]


# Uploads


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", _PART)


def _write(backend: StorageBackend) -> None:
    with backend.create("object", len(_DATA)) as writer:
        for start in range(0, len(_DATA), _PART // 2):
            writer.write(start, _DATA[start : start + _PART // 2])
        writer.complete()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("what", ["refuse", "reset", "lose"])
def test_requests_that_fail_once(backend: StorageBackend, front: GoogleFront, what: str) -> None:
    seen: set[tuple[str, int | None]] = set()

    def rule(exchange: Exchange) -> str | None:
        one = (exchange.kind, exchange.part)
        if exchange.kind in ("begin", "complete") and what != "refuse":
            return None
        if one in seen:
            return None
        seen.add(one)
        return what

    backend.put("other", b"x")  # the endpoint is known now, and may fail as long as the deadline
    front.rule = rule
    _write(backend)
    assert {part for kind, part in seen if kind == "part"} == {1, 2, 3, 4, 5}
    assert backend.get("object") == _DATA
    assert _is_unused()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["begin", "part", "complete"])
def test_an_upload_that_fails(
    backend: StorageBackend, front: GoogleFront, bucket: str, s3: dict[str, Any], kind: str
) -> None:
    """Neither an object nor parts of it remain."""
    front.rule = lambda exchange: "denied" if exchange.kind == kind and exchange.part in (None, 3) else None
    with pytest.raises(StorageError, match="object"):
        _write(backend)
    assert "abort" in front.kinds or kind == "begin"
    front.rule = lambda exchange: None
    assert [*backend.list()] == []
    assert _uploads(bucket, s3) == []
    gc.collect()
    assert _is_unused()


@pytest.mark.usefixtures("small_parts")
def test_an_abort_while_parts_are_in_flight(
    backend: StorageBackend, front: GoogleFront, bucket: str, s3: dict[str, Any]
) -> None:
    front.rule = lambda exchange: "wait" if exchange.kind == "part" else None
    with ThreadPoolExecutor(1) as pool:
        writer = backend.create("object", len(_DATA) * 5)
        data = _DATA * 5
        writing = pool.submit(writer.write, 0, data[: 20 * _PART])
        for _ in range(PARTS_IN_FLIGHT):
            assert front.waiting.acquire(timeout=time_limit(20))
        writer.abort()
        with pytest.raises(StorageError, match="aborted"):
            writing.result(time_limit(20))
    front.rule = lambda exchange: None
    front.go_on.set()
    del writer, writing
    gc.collect()
    assert [*backend.list()] == []
    assert _uploads(bucket, s3) == []
    assert _is_unused()


@pytest.mark.usefixtures("small_parts")
def test_a_forgotten_writer_stores_nothing(backend: StorageBackend) -> None:
    writer = backend.create("object", len(_DATA))
    writer.write(0, _DATA[:-1])
    is_gone = threading.Event()
    weakref.finalize(writer, is_gone.set)
    del writer
    while not is_gone.wait(0.1):  # the parts in flight still use it
        gc.collect()
    assert [*backend.list()] == []
    assert parts.window()._writers == 0


_UPLOAD = """
import sys
from pathlib import Path
from bytecheckpoint.storage_backends import open_backend

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name + ":"))

url, endpoint, size, piece = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
backend = open_backend(url, token="anon", endpoint_url=endpoint)
data = bytearray(piece)

def upload(key, size):
    with backend.create(key, size) as writer:
        for start in range(0, size, piece):
            writer.write(start, data)
        writer.complete()

upload("small", 4 * piece)  # the client's own memory
Path("/proc/self/clear_refs").write_text("5")  # the peak is the present from now on
before = status("VmRSS")
upload("large", size)
print(status("VmHWM") - before)
"""


@pytest.mark.full
def test_an_upload_holds_only_the_parts_in_flight(front: GoogleFront, bucket: str) -> None:
    size, piece, limit = 384 << 20, 8 << 20, PARTS_IN_FLIGHT * parts.PART_BYTES + (64 << 20)
    words = [sys.executable, "-c", _UPLOAD, f"gs://{bucket}/root", front.url, str(size), str(piece)]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=time_limit(120))
    assert PARTS_IN_FLIGHT * parts.PART_BYTES // 2 < int(found.stdout) < limit


# Deadlines and errors

_OPERATIONS: dict[str, Callable[[StorageBackend], object]] = {
    "put": lambda backend: backend.put("object", b"x"),
    "put if absent": lambda backend: backend.put("object", b"x", if_absent=True),
    "create": _write,
    "get": lambda backend: backend.get("object"),
    "read": lambda backend: backend.read_into("object", 0, bytearray(1)),
    "stat": lambda backend: backend.stat("object"),
    "list": lambda backend: [*backend.list()],
    "children": lambda backend: backend.list_children(),
    "delete": lambda backend: backend.delete(["a", "b"]),
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("operation", _OPERATIONS)
@pytest.mark.parametrize("what", ["stall", "refuse"])
@pytest.mark.sampled(6)
def test_a_store_that_does_not_answer(backend: StorageBackend, front: GoogleFront, operation: str, what: str) -> None:
    backend.deadline_s = time_limit(1)
    backend.put("object", b"there")
    front.rule = lambda exchange: what
    begun = time.monotonic()
    with pytest.raises(StorageError) as caught:
        _OPERATIONS[operation](backend)
    after_s = time_limit(2) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert time.monotonic() - begun < backend.deadline_s + after_s
    assert caught.value.is_late
    assert isinstance(caught.value, UnansweredError) == (operation.startswith("put") and what == "stall")


def test_obstore_may_give_up_before_the_session() -> None:
    """A regression: then the store did not count as silent."""
    for error in (GenericError("Error performing PUT in 1.7s - no reply"), TimeoutError()):
        assert EndpointSession(explain).error(error, "writing 'object'").is_late
    refused = GenericError(
        "Error performing PUT in 1.7s - Server returned non-2xx status code: 503 Service Unavailable"
    )
    assert not EndpointSession(explain).error(refused, "writing 'object'").is_late


def test_a_store_that_refuses_and_then_stalls(backend: StorageBackend, front: GoogleFront) -> None:
    """Its replies count for more than that the last try had little time left."""
    backend.deadline_s = time_limit(1)
    backend.put("object", b"there")
    begun = time.monotonic()
    front.rule = lambda exchange: "refuse" if time.monotonic() - begun < 0.8 * backend.deadline_s else "stall"
    with pytest.raises(StorageError, match="SlowDown"):
        backend.get("object")


def test_an_address_without_a_server_fails_at_once() -> None:
    backend = open_backend("gs://bucket/root", token="anon", endpoint_url="http://127.0.0.1:1")
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        backend.get("object")
    assert time.monotonic() - begun < backend.deadline_s / 2


def test_what_errors_mean(backend: StorageBackend, front: GoogleFront) -> None:
    with pytest.raises(KeyNotFoundError):
        backend.get("missing")
    front.rule = lambda exchange: "skewed"
    for operation in _OPERATIONS.values():
        with pytest.raises(AccessDeniedError, match="credentials"):
            operation(backend)
    elsewhere = open_backend("gs://no-such-bucket/root", **backend.options)
    front.rule = lambda exchange: None
    for operation in (lambda: elsewhere.get("object"), lambda: elsewhere.put("object", b"x")):
        with pytest.raises(StorageError, match="bucket") as caught:
            operation()
        assert not isinstance(caught.value, KeyNotFoundError)


def test_credentials_that_are_replaced_in_their_file(
    front: GoogleFront, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old key is revoked, the file contains a new one: the next request uses it."""
    private = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = {"type": "service_account", "client_email": "me@project", "private_key": private.decode()}

    def provide(key: str) -> None:
        (tmp_path / "new").write_text(json.dumps({**account, "private_key_id": key}))
        (tmp_path / "new").replace(tmp_path / "account")

    provide("old")
    root, options = f"gs://{bucket}/{uuid.uuid4().hex}", {"endpoint_url": front.url}
    named = open_backend(root, token=str(tmp_path / "account"), **options)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account"))
    for backend in (named, open_backend(root, **options)):
        provide("old")
        front.rule = lambda exchange: "denied" if exchange.key != "old" else None
        assert isinstance(backend, ObstoreBackend)
        backend.put("object", _DATA)
        front.rule = lambda exchange: "denied" if exchange.key != "new" else None
        with pytest.raises(AccessDeniedError):
            backend.get("object")
        assert backend._session() is backend._session(), "no new client for the same credentials"
        provide("new")
        assert backend.get("object") == _DATA
        _write(backend)
        assert [found.size for found in backend.list()] == [len(_DATA)]


def test_signatures_of_urls_are_not_shown() -> None:
    url = "https://me.blob.core.windows.net/c/k?sv=2020-02-10&sig=SECRET"
    error = GenericError(f"Error performing GET {url} in 1ms - no reply\n\nDebug source:\nGeneric {{ {url} }}")
    mapped = EndpointSession(explain).error(error, "reading 'k'")
    assert str(mapped) == "reading 'k': Error performing GET https://me.blob.core.windows.net/c/k?*** in 1ms - no reply"
    assert "SECRET" not in f"{mapped!r} {error} {error!r}"


def test_secrets_are_in_no_error() -> None:
    secret = "c2VjcmV0LWtleQ=="
    nowhere = "http://user:c2VjcmV0LWtleQ@127.0.0.1:1"
    account = {"AccountName": "me", "BlobEndpoint": nowhere}
    for given in (
        {"AccountKey": secret},
        {"AccountKey": f"!{secret}"},
        {"SharedAccessSignature": f"sv=2020-02-10&sig={secret}"},
    ):
        text = ";".join(f"{name}={value}" for name, value in {**account, **given}.items())
        backend = open_backend("az://container/root", connection_string=text)
        backend.deadline_s = time_limit(5)
        for operation in (lambda: backend.get("object"), lambda: backend.put("object", b"x")):  # noqa: B023
            with pytest.raises(StorageError) as caught:
                operation()
            seen = "".join(traceback.format_exception(caught.value))
            assert "c2VjcmV0" not in f"{seen} {caught.value!r} {backend!r} {backend._store_root!r}"  # type: ignore[attr-defined]


# Whole checkpoints


@pytest.mark.usefixtures("small_parts")
def test_a_checkpoint_is_saved_overwritten_and_loaded(backend: StorageBackend, front: GoogleFront) -> None:
    options = dict(backend.options)
    for step in (1, 2):
        model = {"w": torch.full((3 << 20,), float(step)), "b": torch.arange(5) + step}
        front.kinds.clear()
        bcp.save(backend.url, {"model": model, "extra_state": {"step": step}}, step=step, storage_options=options)
    assert "begin" in front.kinds
    checkpoint = bcp.open(backend.url, storage_options=options)
    assert checkpoint.verify().ok
    loaded = {"model": {"w": torch.zeros(3 << 20), "b": torch.zeros(5, dtype=torch.int64)}}
    bcp.load(backend.url, loaded, storage_options=options)
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.items())
    assert {found.key for found in backend.list()} == {"manifest.msgpack", *checkpoint.manifest.files.name}


def test_of_two_savers_one_replaces_the_other(backend: StorageBackend, front: GoogleFront) -> None:
    """A manifest that appears between the read of the old one and the put is not replaced unnoticed."""
    options = dict(backend.options)
    bcp.save(backend.url, {"extra_state": {"step": 1}}, storage_options=options)
    saved: list[str] = []

    def rule(exchange: Exchange) -> str | None:
        if exchange.kind == "put" and "manifest" in exchange.path and not saved:
            front.rule = lambda exchange: None
            saved.append("by another process")
            bcp.Checkpointer().save(backend.url, {"extra_state": {"step": 2}}, storage_options=options)
        return None

    front.rule = rule
    bcp.save(backend.url, {"extra_state": {"step": 3}}, storage_options=options)
    assert saved
    checkpoint = bcp.open(backend.url, storage_options=options)
    assert checkpoint.tree("extra_state")["step"] == 3
    # The files of the manifest in between are gone, too: the save saw that one, and not only the first.
    assert {found.key for found in backend.list()} == {"manifest.msgpack", *checkpoint.manifest.files.name}


# Forks

_FORK = """
import os, sys
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends import open_backend

url, endpoint = sys.argv[1:]
options = {"token": "anon", "endpoint_url": endpoint}
unused, used = open_backend(url, **options), open_backend(url, **options)
if os.fork() == 0:
    unused.put("child", b"of a child whose parent had not used obstore")
    os._exit(0)
assert os.wait()[1] == 0
used.put("object", b"x")
if os.fork() == 0:
    try:
        used.get("object")
    except StorageError as error:
        assert "forked" in str(error), error
        try:
            opened = open_backend(url, **options)
        except StorageError as error:
            assert "gcsfs" in str(error) and "forked" in str(error), error
        else:
            assert type(opened).__name__ == "FsspecBackend", opened
        os._exit(0)
    os._exit(1)
assert os.wait()[1] == 0
print(sorted(found.key for found in used.list()))
"""


def test_a_forked_child(front: GoogleFront, bucket: str) -> None:
    """obstore hangs in a child whose parent has used it, and works otherwise."""
    words = [sys.executable, "-W", "ignore", "-c", _FORK, f"gs://{bucket}/root", front.url]
    found = subprocess.run(words, capture_output=True, text=True, timeout=time_limit(60))
    assert found.returncode == 0, found.stderr
    assert found.stdout == "['child', 'object']\n"
