"""The backend for S3 and the stores that speak its protocol.

Small objects are one request: a conditional one where the caller asks for it. Large objects are multipart uploads with
several parts in flight (``MultipartWriter``). A read is one ranged request, whose reply is checked against the range
that was asked for. Nothing is looked up before it is read. ``Retries`` repeats requests, and nothing else does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from typing_extensions import Buffer

from ...errors import KeyChangedError, KeyExistsError, StorageError, UnansweredError
from ..base import Conditions, IncompleteUpload, ObjectReader, ObjectStat, ObjectWriter, PartWriter, StorageBackend
from ..buffers import byte_view, check_max_size, writable_view
from ..keys import TEMPORARY_PREFIX, check_children_prefix, check_key, check_prefix, is_object_key
from ..writers import BufferedWriter
from .bodies import body_of, check_range, too_short
from .client import MARK, Client, client_for
from .direct import Body
from .incomplete import abort_all, uploads_of
from .probe import REFUSED_CODES, PutRules
from .replies import ShortReplyError, code_of, is_missing
from .retries import Request
from .uploads import S3PartWriter
from .writers import MultipartWriter, part_bytes_for

__all__ = ["S3Backend"]

_SINGLE_PUT_BYTES = 8 << 20
_CONCURRENT_DELETES = 16
_LEAST_S = 0.75  # to find out what became of a put, or why a read was refused, that has taken the whole deadline
_NEXT_PAGE = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
}
"""Which values of a page are the arguments of the request for the next one."""

_OUTSIDE_CODES = frozenset({"416", "InvalidRange"})


class S3Backend(StorageBackend):
    """Objects below ``s3://bucket/prefix``. Thread-safe, and usable in forked children."""

    schemes: ClassVar[tuple[str, ...]] = ("s3", "s3a")

    read_size = 16 << 20  # a request takes 2 ms of processor time, as much as a few MiB of its reply

    def __init__(self, url: str, **options: Any) -> None:
        """Create a backend.

        Args:
            url: The bucket, and a prefix in it.
            **options: Arguments of ``s3fs.S3FileSystem``: ``endpoint_url=``, ``key=``, ``secret=``, ``anon=``, ...
        """
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._options = options

    @classmethod
    def from_url(cls, url: str, **options: Any) -> S3Backend:
        return cls(url, **options)

    @property
    def url(self) -> str:
        return self._url

    def endpoint(self) -> str:
        client = self._client()
        return client.run(f"opening {self.display_url}", client.endpoint())

    def conditions(self) -> Conditions:
        client = self._client()
        return client.run(f"opening {self.display_url}", self._put_rules(client)).conditions

    async def _put_rules(self, client: Client) -> PutRules:
        address = self._address(client, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        return await client.put_rules(address, self.deadline_s)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        client, action = self._client(), self._action("writing", key)
        content = memoryview(bytes(byte_view(data)))
        if if_absent:
            refusal = KeyExistsError(f"{action}: the key is taken")
            return client.run(action, self._put_if(client, action, key, content, {"IfNoneMatch": "*"}, refusal))
        if if_version:
            changed = KeyChangedError(f"{action}: the object was replaced or deleted")
            return client.run(action, self._put_if(client, action, key, content, {"IfMatch": if_version}, changed))
        return client.run(action, self._put(client, action, key, content))

    async def _put(self, client: Client, action: str, key: str, content: memoryview) -> str:
        async def send() -> str:
            reply = await client.call("put_object", **self._address(client, key), Body=Body(content))
            return str(reply.get("ETag", ""))

        return await client.repeat(Request(action, self.deadline_s, "put", len(content)), send)

    async def _put_if(
        self,
        client: Client,
        action: str,
        key: str,
        content: memoryview,
        condition: dict[str, str],
        refusal: StorageError,
    ) -> str:
        """Put with a condition. Raises ``refusal`` if it is not met.

        Raises ``UnansweredError`` if a try without reply may have met it, and the object was replaced since then.
        """
        rules = await self._put_rules(client)
        if "IfMatch" in condition:
            condition = {"IfMatch": rules.if_match(condition["IfMatch"])}
        if not (rules.conditions.if_version if "IfMatch" in condition else rules.conditions.if_absent):
            raise StorageError(f"{action}: this store cannot decide whether to put; see conditions()")
        mark, address, is_open = secrets.token_hex(16), self._address(client, key), False
        begun = time.monotonic()

        async def send() -> str:
            nonlocal is_open
            try:
                reply = await client.call(
                    "put_object", **address, Body=Body(content), **condition, Metadata={MARK: mark}
                )
            except BaseException as error:
                is_open |= not code_of(error)
                raise
            return str(reply.get("ETag", ""))

        try:
            return await client.repeat(Request(action, self.deadline_s, "put", len(content)), send)
        except Exception as error:
            if code_of(error) not in REFUSED_CODES:
                raise
            # The reply to an earlier try may have been lost, also to one that the HTTP client has repeated itself.
            request = Request(action, self._rest_s(begun))
            found, version = await client.repeat(request, lambda: client.mark_of(address))
            if found != mark and is_open:
                raise UnansweredError(
                    f"{action}: another program has written the object, before or after a try without reply"
                ) from error
            if found != mark:
                raise refusal from error
            return version

    def create(self, key: str, size: int) -> ObjectWriter:
        check_key(key)
        client, action = self._client(), self._action("writing", key)
        if size <= _SINGLE_PUT_BYTES:
            return BufferedWriter(
                action,
                size,
                lambda data: client.run(action, self._put(client, action, key, data)),
            )
        return MultipartWriter(client, action, self._address(client, key), size, self.deadline_s)

    def create_parts(self, key: str, size: int, *, token: str = "") -> PartWriter:
        check_key(key)
        if size <= _SINGLE_PUT_BYTES and not token:
            return super().create_parts(key, size)
        client, action = self._client(), self._action("writing", key)
        address, part_bytes = self._address(client, key), part_bytes_for(size)
        return S3PartWriter(client, action, address, size, self.deadline_s, part_bytes=part_bytes, token=token)

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
        action = self._action("reading", key)
        views = [writable_view(action, buffer) for buffer in buffers]
        views = [view for view in views if len(view)]
        if offset < 0:
            raise StorageError(f"{action}: the offset is {offset}")
        client = self._client()
        if not views:
            # HTTP has no empty range.
            found = client.run(action, self._stat(client, action, key, self.deadline_s))
            if found.size < offset:
                raise StorageError(f"{action}: byte {offset} is beyond the object's end at {found.size}")
            return found
        count, address = sum(map(len, views)), self._address(client, key)
        request = Request(action, self.deadline_s, "read", count, can_hedge=True)
        begun = time.monotonic()

        async def send() -> ObjectStat:
            nonlocal version
            reply = await client.call("get_object", **address, Range=f"bytes={offset}-{offset + count - 1}")
            async with aclosing(body_of(reply)) as body:
                size = check_range(reply, action, offset, offset + count)
                found = str(reply.get("ETag", ""))
                # Two tries may fill the buffers at the same time.
                if version and found != version:
                    raise StorageError(f"{action}: the object was replaced while it was being read")
                version = found
                await body.fill(views)
            return ObjectStat(key, size, found)

        try:
            return client.run(action, client.repeat(request, send))
        except StorageError as error:
            if code_of(error.__cause__ or error) not in _OUTSIDE_CODES:
                raise
            # The reply does not state the size.
            found = client.run(action, self._stat(client, action, key, self._rest_s(begun)))
            raise too_short(action, offset, offset + count, found.size) from error

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        client, action = self._client(), self._action("reading", key)
        return client.run(action, self._get(client, action, key, max_size))

    async def _get(self, client: Client, action: str, key: str, max_size: int | None) -> tuple[bytes, str]:
        async def send() -> tuple[bytes, str]:
            reply = await client.call("get_object", **self._address(client, key))
            async with aclosing(body_of(reply)) as body:
                check_max_size(action, int(reply["ContentLength"]), max_size)
                content = await body.read()
            if len(content) != reply["ContentLength"]:
                raise ShortReplyError(f"the reply has {len(content)} of {reply['ContentLength']} bytes")
            return content, str(reply.get("ETag", ""))

        return await client.repeat(Request(action, self.deadline_s), send)

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        client, action = self._client(), self._action("looking at", key)
        return client.run(action, self._stat(client, action, key, self.deadline_s))

    async def _stat(self, client: Client, action: str, key: str, deadline_s: float) -> ObjectStat:
        address = self._address(client, key)
        found = await client.repeat(Request(action, deadline_s), lambda: client.call("head_object", **address))
        return ObjectStat(key, int(found["ContentLength"]), str(found.get("ETag", "")))

    def _rest_s(self, begun: float) -> float:
        """Return what remains of the deadline of a call."""
        return max(_LEAST_S, begun + self.deadline_s - time.monotonic())

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        stats = (
            ObjectStat(key, int(found["Size"]), str(found.get("ETag", "")))
            for page in self._pages("list_objects_v2", prefix)
            for found in page.get("Contents", ())
            if (key := self._key(str(found["Key"]))) is not None and is_object_key(key)
        )
        return stats

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        names = set()
        for page in self._pages("list_objects_v2", prefix, Delimiter="/"):
            paths = [str(found["Key"]) for found in page.get("Contents", ())]
            paths += [str(found["Prefix"]) for found in page.get("CommonPrefixes", ())]
            for path in paths:
                key = self._key(path)
                if key is not None and len(key) > len(prefix) and is_object_key(key.rstrip("/")):
                    names.add(key[len(prefix) :])
        return sorted(names)

    def _pages(self, method: str, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        client, action = self._client(), self._action("listing", prefix)
        bucket, root = client.split(self._url)
        arguments |= {"Bucket": bucket, "Prefix": f"{root}/{prefix}" if root else prefix}
        while True:
            request = Request(action, self.deadline_s)
            page = client.run(action, client.repeat(request, lambda: client.call(method, **arguments)))
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page.get(next_one) for name, next_one in _NEXT_PAGE[method].items()}
            if following.items() <= arguments.items() or None in following.values():
                raise StorageError(f"{action}: the store replied that there is more, but not where it continues")
            arguments.update(following)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if keys:
            client = self._client()
            client.run(f"deleting in {self.display_url}", self._delete(client, keys))

    async def _delete(self, client: Client, keys: Sequence[str]) -> None:
        # One request per key: a bulk request reports the failures of single keys in a reply with status 200, needs a
        # checksum that stores disagree on, and is unknown to some.
        slots = asyncio.Semaphore(_CONCURRENT_DELETES)

        async def delete_one(key: str) -> None:
            action, address = self._action("deleting", key), self._address(client, key)
            async with slots:
                try:
                    await client.repeat(
                        Request(action, self.deadline_s), lambda: client.call("delete_object", **address)
                    )
                except Exception as error:
                    if not is_missing(error):
                        raise

        results = await asyncio.gather(*(delete_one(key) for key in keys), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        check_prefix(prefix)
        return uploads_of(self._pages("list_multipart_uploads", prefix), self._key)

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:
        client = self._client()

        async def abort(upload: IncompleteUpload) -> None:
            action, address = self._action("ending the upload of", upload.key), self._address(client, upload.key)
            await client.repeat(
                Request(action, self.deadline_s),
                lambda: client.call("abort_multipart_upload", **address, UploadId=upload.upload_id),
            )

        if uploads:
            client.run(f"ending uploads in {self.display_url}", abort_all(uploads, abort))

    def _client(self) -> Client:
        return client_for(self._options)

    def _address(self, client: Client, key: str) -> dict[str, str]:
        bucket, root = client.split(self._url)
        return {"Bucket": bucket, "Key": f"{root}/{key}" if root else key}

    def _key(self, path: str) -> str | None:
        _, root = self._client().split(self._url)
        if not root:
            return path
        return path[len(root) + 1 :] if path.startswith(root + "/") else None

    def _action(self, verb: str, key: str) -> str:
        return f"{verb} {key!r} in {self.display_url}"


class _Reader(ObjectReader):
    """Reads one version of an object."""

    def __init__(self, backend: S3Backend, key: str) -> None:
        self._backend, self._key = backend, key
        self._version = ""

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        found = self._backend._read(self._key, offset, buffers, self._version)
        self._version, self.size = self._version or found.version, found.size
