"""Multipart uploads: their requests, and a writer that a later process can continue."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from typing_extensions import Buffer

from ...errors import KeyNotFoundError, StorageError
from ..base import PartWriter
from ..buffers import byte_view
from ..remote.parts import Upload, part_bytes_for, window
from ..remote.session import Request
from .client import MARK, Body, S3Client
from .replies import code_of

_LEAST_S = 0.75  # where the caller has waited for the deadline already; ``incomplete`` shows what remains
_AT_WORK_S, _PAUSE_S = 30.0, 0.5  # how long, and how often, the object of a try without reply is looked for
_TOKEN = re.compile(r"(?P<part_bytes>[1-9]\d*) (?P<mark>[0-9a-f]{32}) (?P<id>\S+)")

_log = logging.getLogger(__name__)


class S3Upload(Upload):
    """The requests of one multipart upload, which the first part begins.

    ``mark`` is in the metadata of the object, so that a writer recognizes its own when the reply was lost.
    """

    def __init__(self, client: S3Client, action: str, address: dict[str, str], deadline_s: float) -> None:
        self._client, self._action, self._address, self._deadline_s = client, action, address, deadline_s
        self.mark = secrets.token_hex(16)
        self._begun: asyncio.Future[str] | None = None  # used on the event loop only

    async def begin(self) -> str:
        """Return the id of the upload, which the first call begins."""
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._begin())
        return await asyncio.shield(self._begun)

    async def _begin(self) -> str:
        reply = await self._client.repeat(
            Request(self._action, self._deadline_s),
            lambda: self._client.call("create_multipart_upload", **self._address, Metadata={MARK: self.mark}),
        )
        return str(reply["UploadId"])

    async def resume(self, upload: str, mark: str) -> None:
        """Continue an upload of another process."""
        self.mark, self._begun = mark, asyncio.get_running_loop().create_future()
        self._begun.set_result(upload)

    async def send(self, number: int, data: memoryview) -> str:
        where = {**self._address, "UploadId": await self.begin(), "PartNumber": number + 1}
        action = f"{self._action}: part {number + 1}"
        request = Request(action, self._deadline_s, "part", len(data), can_hedge=True)
        reply = await self._client.repeat(
            request, lambda: self._client.call("upload_part", **where, Body=Body(data), ContentLength=len(data))
        )
        return str(reply["ETag"])

    async def complete(self, tags: Sequence[str]) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        where, begun = {**self._address, "UploadId": await self.begin()}, time.monotonic()
        tries = 0

        async def send() -> None:
            nonlocal tries
            tries += 1
            try:
                await self._client.call("complete_multipart_upload", **where, MultipartUpload={"Parts": parts})
            except Exception as error:
                if code_of(error) == "InternalError":
                    # Ceph says so also of an upload that has ended, and to list its parts says which it is.
                    await self._client.call("list_parts", **where, MaxParts=1)
                raise

        try:
            await self._client.repeat(Request(self._action, self._deadline_s, "complete"), send)
        except KeyNotFoundError:
            # The reply to an earlier try may be lost, or another process has ended the upload. A store may also end it
            # before the object is there, and an earlier try be still at work.
            end = begun + self._deadline_s
            give_up = min(end, time.monotonic() + _AT_WORK_S) if tries > 1 else 0.0
            while True:
                request = Request(self._action, max(_LEAST_S, end - time.monotonic()))
                mark, _ = await self._client.repeat(request, lambda: self._client.mark_of(self._address))
                if mark == self.mark:
                    return
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(_PAUSE_S)

    async def abort(self) -> None:
        if self._begun is None:
            return
        await asyncio.wait([self._begun])
        if self._begun.exception() is None:
            await end_upload(self._client, self._action, self._address, self._begun.result(), _LEAST_S)


async def end_upload(client: S3Client, action: str, address: dict[str, str], upload: str, deadline_s: float) -> None:
    """End an upload without an object. One that has ended is not an error."""
    with suppress(KeyNotFoundError):
        await client.repeat(
            Request(action, deadline_s), lambda: client.call("abort_multipart_upload", **address, UploadId=upload)
        )


class S3PartWriter(PartWriter):
    """Stores parts of an upload whose id, part size and mark are in its token."""

    def __init__(
        self, client: S3Client, action: str, address: dict[str, str], size: int, deadline_s: float, *, token: str
    ) -> None:
        found = _TOKEN.fullmatch(token)
        if token and found is None:
            raise StorageError(f"{action}: {token!r:.200} is not the token of an upload to S3")
        self._client, self._action, self._deadline_s = client, action, deadline_s
        self._upload = S3Upload(client, action, address, deadline_s)
        if found:
            client.run(action, self._upload.resume(found["id"], found["mark"]))
        self.part_bytes = int(found["part_bytes"]) if found else part_bytes_for(size)
        self._count = -(-size // self.part_bytes)
        self.token = f"{self.part_bytes} {self._upload.mark} {client.run(action, self._upload.begin())}"
        self._is_complete = False

    def put_part(self, number: int, data: Buffer) -> str:
        shared = window()
        if not shared.acquire_slot(self._deadline_s):
            raise StorageError(f"{self._action}: no part was confirmed within {self._deadline_s:g} s")
        try:
            return self._client.run(self._action, self._upload.send(number, byte_view(data)))
        finally:
            shared.release_slot()

    def complete(self, tags: Sequence[str]) -> None:
        if len(tags) != self._count:
            # A store accepts a list with gaps, and the object would lack their bytes.
            raise StorageError(f"{self._action}: there are tags of {len(tags)} parts, but the object has {self._count}")
        self._client.run(self._action, self._upload.complete(tags))
        self._is_complete = True

    def abort(self) -> None:
        if self._is_complete:
            return
        try:
            self._client.run(self._action, self._upload.abort())
        except Exception as error:  # noqa: BLE001 - abort never raises
            _log.warning("%s: could not end the incomplete upload: %s", self._action, error)
