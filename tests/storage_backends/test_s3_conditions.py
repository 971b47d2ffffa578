"""Conditional puts on endpoints that obey conditions, ignore them, or do not know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs")

from s3_faults import Exchange, FaultProxy, fault_proxy

import bytecheckpoint as bcp
from bytecheckpoint.control.base import SingleProcess
from bytecheckpoint.errors import CommitUnknownError, KeyChangedError, KeyExistsError, StorageError
from bytecheckpoint.storage_backends import Conditions, StorageBackend, open_backend
from bytecheckpoint.storage_backends.s3.client import is_known_endpoint
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.sampled(5, of=__name__)]

BOTH = Conditions(if_absent=True, if_version=True)
LOG = "bytecheckpoint.storage_backends.s3.client"


@pytest.fixture
def proxy(s3: dict[str, Any]) -> Iterator[FaultProxy]:
    with fault_proxy(s3["endpoint_url"]) as running:
        yield running


@pytest.fixture
def options(proxy: FaultProxy, s3: dict[str, Any]) -> dict[str, Any]:
    return {**s3, "endpoint_url": proxy.url}


@pytest.fixture
def backend(options: dict[str, Any], bucket: str) -> StorageBackend:
    backend = open_backend(f"s3://{bucket}/root", **options)
    backend.deadline_s = time_limit(20)
    return backend


@pytest.mark.parametrize(
    ("rule", "found", "requests"),
    [
        (None, BOTH, ["put"] * 4 + ["delete"]),
        ("unquoted", BOTH, ["put"] * 5 + ["delete"]),
        ("ignore", Conditions(), ["put"] * 3 + ["delete"]),
        ("unknown", Conditions(), ["put"] * 3 + ["delete"]),
    ],
)
def test_an_endpoint_is_probed_once(
    backend: StorageBackend,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    rule: str | None,
    found: Conditions,
    requests: list[str],
) -> None:
    proxy.rule = lambda exchange: rule
    assert backend.conditions() == backend.conditions() == found
    assert proxy.kinds == requests
    assert [*backend.list()] == []
    warnings = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert len(warnings) == (found != BOTH)
    if warnings:
        assert "ignores If-None-Match and If-Match on puts" in warnings[0]
        assert "unnoticed" in warnings[0]
        for condition in ({"if_absent": True}, {"if_version": "1"}):
            with pytest.raises(StorageError, match="cannot decide") as caught:
                backend.put("object", b"x", **condition)
            assert not isinstance(caught.value, (KeyExistsError, KeyChangedError))
    else:
        version = backend.put("object", b"one", if_absent=True)
        second = backend.put("object", b"two", if_version=version)
        with pytest.raises(KeyChangedError):
            backend.put("object", b"three", if_version=version)
        assert backend.get_versioned("object") == (b"two", second)


def test_aws_is_not_probed() -> None:
    assert is_known_endpoint("https://s3.eu-central-1.amazonaws.com")
    assert is_known_endpoint("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com")
    assert not is_known_endpoint("https://s3.amazonaws.com.example.org")
    assert not is_known_endpoint("http://127.0.0.1:9000")


def test_a_probe_that_fails_is_repeated_later(backend: StorageBackend, proxy: FaultProxy) -> None:
    backend.deadline_s = 0.5
    proxy.rule = lambda exchange: "refuse"
    with pytest.raises(StorageError, match="trying conditional puts in "):
        backend.put("object", b"x", if_absent=True)
    backend.deadline_s = time_limit(20)
    proxy.rule = lambda exchange: "refuse" if len(proxy.kinds) % 2 else None
    assert backend.conditions() == BOTH


@pytest.mark.parametrize("rule", ["unquoted", "ignore", "unknown"])
def test_a_path_is_saved_and_overwritten(proxy: FaultProxy, options: dict[str, Any], bucket: str, rule: str) -> None:
    proxy.rule = lambda exchange: rule
    path = f"s3://{bucket}/step"
    for step in (1, 2):
        bcp.save(path, {"model": {"w": torch.full((3,), float(step))}}, step=step, storage_options=options)
    checkpoint = bcp.open(path, storage_options=options)
    assert checkpoint.step == 2
    assert checkpoint.verify().ok
    expected = ["manifest.msgpack", *checkpoint.manifest.files.name]
    assert sorted(found.key for found in open_backend(path, **options).list()) == sorted(expected)


@pytest.mark.parametrize("is_new", [False, True], ids=["overwrite", "new"])
def test_the_reply_to_the_commit_is_lost(proxy: FaultProxy, options: dict[str, Any], bucket: str, is_new: bool) -> None:
    path = f"s3://{bucket}/step"
    state = {"extra_state": {"step": 1}}  # one file, with one put
    bcp.save(f"{path}-other" if is_new else path, state, storage_options=options)
    proxy.kinds.clear()
    lost: list[Exchange] = []

    def rule(exchange: Exchange) -> str | None:
        if (exchange.kind, exchange.number) != ("put", 2):
            return None
        lost.append(exchange)
        return "lose"

    proxy.rule = rule
    bcp.save(path, state, step=2, storage_options=options)
    assert lost
    assert proxy.kinds.count("put") == 3
    assert bcp.open(path, storage_options=options).step == 2


@pytest.mark.parametrize("is_new", [False, True], ids=["overwrite", "new"])
def test_another_save_replaces_a_commit_whose_reply_is_lost(
    proxy: FaultProxy, options: dict[str, Any], s3: dict[str, Any], bucket: str, is_new: bool
) -> None:
    """The first save does not know whether it was committed, and touches nothing."""
    path, other = f"s3://{bucket}/step", bcp.Checkpointer(communicator=SingleProcess())
    state = {"model": {"w": torch.arange(100.0)}}
    bcp.save(f"{path}-other" if is_new else path, state, step=1, storage_options=options)
    tries: list[Exchange] = []

    def rule(exchange: Exchange) -> str | None:
        if exchange.kind != "put" or not exchange.path.endswith("/manifest.msgpack"):
            return None
        tries.append(exchange)
        if len(tries) == 1:
            return "lose"
        if len(tries) == 2:
            other.save(path, state, step=3, storage_options=s3)
        return None

    proxy.rule = rule
    with pytest.raises(CommitUnknownError):
        bcp.save(path, state, step=2, storage_options=options)
    assert len(tries) == 2
    checkpoint = bcp.open(path, storage_options=s3)
    assert checkpoint.step == 3
    assert checkpoint.verify().ok
    other.close()
