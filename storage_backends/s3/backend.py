"""The backend for S3 and the stores that speak its protocol, on s3fs's client."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, ClassVar

from ...errors import StorageError
from ..base import Conditions, IncompleteUpload, ObjectStat, PartWriter
from ..keys import TEMPORARY_PREFIX, check_children_prefix, check_key, check_prefix, is_object_key
from ..remote.backend import SINGLE_PUT_BYTES, Condition, Found, RemoteBackend, content_range
from ..remote.failures import ShortReplyError
from ..remote.session import Sessions
from .client import MARK, Body, PutRules, S3Client, body_of
from .replies import explain
from .uploads import S3PartWriter, S3Upload, end_upload

_NEXT_PAGE = {
    "list_objects_v2": {"ContinuationToken": "NextContinuationToken"},
    "list_multipart_uploads": {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
}
"""Which values of a page are the arguments of the request for the next one."""


class S3Backend(RemoteBackend[S3Client]):
    """Objects below ``s3://bucket/prefix``. Thread-safe, and usable in forked children."""

    schemes: ClassVar[tuple[str, ...]] = ("s3", "s3a")

    read_size = 16 << 20  # a request takes 2 ms of processor time, as much as a few MiB of its reply

    def __init__(self, url: str, **options: Any) -> None:
        """Create a backend.

        Args:
            url: The bucket, and a prefix in it.
            **options: Arguments of ``s3fs.S3FileSystem``: ``endpoint_url=``, ``key=``, ``secret=``, ``anon=``, ...
        """
        super().__init__(url)
        self._options = options

    def endpoint(self) -> str:
        client = self._session()
        return client.run(f"opening {self.display_url}", client.endpoint())

    def conditions(self) -> Conditions:
        client = self._session()
        return client.run(f"opening {self.display_url}", self._put_rules(client)).conditions

    async def _put_rules(self, client: S3Client) -> PutRules:
        address = self._address(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        return await client.put_rules(address, self.deadline_s)

    async def _send_put(self, client: S3Client, key: str, content: memoryview, condition: Condition | None) -> str:
        arguments: dict[str, Any] = {}
        if condition is not None:
            version = condition.version
            arguments = (
                {"IfMatch": (await self._put_rules(client)).if_match(version)} if version else {"IfNoneMatch": "*"}
            )
            arguments["Metadata"] = {MARK: condition.mark}
        reply = await client.call("put_object", **self._address(key), Body=Body(content), **arguments)
        return str(reply.get("ETag", ""))

    async def _marked(self, client: S3Client, key: str) -> tuple[str | None, str]:
        return await client.mark_of(self._address(key))

    async def _send_read(
        self, client: S3Client, key: str, start: int, views: Sequence[memoryview], accept: Callable[[Found], None]
    ) -> bytes | None:
        span = f"bytes={start}-{start + sum(map(len, views)) - 1}"
        reply = await client.call("get_object", **self._address(key), Range=span)
        async with aclosing(body_of(reply)) as body:
            accept(Found(*content_range(reply.get("ContentRange"), int(reply["ContentLength"])), reply.get("ETag", "")))
            return await body.fill(views)

    async def _send_get(self, client: S3Client, key: str, check_size: Callable[[int], None]) -> tuple[bytes, str]:
        reply = await client.call("get_object", **self._address(key))
        async with aclosing(body_of(reply)) as body:
            check_size(int(reply["ContentLength"]))
            content = await body.read()
        if len(content) != reply["ContentLength"]:
            raise ShortReplyError(f"the reply has {len(content)} of {reply['ContentLength']} bytes")
        return content, str(reply.get("ETag", ""))

    async def _send_stat(self, client: S3Client, key: str) -> ObjectStat:
        found = await client.call("head_object", **self._address(key))
        return ObjectStat(key, int(found["ContentLength"]), str(found.get("ETag", "")))

    async def _send_delete(self, client: S3Client, key: str) -> None:
        await client.call("delete_object", **self._address(key))

    def _upload(self, client: S3Client, action: str, key: str, size: int) -> S3Upload:
        return S3Upload(client, action, self._address(key), self.deadline_s)

    def create_parts(self, key: str, size: int, *, token: str = "") -> PartWriter:
        check_key(key)
        if size <= SINGLE_PUT_BYTES and not token:
            return super().create_parts(key, size)
        client, action = self._session(), self._action("writing", key)
        return S3PartWriter(client, action, self._address(key), size, self.deadline_s, token=token)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        return (
            ObjectStat(key, int(found["Size"]), str(found.get("ETag", "")))
            for page in self._pages("list_objects_v2", prefix)
            for found in page.get("Contents", ())
            if is_object_key(key := self._key_of(found["Key"]))
        )

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        names = set()
        for page in self._pages("list_objects_v2", prefix, Delimiter="/"):
            paths = [str(found["Key"]) for found in page.get("Contents", ())]
            paths += [str(found["Prefix"]) for found in page.get("CommonPrefixes", ())]
            for path in paths:
                key = self._key_of(path)
                if len(key) > len(prefix) and is_object_key(key.rstrip("/")):
                    names.add(key[len(prefix) :])
        return sorted(names)

    def _pages(self, method: str, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        action = self._action("listing", prefix)
        bucket, above = self._place
        arguments |= {"Bucket": bucket, "Prefix": f"{above}{prefix}"}
        while True:
            page = self._ask(action, lambda client: client.call(method, **arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page.get(next_one) for name, next_one in _NEXT_PAGE[method].items()}
            if following.items() <= arguments.items() or None in following.values():
                raise StorageError(f"{action}: the store replied that there is more, but not where it continues")
            arguments.update(following)

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        check_prefix(prefix)
        for page in self._pages("list_multipart_uploads", prefix):
            now = _time_of(page)
            for found in page.get("Uploads", ()):
                key, begun = self._key_of(found["Key"]), found.get("Initiated")
                if key:
                    age_s = now - begun.timestamp() if isinstance(begun, datetime) else 0.0
                    yield IncompleteUpload(key, str(found["UploadId"]), max(0.0, age_s))

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:
        client = self._session()

        async def end(upload: IncompleteUpload) -> None:
            action = self._action("ending the upload of", upload.key)
            await end_upload(client, action, self._address(upload.key), upload.upload_id, self.deadline_s)

        if uploads:
            client.run(f"ending uploads in {self.display_url}", self._each(uploads, end))

    def _session(self) -> S3Client:
        return _sessions.find(lambda: S3Client(self._options), self.display_url, self._options)

    @cached_property
    def _place(self) -> tuple[str, str]:
        """The bucket, and the beginning of all keys in it, which is empty or ends with a slash."""
        bucket, root = self._session().split(self._url)
        return bucket, f"{root}/" if root else ""

    def _address(self, key: str) -> dict[str, str]:
        bucket, above = self._place
        return {"Bucket": bucket, "Key": f"{above}{key}"}

    def _key_of(self, path: str) -> str:
        """Return the key of a path in the bucket; an empty string if it is not below the root."""
        _, above = self._place
        return path[len(above) :] if path.startswith(above) else ""


def _time_of(reply: dict[str, Any]) -> float:
    """Return the time on the clock of the store, which has also written when uploads began."""
    try:
        return parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


_sessions = Sessions(explain, "AWS_", "FSSPEC_S3")
