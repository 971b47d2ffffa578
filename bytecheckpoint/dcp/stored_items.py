"""List what a checkpoint stores as DCP would name it, and rebuild single items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ..checkpoint.checkpoint import Checkpoint
from ..errors import StateError
from ..format.values import Container, decode_value, is_left_out
from ..frameworks.tree_paths import PathIndex, build_tree, is_sequence
from ..tensors.metadata import Path
from .names import StoredAs

__all__ = ["StoredItems", "StoredTensorItem"]

_MODELS = frozenset({"module", "fsdp1", "deepspeed", "megatron"})
_OPTIMIZERS = frozenset({"optimizer", "deepspeed-optimizer", "megatron-optimizer"})
_EXTRA_STATE = "_extra_state"
_OWN_STATE = "_state_dict"
# What docs/format.md, section 5.1, defines below a model besides its state dict.
_NOT_IN_STATE_DICT = ("_metadata", "_engine", "__wrapper__")


@dataclass(frozen=True)
class StoredTensorItem:
    """A tensor in the manifest's row ``row``."""

    row: int


@dataclass(frozen=True)
class _Refused:
    """A value that cannot be decoded."""

    error: StateError


@dataclass
class StoredItems:
    """The items of a checkpoint under DCP's names: tensors, and plain values, which may contain ``StoredTensorItem``.

    ``paths`` are the keys that lead to each item, as DCP's planner records them; None if the planner did not flatten.
    ``others`` are further names of values: the hyper-parameters of each parameter of an optimizer, as a flattened state
    dict of it has them. A state dict that is made from the checkpoint does not get them.
    """

    items: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, rank: int, allow_pickle: bool) -> StoredItems:
        """List all items for one rank: shared ones and those that this rank of the save had alone.

        Raises:
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        stored = StoredAs.from_metadata(checkpoint.metadata)
        state: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for section in checkpoint.manifest.sections:
            values = _section_values(checkpoint, section.name, rank, allow_pickle=allow_pickle)
            rows = checkpoint.section_rows(section.name, rank)
            if section.kind in _OPTIMIZERS:
                options = _options_by_name(values)
                state[section.name] = _optimizer_state_dict(values, rows, options)
                for fqn, found in options.items():
                    others.update((f"{section.name}.param_groups.{fqn}.{key}", value) for key, value in found.items())
                continue
            tree = _tree(section.name, values, rows)
            if section.kind in _MODELS:
                tree = _model_state_dict(tree)
            if section.name == stored.top_level and isinstance(tree, Mapping):
                state.update(tree)
            else:
                state[section.name] = tree
        if not stored.flattened:
            return cls(state)
        # Tensors without memory make DCP's own rules for lists of tensors apply.
        items, paths = flatten_state_dict(_replaced(state, StoredTensorItem, _placeholder))
        return cls({name: _replaced(item, torch.Tensor, _item_of) for name, item in items.items()}, paths, others)

    def __contains__(self, name: str) -> bool:
        return name in self.items or name in self.others

    def __getitem__(self, name: str) -> Any:
        return self.items[name] if name in self.items else self.others[name]

    def value(self, name: str, tensors: Mapping[int, torch.Tensor]) -> Any:
        """Return a plain item, with ``tensors`` by row in the place of those inside it.

        Raises:
            StateError: A value is stored as a pickle.
        """
        refused = _found(self[name], _Refused)
        if refused:
            raise refused[0].error
        return _replaced(self[name], StoredTensorItem, lambda item: tensors[item.row])

    def rows_inside(self, name: str) -> list[int]:
        """Return the rows of the tensors inside an item."""
        return [item.row for item in _found(self[name], StoredTensorItem)]


class _Placeholder(torch.Tensor):
    """A tensor without elements that refers to a stored one."""

    row: int


def _placeholder(item: StoredTensorItem) -> torch.Tensor:
    made = torch.empty(0).as_subclass(_Placeholder)
    made.row = item.row
    return made


def _item_of(tensor: Any) -> StoredTensorItem:
    return StoredTensorItem(tensor.row)


def _section_values(checkpoint: Checkpoint, section: str, rank: int, *, allow_pickle: bool) -> dict[Path, Any]:
    values: dict[Path, Any] = {}
    found = sorted(
        checkpoint.index.values(section=section, ranks=(rank,)),
        key=lambda value: value.rank is not None,  # a rank's own values take precedence
    )
    for value in found:
        try:
            decoded = decode_value(value.encoded, where=value.name, allow_pickle=allow_pickle)
        except StateError as error:
            decoded = _Refused(error)
        if not is_left_out(decoded):
            values[value.path] = decoded
    return values


def _tree(section: str, values: Mapping[Path, Any], rows: Mapping[str, int]) -> Any:
    if set(values) == {()} and not rows and not isinstance(values[()], Container):
        return values[()]
    index = PathIndex.of(values)
    leaves = [(path, value) for path, value in values.items() if type(value) is not Container]
    leaves += [(index.path_of(fqn), StoredTensorItem(row)) for fqn, row in rows.items()]
    return build_tree(leaves, index.containers, (), section)


def _model_state_dict(tree: Any) -> dict[str, Any]:
    state = {name: value for name, value in tree.items() if name not in (*_NOT_IN_STATE_DICT, _EXTRA_STATE, _OWN_STATE)}
    for module, extra in tree.get(_EXTRA_STATE, {}).items():
        state[f"{module}.{_EXTRA_STATE}" if module else _EXTRA_STATE] = extra
    return {**state, **tree.get(_OWN_STATE, {})}


def _options_by_name(values: Mapping[Path, Any]) -> dict[str, dict[str, Any]]:
    """The hyper-parameters of each parameter of an optimizer."""
    return {str(path[1]): value for path, value in values.items() if path[:1] == ("param_groups",) and len(path) == 2}


def _optimizer_state_dict(
    values: Mapping[Path, Any], rows: Mapping[str, int], options: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The state dict of an optimizer as ``get_optimizer_state_dict`` returns it.

    Parameters with equal hyper-parameters form a group, because a checkpoint does not store groups.
    """
    state: dict[str, Any] = {}
    for path, value in values.items():
        if path[:1] == ("state",) and len(path) == 3 and type(value) is not Container:
            state.setdefault(str(path[1]), {})[str(path[2])] = value
    for name, row in rows.items():
        rest = name.removeprefix("state.")
        end = len(rest)
        while (end := rest.rfind(".", 0, end)) > 0 and rest[:end] not in options:
            pass
        if end > 0:
            state.setdefault(rest[:end], {})[rest[end + 1 :]] = StoredTensorItem(row)
    groups: list[dict[str, Any]] = []
    for fqn, found in options.items():
        group = next((one for one in groups if {**one, "params": None} == {**found, "params": None}), None)
        if group is None:
            groups.append(group := {**found, "params": []})
        group["params"].append(fqn)
    return {"state": state, "param_groups": groups}


def _replaced(node: Any, kind: type, replace: Any) -> Any:
    """The tree with everything of a type replaced."""
    if isinstance(node, kind):
        return replace(node)
    if isinstance(node, dict):
        made = type(node)() if type(node).__init__ is dict.__init__ else {}
        made.update((key, _replaced(item, kind, replace)) for key, item in node.items())
        return made
    if is_sequence(node):
        return type(node)(_replaced(item, kind, replace) for item in node)
    return node


def _found(node: Any, kind: type) -> list[Any]:
    if isinstance(node, kind):
        return [node]
    if isinstance(node, Mapping):
        return [one for item in node.values() for one in _found(item, kind)]
    return [one for item in node for one in _found(item, kind)] if is_sequence(node) else []
