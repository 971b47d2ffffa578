"""The adapter for optimizers of Megatron-core, whose ranks hold ranges of parameters or whole ones."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import MismatchError, StateError, UnsupportedTensorError
from ...tensors.derived import dense_values, is_derived
from ...tensors.metadata import BasicMeta
from ...tensors.shards import Path, SectionSource, SectionTarget, StoredSection, torch_dtype
from ..base import Context
from ..dtensor import dtensor_around, is_dtensor, local_tensor
from ..optimizer import LOSS_SCALER, NAMELESS, OptimizerAdapter, capture_by_name, fill_by_name
from ..optimizer_groups import set_options
from ..optimizer_params import NamedParam, OwnedLayout, owned_layouts
from ..optimizer_state import MASTER, StoredState, state_name
from ..optimizer_wrappers import StateHolder, as_list
from ..scaled_state import OWN_MASTER, converts_state, fp32_state
from .buckets import LiveBuckets
from .model import LOW_PRECISION, zero_padding
from .stepped import (
    SCALED,
    Stepped,
    config_of,
    grad_scalers,
    inner_optimizers,
    is_optimizer,
    leaves,
    plain_numbers,
    stepped,
    stepped_by_any_rank,
    update_offloaded,
)

NOT_OPTIONS = frozenset(
    {
        *("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "is_expert_parallel", "is_decoupled_lr"),
        *("default_config", "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
        *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
    }
)
"""Items of a param group that follow from Megatron's configuration, and have no meaning elsewhere."""

GRAD_SCALER: Path = (LOSS_SCALER, "grad_scaler")
"""The path of the state of the dynamic loss scaler."""

_STEP = "step"


class MegatronOptimizerAdapter(OptimizerAdapter):
    """What ``get_megatron_optimizer`` and its layer-wise counterpart return, or a list of them.

    The distributed optimizer's ranges of a parameter become boxes of the model's tensors, and chained optimizers
    (dense parameters, experts) one union, so the state loads into any other layout, and into optimizers of torch. The
    step of each parameter is stored with its state, even if the optimizer counts in its groups. The model must be in
    the same state, since the names and boxes are those of its parameters.

    A parameter that Megatron marks as shared (a copy of the embedding on the last pipeline stage) is not stored, and
    is loaded from the original.
    """

    name: ClassVar[str] = "megatron-optimizer"
    priority: ClassVar[int] = 20

    def recognizes(self, obj: object) -> bool:
        items = as_list(obj)
        return bool(items) and all(map(is_optimizer, items))

    def capture(self, obj: Any, context: Context) -> SectionSource:
        found = _Optimizers(obj, context)
        kept = [named for named in found.params if id(named) not in found.copies]
        source = capture_by_name(found.holders, kept, context)
        for scaler in grad_scalers(obj)[:1]:
            source.values[GRAD_SCALER] = plain_numbers(scaler.state_dict())
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        buckets = LiveBuckets(obj, context, stored) if NAMELESS in stored.values else None
        stored = buckets.contents if buckets is not None else stored
        found = _Optimizers(obj, context, loading=True, buckets=buckets)
        entries = StoredState(stored, found.params)
        found.make_state(entries)
        target = fill_by_name(found.holders, found.params, context, stored)
        target.derived |= found.derived
        padded = found.resize(target, entries)
        scalers = grad_scalers(obj)
        if scalers:
            target.requested_values.add(GRAD_SCALER)
            target.optional.add(GRAD_SCALER)
        options = found.add_buckets(target)
        rest = target.apply

        def apply(values: Mapping[Path, Any]) -> None:
            rest(values)
            set_options(options)
            with torch.no_grad():
                for named, rows in padded:
                    _zero_padding(named, rows)
                found.write_back()
            for scaler in scalers if GRAD_SCALER in values else ():
                scaler.load_state_dict(
                    {**values[GRAD_SCALER], "scale": torch.tensor(values[GRAD_SCALER]["scale"], dtype=torch.float32)}
                )
            if buckets is not None:
                buckets.compare()

        target.apply = apply
        return target


@dataclass(eq=False)
class _Part:
    """One inner optimizer of ``leaf``. ``holder`` is a copy of its dicts, in the form of torch's optimizers.

    With ``counts_in_groups``, the optimizer keeps the step in its groups. With ``is_scaled``, it may keep state in a
    private format (``scaled_state``), and with ``has_masters`` it holds the master weights in its state.
    """

    leaf: Any
    optimizer: Any
    holder: StateHolder
    counts_in_groups: bool
    is_scaled: bool
    has_masters: bool


