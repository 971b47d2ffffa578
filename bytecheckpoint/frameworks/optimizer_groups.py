"""Hyper-parameters, stored for each parameter name, so that groups may be reordered, split or merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import MismatchError, UnsupportedTensorError
from ..tensors.shards import Path
from .optimizer_params import NamedParam

__all__ = [
    "IMPLEMENTATION_FLAGS",
    "GroupParams",
    "agreed_options",
    "group_path",
    "groups_of",
    "options_of",
    "set_options",
]

IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation of the step but not its result. A load keeps the target's."""

_NOT_OPTIONS = frozenset({"params", "param_names"})

GroupParams = tuple["dict[str, Any]", "list[str]"]
"""A group and the names of its parameters."""


def group_path(name: str) -> Path:
    """The path of the hyper-parameters of the parameter ``name``."""
    return ("param_groups", name)


def groups_of(params: Iterable[NamedParam]) -> list[GroupParams]:
    """The groups that have parameters, each with the names of all of them."""
    groups: dict[int, GroupParams] = {}
    for named in params:
        groups.setdefault(id(named.group), (named.group, []))[1].extend(named.names)
    return list(groups.values())


def options_of(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The hyper-parameters as plain values. A one-element tensor (a learning rate on a device) becomes a number."""
    return {key: _plain(value, f"{where}.{key}") for key, value in group.items() if key not in _NOT_OPTIONS}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UnsupportedTensorError(f"{where}: a hyper-parameter of shape {tuple(value.shape)} is not one number")
        return value.item()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(item, where) for item in value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    return value


def agreed_options(groups: Iterable[GroupParams], values: Mapping[Path, Any]) -> list[tuple[dict[str, Any], Any]]:
    """For each target group, the stored hyper-parameters of its parameters. Groups that are not stored are left out.

    Raises ``MismatchError`` (kind ``value``) if the parameters of one target group were stored with different
    hyper-parameters, since no choice between them would be right.
    """
    result: list[tuple[dict[str, Any], Any]] = []
    faults: list[tuple[str, str, str]] = []
    for group, names in groups:
        stored = {name: values[path] for name in names if (path := group_path(name)) in values}
        if not stored:
            continue
        first, options = next(iter(stored.items()))
        common = _without_flags(options)
        for name, other in stored.items():
            if other == options:
                continue
            others = _without_flags(other)
            differing = sorted(k for k in common.keys() | others.keys() if common.get(k) != others.get(k))
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


def _without_flags(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key not in IMPLEMENTATION_FLAGS | _NOT_OPTIONS}


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the hyper-parameters of a group. Existing tensors keep their identity, device and dtype."""
    for key, value in options.items():
        group[key] = _like(group.get(key), value)


def _like(existing: Any, value: Any) -> Any:
    if isinstance(existing, torch.Tensor) and isinstance(value, (int, float)):
        with torch.no_grad():
            return existing.fill_(value)
    if type(existing) in (list, tuple) and isinstance(value, (list, tuple)):
        padded = (*existing, *(None for _ in value[len(existing) :]))
        return type(existing)(_like(old, new) for old, new in zip(padded, value))
    return value
