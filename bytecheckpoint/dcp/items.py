"""Turn the items that DCP's plan assigns to this rank into the tensors and values of sections."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ..errors import NameCollisionError, PlanError, UnserializableError
from ..format.values import path_name
from ..frameworks.base import Context
from ..frameworks.digests import tensor_digest
from ..frameworks.sections import check_name
from ..frameworks.tensors import dense_view
from ..frameworks.tree_capture import Capture
from ..frameworks.tree_paths import is_sequence, is_stateful
from ..tensors.geometry import Box
from ..tensors.metadata import Path
from ..tensors.shards import SectionSource, Shard, basic_meta
from .names import ItemPaths

__all__ = ["SectionItems", "resolve_items"]

_ZIP = b"PK"  # the first bytes of what torch.save writes


@dataclass
class SectionItems:
    """The items of one section on this rank.

    ``leaves`` has the path of each item, and whether it is a tensor.
    """

    source: SectionSource = field(default_factory=SectionSource)
    leaves: list[tuple[Path, bool]] = field(default_factory=list)


def resolve_items(
    plan: SavePlan, planner: SavePlanner, paths: ItemPaths, *, compare: bool = False
) -> dict[str, SectionItems]:
    """Request every item from the planner; return them by section.

    With ``compare``, tensors that DCP describes as whole get digests, by which the ranks find out whether they are
    replicas.

    Raises:
        StateError: An item cannot be stored, or two items would be stored under one name.
    """
    sections: dict[str, SectionItems] = {}
    for item in plan.items:
        is_tensor = item.type != WriteItemType.BYTE_IO
        section, path = paths.place(item.index.fqn, is_tensor=is_tensor)
        items = sections.setdefault(section, SectionItems())
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            _add_tensor(items.source, section, path, item, data, compare=compare)
        else:
            _add_value(items.source, section, path, _saved_object(item.index.fqn, data))
        if (path, is_tensor) not in items.leaves[-1:]:  # shards of one tensor follow each other
            items.leaves.append((path, is_tensor))
    return sections


def _add_tensor(
    source: SectionSource, section: str, path: Path, item: WriteItem, tensor: torch.Tensor, *, compare: bool
) -> None:
    fqn, described = path_name(path), item.tensor_data
    full = f"{section}.{fqn}"
    if described is None:
        raise PlanError(f"{item.index.fqn}: the planner has supplied a tensor for an item that it described as bytes")
    check_name(full, fqn)
    dense = dense_view(full, tensor)
    meta = basic_meta(dense.dtype, described.size)
    if source.metas.setdefault(fqn, meta) != meta:
        raise NameCollisionError(f"{full}: two items have this name, one is {source.metas[fqn]}, the other {meta}")
    box = Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes))
    if box.numel:
        source.shards.append(Shard(fqn, meta, box, dense))
    elif not meta.numel and all(shard.fqn != fqn for shard in source.shards[-1:]):
        source.shards.append(Shard(fqn, meta, Box.whole(meta.shape), dense.new_empty(meta.shape)))
    if compare and item.type == WriteItemType.TENSOR:
        source.digests[fqn] = tensor_digest(meta, dense)


def _saved_object(fqn: str, data: io.BytesIO) -> Any:
    """Return the object that the planner has serialized in this process, right before."""
    if data.getbuffer()[:2] != _ZIP:
        raise UnserializableError(
            f"{fqn}: the planner supplied bytes that torch.save has not written, so their meaning is unknown; let "
            f"resolve_data return torch.save's bytes, as DefaultSavePlanner does"
        )
    data.seek(0)
    return torch.load(data, weights_only=False)


def _add_value(source: SectionSource, section: str, path: Path, value: Any) -> None:
    if _holds_object(value):
        source.values[path] = value  # refused when it is encoded, or stored as a pickle
        return
    # As the tree that it is, because only tensors of a tree are stored as tensors.
    capture = Capture(Context(section, {}))
    capture.visit(value, path)
    found = capture.finish()
    for fqn in found.metas:
        check_name(f"{section}.{fqn}", fqn)
        if fqn in source.metas:
            raise NameCollisionError(f"{section}.{fqn}: two items have this name; rename one key")
    source.metas.update(found.metas)
    source.shards.extend(found.shards)
    source.aliases.update(found.aliases)
    source.values.update(found.values)


def _holds_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_object, value.values()))
    return any(map(_holds_object, value)) if is_sequence(value) else is_stateful(value)
