"""The S3 backend against a real server, and through a proxy that damages what passes."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest

pytest.importorskip("s3fs")

from forked_store import use_in_forked_child
from s3_faults import Exchange, FaultProxy, fault_proxy

from bytecheckpoint.checkpoint.location import Location, Tier
from bytecheckpoint.checkpoint.nearest import open_nearest
from bytecheckpoint.errors import AccessDeniedError, KeyExistsError, KeyNotFoundError, StorageError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.remote import backend as remote_backend
from bytecheckpoint.storage_backends.remote import parts, session
from bytecheckpoint.storage_backends.remote.failures import common_failure
from bytecheckpoint.storage_backends.remote.parts import PARTS_IN_FLIGHT
from bytecheckpoint.storage_backends.remote.session import EndpointSession, Request
from bytecheckpoint.storage_backends.s3 import client as s3_client
from bytecheckpoint.storage_backends.s3.backend import S3Backend
from bytecheckpoint.storage_backends.s3.client import S3Client
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultyBackend
from bytecheckpoint.testing.storage import StorageConformance

pytestmark = [pytest.mark.s3, pytest.mark.sampled(46, of=__name__)]

PART = 5 << 20  # the smallest that S3 accepts
DATA = np.random.default_rng(0).bytes(3 * PART + 17)


def test_the_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However it is set; never with user and password. AWS is one store."""
    keys = {"key": "x", "secret": "y"}
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for options in ({"endpoint_url": "http://a:1"}, {"client_kwargs": {"endpoint_url": "http://a:1"}}):
        for backend in (store := open_backend("s3://bucket/x", **keys, **options), FaultyBackend(store)):
            assert backend.endpoint() == "http://a:1"
        location = Location("s3://bucket/x", tier=Tier(tmp_path), storage_options={**keys, **options})
        nearest = open_nearest(location)
        assert nearest.endpoint() == "http://a:1"
    assert "secret" not in open_backend("s3://bucket", **keys, endpoint_url="http://user:secret@a:1").endpoint()
    for region in ("us-east-1", "eu-west-1"):
        assert open_backend("s3://bucket", **keys, client_kwargs={"region_name": region}).endpoint() == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://b:2")
    assert open_backend("s3://bucket", **keys).endpoint() == "http://b:2"
    assert open_backend("memory://bucket").endpoint() == ""


