"""The adapter for DeepSpeed engines: parameters under the model's own names, and the engine's counters.

Only classes that are known completely are accepted, because an engine with another kind of parallelism, or an optimizer
that keeps state elsewhere, would be stored with wrong or missing bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from ...errors import StateError
from ...tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from ..base import Context
from ..dtensor import loaded_class
from ..layout import ParamLayout
from ..module import ENGINE_COUNTERS, ModuleAdapter, Packed
from ..module_tree import Slot, is_engine, join_names, modules_of, named_slots, named_submodules, submodules
from ..optimizer_wrappers import as_list
from .partitions import is_partitioned, partitioned_params, partitions_of, take_changes


def engines_of(obj: object) -> list[Any]:
    """The engines that are a model, or part of it."""
    return [sub for module in modules_of(obj) for sub in submodules(module) if is_engine(sub)]


def optimizer_of(obj: Any) -> Any:
    """DeepSpeed's optimizer, also in accelerate's wrapper; None if this is none."""
    wrapper = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    if isinstance(obj, wrapper):
        obj = getattr(obj, "optimizer", None)
    return obj if isinstance(obj, loaded_class("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer")) else None


def inner_of(engine: Any) -> list[Any]:
    """The optimizers inside an engine's optimizer."""
    optimizer = optimizer_of(getattr(engine, "optimizer", None))
    if optimizer is None:
        return []
    return [inner for inner in (getattr(optimizer, "optimizer", None), engine.basic_optimizer) if inner is not None]


def require_supported(engine: Any, where: str) -> None:
    """Raise ``StateError`` for an engine with a kind of parallelism that its parameters do not describe."""
    for reason, applies in (
        ("pipeline parallelism (PipelineEngine)", bool(engine.pipeline_parallelism)),
        ("model parallelism (mpu= or AutoTP)", engine.mp_world_size > 1),
        ("AutoEP", any(type(sub).__name__ == "AutoEPMoELayer" for sub in submodules(engine))),
    ):
        if applies:
            raise StateError(
                f"{where}: a DeepSpeed engine with {reason} is not supported, because its parameters do not state "
                "which part of a tensor they hold; use DeepSpeed's data parallelism (ZeRO 0 to 3) or its MoE layers"
            )


COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""The attributes that an engine stores with its model."""


class DeepSpeedAdapter(ModuleAdapter):
    """``DeepSpeedEngine`` at ZeRO 0 to 3, and modules whose parameters ZeRO-3 has partitioned.

    Names are those of the module inside the engine; local experts of DeepSpeed's MoE layers have the numbers that they
    have among all experts. The tensors are in the precision of the computations; the optimizer's section holds the
    master weights. If a load does not contain the engine's optimizer, its master weights take the loaded values.

    The section contains the engine's ``global_steps``, ``global_samples`` and ``skipped_steps``. A load sets
    ``micro_steps`` to the beginning of the next step, since accumulated gradients are not part of a checkpoint.

    Raises ``StateError`` for pipeline and model parallelism, for parameters on NVMe, and while ZeRO-3 computes with
    gathered parameters.
    """

    name: ClassVar[str] = "deepspeed"
    priority: ClassVar[int] = 20

    def recognizes(self, obj: object) -> bool:
        if "deepspeed" not in sys.modules:
            return False
        return bool(engines_of(obj)) or any(
            is_partitioned(param) for module in modules_of(obj) for param in module.parameters()
        )

    def slots(self, modules: Sequence[nn.Module]) -> list[Slot]:
        renamed = _expert_names(modules)
        return [
            slot._replace(fqn=renamed.get(slot.fqn, slot.fqn))
            for slot in super().slots(modules)
            if not is_partitioned(slot.tensor)
        ]

    def packed(self, modules: Sequence[nn.Module]) -> Sequence[Packed]:
        return partitioned_params(modules)

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        layouts = super().parameter_layouts(obj)
        modules = modules_of(obj)
        renamed = _expert_names(modules)
        if renamed:
            layouts = {key: layout.renamed(lambda fqn: renamed.get(fqn, fqn)) for key, layout in layouts.items()}
        layouts.update((id(one.param), one.layout) for one in partitioned_params(modules))
        return layouts

    def capture(self, obj: Any, context: Context) -> SectionSource:
        engines = _checked_engines(obj, context)
        source = super().capture(obj, context)
        for path, engine in _counter_paths(engines).items():
            source.values[path] = {key: getattr(engine, key) for key in COUNTERS}
        return source

    def make_target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        engines = _checked_engines(obj, context)
        target = super().make_target(obj, context, stored)
        counters = _counter_paths(engines)
        target.requested_values.update(counters)
        target.optional.update(counters)
        target.ignorable.difference_update(counters)
        loaded = {id(optimizer_of(item)) for value in context.state.values() for item in as_list(value)}
        optimizers = [optimizer_of(engine.optimizer) for engine in engines]
        partitions = [
            part
            for optimizer in optimizers
            if optimizer is not None and id(optimizer) not in loaded
            for part in partitions_of(optimizer, context)
        ]
        rest = target.apply

        def apply(values: Mapping[Path, Any]) -> None:
            rest(values)
            take_changes(partitions)
            for path, engine in counters.items():
                if path in values:
                    counted = values[path]
                    vars(engine).update({key: counted[key] for key in COUNTERS if key in counted})
                    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()

        target.apply = apply
        return target


def _checked_engines(obj: Any, context: Context) -> list[Any]:
    engines = engines_of(obj)
    where = f"section {context.section!r}"
    for engine in engines:
        require_supported(engine, where)
        inner = {id(optimizer) for optimizer in inner_of(engine)}
        for section, value in context.state.items():
            if any(id(item) in inner for item in as_list(value)):
                raise StateError(
                    f"section {section!r}: this optimizer is inside the engine's optimizer, and has neither the "
                    "parameters' names nor the loss scale; pass engine.optimizer instead"
                )
    return engines


def _counter_paths(engines: Sequence[Any]) -> dict[Path, Any]:
    return {(ENGINE_COUNTERS, number): engine for number, engine in enumerate(engines)}


def _expert_names(modules: Sequence[nn.Module]) -> dict[str, str]:
    """By local name of a parameter or buffer of an expert, its name with the expert's number among all experts.

    Ranks of an expert-parallel group call their experts by the same names, although they are different ones.
    """
    layer = loaded_class("deepspeed.moe.sharded_moe", "MOELayer")
    renamed: dict[str, str] = {}
    for prefix, sub in named_submodules(modules) if layer else ():
        if isinstance(sub, layer):
            _name_experts(prefix, sub, renamed)
    return renamed


def _name_experts(prefix: str, layer: Any, renamed: dict[str, str]) -> None:
    if layer.ep_group is None:
        return
    first = dist.get_rank(layer.ep_group) * layer.num_local_experts
    for number, expert in enumerate(layer.experts.deepspeed_experts):
        local, unique = (join_names(prefix, f"experts.deepspeed_experts.{n}") for n in (number, first + number))
        for slot in named_slots([expert]):
            renamed[join_names(local, slot.fqn)] = join_names(unique, slot.fqn)
