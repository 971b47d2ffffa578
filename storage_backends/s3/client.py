"""The connection to one endpoint, shared by all backends of this process that use it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import s3fs
from fsspec.utils import tokenize

from ...errors import StorageError, without_userinfo
from ..base import Conditions
from ..window import Window
from .direct import Connections
from .probe import PutRules, is_known_endpoint, probe
from .replies import is_missing, storage_error
from .retries import Request, Retries

__all__ = ["MARK", "Client", "client_for"]

_T = TypeVar("_T")

MARK = "bcp-put"
"""Metadata by which a writer recognizes an object that it has stored, also when the reply was lost."""

_log = logging.getLogger(__name__)

_CONNECTIONS = 32
_CONNECT_S = 10
_MAX_CLIENTS = 8  # jobs that rotate tokens would otherwise keep one client for each


class Client:
    """Sends requests through s3fs's own client. Thread-safe; unusable in a forked child.

    Attributes:
        window: Slots and memory for the parts of all writers, which all clients of a process share.
    """

    def __init__(self, options: dict[str, Any], window: Window) -> None:
        config = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
            "connect_timeout": _CONNECT_S,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        self.window = window
        self._fs = s3fs.S3FileSystem(skip_instance_cache=True, **{**options, "config_kwargs": config})
        self._fs.retries = 1
        self._retries = Retries()
        # Used on the event loop only.
        self._put_rules: asyncio.Future[PutRules] | None = None
        self._attached: Any = None

    def split(self, url: str) -> tuple[str, str]:
        """Return the bucket and the key of a URL."""
        bucket, key, _ = self._fs.split_path(url)
        return str(bucket), str(key).strip("/")

    async def endpoint(self) -> str:
        """Return the URL of the endpoint without user and password; empty for AWS, where a bucket's name is unique."""
        url = str((await self._connected()).meta.endpoint_url)
        return "" if is_known_endpoint(url) else without_userinfo(url)

    async def call(self, method: str, **arguments: Any) -> Any:
        """Send one request, once."""
        await self._connected()
        return await self._fs._call_s3(method, **arguments)

    async def put_rules(self, address: dict[str, str], deadline_s: float) -> PutRules:
        """Return what the endpoint makes of conditions, which is found out once with a new object at ``address``."""
        if self._put_rules is None:
            self._put_rules = asyncio.ensure_future(self._find_put_rules(address, deadline_s))
        try:
            return await asyncio.shield(self._put_rules)
        except Exception:
            self._put_rules = None
            raise

    async def _find_put_rules(self, address: dict[str, str], deadline_s: float) -> PutRules:
        meta = (await self._connected()).meta
        accepted = meta.service_model.operation_model("PutObject").input_shape.members
        if not {"IfNoneMatch", "IfMatch"} <= set(accepted):
            _log.warning("the installed botocore has no conditional puts, so concurrent saves are unsafe; upgrade s3fs")
            return PutRules(Conditions())
        if is_known_endpoint(meta.endpoint_url):
            return PutRules(Conditions(if_absent=True, if_version=True))
        request = Request(f"trying conditional puts in {address['Bucket']}", deadline_s)
        return await probe(
            lambda method, **arguments: self.repeat(request, lambda: self.call(method, **arguments)),
            address,
            without_userinfo(meta.endpoint_url),
        )

    async def _connected(self) -> Any:
        """Return botocore's client, which s3fs creates at the first use."""
        s3 = await self._fs.set_session()
        config = s3.meta.config
        if s3.meta.endpoint_url.startswith("https://"):
            # TLS detects changed bytes. Signing every byte takes more processor time than sending it.
            config.s3 = {"payload_signing_enabled": False, **(config.s3 or {})}
        if s3 is not self._attached:
            self._attached = s3
            verify = (self._fs.client_kwargs or {}).get("verify")
            if verify is None:
                verify = self._fs.session.get_config_variable("ca_bundle")
            connections = Connections.attach(s3, verify=verify, threads=_CONNECTIONS)
            if connections is not None:
                weakref.finalize(self, connections.close)
        return s3

    async def mark_of(self, address: dict[str, str]) -> tuple[str | None, str]:
        """Return the ``MARK`` of an object and its version; None if it has no mark, or does not exist."""
        try:
            found = await self.call("head_object", **address)
        except Exception as error:
            if not is_missing(error):
                raise
            return None, ""
        return found.get("Metadata", {}).get(MARK), str(found.get("ETag", ""))

    async def repeat(self, request: Request, send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Send a request until it succeeds (see ``Retries``)."""
        return await self._retries.run(request, send)

    def start(self, work: Coroutine[Any, Any, _T]) -> Any:
        """Start a coroutine on the client's event loop; return its ``concurrent.futures.Future``."""
        return asyncio.run_coroutine_threadsafe(work, self._fs.loop)

    def run(self, action: str, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. Raises ``StorageError``."""
        future = self.start(work)
        try:
            result: _T = future.result()
        except StorageError:
            raise
        except Exception as error:
            raise storage_error(error, action) from error
        except BaseException:
            future.cancel()
            raise
        return result


class _Clients:
    """The clients of this process by endpoint, credentials and options."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._window = Window()
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._abandoned: list[Client] = []

    def after_fork(self) -> None:
        """Drop locks that threads of the parent may have held, and the parent's clients."""
        self.lock = threading.Lock()
        self._window = Window()
        # Their event loops, sockets and locks belong to the parent. Finalizing them could hang, so keep them alive.
        self._abandoned += self._clients.values()
        self._clients.clear()

    def find(self, options: dict[str, Any]) -> Client:
        environment = sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "FSSPEC_S3")))
        token = tokenize(options, environment)
        with self.lock:
            found = self._clients.pop(token, None) or Client(options, self._window)
            self._clients[token] = found
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            return found


_clients = _Clients()
os.register_at_fork(after_in_child=_clients.after_fork)


def client_for(options: dict[str, Any]) -> Client:
    """Return the client for an endpoint and credentials; a new one after a fork.

    Raises:
        StorageError: An option is not valid.
    """
    try:
        return _clients.find(options)
    except Exception as error:
        raise storage_error(error, "opening S3") from error
