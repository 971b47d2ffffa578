"""Store and load the hyper-parameters of param groups.

Those of a group with parameters are stored under the name of each parameter, so that groups may be split and merged.
Those of an empty group are stored under the numbers of its optimizer and its group.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import MismatchError, UnsupportedTensorError
from ..tensors.shards import Path
from .optimizer_params import NamedParam
from .optimizer_wrappers import StateHolder

_IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation of the step but not its result. A load keeps the target's."""

_NOT_OPTIONS = frozenset({"params", "param_names"})

_EXPERT_MARKS = frozenset({"moe", "name"})
"""With these, DeepSpeed marks the groups of experts, and names their process groups, which depend on the layout."""

_GroupParams = tuple["MutableMapping[str, Any]", "list[str]"]
"""A group and the names of its parameters."""

_GroupOptions = tuple["MutableMapping[str, Any]", "dict[str, Any]"]
"""A group and the stored hyper-parameters to set."""


def group_path(fqn: str) -> Path:
    """The path of the hyper-parameters of the parameter ``fqn``."""
    return ("param_groups", fqn)


def groups_of(params: Iterable[NamedParam]) -> list[_GroupParams]:
    """The groups that have parameters, each with the names of all of them."""
    groups: dict[int, _GroupParams] = {}
    for named in params:
        groups.setdefault(id(named.group), (named.group, []))[1].extend(named.names)
    return list(groups.values())


def empty_groups(holders: Sequence[StateHolder]) -> Iterator[tuple[Path, MutableMapping[str, Any]]]:
    """The groups without parameters, by path."""
    for number, holder in enumerate(holders):
        for index, group in enumerate(holder.groups):
            if not group["params"]:
                yield ("empty_groups", number, index), group


def options_of(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The hyper-parameters as plain values. A one-element tensor (a learning rate on a device) becomes a number."""
    skipped = _NOT_OPTIONS | _EXPERT_MARKS if "moe" in group else _NOT_OPTIONS
    return {key: _plain(value, f"{where}.{key}") for key, value in group.items() if key not in skipped}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UnsupportedTensorError(
                f"{where}: a hyper-parameter of shape {tuple(value.shape)} is not one number; store it in the state of "
                "a parameter, or as a numpy array"
            )
        return value.item()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(item, where) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    return value


def agreed_options(
    groups: Iterable[_GroupParams],
    empty: Iterable[tuple[Path, MutableMapping[str, Any]]],
    values: Mapping[Path, Any],
) -> list[_GroupOptions]:
    """For each group, the stored hyper-parameters that its parameters have in common. ``empty`` groups have a path.

    Groups that are not stored are left out. Raises ``MismatchError`` (kind ``value``) if the parameters of one group
    were stored with different hyper-parameters, since no choice between them would be right.
    """
    result = [(group, _without_flags(values[path])) for path, group in empty if path in values]
    faults: list[tuple[str, str, str]] = []
    for group, names in groups:
        stored = {name: values[path] for name in names if (path := group_path(name)) in values}
        if not stored:
            continue
        first, options = next(iter(stored.items()))
        common = _without_flags(options)
        for name, other in stored.items():
            if _are_identical(other, options):
                continue
            others = _without_flags(other)
            differing = sorted(
                k
                for k in common.keys() | others.keys()
                if k not in common or k not in others or not same_value(common[k], others[k])
            )
            faults.extend(
                ("value", name, f"{key} = {others.get(key)!r}, but {first} has {common.get(key)!r}")
                for key in differing
            )
        result.append((group, common))
    if faults:
        lines = "\n".join(f"  {name}: {detail}" for _, name, detail in faults)
        raise MismatchError(
            "parameters of one param group were saved with different hyper-parameters; split the group as it was "
            f"saved, or exclude 'param_groups' from the load and set them yourself:\n{lines}",
            faults,
        )
    return result


def set_options(chosen: Iterable[_GroupOptions]) -> None:
    """Set the hyper-parameters of groups. Existing tensors keep their identity, device and dtype."""
    for group, options in chosen:
        for key, value in options.items():
            group[key] = _like(group.get(key), value)


def _are_identical(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether both have the same objects: those of one group are decoded once if they are simple."""
    return left.keys() == right.keys() and all(map(operator.is_, left.values(), right.values()))


def same_value(left: Any, right: Any) -> bool:
    """Whether plain values are equal, with NaN equal to NaN, and arrays compared by dtype, shape and bytes."""
    if left is right:
        return True
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(left.tobytes() == right.tobytes())
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_value(item, right[key]) for key, item in left.items())
    return bool(left == right) or bool(left != left and right != right)


def _without_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key not in _IMPLEMENTATION_FLAGS | _NOT_OPTIONS}


def _like(existing: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(existing, torch.Tensor) and existing is not None:
        value = value.item()
    if isinstance(existing, torch.Tensor) and existing.numel() == 1 and isinstance(value, (int, float, torch.Tensor)):
        with torch.no_grad():
            return existing.copy_(value) if isinstance(value, torch.Tensor) else existing.fill_(value)
    if type(existing) in (list, tuple) and isinstance(value, (list, tuple)):
        known = dict(enumerate(existing))
        return type(existing)(_like(known.get(index), item) for index, item in enumerate(value))
    return value
