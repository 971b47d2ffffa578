"""The backend for GCS and Azure, on obstore."""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import numpy as np
import obstore
import obstore.store
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from typing_extensions import Buffer

from ...errors import KeyChangedError, StorageError, without_userinfo
from ..base import Conditions, ObjectStat
from ..keys import check_children_prefix, check_prefix, is_object_key
from ..remote.backend import Condition, Found, RemoteBackend
from ..remote.failures import Failure, Meaning, Secrets, ShortReplyError, common_failure
from ..remote.parts import PARTS_IN_FLIGHT, OrderedUpload, Upload, part_bytes_for
from ..remote.session import EndpointSession, Request, Sessions, states_of_files
from .roots import SCHEMES, StoreRoot

_PAGE = 1000
_MARK = "bcpput"  # metadata of an object; Azure allows only names of identifiers
_CONNECT_S = 10
_LEAST_TRY_S = 30.0
_TRIES = 5  # of a request of an upload that takes longest, within the deadline
_MAX_PAUSE_S = 5
_ABORT_S = 1.0  # where the caller has waited for the deadline already

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_XML = re.compile(r"(?s)<\?xml.*?<Code>([^<]*)</Code>(?:\s*<Message>([^<\n]*))?.*")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S+")
_NO_CONTAINER = ("ContainerNotFound", "NoSuchBucket")
_MAX_TEXT = 8000  # of a key, twice, and what follows it


def explain(error: BaseException) -> Failure:
    """Return what an error of obstore means. Its message then has no queries of URLs, which may contain a signature."""
    if not isinstance(error, BaseError | FileNotFoundError):
        return common_failure(error)
    text = str(error).partition("\n\nDebug source:")[0]
    found = _XML.search(text)
    if found:
        text = f"{text[: found.start()]}{found[1]}{': ' + found[2] if found[2] else ''}"
    text = " ".join(_QUERY.sub(r"\1?***", text).split())[:_MAX_TEXT]
    error.args = (text,)  # tracebacks show it
    status = _STATUS.search(text)
    return Failure(_meaning(error, text, int(status[1]) if status else 0), text)


def _meaning(error: BaseException, text: str, status: int) -> Meaning:
    if any(name in text for name in _NO_CONTAINER):
        return Meaning.OTHER
    if isinstance(error, FileNotFoundError):
        return Meaning.MISSING
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return Meaning.DENIED
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return Meaning.REFUSED
    if status == 416:
        return Meaning.OUTSIDE
    if status in (408, 429) or status >= 500:
        return Meaning.BUSY
    return Meaning.UNANSWERED if isinstance(error, GenericError) and not status else Meaning.OTHER


class ObstoreClient(EndpointSession):
    """The connection to one container. obstore repeats the requests of uploads and listings, the session all others.

    Attributes:
        version_field: Which field of an object's metadata is its version.
        store: The store of obstore.
        patient_store: The same, for uploads and listings.
    """

    def __init__(self, store_root: StoreRoot, deadline_s: float) -> None:
        super().__init__(explain, secrets=Secrets(options={**store_root.config, **store_root.client_options}))
        self.version_field = "version" if store_root.store == "GCSStore" else "e_tag"
        try_s = min(deadline_s, max(_LEAST_TRY_S, deadline_s / _TRIES))

        def open_store(retries: int, timeout_s: float) -> Any:
            timeouts = {"connect_timeout": timedelta(seconds=_CONNECT_S), "timeout": timedelta(seconds=timeout_s)}
            return getattr(obstore.store, store_root.store)(
                store_root.container,
                config=dict(store_root.config),
                client_options=timeouts | dict(store_root.client_options),
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=deadline_s),
                    "backoff": {"max_backoff": timedelta(seconds=_MAX_PAUSE_S)},
                },
            )

        self.store, self.patient_store = open_store(0, deadline_s), open_store(2**31, try_s)

    def version(self, meta: Any) -> str:
        """Return the version of an object from its metadata."""
        return meta[self.version_field] or ""


