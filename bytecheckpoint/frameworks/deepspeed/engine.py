"""Recognize DeepSpeed's engines and optimizers, and refuse those whose state cannot be described.

Only classes that are known completely are accepted, because an engine with another kind of parallelism, or an optimizer
that keeps state elsewhere, would be stored with wrong or missing bytes.
"""

from __future__ import annotations

import sys
from typing import Any

from ...errors import StateError
from ..dtensor import loaded_class
from ..module_tree import is_engine, modules_of, submodules

__all__ = ["engines_of", "inner_of", "is_loaded", "optimizer_of", "require_supported"]


def is_loaded() -> bool:
    """Whether this process uses DeepSpeed."""
    return "deepspeed" in sys.modules


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
