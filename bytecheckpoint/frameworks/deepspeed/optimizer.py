"""The adapter for the optimizers inside DeepSpeed engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ...errors import StateError
from ...tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from ..base import Context
from ..layout import ParamLayout
from ..optimizer import LOSS_SCALER, OptimizerAdapter
from ..optimizer_params import NamedParam, OwnedLayout, owned_layouts
from ..optimizer_wrappers import StateHolder, as_list
from .model import optimizer_of
from .partitions import FlatRange, Partition, partitions_of, take_changes

SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedOptimizerAdapter(OptimizerAdapter):
    """``engine.optimizer`` at ZeRO 0 to 3, with or without CPU offload; the engine must be in the same state.

    Master weights, moments and steps are stored by name, like those of any other optimizer, and the state of the
    dynamic loss scaler. Layouts come from where the parameters lie in the optimizer's flat tensors. Raises
    ``StateError`` without the engine, for other kinds of optimizers, and for offload to NVMe.
    """

    name: ClassVar[str] = "deepspeed-optimizer"
    priority: ClassVar[int] = 20

    def recognizes(self, obj: object) -> bool:
        items = as_list(obj)
        return bool(items) and all(optimizer_of(item) is not None for item in items)

    def describe(self, obj: Any, context: Context) -> tuple[Sequence[StateHolder], list[NamedParam]]:
        found: list[tuple[StateHolder, Partition]] = []
        holders = []
        for optimizer in map(optimizer_of, as_list(obj)):
            inner = optimizer.optimizer
            # At ZeRO-3, the inner groups have parameters only during a step, so they are not empty groups.
            holders.append(StateHolder(inner, inner.state, (), layers=(optimizer, inner)))
            found.extend((holders[-1], part) for part in partitions_of(optimizer, context))
        owned = owned_layouts({id(held_range.param) for _, part in found for held_range in part.ranges}, context)
        return holders, [_named(holder, part, owned, context) for holder, part in found]

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source = super().capture(obj, context)
        for path, scaler in _scalers(obj).items():
            source.values[path] = {key: getattr(scaler, key) for key in SCALER_KEYS if hasattr(scaler, key)}
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        target = super().target(obj, context, stored)
        scalers = _scalers(obj)
        target.requested_values.update(scalers)
        target.optional.update(scalers)
        target.ignorable.difference_update(scalers)
        # In full precision, the model's tensor is stored only once, and the copy that is stepped follows it.
        copies = [
            part
            for item in as_list(obj)
            for part in partitions_of(optimizer_of(item), context)
            if part.is_copy and not part.is_master
        ]
        rest = target.apply

        def apply(values: Mapping[Path, Any]) -> None:
            rest(values)
            take_changes(copies)
            for path, scaler in scalers.items():
                found = values.get(path, {})
                vars(scaler).update({key: found[key] for key in SCALER_KEYS if key in found and hasattr(scaler, key)})

        target.apply = apply
        return target


def _named(holder: StateHolder, part: Partition, owned: Mapping[int, OwnedLayout], context: Context) -> NamedParam:
    missing = [held_range.param for held_range in part.ranges if id(held_range.param) not in owned]
    if missing:
        raise StateError(
            f"section {context.section!r}: DeepSpeed's optimizer steps parameters that no section owns (the first one "
            f"has the shape {tuple(getattr(missing[0], 'ds_shape', missing[0].shape))}); pass the engine in the same "
            "state, for example as 'model'"
        )
    origins: dict[str, tuple[str, str]] = {}
    for held_range in part.ranges:
        origins.update(owned[id(held_range.param)].origins)
    return NamedParam(
        part.stepped,
        _layout(part.ranges, tuple(part.stepped.shape), owned, is_partial=part.is_partial),
        holder,
        part.group,
        part.stepped,
        master=part.stepped if part.is_master else None,
        origins=origins,
        entry_layouts={
            key: _layout(ranges, (sum(held_range.length for held_range in ranges),), owned, is_partial=False)
            for key, ranges in part.entries.items()
        },
    )


def _layout(
    ranges: Iterable[FlatRange], local_shape: tuple[int, ...], owned: Mapping[int, OwnedLayout], *, is_partial: bool
) -> ParamLayout:
    """The layout of a tensor that consists of ranges of parameters."""
    found = []
    fqns: dict[str, tuple[int, ...]] = {}
    ranks = None
    for held_range in ranges:
        whole = owned[id(held_range.param)].layout
        ranks = whole.replica_ranks
        fqns.update(whole.fqns)
        if held_range.length:
            held = whole.narrowed(held_range.first, held_range.length)
            found += [part._replace(start=part.start + held_range.start) for part in held.parts]
    if is_partial:
        return ParamLayout(local_shape, tuple(found), fqns)
    return ParamLayout(local_shape, tuple(found), fqns, is_replica=True, replica_ranks=ranks)


def _scalers(obj: Any) -> dict[Path, Any]:
    """The dynamic loss scalers by the path of their state. A static scale is part of the job's configuration."""
    found: dict[Path, Any] = {}
    for number, optimizer in enumerate(map(optimizer_of, as_list(obj))):
        scaler = getattr(optimizer, "loss_scaler", None)
        config = getattr(optimizer, "loss_scale_config", None)
        if scaler is not None and scaler.dynamic:
            found[LOSS_SCALER, number] = scaler
        elif config is not None and config.use_grad_scaling and config.dynamic_loss_scale:
            found[LOSS_SCALER, number] = config
    return found
