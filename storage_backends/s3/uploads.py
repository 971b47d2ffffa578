"""Multipart uploads: their requests, and a writer that a later process can continue."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence

from typing_extensions import Buffer

from ...errors import StorageError
from ..base import PartWriter
from ..buffers import byte_view
from .client import MARK, Client
from .direct import Body
from .replies import code_of
from .retries import Request

__all__ = ["S3PartWriter", "Upload"]

_LEAST_S = 0.75  # where the caller has waited for the deadline already; ``incomplete`` shows what remains
_TOKEN = re.compile(r"(?P<part_bytes>[1-9]\d*) (?P<mark>[0-9a-f]{32}) (?P<id>\S+)")

_log = logging.getLogger(__name__)


class Upload:
    """The requests of one multipart upload. Its coroutines run on the client's event loop.

    ``mark`` is in the metadata of the object, so that a writer recognizes its own when the reply was lost.
    """

    def __init__(self, client: Client, action: str, address: dict[str, str], deadline_s: float, mark: str = "") -> None:
        self._client, self._action, self._address, self._deadline_s = client, action, address, deadline_s
        self.mark = mark or secrets.token_hex(16)

    async def begin(self) -> str:
        """Return the id of a new upload."""
        reply = await self._client.repeat(
            Request(self._action, self._deadline_s),
            lambda: self._client.call("create_multipart_upload", **self._address, Metadata={MARK: self.mark}),
        )
        return str(reply["UploadId"])

    async def send(self, upload: str, number: int, data: memoryview) -> str:
        """Send a part, counted from 0, and return its tag."""
        where = {**self._address, "UploadId": upload, "PartNumber": number + 1}
        action = f"{self._action}: part {number + 1}"
        request = Request(action, self._deadline_s, "part", len(data), can_hedge=True)
        reply = await self._client.repeat(
            request, lambda: self._client.call("upload_part", **where, Body=Body(data), ContentLength=len(data))
        )
        return str(reply["ETag"])

    async def complete(self, upload: str, tags: Sequence[str]) -> None:
        """Make the object of all parts."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        where, begun = {**self._address, "UploadId": upload}, time.monotonic()

        async def send() -> None:
            try:
                await self._client.call("complete_multipart_upload", **where, MultipartUpload={"Parts": parts})
            except Exception as error:
                if code_of(error) == "InternalError":
                    # Ceph says so also of an upload that has ended, and to list its parts says which it is.
                    await self._client.call("list_parts", **where, MaxParts=1)
                raise

        try:
            await self._client.repeat(Request(self._action, self._deadline_s, "complete"), send)
        except Exception as error:
            # The reply to an earlier try may be lost, or another process has ended the upload.
            left_s = max(_LEAST_S, begun + self._deadline_s - time.monotonic())
            if code_of(error) != "NoSuchUpload" or not await self._is_stored(left_s):
                raise

    async def _is_stored(self, deadline_s: float) -> bool:
        found, _ = await self._client.repeat(
            Request(self._action, deadline_s), lambda: self._client.mark_of(self._address)
        )
        return found == self.mark

    async def abort(self, upload: str) -> None:
        """End the upload without an object."""
        try:
            await self._client.repeat(
                Request(self._action, min(_LEAST_S, self._deadline_s)),
                lambda: self._client.call("abort_multipart_upload", **self._address, UploadId=upload),
            )
        except Exception as error:
            if code_of(error) != "NoSuchUpload":
                raise


class S3PartWriter(PartWriter):
    """Stores parts of an upload whose id, part size and mark are in its token."""

    def __init__(
        self,
        client: Client,
        action: str,
        address: dict[str, str],
        size: int,
        deadline_s: float,
        *,
        part_bytes: int,
        token: str,
    ) -> None:
        found = _TOKEN.fullmatch(token)
        if token and found is None:
            raise StorageError(f"{action}: {token!r:.200} is not the token of an upload to S3")
        self._client, self._action, self._deadline_s = client, action, deadline_s
        self._upload = Upload(client, action, address, deadline_s, found["mark"] if found else "")
        self.part_bytes = int(found["part_bytes"]) if found else part_bytes
        self._count = -(-size // self.part_bytes)
        self._id = found["id"] if found else client.run(action, self._upload.begin())
        self.token = f"{self.part_bytes} {self._upload.mark} {self._id}"
        self._is_complete = False

    def put_part(self, number: int, data: Buffer) -> str:
        window = self._client.window
        if not window.acquire_slot(self._deadline_s):
            raise StorageError(f"{self._action}: no part was confirmed within {self._deadline_s:g} s")
        try:
            return self._client.run(self._action, self._upload.send(self._id, number, byte_view(data)))
        finally:
            window.release_slot()

    def complete(self, tags: Sequence[str]) -> None:
        if len(tags) != self._count:
            # A store accepts a list with gaps, and the object would lack their bytes.
            raise StorageError(f"{self._action}: there are tags of {len(tags)} parts, but the object has {self._count}")
        self._client.run(self._action, self._upload.complete(self._id, tags))
        self._is_complete = True

    def abort(self) -> None:
        if self._is_complete:
            return
        try:
            self._client.run(self._action, self._upload.abort(self._id))
        except Exception as error:  # noqa: BLE001 - abort never raises
            _log.warning("%s: could not end the incomplete upload: %s", self._action, error)
