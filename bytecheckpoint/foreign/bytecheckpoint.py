"""Read folders of the open-source ByteCheckpoint package (https://github.com/ByteDance-Seed/ByteCheckpoint) in place.

``model/`` and ``optimizer/`` are folders of DCP whose tensors are plain bytes, with a pickled header for each in
``.metadata``. ``extra_state/`` has a file of ``torch.save`` for each rank.
"""

from __future__ import annotations

import re
from typing import Any

from ..checkpoint.index import Index
from ..errors import FormatError, KeyNotFoundError
from ..format.values.types import UnreadObject
from ..frameworks.optimizer_groups import same_value
from ..frameworks.tree_paths import find_all
from .building import IndexBuilder
from .dcp import DcpFolder
from .naming import EXTRA_SECTION, MODEL_SECTION, OPTIMIZER_SECTION, sections_of
from .pickles.records import Global, TensorRef
from .source_path import SourcePath
from .torch_values import TorchValues

_METADATA = Global("bytecheckpoint.checkpointer.meta_type", "Metadata")
_EXTRA_FILE = re.compile(r"extra_state_rank_(\d+)\.pt")
_MISSING = object()


def read_bytecheckpoint(source: SourcePath) -> Index | None:
    """Return the index of a folder of the ByteCheckpoint package; None if the path is none.

    What all ranks stored with equal values is shared. Another plain value belongs to the rank that stored it;
    another tensor, such as the state of a generator, is not read.

    Raises ``FormatError`` and ``CorruptionError`` for damaged files.
    """
    if source.name or f"{MODEL_SECTION}/" not in source.children:
        return None
    try:
        model = DcpFolder(source.below(MODEL_SECTION))
    except KeyNotFoundError:
        return None
    if model.kind != _METADATA:
        return None
    builder = IndexBuilder(source.backend, "ByteCheckpoint")
    builder.add_tree(MODEL_SECTION, _section_of(model, builder, MODEL_SECTION))
    if f"{OPTIMIZER_SECTION}/" in source.children:
        optimizer = DcpFolder(source.below(OPTIMIZER_SECTION))
        builder.add_tree(OPTIMIZER_SECTION, _section_of(optimizer, builder, OPTIMIZER_SECTION))
    # A rank that has replicas only writes no tensors.
    return builder.build(world_size=max(model.world_size, _add_extra_state(source, builder)))


def _section_of(folder: DcpFolder, builder: IndexBuilder, name: str) -> Any:
    found = sections_of(folder.tree(builder))
    if name not in found:
        raise FormatError(f"{builder.backend.url}/{name}: its metadata has no section {name!r}")
    return found[name]


def _add_extra_state(source: SourcePath, builder: IndexBuilder) -> int:
    """Add the section and return the number of ranks that stored a part of it."""
    folder = source.below(EXTRA_SECTION)
    names = folder.children if f"{EXTRA_SECTION}/" in source.children else ()
    files = {int(found[1]): name for name in names if (found := _EXTRA_FILE.fullmatch(name))}
    ranks = sorted(files)
    trees = dict(zip(ranks, folder.objects(files[rank] for rank in ranks), strict=True))
    if not trees:
        return 0
    shared, own = _divide(list(trees.values()))
    values = TorchValues(builder)
    builder.add_tree(EXTRA_SECTION, {} if shared is _MISSING else values.tree(shared))
    for rank, tree in zip(trees, own, strict=True):
        if tree is not _MISSING:
            builder.add_tree(EXTRA_SECTION, values.tree(tree), rank=rank)
    return max(trees) + 1


def _divide(found: list[Any]) -> tuple[Any, list[Any]]:
    """Return what is equal on all ranks, and the rest of each; ``_MISSING`` for nothing."""
    nothing = [_MISSING] * len(found)
    if all(type(one) is dict for one in found):
        shared: dict[Any, Any] = {}
        own: list[dict[Any, Any]] = [{} for _ in found]
        for key in dict.fromkeys(key for tree in found for key in tree):
            common, rest = _divide([tree.get(key, _MISSING) for tree in found])
            for tree, part in zip((shared, *own), (common, *rest), strict=True):
                if part is not _MISSING:
                    tree[key] = part
        return shared, [tree or _MISSING for tree in own]
    if all(_equal(found[0], one) for one in found):
        return found[0], nothing
    if find_all(found, TensorRef):
        return UnreadObject("a tensor that differs between the ranks"), nothing
    return _MISSING, found


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is TensorRef:
        is_same = (one.dtype, one.shape, one.is_whole) == (other.dtype, other.shape, other.is_whole)
        return one is other or (is_same and one.is_whole and one.storage.crc32 == other.storage.crc32 is not None)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return same_value(one, other)
