"""Find a codec by its name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from ..errors import UnsupportedVersionError
from .base import Codec
from .builtin import RawCodec, ZstdCodec

__all__ = ["ENTRY_POINT_GROUP", "find_codec", "list_codecs"]

ENTRY_POINT_GROUP = "bytecheckpoint.codecs"

_BUILTIN: dict[str, type[Codec]] = {codec.name: codec for codec in (RawCodec, ZstdCodec)}


@cache
def find_codec(name: str) -> Codec:
    """Return the codec of this name.

    A codec is built in, or a class that another package registers under the entry point group
    ``bytecheckpoint.codecs``. A package cannot replace a built-in codec.

    Args:
        name: The codec's name in the manifest.

    Returns:
        One shared instance.

    Raises:
        UnsupportedVersionError: No codec has this name. The message lists the known names.
    """
    if name in _BUILTIN:
        return _BUILTIN[name]()
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        codec = found.load()()
        if not isinstance(codec, Codec) or codec.name != name:
            raise UnsupportedVersionError(
                f"entry point {found.value} does not create a Codec named {name!r}; fix or remove its package"
            )
        return codec
    raise UnsupportedVersionError(
        f"no codec is named {name!r:.80}; known: {', '.join(list_codecs())}. Install the package that provides it"
    )


def list_codecs() -> list[str]:
    """Return the names that ``find_codec`` accepts, sorted."""
    return sorted({*_BUILTIN, *(found.name for found in entry_points(group=ENTRY_POINT_GROUP))})