class _Optimizers:
    """The inner optimizers of a section.

    ``copies`` are the ``id``s of parameters that another rank stores, and ``derived`` the sections and names of
    parameters in low precision, of which this rank or another one holds the master weights.
    """

    def __init__(
        self, obj: Any, context: Context, *, loading: bool = False, buckets: LiveBuckets | None = None
    ) -> None:
        self._context, self._loading, self._buckets = context, loading, buckets
        self.params: list[NamedParam] = []
        self.copies: set[int] = set()
        self._parts: list[_Part] = []
        found = [
            (leaf, layer_wise, list(stepped(leaf, context)))
            for item in as_list(obj)
            for leaf, layer_wise in leaves(item)
        ]
        everywhere = {id(param): param for item in as_list(obj) for param in stepped_by_any_rank(item)}
        owned = owned_layouts({*everywhere, *(id(item.model_param) for *_, items in found for item in items)}, context)
        self.derived = {
            origin
            for key, layout in owned.items()
            if key in everywhere and everywhere[key].dtype in LOW_PRECISION
            for origin in layout.origins.values()
        }
        self._leaves = [leaf for leaf, *_ in found]
        for leaf, layer_wise, items in found:
            by_tensor = {id(item.tensor): item for item in items}
            for inner in inner_optimizers(leaf):
                self._add(leaf, inner, by_tensor, owned, is_divided=layer_wise)

    @property
    def holders(self) -> list[StateHolder]:
        return [part.holder for part in self._parts]

    def _add(
        self, leaf: Any, inner: Any, items: Mapping[int, Stepped], owned: Mapping[int, OwnedLayout], *, is_divided: bool
    ) -> None:
        counts = type(inner).__module__.partition(".")[0] in ("apex", "transformer_engine")
        # What only some of the optimizers inside an offloaded one have, would divide its groups elsewhere.
        common = {"params", _STEP}.union(*(group for group in leaf.optimizer.param_groups)) - NOT_OPTIONS
        shown = [{key: value for key, value in group.items() if key in common} for group in inner.param_groups]
        holder = StateHolder(inner, {}, shown, frozenset(items) if is_divided else None)
        has_masters = inner is leaf.optimizer and bool(config_of(leaf, SCALED))
        part = _Part(leaf, inner, holder, counts, converts_state(inner), has_masters)
        self._parts.append(part)
        for group in shown:
            count = group.pop(_STEP, None) if counts else None
            for param in group["params"]:
                item = items.get(id(param))
                layout = owned.get(id(item.model_param)) if item is not None else None
                if item is None or layout is None:
                    raise StateError(
                        f"section {self._context.section!r}: {type(leaf).__name__} steps a tensor of shape "
                        f"{tuple(param.shape)} that belongs to no model of the state. Add all chunks of the model, for "
                        "example as 'model'"
                    )
                self._add_param(part, group, item, layout, count)

    def _add_param(
        self, part: _Part, group: MutableMapping[str, Any], item: Stepped, owned: OwnedLayout, count: Any
    ) -> None:
        param, key = _flat(item.tensor, item.tensor), item.tensor
        layout = owned.layout if item.span is None else owned.layout.narrowed(item.span[0], item.span[1] - item.span[0])
        origins = owned.origins
        if self._buckets is not None:
            layout, origins = self._buckets.layout(item, layout), {}
        state = {name: _flat(value, key) for name, value in part.optimizer.state.get(key, {}).items()}
        master = param if item.is_copy or param.dtype != item.model_param.dtype else None
        if part.is_scaled and not is_dtensor(key):
            state = {name: fp32_state(part.optimizer, param, name) for name in state}
        elif part.is_scaled and any(value.dtype != torch.float32 for value in state.values()):
            raise UnsupportedTensorError(
                f"{next(iter(layout.fqns))}: {type(part.optimizer).__name__} keeps the state of DTensors in a low "
                "precision, which is not supported; set use_precision_aware_optimizer=False"
            )
        held = state.pop(OWN_MASTER, None)
        if part.has_masters and param.dtype != torch.float32:
            master = fp32_state(part.optimizer, param, OWN_MASTER) if held is None and self._loading else held
        if state and count is not None:
            state[_STEP] = torch.tensor(float(count), dtype=torch.float32)
        if state:
            part.holder.state[key] = state
        named = NamedParam(param, layout, part.holder, group, key, master, origins if master is not None else {})
        self.params.append(named)
        if getattr(item.model_param, "shared", False):
            self.copies.add(id(named))

    # ---------------------------------------------------------------------------------------- scaled and padded state

    def make_state(self, stored: StoredState) -> None:
        """Make missing state of padded parameters, whose stored shape does not show that it is like the parameter.

        Missing state that an optimizer keeps in a private format is only described.
        """
        scaled = {id(part.holder): part.optimizer for part in self._parts if part.is_scaled}
        for named in self.params:
            optimizer = scaled.get(id(named.holder)) if named.key is named.param else None
            if named.state or (optimizer is None and not named.layout.ends_with_padding):
                continue
            for key, meta in _stored_entries(named, stored):
                if key == MASTER:
                    continue
                if optimizer is not None:
                    room = fp32_state(optimizer, named.param, key)
                else:
                    room = torch.zeros(named.layout.local_shape, dtype=torch_dtype(meta), device=named.param.device)
                named.own_state()[key] = room

    def resize(self, target: SectionTarget, stored: StoredState) -> list[tuple[NamedParam, int]]:
        """Let padded state have another length. Returns the parameters, and the rows that are stored of each."""
        padded = []
        for named in self.params:
            if named.layout.ends_with_padding:
                entries = _stored_entries(named, stored)
                target.resizable.update({state_name(named.names[0], key): 0 for key, _ in entries})
                if entries:
                    padded.append((named, entries[0][1].shape[0]))
        return padded

    # --------------------------------------------------------------------------------------------------------- loading

    def add_buckets(self, target: SectionTarget) -> list[tuple[MutableMapping[str, Any], dict[str, Any]]]:
        """Request the rest of the buckets, if the state is in such. Returns the hyper-parameters to set."""
        if self._buckets is None:
            return []
        self._buckets.add_to(target)
        return [
            (shown, self._buckets.options(part.leaf, group))
            for part in self._parts
            for group, shown in zip(part.optimizer.param_groups, part.holder.groups, strict=True)
        ]

    def write_back(self) -> None:
        """Put the loaded groups and state into the optimizers."""
        masters = {id(named.key): named.master for named in self.params}
        for part in self._parts:
            for group, shown in zip(part.optimizer.param_groups, part.holder.groups, strict=True):
                group.update({key: value for key, value in shown.items() if key != "params"})
                counts = {}
                for param in group["params"]:
                    state = dict(part.holder.state.get(param, {}))
                    if part.counts_in_groups and _STEP in state:
                        counts[int(state.pop(_STEP))] = param
                    if part.is_scaled and not is_dtensor(param):
                        _write_scaled(part, param, state, masters[id(param)])
                    elif state:
                        entry = part.optimizer.state[param]
                        filled = {key: _unflattened(value, param, entry.get(key)) for key, value in state.items()}
                        entry.clear()
                        entry.update(filled)
                    else:
                        part.optimizer.state.pop(param, None)
                if len(counts) > 1:
                    raise MismatchError(
                        f"parameters of one param group were saved after {', '.join(map(str, sorted(counts)))} steps, "
                        f"but {type(part.optimizer).__name__} counts the steps of the whole group",
                        [("value", f"group of {len(group['params'])} parameters", str(sorted(counts)))],
                    )
                if counts:
                    group[_STEP] = next(iter(counts))
                elif part.counts_in_groups and not any(part.holder.state.get(param) for param in group["params"]):
                    group.pop(_STEP, None)
        for leaf in self._leaves:
            update_offloaded(leaf)


