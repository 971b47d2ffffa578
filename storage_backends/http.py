"""Read checkpoints from an HTTP(S) server. It is read-only, and has no listing."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NoReturn, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

import urllib3
from typing_extensions import Buffer

from ..errors import AccessDeniedError, KeyNotFoundError, StorageError, UnsupportedURLError
from ..runtime.daemon import run_daemon
from .base import ObjectReader, ObjectStat, ObjectWriter, StorageBackend
from .buffers import check_max_size, writable_view
from .keys import check_key

__all__ = ["HttpBackend"]

_T = TypeVar("_T")

_READ_BYTES = 4 << 20  # each in a thread of its own
_CONNECT_S, _SILENCE_S = 10.0, 60.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_CONNECT_TRIES = 3  # a wrong address fails in a second, not after the whole deadline
_CONNECTIONS = 32
_MAX_REDIRECTS = 5
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?P<start>\d+)-(?P<end>\d+)/(?P<size>\d+|\*)")


class _RepeatableError(Exception):
    """A reply that may be another one next time."""


class _LateError(Exception):
    """The deadline has passed."""


class _Reply:
    """A reply, which other threads receive: of a server that sends it byte by byte, no receive call times out.

    After the deadline, such a thread goes on. It is a daemon, and fills memory that nothing else uses.
    """

    def __init__(self, ask: Callable[[], urllib3.BaseHTTPResponse], end: float) -> None:
        self._end, self._is_late = end, False
        self._reply = self._within(ask)
        self.status, self.reason, self.headers = self._reply.status, self._reply.reason, self._reply.headers

    def pieces(self) -> Iterator[bytes]:
        """Receive the body."""
        while piece := self._within(partial(self._reply.read, _READ_BYTES)):
            yield piece

    def _within(self, receive: Callable[[], _T]) -> _T:
        done = run_daemon(receive, "bcp-http")
        try:
            return done.result(max(0.1, self._end - time.monotonic()))
        except FutureTimeoutError:
            if done.done():
                raise
            self._is_late = True
            raise _LateError("the reply did not arrive in time") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_late:  # `close` would wait for the thread that receives
            with suppress(Exception):  # urllib3 before 2.3 has no `shutdown`
                self._reply.shutdown()
        else:
            self._reply.close()


class HttpBackend(StorageBackend):
    """The objects below a URL. The server must support range requests (RFC 9110, section 14).

    Requests are repeated after errors that may pass, and redirects are followed, until ``deadline_s``. Thread-safe;
    a forked child opens its own connections.
    """

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        """Open a URL. No request is sent.

        Args:
            url: The root. A user and a password in it are sent as basic authentication.
            headers: Headers of every request, such as ``Authorization``.

        Raises:
            UnsupportedURLError: The URL has no host, or has a query or a fragment.
        """
        parts = urlsplit(url)
        if not parts.hostname:
            raise UnsupportedURLError(f"{url!r} has no host")
        if parts.query or parts.fragment:
            raise UnsupportedURLError(
                f"{self._shown(url)}: keys cannot follow a query or a fragment; pass credentials as headers="
            )
        self._url = url.rstrip("/")
        host = parts.netloc.rpartition("@")[2]
        self._root = f"{parts.scheme}://{host}{quote(unquote(parts.path), safe='/~')}".rstrip("/")
        # Compressed replies have other lengths and ranges than the object.
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers.update(urllib3.make_headers(basic_auth=user))
        self._pool, self._pid = urllib3.PoolManager(maxsize=_CONNECTIONS), os.getpid()

    @staticmethod
    def _shown(url: str) -> str:
        return url.partition("?")[0].partition("#")[0].rpartition("@")[2]

    @classmethod
    def from_url(cls, url: str, **options: Any) -> HttpBackend:
        """Open a URL.

        Args:
            url: The URL.
            **options: ``headers=``, a mapping.

        Returns:
            The backend.

        Raises:
            UnsupportedURLError: The URL or an option is not valid.
        """
        headers = options.pop("headers", None)
        if options:
            raise UnsupportedURLError(f"HTTP takes the option headers=, got {sorted(options)}")
        if headers is not None and not isinstance(headers, Mapping):
            raise UnsupportedURLError("headers= must be a mapping of strings")
        return cls(url, headers=headers)

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        self._refuse("writing", key)

    def create(self, key: str, size: int) -> ObjectWriter:
        self._refuse("writing", key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._refuse("deleting", key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        raise self._no_listing()

    def list_children(self, prefix: str = "") -> Sequence[str]:
        raise self._no_listing()

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        self.read_scattered(key, offset, [buffer])

    def read_scattered(self, key: str, offset: int, buffers: Sequence[Buffer]) -> None:
        self._read(key, offset, buffers)

    def open_object(self, key: str) -> ObjectReader:
        return _Reader(self, key)

    def _read(self, key: str, offset: int, buffers: Sequence[Buffer]) -> int | None:
        """Fill buffers, and return the size of the object, if the server has stated it."""
        action = self._action("reading", key)
        views = [writable_view(action, buffer) for buffer in buffers]
        views = [view for view in views if len(view)]
        end = offset + sum(map(len, views))
        if offset < 0 or not views:
            size = self.stat(key).size
            if not 0 <= offset <= end <= size:
                raise _too_short(action, offset, end, size)
            return size

        def fill(reply: _Reply) -> int | None:
            size = self._check_range(reply, action, offset, end)
            pieces = reply.pieces()
            rest = memoryview(b"")
            for view in views:
                while len(view):
                    rest = rest or memoryview(next(pieces, b""))
                    if not rest:
                        raise _RepeatableError("the reply ends early")
                    count = min(len(view), len(rest))
                    view[:count] = rest[:count]
                    view, rest = view[count:], rest[count:]
            return size

        return self._send(action, "GET", key, fill, {"Range": f"bytes={offset}-{end - 1}"})

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        action = self._action("reading", key)

        def collect(reply: _Reply) -> bytes:
            stated = reply.headers.get("Content-Length")
            check_max_size(action, int(stated or 0), max_size)
            found = bytearray()
            for piece in reply.pieces():
                found += piece
                check_max_size(action, len(found), max_size)
            if stated is not None and len(found) != int(stated):
                raise _RepeatableError(f"the reply has {len(found)} of {stated} bytes")
            return bytes(found)

        return self._send(action, "GET", key, collect)

    def stat(self, key: str) -> ObjectStat:
        action = self._action("looking up", key)

        def look(reply: _Reply) -> ObjectStat:
            size = reply.headers.get("Content-Length")
            if size is None:
                raise StorageError(f"{action}: the server does not state the size")
            version = reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""
            return ObjectStat(key, int(size), version)

        return self._send(action, "HEAD", key, look)

    def _send(
        self,
        action: str,
        method: str,
        key: str,
        use: Callable[[_Reply], _T],
        headers: Mapping[str, str] | None = None,
    ) -> _T:
        """Return what ``use`` makes of the reply to a request, which is repeated until it succeeds."""
        check_key(key)
        url = f"{self._root}/{quote(key, safe='/~')}"
        end, pause, tries = time.monotonic() + self.deadline_s, _FIRST_PAUSE_S, 0
        while True:
            tries += 1
            left = max(0.1, end - time.monotonic())
            ask = partial(
                self._pool_of_process().request,
                method,
                url,
                headers={**self._headers, **(headers or {})},
                preload_content=False,
                retries=urllib3.Retry(None, connect=0, read=0, status=0, other=0, redirect=_MAX_REDIRECTS),
                timeout=urllib3.Timeout(connect=min(_CONNECT_S, left), read=min(_SILENCE_S, left)),
            )
            try:
                with _Reply(ask, end) as reply:
                    self._check_status(reply, action)
                    return use(reply)
            except (urllib3.exceptions.HTTPError, _RepeatableError, _LateError) as error:
                reason = getattr(error, "reason", None) or error
                wait_s = random.uniform(pause / 2, pause)
                is_lost = isinstance(reason, urllib3.exceptions.NewConnectionError) and tries >= _CONNECT_TRIES
                is_late = time.monotonic() + wait_s > end
                if is_lost or isinstance(reason, urllib3.exceptions.SSLError) or is_late:
                    failure = StorageError(f"{action}: {_text(reason)} ({tries} tries)")
                    failure.is_late = is_late
                    raise failure from error
                time.sleep(wait_s)
                pause = min(2 * pause, _MAX_PAUSE_S)

    def _pool_of_process(self) -> urllib3.PoolManager:
        if self._pid != os.getpid():  # a forked child must not use its parent's connections
            self._pool, self._pid = urllib3.PoolManager(maxsize=_CONNECTIONS), os.getpid()
        return self._pool

    def _check_status(self, reply: _Reply, action: str) -> None:
        status = f"the server replied {reply.status} {reply.reason}"
        if reply.status in _BUSY:
            raise _RepeatableError(status)
        if reply.status in (404, 410):
            raise KeyNotFoundError(f"{action}: {status}")
        if reply.status in (401, 403, 407):
            raise AccessDeniedError(f"{action}: {status}; pass credentials as headers= or in the URL")
        if reply.status not in (200, 206, 416):
            raise StorageError(f"{action}: {status}")

    def _check_range(self, reply: _Reply, action: str, start: int, end: int) -> int | None:
        """Check that the reply has these bytes, and return the size of the object, if it is stated."""
        if reply.status == 416:
            size = reply.headers.get("Content-Range", "").rpartition("/")[2]
            raise _too_short(action, start, end, int(size) if size.isdigit() else None)
        if reply.status == 200:
            if start == 0 and reply.headers.get("Content-Length") == str(end):
                return end
            raise StorageError(
                f"{action}: the server has sent the whole object instead of bytes [{start}, {end}); use one that "
                f"supports range requests, or copy the checkpoint first"
            )
        found = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
        if found is None or int(found["start"]) != start:
            raise _RepeatableError(
                f"requested bytes [{start}, {end}), the reply has {reply.headers.get('Content-Range')}"
            )
        if int(found["end"]) + 1 != end:
            raise _too_short(action, start, end, int(found["end"]) + 1)
        return None if found["size"] == "*" else int(found["size"])

    def _action(self, what: str, key: str) -> str:
        return f"{what} {key!r} in {self.display_url}"

    def _refuse(self, what: str, key: str) -> NoReturn:
        check_key(key)
        raise AccessDeniedError(f"{self._action(what, key)}: HTTP is read-only; save to a path or an object store")

    def _no_listing(self) -> StorageError:
        return StorageError(
            f"{self.display_url}: an HTTP server has no listing, so that only a checkpoint of this library (there is "
            f"no manifest.msgpack) or a single file can be read; pass its own URL, or copy the folder first"
        )


class _Reader(ObjectReader):
    def __init__(self, backend: HttpBackend, key: str) -> None:
        self._backend, self._key = backend, key

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self.size = self._backend._read(self._key, offset, buffers)


def _too_short(action: str, start: int, end: int, size: int | None) -> StorageError:
    has = "has fewer bytes" if size is None else f"has only {size} bytes"
    return StorageError(f"{action}: requested bytes [{start}, {end}): the object {has}")


def _text(reason: object) -> str:
    """Return the cause without the object addresses in urllib3's messages."""
    return re.sub(r"^(<[^>]*>|\w+\([^)]*\)): ", "", str(reason)) or type(reason).__name__
