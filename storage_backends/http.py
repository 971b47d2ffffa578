"""Read checkpoints from an HTTP(S) server. It is read-only, and has no listing."""

from __future__ import annotations

import ssl
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from ..errors import AccessDeniedError, StorageError, UnsupportedURLError
from .base import ObjectStat, ObjectWriter
from .keys import check_key
from .remote.backend import Condition, Found, RemoteBackend, content_range
from .remote.failures import Failure, Meaning, ShortReplyError, common_failure
from .remote.parts import Upload
from .remote.session import EndpointSession, Sessions
from .remote.transport import Connections, Reply

_CONNECT_S = 10.0
_CONNECTIONS = 32
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MEANINGS = {
    **dict.fromkeys((404, 410), Meaning.MISSING),
    **dict.fromkeys((401, 403, 407), Meaning.DENIED),
    **dict.fromkeys((408, 425, 429, 500, 502, 503, 504), Meaning.BUSY),
    416: Meaning.OUTSIDE,
}


class _StatusError(Exception):
    """The server replied with an error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the server replied {reply.status} {reply.reason}")
        self.status = reply.status


def _explain(error: BaseException) -> Failure:
    if not isinstance(error, _StatusError):
        return common_failure(error)
    meaning = _MEANINGS.get(error.status, Meaning.OTHER)
    hint = "; pass credentials as headers= or in the URL" if meaning is Meaning.DENIED else ""
    return Failure(meaning, f"{error}{hint}")


class _Client(EndpointSession):
    """Sends requests to one root, and follows redirects."""

    def __init__(self) -> None:
        super().__init__(_explain)
        self._connections = Connections(ssl.create_default_context, connect_s=_CONNECT_S, threads=_CONNECTIONS)
        weakref.finalize(self, self._connections.close)

    async def send(self, method: str, url: str, headers: Mapping[str, str]) -> Reply:
        """Send one request; return a reply that is not an error."""
        sent = dict(headers)
        for _ in range(_MAX_REDIRECTS + 1):
            reply = await self._connections.send(method, url, sent, None)
            target = reply.headers.get("Location") if reply.status in _REDIRECTS else None
            if target is None:
                break
            await reply.aclose()
            following = urljoin(url, target)
            if urlsplit(following).scheme not in ("http", "https"):
                raise StorageError(f"the server redirects to {following!r:.200}")
            if urlsplit(following)[:2] != urlsplit(url)[:2]:  # another server must not get the credentials
                sent = {name: value for name, value in sent.items() if name.lower() not in ("authorization", "cookie")}
            url = following
        if reply.status not in (200, 206):
            await reply.aclose()
            raise _StatusError(reply)
        return reply


class HttpBackend(RemoteBackend[_Client]):
    """The objects below a URL. The server must support range requests (RFC 9110, section 14)."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")

    def __init__(self, url: str, **options: Any) -> None:
        """Open a URL. No request is sent.

        Args:
            url: The root. A user and a password in it are sent as basic authentication.
            **options: ``headers`` of every request, such as ``Authorization``.

        Raises:
            UnsupportedURLError: The URL has no host, or has a query or a fragment; or there are other options.
        """
        headers = options.pop("headers", None) or {}
        if options:
            raise UnsupportedURLError(f"HTTP takes the option headers=, got {sorted(options)}")
        if not isinstance(headers, Mapping):
            raise UnsupportedURLError("headers= must be a mapping of strings")
        parts = urlsplit(url)
        if not parts.hostname:
            raise UnsupportedURLError(f"{url!r} has no host")
        if parts.query or parts.fragment:
            shown = url.partition("?")[0].partition("#")[0].rpartition("@")[2]
            raise UnsupportedURLError(
                f"{shown}: keys cannot follow a query or a fragment; pass credentials as headers="
            )
        super().__init__(url)
        host = parts.netloc.rpartition("@")[2]
        self._root = f"{parts.scheme}://{host}{quote(unquote(parts.path), safe='/~')}".rstrip("/")
        # Compressed replies have other lengths and ranges than the object.
        self._headers = {"Accept-Encoding": "identity", **headers}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        self._refuse("writing", key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        raise self._no_listing()

    def list_children(self, prefix: str = "") -> Sequence[str]:
        raise self._no_listing()

    async def _send_read(
        self, client: _Client, key: str, start: int, views: Sequence[memoryview], accept: Callable[[Found], None]
    ) -> None:
        end = start + sum(map(len, views))
        reply = await client.send("GET", self._url_of(key), {**self._headers, "Range": f"bytes={start}-{end - 1}"})
        async with aclosing(reply):
            length = reply.headers.get("Content-Length")
            if reply.status == 200 and (start or length != str(end)):
                raise StorageError(
                    f"{self._action('reading', key)}: the server has sent the whole object instead of bytes [{start}, "
                    f"{end}); use one that supports range requests, or copy the checkpoint first"
                )
            shown = None if reply.status == 200 else reply.headers.get("Content-Range", "")
            accept(Found(*content_range(shown, end)))
            await reply.fill(views)

    async def _send_get(self, client: _Client, key: str, check_size: Callable[[int], None]) -> tuple[bytes, str]:
        reply = await client.send("GET", self._url_of(key), self._headers)
        async with aclosing(reply):
            length = int(reply.headers.get("Content-Length", -1))
            check_size(length)
            content = await reply.read(check_size)
        if length not in (-1, len(content)):
            raise ShortReplyError(f"the reply has {len(content)} of {length} bytes")
        return content, self._version(reply)

    async def _send_stat(self, client: _Client, key: str) -> ObjectStat:
        reply = await client.send("HEAD", self._url_of(key), self._headers)
        await reply.read()
        size = reply.headers.get("Content-Length")
        if size is None:
            raise StorageError(f"{self._action('looking at', key)}: the server does not state the size")
        return ObjectStat(key, int(size), self._version(reply))

    async def _send_put(self, client: _Client, key: str, content: memoryview, condition: Condition | None) -> str:
        self._refuse("writing", key)

    async def _send_delete(self, client: _Client, key: str) -> None:
        self._refuse("deleting", key)

    def _upload(self, client: _Client, action: str, key: str, size: int) -> Upload:
        self._refuse("writing", key)

    def _session(self) -> _Client:
        return _sessions.find(_Client, self.display_url, self._root)

    def _url_of(self, key: str) -> str:
        return f"{self._root}/{quote(key, safe='/~')}"

    @staticmethod
    def _version(reply: Reply) -> str:
        return reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""

    def _refuse(self, verb: str, key: str) -> NoReturn:
        check_key(key)
        raise AccessDeniedError(f"{self._action(verb, key)}: HTTP is read-only; save to a path or an object store")

    def _no_listing(self) -> StorageError:
        return StorageError(
            f"{self.display_url}: an HTTP server has no listing, so that only a checkpoint of this library (there is "
            f"no manifest.msgpack) or a single file can be read; pass its own URL, or copy the folder first"
        )


_sessions = Sessions(_explain)
