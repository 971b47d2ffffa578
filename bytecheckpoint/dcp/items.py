"""Convert between DCP's names of items and the sections, tensor names and value paths of a checkpoint.

DCP flattens a nested state dict: an item is called by the keys that lead to it, joined with dots. Its first key is the
section here, as if the state dict had been passed to ``bytecheckpoint.save``. Tensors at the top level (of a model's
own state dict, say) and entries whose name no section can have share the section ``model``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ..checkpoint.location import Location
from ..errors import NameCollisionError, PlanError, UnserializableError, UnsupportedURLError
from ..format.values.types import Container, path_name
from ..frameworks.base import Context
from ..frameworks.digests import tensor_digest
from ..frameworks.sections import check_name, is_section_name
from ..frameworks.tensors import dense_view
from ..frameworks.tree_capture import Capture
from ..frameworks.tree_paths import is_sequence, is_stateful, with_lists
from ..tensors.geometry import Box
from ..tensors.metadata import Path
from ..tensors.shards import SectionSource, Shard, basic_meta

_ZIP = b"PK"  # the first bytes of what torch.save writes

METADATA_KEY = "dcp"
"""The entry of a checkpoint's metadata with what its tree does not state about the items of DCP.

``top_level`` is the section of the entries at the top level of the state dict that are no sections, or empty. If
``flattened`` is false, the planner did not flatten the state dict, and each entry at its top level is one item.
"""

_TOP_LEVEL = ("model", "top_level")
_ROOT_STATE = "_extra_state"  # of a module that is itself the state dict


def is_served(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a storage backend serves a path or URL."""
    try:
        Location(checkpoint_id).open()
    except UnsupportedURLError:
        return False
    return True


def top_level_section(plans: Iterable[SavePlan]) -> str:
    """Choose the section of top-level tensors: ``model``, or another name if the state dict has an entry ``model``."""
    taken: set[object] = set()
    for plan in plans:
        paths = _recorded_paths(plan.planner_data)
        taken.update(path[0] for path in paths.values())
        taken.update(item.index.fqn for item in plan.items if item.index.fqn not in paths)
    name = next((name for name in _TOP_LEVEL if name not in taken), _TOP_LEVEL[-1])
    while name in taken:
        name += "_"
    return name


def describe_containers(section: str, leaves: Iterable[tuple[Path, bool]]) -> dict[Path, Container]:
    """Return the containers of a tree, from the path of each leaf and whether it is a tensor.

    They are those that a save of the tree itself stores, with which a load rebuilds it.
    """
    root: dict[str | int, Any] = {}
    for path, is_tensor in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        if path:
            node[path[-1]] = torch.empty(0, dtype=torch.float32) if is_tensor else None
    capture = Capture(Context(section, {}))
    capture.visit(with_lists(root))
    values = capture.finish().values
    return {path: value for path, value in values.items() if type(value) is Container}


def _recorded_paths(planner_data: object) -> dict[str, Path]:
    """The keys that lead to each item, if the planner recorded them in the form in which DCP's own planner does."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {
        fqn: path
        for fqn, path in planner_data.items()
        if type(path) is tuple and all(type(key) in (str, int) for key in path) and path_name(path) == fqn
    }


@dataclass
class SectionItems:
    """The items of one section on this rank.

    ``leaves`` has the path of each item, and whether it is a tensor.
    """

    source: SectionSource = field(default_factory=SectionSource)
    leaves: list[tuple[Path, bool]] = field(default_factory=list)


def resolve_items(
    plan: SavePlan, planner: SavePlanner, top_level: str, *, compare: bool = False
) -> dict[str, SectionItems]:
    """Request every item from the planner; return them by section. Those that are in no section are in ``top_level``.

    With ``compare``, tensors that DCP describes as whole get digests, by which the ranks find out whether they are
    replicas.

    Raises:
        StateError: An item cannot be stored, or two items would be stored under one name.
    """
    sections: dict[str, SectionItems] = {}
    paths = _recorded_paths(plan.planner_data)
    for item in plan.items:
        is_tensor = item.type != WriteItemType.BYTE_IO
        section, path = top_level, paths.get(item.index.fqn, (item.index.fqn,))
        if is_section_name(path[0]) and (len(path) > 1 or not (is_tensor or path[0] == _ROOT_STATE)):
            section, path = str(path[0]), path[1:]
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
