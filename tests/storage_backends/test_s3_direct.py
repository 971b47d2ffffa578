"""Requests that threads send: over https, on kept connections, and which clients keep their own transport."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs")

from certificates import server_context
from s3_faults import FaultProxy, fault_proxy

from bytecheckpoint.errors import AccessDeniedError, StorageError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.remote.transport import Connections
from bytecheckpoint.storage_backends.s3.client import S3Client
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.s3, pytest.mark.sampled(4, of=__name__)]

DATA = os.urandom(3 << 20)
OWN_CONNECTOR = {"config_kwargs": {"connector_args": {"use_dns_cache": False}}}


@pytest.fixture
def proxy(s3: dict[str, Any]) -> Iterator[FaultProxy]:
    with fault_proxy(s3["endpoint_url"]) as found:
        yield found


def _read(root: str, options: dict[str, Any]) -> bytes:
    parts = [bytearray(1), bytearray(1 << 20), bytearray(len(DATA) - (1 << 20) - 1)]
    backend = open_backend(root, **options)
    with backend.open_object("key") as opened:
        opened.read(0, parts)
    assert backend.get("key") == DATA
    return b"".join(parts)


def _write(backend: StorageBackend, data: bytes) -> None:
    with backend.create("key", len(data)) as writer:
        writer.write(0, data)
        writer.complete()


def test_https(s3: dict[str, Any], bucket: str, certificate: Path) -> None:
    root = f"s3://{bucket}/direct"
    open_backend(root, **s3).put("key", DATA)
    with fault_proxy(s3["endpoint_url"], server_context(certificate)) as proxy:
        options = {**s3, "endpoint_url": proxy.url}
        for verify in (str(certificate), False):
            assert _read(root, {**options, "client_kwargs": {"verify": verify}}) == DATA
        unknown = open_backend(root, **options)
        with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
            unknown.get("key")


def test_an_upload_over_https(s3: dict[str, Any], bucket: str, certificate: Path) -> None:
    root, data = f"s3://{bucket}/direct", os.urandom((9 << 20) + 1)
    with fault_proxy(s3["endpoint_url"], server_context(certificate)) as proxy:
        options = {**s3, "endpoint_url": proxy.url, "client_kwargs": {"verify": str(certificate)}}
        _write(open_backend(root, **options), data)
    assert proxy.kinds[:2] == ["begin", "part"]
    assert open_backend(root, **s3).get("key") == data


def test_a_refusal_before_the_body_was_read(s3: dict[str, Any], bucket: str, proxy: FaultProxy) -> None:
    """The store replies and closes the connection while the part is being sent. To send it again would be useless."""
    backend = open_backend(f"s3://{bucket}/direct", **{**s3, "endpoint_url": proxy.url})
    proxy.rule = lambda exchange: "deny" if exchange.kind == "part" else None
    with pytest.raises(AccessDeniedError, match="AccessDenied"):
        _write(backend, bytes(64 << 20))
    assert proxy.kinds.count("part") <= 4


def test_the_authorities_of_the_environment(
    s3: dict[str, Any], bucket: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"s3://{bucket}/direct"
    open_backend(root, **s3).put("key", DATA)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with fault_proxy(s3["endpoint_url"], server_context(certificate)) as proxy:
        assert _read(root, {**s3, "endpoint_url": proxy.url}) == DATA


def test_a_connection_is_kept_and_renewed(s3: dict[str, Any], bucket: str, proxy: FaultProxy) -> None:
    root, options = f"s3://{bucket}/direct", {**s3, "endpoint_url": proxy.url}
    open_backend(root, **s3).put("key", DATA)
    for _ in range(3):
        assert _read(root, options) == DATA
    assert len(proxy.connections) == 1
    proxy.disconnect()
    proxy.connections[0].join(time_limit(20))
    proxy.kinds.clear()
    assert _read(root, options) == DATA
    assert proxy.kinds == ["get", "get"], "a request on a closed connection would be repeated"


def test_a_client_that_ends_closes_its_connections(s3: dict[str, Any], bucket: str, proxy: FaultProxy) -> None:
    open_backend(f"s3://{bucket}/direct", **s3).put("key", DATA)
    client = S3Client({**s3, "endpoint_url": proxy.url})
    client.run("looking", client.call("head_object", Bucket=bucket, Key="direct/key"))
    connection = proxy.connections[0]
    assert connection.is_alive()
    del client
    gc.collect()
    connection.join(time_limit(20))
    assert not connection.is_alive()


def test_connections_that_are_closed_during_a_request(s3: dict[str, Any], bucket: str, proxy: FaultProxy) -> None:
    """As when a client with new credentials replaces theirs: the reply arrives, and the connection ends with it."""
    open_backend(f"s3://{bucket}/direct", **s3).put("key", DATA)
    client = S3Client({**s3, "endpoint_url": proxy.url})
    proxy.rule = lambda exchange: "wait"
    reply = client.start(client.call("head_object", Bucket=bucket, Key="direct/key"))
    assert proxy.waiting.acquire(timeout=time_limit(20))
    client._close_connections()
    proxy.go_on.set()
    assert reply.result(time_limit(20))["ContentLength"] == len(DATA)
    connection = proxy.connections[0]
    connection.join(time_limit(20))
    assert not connection.is_alive()


@pytest.mark.parametrize("fault", [None, "cut", "shift", "refuse", "reset"])
@pytest.mark.parametrize("transport", ["direct", "own"])
@pytest.mark.sampled(4)
def test_each_transport_repeats_what_failed(
    s3: dict[str, Any],
    bucket: str,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    fault: str | None,
) -> None:
    root, options = f"s3://{bucket}/direct", {**s3, "endpoint_url": proxy.url}
    open_backend(root, **s3).put("key", DATA)
    if transport == "own":
        options |= OWN_CONNECTOR
        monkeypatch.setattr(Connections, "send", None)
    proxy.rule = lambda exchange: fault if exchange.number == 1 else None
    assert _read(root, options) == DATA
    assert proxy.kinds == ["get"] * (2 if fault is None else 3)