# ---------------------------------------------------------------------------------------------------------- conversions


def _flat(value: Any, param: torch.Tensor) -> Any:
    """The memory of a DTensor of Megatron-FSDP, which is distributed like ``param``, in one dimension."""
    if not is_dtensor(value):
        return value
    local = local_tensor(value)
    if not is_dtensor(param) or local.shape != param._local_tensor.shape or value.placements != param.placements:
        raise UnsupportedTensorError(
            f"optimizer state of shape {tuple(value.shape)} and placements {value.placements} for a parameter of shape "
            f"{tuple(param.shape)} is not distributed like the parameter"
        )
    return local.view(-1).requires_grad_(value.requires_grad)


def _unflattened(value: Any, param: torch.Tensor, existing: Any) -> Any:
    """The inverse of ``_flat``: the DTensor whose memory was filled, or a new one."""
    if not is_dtensor(param) or not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if is_dtensor(existing) and existing._local_tensor.data_ptr() == value.data_ptr():
        return existing
    return dtensor_around(param, value.view(param._local_tensor.shape))


def _write_scaled(part: _Part, param: torch.Tensor, state: Mapping[str, Any], master: torch.Tensor | None) -> None:
    """Put back what has separate memory. Derived tensors were assigned during the load."""
    optimizer = part.optimizer
    if not state:  # the loaded one had none; its master weight is loaded nevertheless
        held = dense_values(master).clone() if master is not None else None
        optimizer.state.pop(param, None)
        if part.has_masters and held is not None:
            _assign(fp32_state(optimizer, param, OWN_MASTER), held)
    for key, value in state.items():
        if not is_derived(value) and value is not optimizer.state.get(param, {}).get(key):
            _assign(fp32_state(optimizer, param, key), value)
    if part.has_masters and param.dtype == torch.float32 and OWN_MASTER in optimizer.state.get(param, {}):
        optimizer.set_scaled_state(param, OWN_MASTER, param.detach().clone())  # a copy that it does not step


def _assign(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if is_derived(tensor):
        tensor.assign(values)
    else:
        tensor.copy_(values)


def _stored_entries(named: NamedParam, stored: StoredState) -> list[tuple[str, BasicMeta]]:
    """The keys and metas of what is stored with the parameter's shape, but for the length of a padded parameter."""
    fqn, shape = next(iter(named.layout.fqns.items()))
    same = 1 if named.layout.ends_with_padding else 0
    found = stored[fqn].tensors.items()
    return [(key, meta) for key, meta in found if len(meta.shape) == len(shape) and meta.shape[same:] == shape[same:]]


def _zero_padding(named: NamedParam, rows: int) -> None:
    for tensor in (named.master, *named.state.values()):
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == named.layout.local_shape:
            values = dense_values(tensor).clone() if is_derived(tensor) else tensor.detach()
            zero_padding(values, named.layout, rows)
            if is_derived(tensor):
                tensor.release(tensor.nbytes)
                tensor.assign(values)
