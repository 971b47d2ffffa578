"""The connection to one endpoint, shared by all backends of this process that use it.

aiobotocore makes and signs each request, and interprets the reply; the transport is ``remote.transport``, unless the
client needs a proxy, a client certificate or other connectors.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import s3fs
from botocore.awsrequest import HeadersDict
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from ...errors import without_userinfo
from ..base import Conditions
from ..remote.failures import Meaning, Secrets
from ..remote.session import EndpointSession, Request
from ..remote.transport import Connections, Reply
from .replies import code_of, explain, is_missing

MARK = "bcp-put"
"""Metadata by which a writer recognizes an object that it has stored, also when the reply was lost."""

_log = logging.getLogger(__name__)

_CONNECTIONS = 32
_CONNECT_S = 10
_RENEW_S = 10.0  # between two reads of the credentials, if the store keeps refusing them
_PIECE_BYTES = 256 << 10
_REFUSED_CODES = frozenset({"412", "PreconditionFailed", "404", "NoSuchKey"})
_UNKNOWN_CODES = frozenset({"400", "501", "InvalidArgument", "InvalidRequest", "NotImplemented"})
# A reply to HEAD has no body, and so no code but its status.
_STALE_CODES = frozenset(
    {
        *("400", "401", "403"),
        *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"),
    }
)
_KNOWN_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
_OTHER_VERSION = f'"{hashlib.md5(b"another object", usedforsecurity=False).hexdigest()}"'

_REMAINS = (
    ". Every checkpoint is still complete or absent. But if two jobs save to one path at the same moment, the second "
    "one replaces the first one's checkpoint unnoticed, and files may remain; let one job save below a root"
)


class Body:
    """The bytes of a request's body, which are sent without a copy of all of them.

    botocore reads them to sign them. Where aiohttp sends them, it iterates: a file it would read in other threads,
    64 KiB at a time, which takes longer than to send them.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self._at = data, 0

    async def __aiter__(self) -> AsyncIterator[memoryview | bytes]:
        while piece := self.read(_PIECE_BYTES):
            yield piece

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return a view of the next bytes; ``b""`` at the end."""
        end = len(self.data) if size < 0 else self._at + size
        piece = self.data[self._at : end]
        self._at += len(piece)
        return piece or b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self.data)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:  # word-ok: botocore calls it
        return self._at

    def __len__(self) -> int:
        return len(self.data)


class _DirectReply:
    """A reply of our transport, as aiobotocore's parser expects it."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.status_code, self.headers = reply, reply.status, HeadersDict(reply.headers.items())

    @property
    def raw(self) -> _DirectReply:
        """The body."""
        return self

    @property
    def raw_stream(self) -> _DirectReply:
        """The body, also where an older aiobotocore wraps ``raw``."""
        return self

    @property
    def content(self) -> Awaitable[bytes]:
        """The whole body, of an error twice."""
        return self.reply.read()


class StreamedBody:
    """A body that the event loop reads."""

    def __init__(self, body: Any) -> None:
        self._body = body

    async def read(self) -> bytes:
        """Return the whole body."""
        content: bytes = await self._body.read()
        return content

    async def fill(self, views: Sequence[memoryview]) -> bytes:
        """Return the whole body, which the caller copies to ``views``."""
        return await self.read()

    async def aclose(self) -> None:
        """Close the connection if the body was not read completely."""
        with suppress(Exception):
            self._body.close()


def body_of(reply: dict[str, Any]) -> Reply | StreamedBody:
    """Return the body of a reply to ``get_object``; its ``aclose`` closes the connection if bytes are left."""
    raw = getattr(reply["Body"], "raw_stream", None)
    return raw.reply if isinstance(raw, _DirectReply) else StreamedBody(reply["Body"])


@dataclass(frozen=True)
class PutRules:
    """What an endpoint makes of conditions.

    Attributes:
        conditions: Those that it obeys.
        has_quotes: ``If-Match`` contains the quotes of the ETag, as in RFC 9110. Ceph refuses them.
    """

    conditions: Conditions
    has_quotes: bool = True

    def if_match(self, version: str) -> str:
        return version if self.has_quotes else version.strip('"')


def is_known_endpoint(url: str) -> bool:
    """Whether this is S3 itself, which obeys conditions."""
    return (urlsplit(url).hostname or "").endswith(_KNOWN_HOSTS)


