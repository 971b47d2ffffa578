"""The messages between the coordinator and workers: msgpack documents, encoded as text that any RPC can carry.

An engine's RPC may allow JSON only (vLLM over HTTP), so a message is base64 of zstd of msgpack. A worker reports an
error as a normal response: an exception would leave the responses of the engine's other workers unread.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import msgpack
import torch
import xxhash
import zstandard

from ... import errors
from ...control.failure import faults_of, library_error, message_of, traceback_text_of
from ...errors import BytecheckpointError, EngineError, FormatError, MismatchError
from ...runtime.messages import listed
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from ...tensors.metadata import BasicMeta
from ...tensors.shards import torch_dtype
from ..layouts.parts import TensorBox

PROTOCOL = 16
"""The version of the messages; both sides must have the same."""

E = TypeVar("E", bound=BaseException)

Faults = Sequence[tuple[str, str, str]]
"""The kind, name and description of each tensor that does not fit, as in ``MismatchError``."""

_MAX_TRACEBACK = 1 << 16  # characters
_MAX_MESSAGE_BYTES = 1 << 30  # unpacked; a table of 100,000 tensors has about 10 MB


def pack(value: Any) -> bytes:
    """Return ``value`` as a msgpack document."""
    packed: bytes = msgpack.packb(value)
    return packed


def encode(message: Mapping[str, Any]) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(level=1).compress(pack(message))).decode()


def decode(text: str) -> dict[str, Any]:
    """Decode the result of ``encode``. Raises ``FormatError`` for anything else."""
    try:
        data = base64.b64decode(text, validate=True)
        if not 0 <= zstandard.frame_content_size(data) <= _MAX_MESSAGE_BYTES:
            raise FormatError(f"a push message of {zstandard.frame_content_size(data)} bytes is refused")
        message = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data), strict_map_key=False)
    except (binascii.Error, zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
        raise FormatError(
            f"this is not a push message: {error}; is the same version of bytecheckpoint on both sides?"
        ) from error
    if not isinstance(message, dict):
        raise FormatError(f"a push message is a map, not {type(message).__name__}")
    return cast("dict[str, Any]", message)


@dataclass(frozen=True)
class Table:
    """The tensors that senders hold, in the order in which the engine's loader gets them."""

    rows: tuple[tuple[str, BasicMeta], ...]

    @cached_property
    def packed(self) -> bytes:
        return pack([(name, meta.dtype.name, meta.shape) for name, meta in self.rows])

    @cached_property
    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Table:
        rows = msgpack.unpackb(data, use_list=False)
        return cls(tuple((name, BasicMeta(find_dtype(dtype), shape)) for name, dtype, shape in rows))

    def metas(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield name, shape and dtype, as a ``Recorder`` expects them."""
        return ((name, meta.shape, torch_dtype(meta)) for name, meta in self.rows)


def check_faults(text: str, faults: Faults, *, then: str = "", limit: int = 20) -> None:
    """Raise a ``MismatchError`` that lists the faults, if there are any, between ``text`` and ``then``."""
    if faults:
        lines = listed([f"{name}: {detail}" for _, name, detail in faults], limit, "\n  ")
        raise MismatchError(f"{text}:\n  {lines}{then}", list(faults))


def pack_parts(parts: Sequence[TensorBox]) -> bytes:
    return pack([(part.name, part.shape, *part.box, part.dtype.name) for part in parts])


def unpack_parts(data: bytes) -> list[TensorBox]:
    return [
        TensorBox(name, shape, Box(offsets, lengths), find_dtype(dtype))
        for name, shape, offsets, lengths, dtype in msgpack.unpackb(data, use_list=False)
    ]


class SenderLost(EngineError):
    """A sender ended too early. Its cause may be a failure elsewhere, which another error describes."""


def without_traceback(error: E) -> E | EngineError:
    """Return a copy of the error without its traceback, which would keep all local variables of its frames alive."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - some exceptions cannot be copied
        return EngineError(f"{type(error).__name__}: {error}")


def first_cause(errors: Sequence[BytecheckpointError]) -> BytecheckpointError:
    """Return the first error that is not a consequence of another one."""
    return next((error for error in errors if not isinstance(error, SenderLost)), errors[0])


def failure_of(error: BaseException, serving: str) -> dict[str, Any]:
    """Return a worker's exception as a part of its response. ``serving`` states what the worker serves after it."""
    text = traceback_text_of(error)[-_MAX_TRACEBACK:]
    found = {"kind": type(error).__name__, "message": message_of(error), "faults": faults_of(error)}
    return {**found, "traceback_text": text, "serving": serving}


def error_of(failure: Mapping[str, Any], where: str) -> BytecheckpointError:
    """Return an error of the same class, or an ``EngineError``; its message begins with ``where``."""
    kind, serving = failure["kind"], failure["serving"]
    after = f"\n  {where} {serving}" if serving else ""
    text = f"{where}: {failure['message']}{after}"
    if kind == SenderLost.__name__:
        return SenderLost(text)
    if kind in errors.__all__ and kind != errors.RankFailedError.__name__:
        return library_error(kind, text, failure["faults"])
    return EngineError(f"{where}: {kind}: {failure['message']}{after}\n\n{failure['traceback_text']}".rstrip())
