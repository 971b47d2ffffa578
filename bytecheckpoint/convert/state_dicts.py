"""The state dicts of what a checkpoint stores, with references in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.values import StoredValue, decoded_values, section_tree
from ..errors import StateError
from ..format.values.decoding import decode_value
from ..format.values.types import Container
from ..frameworks.optimizer_state import split_entry
from ..tensors.metadata import Path

_MODELS = frozenset({"module", "fsdp1", "deepspeed", "megatron"})
_OPTIMIZERS = frozenset({"optimizer", "deepspeed-optimizer", "megatron-optimizer"})
_EXTRA_STATE = "_extra_state"
_OWN_STATE = "_state_dict"
# What docs/sections.md defines below a model besides its state dict.
_NOT_IN_STATE_DICT = ("_metadata", "_engine", "__wrapper__")


@dataclass(frozen=True)
class StoredTensorRef:
    """The tensor in the manifest's row ``row``."""

    row: int


@dataclass(frozen=True)
class Refused:
    """A value that cannot be decoded."""

    error: StateError


def section_state(
    checkpoint: Checkpoint,
    section: str,
    *,
    rank: int = 0,
    allow_pickle: bool = False,
    keep: Callable[[str], bool] = lambda name: True,
) -> Any:
    """Return the state dict of a section, or the tree that was saved: shared items and those of one rank of the save.

    A model's is that of the module; an optimizer's has names of parameters in place of numbers, and one group for all
    parameters with equal hyper-parameters, because a checkpoint does not store groups. Tensors are ``StoredTensorRef``,
    and values that cannot be decoded ``Refused``.

    Args:
        checkpoint: The opened checkpoint.
        section: Name of the section.
        rank: The rank of the save whose own items are included.
        allow_pickle: Decode values that are stored as pickles, which can run arbitrary code.
        keep: Whether to include the tensor or value with this full name.

    Returns:
        The tree.

    Raises:
        MismatchError: The items contradict each other, or a list is incomplete.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: The store failed.
    """

    def decode(value: StoredValue) -> Any:
        try:
            return decode_value(value.encoded, where=value.name, allow_pickle=allow_pickle)
        except StateError as error:
            return Refused(error)

    stored = checkpoint.index.values(section=section, ranks=(rank,))
    values = decoded_values((value for value in stored if keep(value.name)), decode)
    rows = {fqn: row for fqn, row in checkpoint.section_rows(section, rank).items() if keep(f"{section}.{fqn}")}
    number = checkpoint.manifest.section_index(section)
    kind = "" if number is None else checkpoint.manifest.sections[number].kind
    if kind in _OPTIMIZERS:
        return _optimizer_state_dict(values, rows)
    tree = section_tree(section, values, {fqn: StoredTensorRef(row) for fqn, row in rows.items()})
    return _model_state_dict(tree) if kind in _MODELS else tree


def options_by_name(tree: Any) -> dict[str, Any] | None:
    """Return the hyper-parameters of each parameter as a flattened state dict of an optimizer has them.

    None if the tree is no state dict of an optimizer, or has numbers in place of names.
    """
    groups = tree.get("param_groups") if isinstance(tree, Mapping) else None
    found = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    named = [(fqn, group) for group in found for fqn in group.get("params", ()) if isinstance(fqn, str)]
    options = {
        f"param_groups.{fqn}.{key}": value for fqn, group in named for key, value in group.items() if key != "params"
    }
    return options if named else None


def _model_state_dict(tree: Any) -> dict[str, Any]:
    state = {name: value for name, value in tree.items() if name not in (*_NOT_IN_STATE_DICT, _EXTRA_STATE, _OWN_STATE)}
    for module, extra in tree.get(_EXTRA_STATE, {}).items():
        state[f"{module}.{_EXTRA_STATE}" if module else _EXTRA_STATE] = extra
    return {**state, **tree.get(_OWN_STATE, {})}


def _optimizer_state_dict(values: Mapping[Path, Any], rows: Mapping[str, int]) -> dict[str, Any]:
    options = {
        str(path[1]): value for path, value in values.items() if path[:1] == ("param_groups",) and len(path) == 2
    }
    state: dict[str, Any] = {}
    for path, value in values.items():
        if path[:1] == ("state",) and len(path) == 3 and type(value) is not Container:
            state.setdefault(str(path[1]), {})[str(path[2])] = value
    for name, row in rows.items():
        fqn, key = split_entry(name.removeprefix("state."), options)
        if fqn:
            state.setdefault(fqn, {})[key] = StoredTensorRef(row)
    groups: list[dict[str, Any]] = []
    for fqn, found in options.items():
        group = next((one for one in groups if {**one, "params": None} == {**found, "params": None}), None)
        if group is None:
            groups.append(group := {**found, "params": []})
        group["params"].append(fqn)
    return {"state": state, "param_groups": groups}