class S3Client(EndpointSession):
    """Sends requests through s3fs's own client. Thread-safe; unusable in a forked child."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(explain, secrets=Secrets(options=options))
        config = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
            "connect_timeout": _CONNECT_S,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **(options.get("config_kwargs") or {}),
        }
        self._fs = s3fs.S3FileSystem(skip_instance_cache=True, **{**options, "config_kwargs": config})
        self._fs.retries = 1
        # Used on the event loop only.
        self._put_rules: asyncio.Future[PutRules] | None = None
        self._attached: Any = None
        self._close_connections: Callable[[], object] = lambda: None  # of the attached client
        self._renewing = asyncio.Lock()
        self._renewed_at = -_RENEW_S

    def split(self, url: str) -> tuple[str, str]:
        """Return the bucket and the key of a URL."""
        bucket, key, _ = self._fs.split_path(url)
        return str(bucket), str(key).strip("/")

    async def endpoint(self) -> str:
        """Return the URL of the endpoint without user and password; empty for AWS, where a bucket's name is unique."""
        url = str((await self._connected()).meta.endpoint_url)
        return "" if is_known_endpoint(url) else without_userinfo(url)

    async def call(self, method: str, **arguments: Any) -> Any:
        """Send one request, once; again if the store refuses credentials that have been replaced since."""
        s3 = await self._connected()
        try:
            return await self._fs._call_s3(method, **arguments)
        except Exception as error:
            if code_of(error) not in _STALE_CODES or not await self._renew(s3):
                raise
        if isinstance(body := arguments.get("Body"), Body):
            body.seek(0)
        return await self._fs._call_s3(method, **arguments)

    async def _renew(self, s3: Any) -> bool:
        """Read the credentials of ``s3`` again, unless that was done a moment ago; return whether others are used now.

        botocore reads a file of credentials, or asks a process for them, once. Only other ones get a new client: a
        store may refuse requests for as long as the process runs.
        """
        if self._fs.key or self._fs.anon:
            return False
        async with self._renewing:
            if s3 is self._attached and time.monotonic() >= self._renewed_at + _RENEW_S:
                self._renewed_at = time.monotonic()
                session = self._fs.session
                if await _credentials(type(session)(**self._fs.kwargs)) != await _credentials(session):
                    await self._fs.set_session(refresh=True)
            return await self._connected() is not s3

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
        return await _probe(
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
            connections = _attach(s3, verify=verify)
            self._close_connections()
            if connections is not None:
                self._close_connections = weakref.finalize(self, connections.close)
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


async def _credentials(session: Any) -> Any:
    found = await session.get_credentials()
    return None if found is None else await found.get_frozen_credentials()


def _attach(client: Any, *, verify: bool | str | None) -> Connections | None:
    """Take over the requests of aiobotocore's ``client``.

    Returns None, and leaves the client as it is, if it needs a proxy, a client certificate or other connectors.
    """
    config = client.meta.config
    proxies = config.proxies or get_environ_proxies(client.meta.endpoint_url)
    connector = set(getattr(config, "connector_args", None) or ()) - {"keepalive_timeout"}  # which has a default
    if proxies or config.client_cert or connector:
        return None
    if verify is None:
        verify = os.environ.get("REQUESTS_CA_BUNDLE") or True

    def make_tls() -> ssl.SSLContext:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not verify:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        elif os.path.isdir(path := get_cert_path(verify)):
            tls.load_verify_locations(capath=path)
        else:
            tls.load_verify_locations(path)
        return tls

    connections = Connections(make_tls, connect_s=config.connect_timeout, threads=_CONNECTIONS)

    async def send(request: Any, **_: object) -> _DirectReply | None:
        """Send a signed request. botocore takes the result for the reply, and sends it itself if there is none."""
        body = request.body
        if hasattr(body, "read"):
            if not isinstance(body, Body):
                return None
            body = body.data
        headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
        # http.client would send the body without waiting for "100 Continue".
        headers.pop("Expect", None)
        return _DirectReply(await connections.send(request.method, request.url, headers, body or None))

    client.meta.events.register("before-send.s3", send)
    return connections


async def _probe(send: Callable[..., Awaitable[Any]], address: dict[str, str], endpoint: str) -> PutRules:
    """Put an empty object at ``address`` several times, and remove it.

    Nothing else uses the address. Logs a warning if ``endpoint`` ignores or refuses conditions.
    """

    async def is_stored(**condition: str) -> bool | None:
        """Whether the condition was met; None if the endpoint does not know it."""
        try:
            await send("put_object", **address, Body=b"", **condition)
        except Exception as error:
            if (code := code_of(error.__cause__ or error)) not in _REFUSED_CODES | _UNKNOWN_CODES:
                raise
            return False if code in _REFUSED_CODES else None
        return True

    try:
        version = str((await send("put_object", **address, Body=b"")).get("ETag", ""))
    except Exception as error:
        found = explain(error.__cause__ or error)
        if found.meaning is not Meaning.DENIED:
            raise
        _log.warning("%s: cannot find out whether it obeys conditions: %s%s", endpoint, found.text, _REMAINS)
        return PutRules(Conditions())
    try:
        if_absent = await is_stored(IfNoneMatch="*") is False
        quoted = unquoted = False
        if version and await is_stored(IfMatch=_OTHER_VERSION) is False:
            quoted = bool(await is_stored(IfMatch=version))
            unquoted = not quoted and bool(await is_stored(IfMatch=version.strip('"')))
    finally:
        with suppress(Exception):  # an empty object, which is never listed
            await send("delete_object", **address)
    obeyed = {"If-None-Match": if_absent, "If-Match": quoted or unquoted}
    if ignored := [name for name, is_obeyed in obeyed.items() if not is_obeyed]:
        _log.warning("%s ignores %s on puts%s", endpoint, " and ".join(ignored), _REMAINS)
    return PutRules(Conditions(*obeyed.values()), has_quotes=not unquoted)
