"""What senders and workers tell each other: msgpack documents of plain data, as text that any RPC carries.

An engine's RPC may allow JSON only (vLLM over HTTP), so a message is base64 of zstd of msgpack. What goes wrong in a
worker is an answer like any other: an exception would leave the answers of the engine's other workers unread.
"""

from __future__ import annotations

import base64
import binascii
import copy
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import msgpack
import torch
import xxhash
import zstandard

from ... import errors
from ...dtypes import dtype_named
from ...errors import BytecheckpointError, EngineError, FormatError, MismatchError
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import torch_dtype
from ..parts import Part

__all__ = [
    "Failure",
    "SenderGone",
    "Table",
    "decode",
    "encode",
    "first_cause",
    "pack_parts",
    "unpack_parts",
    "without_frames",
]

E = TypeVar("E", bound=BaseException)

_MAX_MESSAGE = 1 << 30  # bytes, unpacked; tables of 100,000 tensors are some 10 MB


def encode(message: Mapping[str, Any]) -> str:
    packed = msgpack.packb(message)
    return base64.b64encode(zstandard.ZstdCompressor(level=1).compress(packed)).decode()


def decode(text: str) -> dict[str, Any]:
    """Raises ``FormatError`` for what ``encode`` did not make."""
    try:
        data = base64.b64decode(text, validate=True)
        if not 0 <= zstandard.frame_content_size(data) <= _MAX_MESSAGE:
            raise FormatError(f"a push message of {zstandard.frame_content_size(data)} bytes is refused")
        message = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data), strict_map_key=False)
    except (binascii.Error, zstandard.ZstdError, ValueError, msgpack.UnpackException) as error:
        raise FormatError(
            f"this is no push message: {error}; is the same version of bytecheckpoint on both sides?"
        ) from error
    if not isinstance(message, dict):
        raise FormatError(f"a push message is a map, not {type(message).__name__}")
    return cast("dict[str, Any]", message)


@dataclass(frozen=True)
class Table:
    """The tensors that senders have, in the order in which the engine's loader shall see them."""

    rows: tuple[tuple[str, BasicMeta], ...]

    @cached_property
    def packed(self) -> bytes:
        packed: bytes = msgpack.packb([[name, meta.dtype.name, list(meta.shape)] for name, meta in self.rows])
        return packed

    @cached_property
    def digest(self) -> bytes:
        return xxhash.xxh3_128_digest(self.packed)

    @classmethod
    def unpack(cls, data: bytes) -> Table:
        rows = msgpack.unpackb(data)
        return cls(tuple((name, BasicMeta(dtype_named(dtype), tuple(shape))) for name, dtype, shape in rows))

    def metas(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        """As a ``Recorder`` takes them."""
        return ((name, meta.shape, torch_dtype(meta)) for name, meta in self.rows)


def pack_parts(parts: Sequence[Part]) -> bytes:
    rows = [[p.name, list(p.shape), list(p.box.offsets), list(p.box.lengths), p.dtype.name] for p in parts]
    packed: bytes = msgpack.packb(rows)
    return packed


def unpack_parts(data: bytes) -> list[Part]:
    return [
        Part(name, tuple(shape), Box(tuple(offsets), tuple(lengths)), dtype_named(dtype))
        for name, shape, offsets, lengths, dtype in msgpack.unpackb(data)
    ]


class SenderGone(EngineError):
    """A sender ended too early. Senders do that when something has failed elsewhere, so others may know more."""


def without_frames(error: E) -> E | EngineError:
    """The same error, to be kept: its own would keep all that the functions which it went through knew."""
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - some are made in ways of their own
        return EngineError(f"{type(error).__name__}: {error}")


def first_cause(errors: Sequence[BytecheckpointError]) -> BytecheckpointError:
    """The first that is not only the consequence of another."""
    return next((error for error in errors if not isinstance(error, SenderGone)), errors[0])


@dataclass(frozen=True)
class Failure:
    """An exception as it travels from a worker. ``serving`` says what the worker serves after it."""

    kind: str
    message: str
    faults: list[list[str]]
    traceback_text: str
    serving: str

    @classmethod
    def of(cls, error: BaseException, serving: str) -> Failure:
        faults = getattr(error, "faults", []) if isinstance(error, MismatchError) else []
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-(1 << 16) :]
        return cls(type(error).__name__, str(error), [[str(part) for part in fault] for fault in faults], text, serving)

    def error(self, where: str) -> BytecheckpointError:
        """The same class of this library's errors, or an ``EngineError``; names ``where`` it happened."""
        known = SenderGone if self.kind == SenderGone.__name__ else None
        known = getattr(errors, self.kind) if self.kind in errors.__all__ else known
        after = f"\n  {where} {self.serving}" if self.serving else ""
        if known is MismatchError:
            faults = [(kind, name, detail) for kind, name, detail in self.faults]
            return MismatchError(f"{where}: {self.message}{after}", faults)
        if known is not None and issubclass(known, BytecheckpointError) and known is not errors.RankFailedError:
            return cast("BytecheckpointError", known(f"{where}: {self.message}{after}"))
        return EngineError(f"{where}: {self.kind}: {self.message}{after}\n\n{self.traceback_text}".rstrip())