class TestS3(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    writers = 8
    sequences = 5

    @pytest.fixture
    def backend(self, bucket: str, s3: dict[str, Any]) -> Iterator[StorageBackend]:
        self.fs = fsspec.filesystem("s3", **s3)
        self.bucket = bucket
        backend = open_backend(f"s3://{bucket}/some/root", **s3)
        yield backend
        backend.close()

    @pytest.fixture(autouse=True)
    def _no_pending_uploads(self, backend: StorageBackend) -> Iterator[None]:
        yield
        self.check_no_uploads()

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        self.fs.invalidate_cache()
        assert self.fs.find(self.bucket) == []
        self.check_no_uploads()

    def check_no_uploads(self) -> None:
        assert self.fs.list_multipart_uploads(self.bucket) == []


def test_s3_usable_in_a_forked_child(bucket: str, s3: dict[str, Any]) -> None:
    use_in_forked_child(f"s3://{bucket}/root", s3)


def test_a_listing_finds_its_client_once(bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each object: that takes longer than the rest of the listing."""
    backend = open_backend(f"s3://{bucket}/root", **s3)
    keys = [f"folder/{number:02}" for number in range(20)]
    for key in keys:
        backend.put(key, b"x")
    clients: list[S3Client] = []
    find = S3Backend._session

    def session(backend: S3Backend) -> S3Client:
        clients.append(found := find(backend))
        return found

    monkeypatch.setattr(S3Backend, "_session", session)
    assert [stat.key for stat in backend.list()] == keys
    assert list(backend.list_children("folder/")) == [key.removeprefix("folder/") for key in keys]
    assert len(clients) < 10


def test_s3_bucket_is_never_made(s3: dict[str, Any]) -> None:
    backend = open_backend(f"s3://none-{uuid.uuid4().hex}/root", **s3)
    with pytest.raises(StorageError, match="bucket"):
        backend.put("object", b"x")
    with pytest.raises(StorageError, match="bucket"):
        backend.get("object")
    with pytest.raises(StorageError, match="bucket"):
        _write(backend, bytes(20 * 2**20))
    # A job whose bucket is misspelled must not start from scratch.
    with pytest.raises(StorageError, match="bucket"):
        [*backend.list()]
    with pytest.raises(StorageError, match="bucket"):
        backend.list_children()


def test_an_abort_while_another_thread_writes(damaged: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other writer gets the buffer into which the thread goes on writing, and no slot or buffer is lost."""
    writer = damaged.create("object", len(DATA))
    window = parts.window()
    is_copying, go_on = threading.Event(), threading.Event()
    copy = np.copyto

    def slow(*arguments: Any) -> None:
        is_copying.set()
        assert go_on.wait(time_limit(20))
        copy(*arguments)

    monkeypatch.setattr(np, "copyto", slow)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer.write, 0, DATA)
        assert is_copying.wait(time_limit(20))
        (part,) = writer._filling.values()  # type: ignore[attr-defined]
        window.enter()  # another writer, for which buffers are kept
        writer.abort()
        assert part.buffer not in window._idle
        go_on.set()
        with pytest.raises(StorageError, match="aborted"):
            writing.result(time_limit(20))
    window.leave()
    assert window._taken == window._in_flight == window._sent == window._writers == 0


def test_s3_forgotten_writer_stores_nothing(bucket: str, s3: dict[str, Any]) -> None:
    backend = open_backend(f"s3://{bucket}", **s3)
    writer = backend.create("large", 20 * 2**20)
    writer.write(0, bytes(19 * 2**20))
    window, is_gone = parts.window(), threading.Event()
    weakref.finalize(writer, is_gone.set)
    del writer
    while not is_gone.wait(0.1):  # the part in flight still uses it
        gc.collect()
    assert [*backend.list()] == []
    assert window._taken == window._writers == 0


def test_s3_unreachable(bucket: str, s3: dict[str, Any]) -> None:
    options = {**s3, "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        open_backend(f"s3://{bucket}", **options).get("object")


@pytest.fixture
def proxy(s3: dict[str, Any]) -> Iterator[FaultProxy]:
    with fault_proxy(s3["endpoint_url"]) as running:
        yield running


@pytest.fixture
def damaged(proxy: FaultProxy, bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> StorageBackend:
    """A backend behind the proxy, with small parts and quick time limits."""
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    backend = open_backend(f"s3://{bucket}/root", **{**s3, "endpoint_url": proxy.url})
    backend.deadline_s = time_limit(20)
    return backend


def _write(backend: StorageBackend, data: bytes = DATA) -> None:
    with backend.create("object", len(data)) as writer:
        for start in range(0, len(data), 3 << 20):
            writer.write(start, data[start : start + (3 << 20)])
        writer.complete()


def _pending(bucket: str, s3: dict[str, Any]) -> list[Any]:
    found: list[Any] = fsspec.filesystem("s3", **s3).list_multipart_uploads(bucket)
    return found


def test_requests_are_counted(damaged: StorageBackend, proxy: FaultProxy) -> None:
    damaged.conditions()  # probes
    proxy.kinds.clear()
    _write(damaged)
    assert sorted(proxy.kinds) == ["begin", "complete", "part", "part", "part", "part"]
    proxy.kinds.clear()
    buffer = bytearray(1000)
    damaged.read_into("object", 77, buffer)
    assert buffer == DATA[77:1077]
    with pytest.raises(KeyNotFoundError):
        damaged.get("missing")
    damaged.put("small", b"x")
    damaged.put("new", b"x", if_absent=True)
    with pytest.raises(KeyExistsError):
        damaged.put("small", b"y", if_absent=True)
    assert damaged.get("small") == b"x"
    assert proxy.kinds == ["get", "get", "put", "put", "put", "head", "get"]


def test_eight_parts_are_in_flight(damaged: StorageBackend, proxy: FaultProxy) -> None:
    """One thread writes, and waits only for the ninth part."""
    proxy.rule = lambda exchange: "wait" if exchange.kind == "part" else None
    data = DATA * 4
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(_write, damaged, data)
        for _ in range(PARTS_IN_FLIGHT):
            assert proxy.waiting.acquire(timeout=time_limit(30))
        assert proxy.kinds.count("part") == PARTS_IN_FLIGHT
        assert not writing.done()
        proxy.go_on.set()
        writing.result(time_limit(60))
    assert damaged.get("object") == data


def test_many_threads_wait_for_the_memory_of_parts(
    damaged: StorageBackend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them holds a part that is not sent. Those whose parts are not begun wait."""
    proxy.rule = lambda exchange: "wait" if exchange.kind == "part" else None
    data, taken = DATA * 6, []
    window = parts.window()
    window_taken = window.take_buffer

    def take(*arguments: Any) -> Any:
        found = window_taken(*arguments)
        taken.append(window._taken)
        return found

    monkeypatch.setattr(window, "take_buffer", take)
    with damaged.create("object", len(data)) as writer, ThreadPoolExecutor(16) as pool:
        pieces = range(0, len(data), 1 << 20)
        writing = [pool.submit(writer.write, start, data[start : start + (1 << 20)]) for start in pieces]
        for _ in range(PARTS_IN_FLIGHT):
            assert proxy.waiting.acquire(timeout=time_limit(30))
        proxy.go_on.set()
        for one in writing:
            one.result(time_limit(60))
        writer.complete()
    assert PARTS_IN_FLIGHT < max(taken) <= PARTS_IN_FLIGHT + 3
    assert window._taken == 0
    assert damaged.get("object") == data


def test_parts_in_any_order_from_one_thread(damaged: StorageBackend) -> None:
    """More parts are incomplete than there are buffers, and none is in flight that could release one."""
    data = DATA * 4
    with damaged.create("object", len(data)) as writer:
        pieces = [*range(0, len(data), 1 << 20)]
        for start in pieces[::5] + [at for at in pieces if at % (5 << 20)]:
            writer.write(start, data[start : start + (1 << 20)])
        writer.complete()
    assert damaged.get("object") == data


def test_a_store_that_is_busy(damaged: StorageBackend, proxy: FaultProxy, bucket: str, s3: dict[str, Any]) -> None:
    proxy.rule = lambda exchange: "refuse" if len(proxy.kinds) % 3 == 1 else None
    _write(damaged)
    assert damaged.get("object") == DATA
    assert [found.key for found in damaged.list()] == ["object"]
    damaged.delete(["object"])
    assert _pending(bucket, s3) == []


@pytest.mark.parametrize("what", ["refuse", "reset", "stall"])
@pytest.mark.sampled(1)
def test_a_part_that_never_succeeds(
    damaged: StorageBackend,
    proxy: FaultProxy,
    bucket: str,
    s3: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    if what == "stall":
        monkeypatch.setattr(session, "_MIN_LIMIT_S", time_limit(1.5))
        monkeypatch.setattr(session, "_SLOWEST", 1e9)
    damaged.put("object", b"before")
    proxy.rule = lambda exchange: what if exchange.part == 2 else None
    damaged.deadline_s = time_limit(4)
    with pytest.raises(StorageError, match=r"writing 'object' in s3://\S+: part 2: .* \(\d+ tries in \d"):
        _write(damaged)
    assert proxy.kinds.count("part") > 4
    assert damaged.get("object") == b"before"
    assert _pending(bucket, s3) == []


@pytest.mark.parametrize("what", ["reset", "stall", "lose", "refuse"])
@pytest.mark.sampled(2)
def test_each_request_of_an_upload_fails_once(
    damaged: StorageBackend,
    proxy: FaultProxy,
    bucket: str,
    s3: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """Also the reply to the last request, after which the upload no longer exists."""
    monkeypatch.setattr(session, "_MIN_LIMIT_S", time_limit(1))
    monkeypatch.setattr(session, "_SLOWEST", 1e8)
    failed: set[tuple[str, int | None]] = set()

    def rule(exchange: Exchange) -> str | None:
        name = exchange.kind, exchange.part
        if name in failed:
            return None
        failed.add(name)
        # Without the reply, the client does not learn the id of an upload that it has begun.
        return "refuse" if exchange.kind == "begin" else what

    proxy.rule = rule
    _write(damaged)
    assert {kind for kind, _ in failed} >= {"begin", "part", "complete"}
    proxy.rule = lambda exchange: None
    assert damaged.get("object") == DATA
    assert _pending(bucket, s3) == []


def test_a_failed_part_whose_callback_is_late(
    damaged: StorageBackend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A future wakes those that wait for it before it runs its callbacks."""
    monkeypatch.setattr(
        parts.PartsWriter, "_has_ended", lambda writer, sent: parts.window().release_slot(with_buffer=True)
    )
    proxy.rule = lambda exchange: "denied" if exchange.part == 2 else None  # this is not tried again
    with pytest.raises(StorageError, match="part 2"):
        _write(damaged)
    assert "complete" not in proxy.kinds


def test_an_upload_that_another_process_has_ended(damaged: StorageBackend, proxy: FaultProxy) -> None:
    """An object of the same size from an earlier upload is not the new one."""
    _write(damaged, bytes(len(DATA)))
    proxy.rule = lambda exchange: "ended" if exchange.kind == "complete" else None
    with pytest.raises(StorageError, match="NoSuchUpload"):
        _write(damaged)
    assert damaged.get("object") == bytes(len(DATA))


def test_an_upload_that_ends_before_its_object_is_there(
    damaged: StorageBackend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try takes too long. The second one finds that there is no such upload, and no object either yet."""
    monkeypatch.setattr(session, "_MIN_LIMIT_S", time_limit(1))
    monkeypatch.setattr(session, "_SLOWEST", 1e8)

    def rule(exchange: Exchange) -> str | None:
        if exchange.kind == "complete":
            return "wait" if exchange.number == 1 else "ended"
        if (exchange.kind, exchange.number) == ("head", 2):
            proxy.go_on.set()
        return None

    proxy.rule = rule
    _write(damaged)
    assert proxy.kinds.count("complete") == 2
    assert proxy.kinds.count("head") > 1
    assert damaged.get("object") == DATA


def test_an_ended_upload_of_which_the_store_says_that_it_is_broken(
    damaged: StorageBackend, proxy: FaultProxy, bucket: str, s3: dict[str, Any]
) -> None:
    """As Ceph does. The parts are listed then, instead of trying until the deadline."""

    def rule(exchange: Exchange) -> str | None:
        if exchange.kind != "complete":
            return None
        fs = fsspec.filesystem("s3", **s3)
        for upload in fs.list_multipart_uploads(bucket):
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        return "broken"

    proxy.rule = rule
    with pytest.raises(KeyNotFoundError, match="NoSuchUpload"):
        _write(damaged)
    assert proxy.kinds.count("complete") == 1

    proxy.kinds.clear()
    proxy.rule = lambda exchange: "broken" if (exchange.kind, exchange.number) == ("complete", 1) else None
    _write(damaged)
    assert proxy.kinds.count("complete") == 2
    assert damaged.get("object") == DATA


@pytest.mark.parametrize(
    ("what", "kind", "hint"),
    [
        ("expired", AccessDeniedError, "the credentials have expired"),
        ("skewed", AccessDeniedError, "the clock of this machine differs"),
    ],
)
def test_a_store_that_refuses_from_some_request_on(
    damaged: StorageBackend,
    proxy: FaultProxy,
    bucket: str,
    s3: dict[str, Any],
    what: str,
    kind: type[StorageError],
    hint: str,
) -> None:
    """One clear error, the object as before, and nothing pending that is not shown: to end the upload fails too."""
    damaged.put("object", b"before")
    calls = [
        lambda: damaged.put("object", b"x"),
        lambda: [damaged.get("object"), damaged.get("object")],
        lambda: [*damaged.list(), *damaged.list()],
    ]
    proxy.rule = lambda exchange: what
    for call in calls:
        with pytest.raises(kind, match=hint):
            call()
    proxy.rule = lambda exchange: None if exchange.kind == "begin" or exchange.part == 1 else what
    with pytest.raises(kind, match=hint):
        _write(damaged)
    proxy.rule = lambda exchange: None
    assert damaged.get("object") == b"before"
    pending = [*damaged.incomplete()]
    assert [one.key for one in pending] == ["object"]
    damaged.abort_incomplete(pending)
    assert _pending(bucket, s3) == []


def test_a_closed_port(bucket: str, s3: dict[str, Any]) -> None:
    backend = open_backend(f"s3://{bucket}", **{**s3, "endpoint_url": "http://127.0.0.1:1"})
    backend.deadline_s = time_limit(20)
    calls = [
        lambda: backend.put("object", b"x"),
        lambda: backend.read_into("object", 0, bytearray(1)),
        lambda: [*backend.list()],
        lambda: _write(backend, bytes(20 << 20)),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
            call()


def test_keys_in_pages(damaged: StorageBackend, proxy: FaultProxy) -> None:
    keys = sorted(f"{folder}/{number}" for folder in "ab" for number in range(4))
    for key in keys:
        damaged.put(key, b"x")
    proxy.rule = lambda exchange: "pages" if exchange.kind == "list" else None
    proxy.kinds.clear()
    assert [found.key for found in damaged.list()] == keys
    assert len(proxy.kinds) >= len(keys)
    assert [found.key for found in damaged.list("b/")] == keys[4:]
    assert damaged.list_children() == ["a/", "b/"]


def test_uploads_in_pages(damaged: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto replies with all of them at once, so the replies are made here; Ceph pages like this."""
    found = [{"Key": f"root/k{number // 3:02}", "UploadId": f"id-{number}"} for number in range(25)]

    async def call(client: S3Client, method: str, **arguments: Any) -> dict[str, Any]:
        assert method == "list_multipart_uploads"
        after = arguments.get("UploadIdMarker")
        start = next((at for at, one in enumerate(found, 1) if one["UploadId"] == after), 0)
        assert not start or arguments["KeyMarker"] == found[start - 1]["Key"]
        page = found[start : start + 10]
        last = {"NextKeyMarker": page[-1]["Key"], "NextUploadIdMarker": page[-1]["UploadId"]}
        return {"Uploads": page, "IsTruncated": start + 10 < len(found), **last}

    monkeypatch.setattr(S3Client, "call", call)
    assert [one.upload_id for one in damaged.incomplete()] == [one["UploadId"] for one in found]


@pytest.mark.parametrize("token", [{}, {"NextContinuationToken": "the same"}])
def test_pages_that_do_not_continue(
    damaged: StorageBackend, monkeypatch: pytest.MonkeyPatch, token: dict[str, str]
) -> None:
    async def call(client: S3Client, method: str, **arguments: Any) -> dict[str, Any]:
        return {"IsTruncated": True, **token}

    monkeypatch.setattr(S3Client, "call", call)
    with pytest.raises(StorageError, match="not where it continues"):
        [*damaged.list()]


def test_an_abort_ends_the_parts_in_flight_first(damaged: StorageBackend, proxy: FaultProxy) -> None:
    """A part that arrives after the end of its upload is kept, and costs money."""
    proxy.rule = lambda exchange: "wait" if exchange.kind == "part" else None
    writer = damaged.create("object", len(DATA))
    writer.write(0, DATA)
    assert proxy.waiting.acquire(timeout=time_limit(30))
    writer.abort()
    assert not writer._running  # type: ignore[attr-defined]
    assert proxy.kinds[-1] == "abort"


def test_a_slow_part_is_sent_a_second_time(
    damaged: StorageBackend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        _write(damaged)
    monkeypatch.setattr(session, "_HEDGE_AFTER_S", 0.05)
    monkeypatch.setattr(session, "_MAX_HEDGED", 1)
    caplog.set_level(logging.INFO, "bytecheckpoint.storage_backends.remote.session")
    slow: set[int | None] = set()

    def rule(exchange: Exchange) -> str | None:
        if exchange.part != 2 or slow:
            return None
        slow.add(exchange.part)
        return "wait"

    proxy.rule = rule
    _write(damaged)
    assert slow
    assert "sending it again" in caplog.text
    assert damaged.get("object") == DATA


def test_a_lost_reply_to_a_conditional_put(damaged: StorageBackend, proxy: FaultProxy) -> None:
    damaged.conditions()  # probes
    proxy.kinds.clear()
    proxy.rule = lambda exchange: "lose" if (exchange.kind, exchange.number) == ("put", 1) else None
    damaged.put("object", b"first", if_absent=True)
    assert proxy.kinds == ["put", "put", "head"]
    with pytest.raises(KeyExistsError):
        damaged.put("object", b"another's", if_absent=True)


@pytest.mark.parametrize("what", ["reset", "stall", "lose", "refuse", "cut", "shift"])
@pytest.mark.sampled(2)
def test_a_read_that_fails_once(
    damaged: StorageBackend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _write(damaged)
    if what == "stall":
        monkeypatch.setattr(session, "_MIN_LIMIT_S", time_limit(1.5))
    proxy.kinds.clear()
    proxy.rule = lambda exchange: what if exchange.number == 1 else None
    first, second = bytearray(1000), bytearray(50_000)
    with damaged.open_object("object") as opened:
        opened.read(5, [first, second])
    assert first + second == DATA[5 : 5 + 51_000]
    assert proxy.kinds == ["get", "get"] or what == "stall"


def test_a_manifest_that_is_cut_short_is_read_again(damaged: StorageBackend, proxy: FaultProxy) -> None:
    damaged.put("manifest", DATA[:5000])
    proxy.rule = lambda exchange: "cut" if exchange.number == 1 else None
    assert damaged.get("manifest") == DATA[:5000]


def test_replies_that_are_always_wrong(damaged: StorageBackend, proxy: FaultProxy) -> None:
    _write(damaged)
    damaged.deadline_s = time_limit(3)
    proxy.rule = lambda exchange: "shift"
    with pytest.raises(StorageError, match=r"requested bytes \[5, 105\), the reply has \[6, 106\) of 15728657 \("):
        damaged.read_into("object", 5, bytearray(100))


def test_a_read_beyond_the_end_has_one_deadline(damaged: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store refuses the read when the deadline is almost over, and is asked for the object's size then."""
    damaged.put("object", b"0123456789")
    damaged.deadline_s = 600
    clock = iter([1000.0, 1599.9])
    monkeypatch.setattr(remote_backend, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    limits: list[float] = []
    original = EndpointSession.repeat

    async def repeat(self: EndpointSession, request: Request, send: Callable[[], Any]) -> Any:
        limits.append(request.deadline_s)
        return await original(self, request, send)

    monkeypatch.setattr(EndpointSession, "repeat", repeat)
    with pytest.raises(StorageError, match="the object has only 10 bytes"):
        damaged.read_into("object", 10, bytearray(5))
    read, look_up = limits
    assert read == 600
    assert look_up < 1


def test_an_object_that_is_replaced_between_two_reads(damaged: StorageBackend) -> None:
    damaged.put("object", b"first version")
    with damaged.open_object("object") as reader:
        reader.read(0, [bytearray(5)])
        damaged.put("object", b"another version")
        with pytest.raises(StorageError, match="replaced while it was being read"):
            reader.read(5, [bytearray(5)])


def test_wrong_credentials(bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/does/not/exist")
    backend = open_backend(f"s3://{bucket}", endpoint_url=s3["endpoint_url"])
    with pytest.raises(AccessDeniedError, match="no credentials were found"):
        backend.put("object", b"x")


@pytest.mark.parametrize("when", ["between", "within an upload"])
def test_credentials_that_are_replaced_in_their_file(
    proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """The store refuses the old ones: they are read again, and only what is still refused is an error."""

    def provide(key: str) -> None:
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=testing\n")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    monkeypatch.setattr(s3_client, "_RENEW_S", 0.0)
    provide("old")
    backend = open_backend(f"s3://{bucket}/root", endpoint_url=proxy.url)
    backend.put("small", b"before")
    if when == "within an upload":
        provide("new")
        proxy.rule = lambda exchange: "expired" if exchange.key == "old" and exchange.part == 2 else None
        _write(backend)
        assert backend.get("object") == DATA
        return
    proxy.rule = lambda exchange: "expired" if exchange.key == "old" else None
    used = _client(backend)._attached
    for _ in range(3):
        with pytest.raises(AccessDeniedError, match="the credentials have expired"):
            backend.get("small")
    assert _client(backend)._attached is used, "no new client for the same credentials"
    provide("new")
    assert backend.stat("small").size == 6
    assert backend.get("small") == b"before"
    backend.put("small", b"after")
    assert backend.get("small") == b"after"


def test_backends_share_a_client(bucket: str, s3: dict[str, Any], proxy: FaultProxy) -> None:
    options = {**s3, "endpoint_url": proxy.url}
    first, second = (open_backend(f"s3://{bucket}/{name}", **options) for name in "ab")
    other = open_backend(f"s3://{bucket}/a", **options, config_kwargs={"read_timeout": 7})
    clients = [backend._session() for backend in (first, second, other)]  # type: ignore[attr-defined]
    assert clients[0] is clients[1]
    assert clients[0] is not clients[2]


def _client(backend: StorageBackend) -> S3Client:
    client: S3Client = backend._session()  # type: ignore[attr-defined]
    return client


@pytest.mark.parametrize(("scheme", "is_signed"), [("https", False), ("http", True)])
def test_bytes_are_signed_where_the_connection_does_not_protect_them(
    bucket: str, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scheme: str, is_signed: bool
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{scheme}://127.0.0.1:1")
    client = _client(open_backend(f"s3://{bucket}", key=s3["key"], secret=s3["secret"]))
    config = client.run("connecting", client._connected()).meta.config
    assert (config.s3 or {}).get("payload_signing_enabled", True) is is_signed


def test_the_time_of_a_small_request_is_not_the_rate_of_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stalled part would be noticed after hours."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(session, "time", clock)
    sender = EndpointSession(common_failure)

    async def answer() -> None:
        clock.now += 0.05

    asyncio.run(sender.repeat(Request("reading", 100, "read", nbytes=1), answer))
    assert sender._limit(Request("reading", 100, "read", nbytes=16 << 20)) == session._MIN_LIMIT_S


def test_the_cause_is_not_that_the_last_try_had_no_time_left() -> None:
    """A store that replies, and then is slow, is not one that did not answer."""
    answers = iter([ConnectionResetError("reset by the store")])

    async def answer() -> None:
        for error in answers:
            raise error
        await asyncio.Event().wait()

    with pytest.raises(StorageError, match=r"reset by the store \(2 tries"):
        asyncio.run(EndpointSession(common_failure).repeat(Request("reading", time_limit(1), "read"), answer))
