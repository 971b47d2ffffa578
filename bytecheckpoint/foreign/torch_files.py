"""Read files of ``torch.save``, with their tensors in place."""

from __future__ import annotations

from typing import Any

from ..checkpoint.index import Index
from ..errors import KeyNotFoundError, NotACheckpointError
from .archives import read_archive
from .building import IndexBuilder
from .naming import sections_of
from .place import Place
from .torch_values import TorchValues

__all__ = ["read_torch_file"]

_ZIP, _GGUF = b"PK\3\4", b"GGUF"


def read_torch_file(place: Place) -> Index | None:
    """Return the index of one file of ``torch.save``; None if the path is a folder, or another kind of file.

    Raises ``NotACheckpointError`` for a kind of file that is known but not read, ``FormatError`` and
    ``CorruptionError`` for a damaged file.
    """
    if not place.name:
        return None
    magic = bytearray(4)
    try:
        if place.backend.stat(place.name).size < len(magic):
            return None
        place.backend.read_into(place.name, 0, magic)
    except KeyNotFoundError:
        return None
    if magic == _GGUF:
        raise NotACheckpointError(
            f"{place.url} is a GGUF file of llama.cpp, whose quantized blocks are not read; use the safetensors files "
            f"that it was converted from"
        )
    if magic != _ZIP:
        return None
    builder = IndexBuilder(place.backend, "torch.save")
    tree = TorchValues(builder).tree(read_archive(place.backend, place.name).value)
    for section, part in sections_of(tree).items():
        builder.add_tree(section, part)
    return builder.build(name=place.name, step=_step_of(tree))


def _step_of(tree: Any) -> int | None:
    found = [tree[key] for key in ("global_step", "step", "iteration") if isinstance(tree, dict) and key in tree]
    return found[0] if found and type(found[0]) is int and found[0] >= 0 else None