class ObstoreBackend(RemoteBackend[ObstoreClient]):
    """Objects below ``gs://bucket/prefix`` or ``az://container/prefix``. Thread-safe.

    A forked child cannot use obstore if its parent has used it. There, the backend raises ``StorageError``, and
    ``open_backend`` opens these URLs with fsspec.
    """

    schemes: ClassVar[tuple[str, ...]] = tuple(sorted(SCHEMES))

    def __init__(self, url: str, store_root: StoreRoot) -> None:
        """Create a backend.

        Args:
            url: The root, for messages.
            store_root: Where it is.
        """
        super().__init__(url)
        self._store_root = store_root
        self._root = f"{store_root.prefix}/" if store_root.prefix else ""

    def endpoint(self) -> str:
        config = self._store_root.config
        return without_userinfo(str(config.get("endpoint") or config.get("base_url") or ""))

    def conditions(self) -> Conditions:
        return Conditions(if_absent=True, if_version=True)

    async def _send_put(self, client: ObstoreClient, key: str, content: memoryview, condition: Condition | None) -> str:
        how: dict[str, Any] = {"use_multipart": False}
        if condition is not None:
            version = condition.version
            if version and client.version_field == "version" and not version.strip("0").isdecimal():
                # To GCS, generation 0 is an object that does not exist.
                raise KeyChangedError(f"{self._action('writing', key)}: {version!r:.100} is not a version of GCS")
            how = {
                "mode": {client.version_field: version} if version else "create",
                "attributes": {_MARK: condition.mark},
            }
        return client.version(await obstore.put_async(client.store, self._root + key, bytes(content), **how))

    async def _marked(self, client: ObstoreClient, key: str) -> tuple[str | None, str]:
        try:
            found = await obstore.get_async(client.store, self._root + key, options={"head": True})
        except FileNotFoundError:
            return None, ""
        return found.attributes.get(_MARK), client.version(found.meta)

    async def _send_read(
        self, client: ObstoreClient, key: str, start: int, views: Sequence[memoryview], accept: Callable[[Found], None]
    ) -> Buffer:
        span = (start, start + sum(map(len, views)))
        reply = await obstore.get_async(client.store, self._root + key, options={"range": span})
        accept(Found(*reply.range, reply.meta["size"], client.version(reply.meta)))
        content: Buffer = await reply.bytes_async()
        return content

    async def _send_get(self, client: ObstoreClient, key: str, check_size: Callable[[int], None]) -> tuple[bytes, str]:
        reply = await obstore.get_async(client.store, self._root + key)
        check_size(reply.meta["size"])
        content = bytes(await reply.bytes_async())
        if len(content) != reply.meta["size"]:
            raise ShortReplyError(f"the reply has {len(content)} of {reply.meta['size']} bytes")
        return content, client.version(reply.meta)

    async def _send_stat(self, client: ObstoreClient, key: str) -> ObjectStat:
        meta = await obstore.head_async(client.store, self._root + key)
        return ObjectStat(key, meta["size"], client.version(meta))

    async def _send_delete(self, client: ObstoreClient, key: str) -> None:
        await obstore.delete_async(client.store, self._root + key)

    def _upload(self, client: ObstoreClient, action: str, key: str, size: int) -> Upload:
        return _ObstoreUpload(client, self._root + key, part_bytes_for(size), self.deadline_s)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        client, action = self._session(), self._action("listing", prefix)
        folder = self._root + prefix[: prefix.rfind("/") + 1]  # obstore lists whole components

        async def send() -> list[ObjectStat]:
            found = []
            # obstore repeats the requests for single pages.
            async for page in obstore.list(client.patient_store, folder.rstrip("/") or None, chunk_size=_PAGE):
                found += [
                    ObjectStat(key, meta["size"], client.version(meta))
                    for meta in page
                    if (key := meta["path"][len(self._root) :]).startswith(prefix) and is_object_key(key)
                ]
            return found

        request = Request(action, self.deadline_s, try_s=self.deadline_s)
        return iter(sorted(client.run(action, client.repeat(request, send)), key=lambda stat: stat.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        folder = self._root + prefix

        async def send(client: ObstoreClient) -> Any:
            return await obstore.list_with_delimiter_async(client.store, folder.rstrip("/") or None)

        found = self._ask(self._action("listing", prefix), send)
        paths = [meta["path"] for meta in found["objects"]] + [f"{path}/" for path in found["common_prefixes"]]
        return sorted(path[len(folder) :] for path in paths if is_object_key(path[len(self._root) :].rstrip("/")))

    def _session(self) -> ObstoreClient:
        if _first_process() != os.getpid():
            raise StorageError(
                f"{self.display_url}: obstore cannot be used in a process that was forked from one that has used it; "
                "open the store again, which then uses fsspec, or start the process with 'spawn'"
            )
        store_root, deadline_s = self._store_root, self.deadline_s
        options = (store_root.store, store_root.container, store_root.config, store_root.client_options, deadline_s)
        files = states_of_files({**store_root.config, **store_root.client_options})
        return _sessions.find(lambda: ObstoreClient(store_root, deadline_s), self.display_url, *options, files)


class _ObstoreUpload(OrderedUpload):
    """Passes parts to one of obstore's writers, in order, which sends them from this memory, several at a time.

    It does not report that the store has confirmed a part, but drops the part's array then. The last part, if it is
    shorter than the others, waits for ``complete``, because obstore would hold it without sending it.
    """

    def __init__(self, client: ObstoreClient, path: str, part_bytes: int, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self._part_bytes, self._last = part_bytes, b""
        self._file: Any = obstore.open_writer_async(
            client.patient_store, path, buffer_size=part_bytes, max_concurrency=PARTS_IN_FLIGHT
        )

    async def send(self, number: int, data: memoryview) -> str:
        if len(data) < self._part_bytes:
            self._last = bytes(data)
            return ""
        loop, content = asyncio.get_running_loop(), np.frombuffer(data, np.uint8)
        dropped = asyncio.Event()
        weakref.finalize(content, loop.call_soon_threadsafe, dropped.set).atexit = False
        # Only obstore may keep it, and not a frame of this call that an exception refers to.
        handed = [content]
        del content
        await self._in_turn(lambda: self._file.write(handed.pop()))
        await asyncio.wait_for(dropped.wait(), self._deadline_s)
        return ""

    async def complete(self, tags: Sequence[str]) -> None:
        if self._last:
            await self._in_turn(lambda: self._file.write(self._last))
        await asyncio.wait_for(self._file.close(), self._deadline_s)

    async def abort(self) -> None:
        with suppress(OSError):  # it is closed, or the store has no such upload
            await asyncio.wait_for(self._file.__aexit__(StorageError, None, None), _ABORT_S)


@cache
def _first_process() -> int:
    """Return the process that has used obstore first. Its threads are missing in forked children: calls would hang."""
    return os.getpid()


def is_inherited() -> bool:
    """Whether this process was forked from one that has used obstore."""
    return bool(_first_process.cache_info().currsize) and _first_process() != os.getpid()


_sessions = Sessions(explain, "AZURE_", "GOOGLE_")
