"""Find a checkpoint of Megatron-core, and read what it contains besides the bytes of tensors.

A folder of ``dist_checkpointing`` is one of ``torch.distributed.checkpoint`` with two more files: ``metadata.json``
states the format, and ``common.pt`` has what is equal on all ranks. Names and objects are those of
``megatron/core/dist_checkpointing`` (``core.py``, ``mapping.py``, ``strategies/common.py``) and of the trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError, CorruptionError, FormatError
from ..building import IndexBuilder, StoredLeaf
from ..dcp import METADATA_KEY, DcpFolder
from ..source_path import SourcePath, read_json

_FORMAT, _COMMON, _POINTER = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"
_TORCH_DIST = "torch_dist"
_ADVICE = f"Load it with Megatron and save it with bytecheckpoint or with --ckpt-format {_TORCH_DIST}"
_MAX_SMALL_BYTES = 1 << 20
_LEGACY = re.compile(r"mp_rank_\d\d(_\d\d\d)*/")
_OBJECT = re.compile(r"(.+)/shard_([0-9.]{1,100})_([0-9.]{1,100})")


class ShardedObject(NamedTuple):
    """An object that is no tensor. ``offset`` is its place in a grid of objects with the same key, if it is in one."""

    key: str
    offset: tuple[int, ...]
    value: Any


class Contents(NamedTuple):
    """What a folder contains. Objects are as ``interpret`` returns them.

    Attributes:
        tensors: The tensors by Megatron's keys.
        objects: All other objects that ranks saved.
        common: What all ranks have in common.
        world_size: The number of ranks that wrote files.
    """

    tensors: Mapping[str, StoredLeaf]
    objects: list[ShardedObject]
    common: Mapping[str, Any]
    world_size: int


def find_folder(source: SourcePath) -> SourcePath | None:
    """Return the folder of the iteration that Megatron saved last, or the path itself; None if it is none.

    Raises ``CheckpointError`` for another format of Megatron, and ``CorruptionError`` if the iteration is missing.
    """
    if source.name:
        return None
    found, text = source, ""
    if _POINTER in source.children and _FORMAT not in source.children:
        text = source.backend.get(_POINTER, max_size=_MAX_SMALL_BYTES).decode("utf-8", "replace").strip()
        if text != "release" and not (text.isdecimal() and len(text) < 20):
            return None
        found = source.below("release" if text == "release" else f"iter_{int(text):07d}")
    if any(map(_LEGACY.fullmatch, found.children)):
        raise CheckpointError(
            f"{found.url} has one file of Megatron's format 'torch' for each model parallel rank, which is not "
            f"read, since it does not state how the ranks split the tensors. {_ADVICE}"
        )
    has_files = _FORMAT in found.children
    if text and not has_files:
        raise CorruptionError(
            f"{source.url}/{_POINTER} names {text!r}, but {found.url}/{_FORMAT} is not there; fetch it, or pass "
            f"the folder of another iteration"
        )
    return found if has_files and _is_torch_dist(found) else None


def _is_torch_dist(folder: SourcePath) -> bool:
    """Whether ``metadata.json`` is Megatron's. Raises ``CheckpointError`` for another format."""
    try:
        config = read_json(folder.backend, folder.prefix + _FORMAT, _MAX_SMALL_BYTES)
    except FormatError:
        return False
    kind = config.get("sharded_backend") if isinstance(config, dict) else None
    if type(kind) is str and kind != _TORCH_DIST:
        raise CheckpointError(f"{folder.url} has Megatron's format {kind!r:.80}, which is not read. {_ADVICE}")
    return kind == _TORCH_DIST


def read_contents(folder: SourcePath, builder: IndexBuilder) -> Contents:
    """Read everything but the bytes of tensors.

    Raises ``CorruptionError`` for a missing file, and ``FormatError`` for a damaged one.
    """
    if METADATA_KEY not in folder.children:
        raise CorruptionError(f"{folder.url}/{METADATA_KEY}: file is missing; fetch it again")
    (common,) = folder.objects([_COMMON])
    stored = DcpFolder(folder)
    if type(common) is not dict or not all(type(key) is str for key in common):
        raise FormatError(f"{folder.url}/{_COMMON}: it holds no dict with names")
    tensors, objects = stored.contents(builder)
    return Contents(tensors, list(_sharded_objects(objects)), common, stored.world_size)


def _sharded_objects(objects: Mapping[str, Any]) -> Iterator[ShardedObject]:
    for name, value in objects.items():
        found = _OBJECT.fullmatch(name)
        if type(value) is list and len(value) == 1:
            (value,) = value  # Megatron writes the list of a rank's objects with this name
        is_alone = found is None or set(found[3].split(".")) == {"1"}
        offset = () if found is None or is_alone else tuple(int(part) for part in found[2].split(".") if part)
        yield ShardedObject(name if found is None else found[1], offset, value)
