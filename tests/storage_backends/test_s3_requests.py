"""How many requests of which kind each operation sends to an S3 store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

pytest.importorskip("s3fs")

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from tests.support.s3_faults import FaultProxy, fault_proxy

pytestmark = pytest.mark.s3

DATA = Counter(begin=1, part=2, complete=1, put=2)  # a file of two parts, a small one, and one of values
FILES = 3
PROBE = Counter(put=4, delete=1)  # once per process, unless the store is S3 itself

_T = TypeVar("_T")


@dataclass
class _Store:
    proxy: FaultProxy
    root: str
    options: dict[str, Any]

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
        yield _Store(proxy, f"s3://{bucket}/runs", {**s3, "endpoint_url": proxy.url})


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


def test_latest_of_three(store: _Store) -> None:
    for step in (1, 2, 3):
        bcp.save(f"{store.root}/step-{step}", {"extra_state": {"step": step}}, storage_options=store.options)
    newest, kinds = store.count(lambda: bcp.latest(store.root, storage_options=store.options))
    assert newest is not None
    assert newest.url == f"{store.root}/step-3"
    # The names below the root, the manifest of the newest, and the sizes of all its files.
    assert kinds == Counter(list=2, get=1)


def test_save_to_a_missing_bucket_fails_before_anything_is_copied(store: _Store) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        bcp.save(f"{store.root[:-8]}-missing/step-1", _state(1.0), storage_options=store.options)
    assert store.proxy.kinds == ["get", "head"]
