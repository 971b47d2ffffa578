"""How many requests of which kind each operation sends to an S3 store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import pytest
import torch

pytest.importorskip("s3fs")

from s3_faults import Exchange, FaultProxy, fault_proxy

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.discovery import find_best, list_checkpoints
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptionError,
    NotACheckpointError,
    StorageError,
)
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.sampled(5, of=__name__)]

DATA = Counter(begin=1, part=2, complete=1, put=2)  # a file of two parts, a small one, and one of values
FILES = 3
PROBE = Counter(put=4, delete=1)  # once per process, unless the store is S3 itself

_T = TypeVar("_T")


@dataclass
class _Store:
    proxy: FaultProxy
    root: str
    options: dict[str, Any]
    server: str

    def count(self, call: Callable[[], _T]) -> tuple[_T, Counter[str]]:
        self.proxy.kinds.clear()
        result = call()
        return result, Counter(self.proxy.kinds)

    def save(self, name: str) -> Counter[str]:
        _, kinds = self.count(lambda: bcp.save(f"{self.root}/{name}", _state(1.0), storage_options=self.options))
        assert kinds >= DATA
        return kinds - DATA


@pytest.fixture
def store(s3: dict[str, Any], bucket: str) -> Iterator[_Store]:
    with fault_proxy(s3["endpoint_url"]) as proxy:
        yield _Store(proxy, f"s3://{bucket}/runs", {**s3, "endpoint_url": proxy.url}, s3["endpoint_url"])


def _state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((5 << 20,), value)},
        "extra_state": {"step": int(value), "generator": torch.full((3,), value)},
    }


def test_save_and_load(store: _Store) -> None:
    small = {"extra_state": {"step": 0}}  # one file
    _, kinds = store.count(lambda: bcp.save(f"{store.root}/step-0", small, storage_options=store.options))
    assert kinds == Counter(get=1, put=2) + PROBE
    assert store.save("step-1") == Counter(get=1, put=1)
    assert store.save("step-1") == Counter(get=2, put=1, delete=FILES)

    path, state = f"{store.root}/step-1", _state(0.0)
    _, kinds = store.count(lambda: bcp.load(path, state, storage_options=store.options))
    assert set(kinds) == {"get"}
    assert kinds["get"] <= 1 + 8, "the manifest, and reads of at most 8 MiB"
    assert state["extra_state"]["step"] == 1
    assert torch.equal(state["model"]["weight"], torch.full((5 << 20,), 1.0))

    _, kinds = store.count(lambda: bcp.open(path, storage_options=store.options))
    assert kinds == Counter(get=1)


MB = 1 << 20


def _save_weights(store: _Store, tensors: dict[str, torch.Tensor]) -> str:
    """Save a file of these tensors; its header is in front of them."""
    path = f"{store.root}/step-1"
    bcp.save(path, {"model": tensors}, storage_options=store.options)
    return path


def _load(store: _Store, path: str, tensors: dict[str, torch.Tensor]) -> int:
    """Load the same tensors, and return the number of requests for their bytes."""
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    files, rule = [], store.proxy.rule

    def record(exchange: Exchange) -> str | None:
        files.append(exchange.path.endswith(".safetensors"))
        return rule(exchange)

    store.proxy.rule = record
    _, kinds = store.count(lambda: bcp.load(path, state, strict=False, storage_options=store.options))
    store.proxy.rule = rule
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in tensors.items())
    assert set(kinds) == {"get"}
    return sum(files) - 1  # the header


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("change", [1, -1])
def test_an_object_of_another_size(store: _Store, change: int, codec: str | None) -> None:
    """The reply to a read of other bytes states it."""
    path = f"{store.root}/step-1"
    tensors = {"first": torch.arange(1000.0), "last": torch.arange(1000.0)}
    bcp.save(path, {"model": tensors}, storage_options=store.options, options=bcp.SaveOptions(codec=codec))
    opened = bcp.open(path, storage_options=store.options)
    key = next(key for key in opened.manifest.files.name if "model-" in key)
    content = opened.backend.get(key)
    opened.backend.put(key, content + b"x" if change > 0 else content[:change])

    def load() -> str:
        with pytest.raises(CorruptionError) as caught:
            opened["model.first"].load()
        return str(caught.value)

    message, kinds = store.count(load)
    size = len(content)
    assert f"{path}/{key}: the file has {size + change} bytes, but the manifest states {size};" in message
    assert kinds == Counter(get=3), "the header, and the bytes twice: the first reply may have been damaged"


def test_a_load_of_many_small_tensors(store: _Store) -> None:
    tensors = {f"w{number:03}": torch.full((700,), float(number)) for number in range(1000)}
    path = _save_weights(store, tensors)
    assert _load(store, path, tensors) == 1
    # A gap of less than 1 MiB is read as well, and a larger one is not.
    some = {name: tensors[name] for name in ("w000", "w350", "w700", "w999")}
    assert _load(store, path, some) == 1


def test_a_load_of_a_large_tensor(store: _Store) -> None:
    tensors = {"weight": torch.arange(18 * MB, dtype=torch.float32)}
    path = _save_weights(store, tensors)
    store.proxy.rule = lambda exchange: "wait" if exchange.kind == "get" and exchange.number > 2 else None
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load, store, path, tensors)
        # The manifest and the header are answered. Eight threads read then.
        for _ in range(8):
            assert store.proxy.waiting.acquire(timeout=time_limit(60))
        store.proxy.go_on.set()
        assert loading.result(time_limit(60)) == 9


@pytest.mark.parametrize(("rows", "columns", "requests"), [(8, MB // 2, 8), (64, 64 << 10, 2)])
def test_a_load_of_some_columns(store: _Store, rows: int, columns: int, requests: int) -> None:
    """A box of a quarter of each row, as one of four ranks of tensor parallelism reads it.

    Rows of 2 MiB have 1.5 MiB between them, which are skipped; of rows of 256 KiB, everything is read.
    """
    weight = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    path = _save_weights(store, {"weight": weight})
    checkpoint = bcp.open(path, storage_options=store.options)
    part, kinds = store.count(lambda: checkpoint["model.weight"][:, columns // 4 : columns // 2])
    assert torch.equal(part, weight[:, columns // 4 : columns // 2])
    assert kinds == Counter(get=1 + requests)


def test_latest_of_three(store: _Store) -> None:
    for step in (1, 2, 3):
        bcp.save(f"{store.root}/step-{step}", {"extra_state": {"step": step}}, storage_options=store.options)
    newest, kinds = store.count(lambda: bcp.latest(store.root, storage_options=store.options))
    assert newest is not None
    assert newest.url == f"{store.root}/step-3"
    # The names below the root, the manifest of the newest, and the sizes of all its files.
    assert kinds == Counter(list=2, get=1)


@pytest.mark.parametrize("search", ["all", "best"])
def test_a_search_of_all_three(store: _Store, search: str) -> None:
    """It reads their manifests at the same time."""
    root = bcp.Location(store.root, storage_options=store.options)
    for step in (1, 2, 3):
        bcp.save(root.join(f"step-{step}"), {"extra_state": {}}, step=step, metadata={"metrics": {"loss": step / 10}})
    store.proxy.rule = lambda exchange: "wait" if exchange.path.endswith("manifest.msgpack") else None
    find: Callable[[], Any] = partial(find_best, root, "loss", "min")
    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(store.count, partial(list_checkpoints, root) if search == "all" else find)
        for _ in range(3):
            assert store.proxy.waiting.acquire(timeout=time_limit(60))
        store.proxy.go_on.set()
        found, kinds = searching.result(time_limit(60))
    if search == "all":
        assert [one.metrics for one in found] == [{"loss": step / 10} for step in (1, 2, 3)]
        assert kinds == Counter(list=1 + 3, get=3)
    else:
        assert found.step == 1
        assert kinds == Counter(list=2, get=3 + 1), "of all but the best one, only the manifest"


def test_an_incremental_save(store: _Store) -> None:
    """It puts one file, the manifest and a lease, and lists the root and what its manifest names."""
    state = {"extra_state": {"tensor": torch.arange(1 << 16)}}
    for step in (1, 2):
        _, kinds = store.count(
            lambda step=step: bcp.save(  # type: ignore[misc]
                f"{store.root}/step-{step}", state, storage_options=store.options, options=bcp.SaveOptions(base="auto")
            )
        )
    # Of the gets, three are for the base and the path, and two for the lease, which is deleted.
    assert kinds == Counter(get=5, put=3, list=3, delete=1)


def test_save_to_a_missing_bucket_fails_before_anything_is_copied(store: _Store) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        bcp.save(f"{store.root[:-8]}-missing/step-1", _state(1.0), storage_options=store.options)
    assert store.proxy.kinds == ["get", "head"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new path", "overwrite"])
@pytest.mark.sampled(1)
def test_a_manifest_that_arrives_after_the_save_has_failed(store: _Store, is_new: bool) -> None:
    """The store got the manifest and did not reply. It must not refer to files that the failed save has removed."""
    url = f"{store.root}/step-1"
    direct = {**store.options, "endpoint_url": store.server}
    store.save("another")  # the store's rules are known from here on
    if not is_new:
        store.save("step-1")

    def rule(exchange: Exchange) -> str | None:
        return "wait" if exchange.kind == "put" and exchange.path.endswith("manifest.msgpack") else None

    store.proxy.rule = rule
    with pytest.raises(CommitUnknownError, match="may still put it there"):
        bcp.save(url, _state(2.0), storage_options=store.options, options=bcp.SaveOptions(deadline_s=time_limit(2)))
    store.proxy.go_on.set()
    end = time.monotonic() + time_limit(60)
    while True:
        with contextlib.suppress(CheckpointNotFoundError, NotACheckpointError):
            checkpoint = bcp.open(url, storage_options=direct)
            if checkpoint["extra_state.generator"].load()[0] == 2.0:
                break
        assert time.monotonic() < end, "the manifest has not arrived"
    assert checkpoint.verify().ok


class _Elsewhere(BaseHTTPRequestHandler):
    """Replies to everything that the bucket is in another region."""

    protocol_version = "HTTP/1.1"

    def _reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>PermanentRedirect</Code><Message>-</Message><Region>eu-west-1</Region></Error>"
        self.send_response(301)
        self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_HEAD = _reply

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_bucket_in_another_region(s3: dict[str, Any]) -> None:
    """The client follows one redirect, to the same server, and then a save and a load say what to set."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        options = {**s3, "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        try:
            with pytest.raises(StorageError, match="in another region or at another endpoint; set the region"):
                bcp.save(
                    "s3://elsewhere/step-1",
                    _state(1.0),
                    storage_options=options,
                    options=bcp.SaveOptions(deadline_s=time_limit(20)),
                )
            with pytest.raises(StorageError, match="in another region or at another endpoint; set the region"):
                bcp.open("s3://elsewhere/step-1", storage_options=options)
        finally:
            server.shutdown()
            thread.join()
