"""The backend for GCS and Azure, on obstore.

Small objects are one request: a conditional one where the caller asks for it. Large objects are uploads in parts, of
which several are in flight (``StreamWriter``). A read is one ranged request, whose reply is checked against the range
that was asked for. Nothing is looked up before it is read. obstore repeats requests, and nothing else does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np
import obstore
from typing_extensions import Buffer

from ...errors import (
    KeyChangedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UnansweredError,
    without_userinfo,
)
from ..base import Conditions, ObjectReader, ObjectStat, ObjectWriter, StorageBackend
from ..buffers import byte_view, check_max_size, writable_view
from ..keys import check_children_prefix, check_key, check_prefix, is_object_key
from ..writers import BufferedWriter
from .client import Client, client_for
from .errors import is_beyond_end, is_refused, was_repeated
from .places import SCHEMES, Place
from .writers import StreamWriter

__all__ = ["ObstoreBackend"]

_SINGLE_PUT_BYTES = 8 << 20
_CONCURRENT_DELETES = 16
_PAGE = 1000
_MARK = "bcpput"  # metadata of an object; Azure allows only names of identifiers
_LEAST_S = 0.75  # to find out what became of a put that has taken the whole deadline


class ObstoreBackend(StorageBackend):
    """Objects below ``gs://bucket/prefix`` or ``az://container/prefix``. Thread-safe.

    A forked child cannot use obstore if its parent has used it. There, the backend raises ``StorageError``, and
    ``open_backend`` opens these URLs with fsspec.
    """

    schemes: ClassVar[tuple[str, ...]] = tuple(sorted(SCHEMES))

    def __init__(self, url: str, place: Place) -> None:
        """Create a backend.

        Args:
            url: The root, for messages.
            place: Where it is.
        """
        self._url, self._place = url.rstrip("/"), place
        self._root = f"{place.prefix}/" if place.prefix else ""

    @property
    def url(self) -> str:
        return self._url

    def endpoint(self) -> str:
        config = self._place.config
        return without_userinfo(str(config.get("endpoint") or config.get("base_url") or ""))

    def conditions(self) -> Conditions:
        return Conditions(if_absent=True, if_version=True)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        client, action = self._client(f"writing {key!r}")
        content = bytes(byte_view(data))
        if if_absent:
            return self._put_if(client, action, key, content, "create", KeyExistsError(f"{action}: the key is taken"))
        if if_version:
            refusal = KeyChangedError(f"{action}: the object was replaced or deleted")
            if client.version_field == "version" and not if_version.strip("0").isdecimal():
                raise refusal  # to GCS, generation 0 is an object that does not exist
            return self._put_if(client, action, key, content, {client.version_field: if_version}, refusal)
        return self._put(client, action, key, content)

    def _put(self, client: Client, action: str, key: str, content: Buffer) -> str:
        async def send() -> str:
            reply = await obstore.put_async(client.store, self._root + key, content, use_multipart=False)
            return _version(client, reply)

        return client.run(action, send, self.deadline_s, putting=True)

    def _put_if(self, client: Client, action: str, key: str, content: bytes, mode: Any, refusal: StorageError) -> str:
        """Put with a condition. Raises ``refusal`` if it is not met.

        Raises ``UnansweredError`` if a try without reply may have met it, and the object was replaced since then.
        """
        path, mark, end = self._root + key, secrets.token_hex(16), time.monotonic() + self.deadline_s

        async def send() -> str:
            attributes = {_MARK: mark}
            return _version(
                client, await obstore.put_async(client.store, path, content, mode=mode, attributes=attributes)
            )

        async def look() -> tuple[str | None, str]:
            found = await obstore.get_async(client.store, path, options={"head": True})
            return found.attributes.get(_MARK), _version(client, found.meta)

        try:
            return client.run(action, send, self.deadline_s, putting=True)
        except StorageError as error:
            cause = error.__cause__ or error
            if not (is_refused(cause) or (mode != "create" and isinstance(cause, FileNotFoundError))):
                raise
            try:
                found, version = client.run(action, look, max(_LEAST_S, end - time.monotonic()), reading=True)
            except KeyNotFoundError:
                found, version = None, ""
            if found == mark:
                # The reply to an earlier try was lost.
                return version
            if was_repeated(cause):
                raise UnansweredError(
                    f"{action}: another program has written the object, before or after a try without reply"
                ) from error
            raise refusal from error

    def create(self, key: str, size: int) -> ObjectWriter:
        check_key(key)
        client, action = self._client(f"writing {key!r}")
        if size <= _SINGLE_PUT_BYTES:
            return BufferedWriter(action, size, lambda data: self._put(client, action, key, data))
        return StreamWriter(client, action, self._root + key, size, self.deadline_s)

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        self.read_scattered(key, offset, [buffer])

    def read_scattered(self, key: str, offset: int, buffers: Sequence[Buffer]) -> None:
        check_key(key)
        self._read(key, offset, buffers, "")

    def open_object(self, key: str) -> ObjectReader:
        check_key(key)
        return _Reader(self, key)

    def _read(self, key: str, offset: int, buffers: Sequence[Buffer], version: str) -> ObjectStat:
        """Fill ``buffers`` with bytes of one version of the object, of ``version`` if it is not empty; describe it."""
        client, action = self._client(f"reading {key!r}")
        views = [writable_view(action, buffer) for buffer in buffers]
        views = [view for view in views if len(view)]
        if offset < 0:
            raise StorageError(f"{action}: the offset is {offset}")
        if not views:
            # HTTP has no empty range.
            found = self.stat(key)
            if found.size < offset:
                raise StorageError(f"{action}: byte {offset} is beyond the object's end at {found.size}")
            return found
        end = offset + sum(map(len, views))

        async def send() -> tuple[Any, Any]:
            reply = await obstore.get_async(client.store, self._root + key, options={"range": (offset, end)})
            return reply.meta, await reply.bytes_async()

        try:
            meta, content = client.run(action, send, self.deadline_s, reading=True)
        except StorageError as error:
            if not is_beyond_end(error.__cause__ or error):
                raise
            raise _too_short(action, offset, end, self.stat(key).size) from error
        if len(content) != end - offset:
            raise _too_short(action, offset, end, meta["size"])
        found = ObjectStat(key, meta["size"], _version(client, meta))
        if version and found.version != version:
            raise StorageError(f"{action}: the object was replaced while it was being read")
        rest = np.frombuffer(content, np.uint8)
        for view in views:
            # Without the GIL, which a slice assignment holds.
            np.copyto(np.frombuffer(view, np.uint8), rest[: len(view)])
            rest = rest[len(view) :]
        return found

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        client, action = self._client(f"reading {key!r}")

        async def send() -> tuple[Any, Any]:
            reply = await obstore.get_async(client.store, self._root + key)
            check_max_size(action, reply.meta["size"], max_size)
            return reply.meta, await reply.bytes_async()

        meta, content = client.run(action, send, self.deadline_s, reading=True)
        if len(content) != meta["size"]:
            raise StorageError(f"{action}: the reply has {len(content)} of {meta['size']} bytes; try again")
        return bytes(content), _version(client, meta)

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        client, action = self._client(f"looking at {key!r}")

        async def send() -> Any:
            return await obstore.head_async(client.store, self._root + key)

        meta = client.run(action, send, self.deadline_s, reading=True)
        return ObjectStat(key, meta["size"], _version(client, meta))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        client, action = self._client(f"listing {prefix!r}")
        folder = self._root + prefix[: prefix.rfind("/") + 1]  # obstore lists whole components
        pages = obstore.list(client.store, folder.rstrip("/") or None, chunk_size=_PAGE)

        async def next_page() -> Any:
            return await anext(pages, None)

        found = []
        while page := client.run(action, next_page, self.deadline_s):
            found += [
                ObjectStat(key, meta["size"], _version(client, meta))
                for meta in page
                if (key := meta["path"][len(self._root) :]).startswith(prefix) and is_object_key(key)
            ]
        return iter(sorted(found, key=lambda stat: stat.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        client, action = self._client(f"listing {prefix!r}")
        folder = self._root + prefix

        async def send() -> Any:
            return await obstore.list_with_delimiter_async(client.store, folder.rstrip("/") or None)

        found = client.run(action, send, self.deadline_s)
        paths = [meta["path"] for meta in found["objects"]] + [f"{path}/" for path in found["common_prefixes"]]
        return sorted(path[len(folder) :] for path in paths if is_object_key(path[len(self._root) :].rstrip("/")))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        client, action = self._client("deleting")
        slots = asyncio.Semaphore(_CONCURRENT_DELETES)

        async def delete_one(key: str) -> None:
            async with slots:
                with suppress(FileNotFoundError):
                    await obstore.delete_async(client.store, self._root + key)

        async def delete_page(page: Sequence[str]) -> None:
            # One request per key: a bulk request ends at the first key that does not exist.
            for result in await asyncio.gather(*map(delete_one, page), return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

        for at in range(0, len(keys), _PAGE):
            client.run(action, partial(delete_page, keys[at : at + _PAGE]), self.deadline_s)

    def _client(self, doing: str) -> tuple[Client, str]:
        """Return the client, and ``doing`` with the root, for messages."""
        action = f"{doing} in {self.display_url}"
        return client_for(self._place, self.deadline_s, action), action


def _version(client: Client, meta: Any) -> str:
    return meta[client.version_field] or ""


def _too_short(action: str, start: int, end: int, size: int) -> StorageError:
    return StorageError(
        f"{action}: requested bytes [{start}, {end}): the object has only {size} bytes; it was cut short or replaced"
    )


class _Reader(ObjectReader):
    """Reads one version of an object, that of the first read."""

    def __init__(self, backend: ObstoreBackend, key: str) -> None:
        self._backend, self._key, self._version = backend, key, ""

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        found = self._backend._read(self._key, offset, buffers, self._version)
        self._version, self.size = self._version or found.version, found.size
