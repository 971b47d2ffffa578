"""Present the state of Megatron's optimizers as the adapter of live ones stores it: by parameter name.

The state of a parameter has the parameter's key behind ``optimizer.state.exp_avg.`` and the like. The groups in
``common.pt`` do not list their parameters, so the rule by which Megatron makes them assigns them.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...format.values.types import UnreadObject
from ...frameworks.megatron.optimizer import GRAD_SCALER, NOT_OPTIONS
from ...frameworks.optimizer_groups import options_of, same_value
from ...frameworks.optimizer_state import MASTER
from ...frameworks.tree_paths import replace_all
from ..building import IndexBuilder, StoredLeaf
from ..naming import OPTIMIZER_SECTION, OptimizerWriter
from ..pickles.records import Instance, TensorRef
from ..torch_values import TorchValues, read_small

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*", re.DOTALL)
_MASTERS = ("param", "fp32_param", "master_param")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
_HEAD_NORM = re.compile(r"(?:q|k)_layernorm\.")
_STEP = "step"
_SAMPLED, _SAMPLE = 4, 64  # parameters, and elements of each, that are compared


def is_of_optimizer(key: str) -> bool:
    """Whether a tensor or an object belongs to the optimizer."""
    return _STATE.fullmatch(key) is not None or _BUCKETS.fullmatch(key) is not None


def split_state(tensors: Mapping[str, StoredLeaf]) -> dict[str, dict[str, StoredLeaf]]:
    """Return the optimizer's tensors by the key of the state, and then by the key of the parameter."""
    found: dict[str, dict[str, StoredLeaf]] = {}
    for key, leaf in tensors.items():
        match = _STATE.fullmatch(key)
        if match is not None:
            found.setdefault(MASTER if match[1] in _MASTERS else match[1], {})[match[2]] = leaf
    return found


def has_remainders(builder: IndexBuilder, model: Mapping[str, StoredLeaf], masters: Mapping[str, StoredLeaf]) -> bool:
    """Whether the master weights are what rounding to bfloat16 left out, as integers, and not the weights.

    Nothing in the files states it, so some elements of the largest weights are compared with the model's.
    """
    low = [fqn for fqn in masters if fqn in model and model[fqn].meta.dtype.name == "bfloat16"]
    return any(
        _are_remainders(builder, model[fqn], masters[fqn])
        for fqn in heapq.nlargest(_SAMPLED, low, key=lambda fqn: prod(model[fqn].meta.shape))
    )


def _are_remainders(builder: IndexBuilder, weight: StoredLeaf, master: StoredLeaf) -> bool:
    places = {stored_box.box: stored_box for stored_box in weight.boxes if stored_box.strides is None}
    for stored_box in master.boxes:
        if stored_box.box not in places or stored_box.strides is not None or master.meta.dtype.name != "float32":
            continue
        count = min(stored_box.box.numel, _SAMPLE)
        stored = np.frombuffer(builder.read(stored_box, master.meta.dtype, count), np.float32)
        low = np.frombuffer(builder.read(places[stored_box.box], weight.meta.dtype, count), np.uint16)
        computed = (low.astype(np.uint32) << 16).view(np.float32)
        is_integer = bool((stored == np.trunc(stored)).all())
        return is_integer and not np.allclose(stored, computed, rtol=1e-2)
    return False


def add_optimizer_state(
    builder: IndexBuilder,
    model: Mapping[str, StoredLeaf],
    state: Mapping[str, Mapping[str, StoredLeaf]],
    options: ParamOptions,
) -> None:
    """Add the hyper-parameters, and tensors by the key of the state and the name of the parameter, to an index."""
    writer = OptimizerWriter(builder)
    for fqn in dict.fromkeys(fqn for tensors in state.values() for fqn in tensors):
        entries: dict[str, Any] = {key: tensors[fqn] for key, tensors in state.items() if fqn in tensors}
        param, master = model[fqn].meta, entries.pop(MASTER, None)
        if master is not None and master.meta.dtype == param.dtype:
            master = None
        step, group = options.of(fqn, param.shape)
        if entries and step is not None:
            entries[_STEP] = step
        writer.add(fqn, entries, group, master)


