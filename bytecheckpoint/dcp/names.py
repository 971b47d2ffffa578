"""Convert between DCP's names of items and the sections, tensor names and value paths of a checkpoint.

DCP flattens a nested state dict: an item is called by the keys that lead to it, joined with dots. Its first key is the
section here, as if the state dict had been passed to ``bytecheckpoint.save``. Tensors at the top level (of a model's
own state dict, say) and entries whose name no section can have share the section ``model``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from ..format.values import Container, path_name
from ..frameworks.base import Context
from ..frameworks.sections import is_section_name
from ..frameworks.tree_capture import Capture
from ..frameworks.tree_paths import with_lists
from ..tensors.metadata import Path

__all__ = ["METADATA_KEY", "ItemPaths", "StoredAs", "describe_containers", "top_level_section"]

METADATA_KEY = "dcp"
"""The entry of a checkpoint's metadata with what its tree does not state about the items of DCP."""

_TOP_LEVEL = ("model", "top_level")
_ROOT_STATE = "_extra_state"  # of a module that is itself the state dict


@dataclass(frozen=True)
class StoredAs:
    """What a checkpoint records, under ``METADATA_KEY``, about the state dict that DCP saved.

    Attributes:
        top_level: The section of the entries at the top level of the state dict that are no sections; empty if none is.
        flattened: Whether the planner flattened the state dict. Otherwise each entry at its top level is one item.
    """

    top_level: str = ""
    flattened: bool = True

    def to_metadata(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        return {METADATA_KEY: {"top_level": self.top_level, "flattened": self.flattened}}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> StoredAs:
        """Return what the manifest records; the default for a checkpoint that DCP has not saved."""
        found = metadata.get(METADATA_KEY)
        if not isinstance(found, Mapping):
            return cls()
        return cls(str(found.get("top_level", "")), bool(found.get("flattened", True)))


@dataclass(frozen=True)
class ItemPaths:
    """Where one rank's items are stored. ``paths`` are the keys that lead to each, as the planner recorded them."""

    paths: Mapping[str, Path]
    top_level: str

    @classmethod
    def of(cls, planner_data: object, top_level: str) -> ItemPaths:
        """Use what a planner recorded if it has the form in which DCP's own planner records it."""
        return cls(_recorded_paths(planner_data), top_level)

    def place(self, fqn: str, *, is_tensor: bool) -> tuple[str, Path]:
        """Return the section of an item, and its path inside it."""
        path = self.paths.get(fqn, (fqn,))
        if _is_in_section(path, is_tensor=is_tensor):
            return str(path[0]), path[1:]
        return self.top_level, path


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
            node[path[-1]] = torch.empty(0) if is_tensor else None
    capture = Capture(Context(section, {}))
    capture.visit(with_lists(root))
    values = capture.finish().values
    return {path: value for path, value in values.items() if type(value) is Container}


def _recorded_paths(planner_data: object) -> dict[str, Path]:
    if not isinstance(planner_data, Mapping):
        return {}
    return {
        fqn: path
        for fqn, path in planner_data.items()
        if type(path) is tuple and all(type(key) in (str, int) for key in path) and path_name(path) == fqn
    }


def _is_in_section(path: Path, *, is_tensor: bool) -> bool:
    first = path[0]
    if not is_section_name(first):
        return False
    return len(path) > 1 or not (is_tensor or first == _ROOT_STATE)
