"""From a codec's name to the codec."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from ..errors import UnsupportedVersionError
from .base import Codec
from .builtin import RawCodec, ZstdCodec

__all__ = ["ENTRY_POINT_GROUP", "codec_named", "codec_names"]

ENTRY_POINT_GROUP = "bytecheckpoint.codecs"

_BUILTIN: dict[str, type[Codec]] = {codec.name: codec for codec in (RawCodec, ZstdCodec)}


@cache
def codec_named(name: str) -> Codec:
    """The codec of this name: a built-in one, or a class that another package registers under the entry point group
    ``bytecheckpoint.codecs``. Built-in names cannot be taken over.

    Raises ``UnsupportedVersionError`` where there is none; the message says which are known.
    """
    if name in _BUILTIN:
        return _BUILTIN[name]()
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        codec = found.load()()
        if not isinstance(codec, Codec) or codec.name != name:
            raise UnsupportedVersionError(f"entry point {found.value} of codec {name!r} does not make a Codec {name!r}")
        return codec
    raise UnsupportedVersionError(
        f"no codec {name!r:.80}; known are {', '.join(codec_names())}: install the package that brings it"
    )


def codec_names() -> list[str]:
    """Every codec that ``codec_named`` finds, by name."""
    return sorted({*_BUILTIN, *(found.name for found in entry_points(group=ENTRY_POINT_GROUP))})