def add_scaler(builder: IndexBuilder, optimizers: Iterable[Mapping[str, Any]]) -> None:
    """Add the state of the dynamic loss scaler, which is equal in all optimizers of a chain."""
    scalers = [found for optimizer in optimizers if type(found := optimizer.get("grad_scaler")) is dict]
    if scalers:
        builder.add_value(OPTIMIZER_SECTION, GRAD_SCALER, _plain(builder, scalers[0]))


class ParamOptions:
    """The hyper-parameters and the step of each parameter.

    Megatron makes groups by a rule: no weight decay for vectors and biases, and separate groups for experts. Where that
    leaves several groups with different hyper-parameters, the parameter gets an ``UnreadObject``.
    """

    def __init__(self, builder: IndexBuilder, optimizers: Sequence[Mapping[str, Any]], args: Any) -> None:
        """``optimizers`` are those in ``common.pt``, ``args`` the arguments of the trainer there."""
        self._groups = [
            ParamGroup.of(builder, group, optimizer) for optimizer in optimizers for group in groups_of(optimizer)
        ]
        self._has_experts = any(group.is_expert for group in self._groups)
        # All parameters have the same, but groups without parameters on rank 0 may lack it.
        self._step = next((group.step for group in self._groups if group.step is not None), None)
        attributes = args.attributes if type(args) is Instance else {}
        self._decays_head_norms = attributes.get("apply_wd_to_qk_layernorm") is True

    def of(self, fqn: str, shape: Sequence[int]) -> tuple[float | None, dict[str, Any] | None]:
        """Return the step and the hyper-parameters of a parameter, each None if it is not stored."""
        is_expert = self._has_experts and _EXPERT.search(fqn) is not None
        decays = len(shape) != 1 and not fqn.endswith(".bias")
        if self._decays_head_norms and _HEAD_NORM.search(fqn):
            decays = True
        groups = [group for group in self._groups if group.is_expert == is_expert]
        groups = [group for group in groups if group.decays == decays] or groups
        if not groups:
            return self._step, None
        options = groups[0].options
        if all(same_value(group.options, options) for group in groups):
            return self._step, options
        what = f"those of one of {len(groups)} different param groups, of which the file does not list the parameters"
        return self._step, {"lr": UnreadObject(what)}


class ParamGroup(NamedTuple):
    """A param group of the files."""

    is_expert: bool
    decays: bool
    step: float | None
    options: dict[str, Any]

    @classmethod
    def of(cls, builder: IndexBuilder, group: Mapping[str, Any], optimizer: Mapping[str, Any]) -> ParamGroup:
        state = optimizer.get("optimizer", optimizer).get("state")
        step = _plain(builder, group.get(_STEP, state.get("common_step") if type(state) is dict else None))
        kept = {key: value for key, value in group.items() if key not in NOT_OPTIONS | {_STEP}}
        mult = group.get("wd_mult")
        return cls(
            group.get("is_expert_parallel") is True,
            not (type(mult) in (int, float) and mult == 0),
            step if type(step) in (int, float) else None,
            options_of(_plain(builder, kept), f"{OPTIMIZER_SECTION}.param_groups"),
        )


def optimizers_of(found: Any) -> list[Mapping[str, Any]]:
    """Return the optimizers in ``common.pt``: one, or those of a chain."""
    if type(found) is not dict:
        return []
    numbers = sorted(key for key in found if type(key) is int)
    return [found[number] for number in numbers if type(found[number]) is dict] if numbers else [found]


def groups_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the param groups of an optimizer."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if type(inner) is dict else None
    return [group for group in groups if type(group) is dict] if type(groups) is list else []


def _plain(builder: IndexBuilder, value: Any) -> Any:
    """A value with the contents of its tensors as numbers and lists."""
    read = replace_all(value, TensorRef, lambda tensor: read_small(builder.backend, tensor).tolist())
    return TorchValues(builder).tree(read)
