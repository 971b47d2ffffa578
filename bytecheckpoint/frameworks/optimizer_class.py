"""Record which class of optimizer a parameter's state belongs to, and refuse to load it into another class.

The state of one class has no meaning for another, even if the names of its entries happen to be equal. The class is
recorded by name, with the optimizer classes that it derives from: a subclass may load the state of its base class and
the other way round. (torch's AdamW derives from Adam.) ``foreach`` and ``fused`` are options of one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import MismatchError
from ..tensors.shards import Path
from .base import Context
from .optimizer_params import NamedParam

_MAX_SHOWN = 5

_ADAMS = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "CPUAdam"})
"""Implementations of Adam with the same two moments. How they decay weights is an option of most of them."""

_ADAM_PACKAGES = frozenset({"apex", "deepspeed", "megatron", "torch", "transformer_engine"})

# What the step of each class of torch reads from a state that is not empty.
_NEEDED = {
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}


def class_path(fqn: str) -> Path:
    """The path of the class of optimizer that updated the parameter ``fqn``."""
    return ("class", fqn)


def lineage_of(optimizer: object) -> list[str]:
    """The name of an optimizer's class, and those of its base classes below ``torch.optim.Optimizer``."""
    own, *bases = type(optimizer).__mro__
    bases = [base for base in bases if issubclass(base, torch.optim.Optimizer) and base is not torch.optim.Optimizer]
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in (own, *bases)]


def needed_keys(optimizer: object) -> tuple[str, ...]:
    """What a step of this optimizer reads from a state that is not empty; nothing if that is unknown."""
    cls = type(optimizer)
    return _NEEDED.get(cls.__name__, ()) if cls.__module__.startswith("torch.optim.") else ()


def counts_in_numbers(optimizer: object) -> bool | None:
    """Whether the optimizer counts its steps in plain numbers, or in 0-d tensors; None if that is unknown."""
    package = type(optimizer).__module__.partition(".")[0]
    return isinstance(optimizer, torch.optim.SparseAdam) if package == "torch" else {"deepspeed": True}.get(package)


def is_elementwise(optimizer: object) -> bool:
    """Whether every state tensor that is not a scalar certainly has the parameter's shape."""
    cls = type(optimizer)
    return cls.__module__.startswith("torch.optim.") and (cls.__name__ in _NEEDED or cls.__name__ == "SGD")


def require_same_class(params: Iterable[NamedParam], values: Mapping[Path, Any], context: Context) -> None:
    """Raise ``MismatchError`` if state was saved by a class of optimizer that is not related to the target's."""
    lineages: dict[int, list[str]] = {}
    faults: list[tuple[str, str, str]] = []
    for named in params:
        if named.holder.optimizer is None:
            continue  # a state dict has no class
        target = lineages.setdefault(id(named.holder), [])
        if not target:
            target += lineage_of(named.holder.optimizer)
        for fqn in named.names:
            stored = values.get(class_path(fqn))
            if not isinstance(stored, (list, tuple)) or not stored:
                continue
            if not _are_related(tuple(map(str, stored)), target):
                faults.append(("value", fqn, f"saved by {stored[0]}, loaded into {target[0]}"))
    if faults:
        lines = "\n".join(f"  {name}: {detail}" for _, name, detail in faults[:_MAX_SHOWN])
        more = f"\n  ... and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
        raise MismatchError(
            f"section {context.section!r}: {len(faults)} parameters were saved by another class of optimizer, whose "
            f"state has another meaning. Build the same optimizer, or leave the section out of the load; if the state "
            f"fits nevertheless, pass exclude=['{context.section}.class.*']:\n{lines}{more}",
            faults,
        )


def _are_related(stored: Sequence[str], target: Sequence[str]) -> bool:
    if _is_adam(stored[0]) and _is_adam(target[0]):
        return True
    if stored[0] in target or target[0] in stored:
        return True
    # A script's own class is in the module __main__ or in one of the script's name, as it was started.
    (module, _, name), (other, _, other_name) = stored[0].rpartition("."), target[0].rpartition(".")
    return name == other_name and "__main__" in (module, other)


def _is_adam(path: str) -> bool:
    return path.partition(".")[0] in _ADAM_PACKAGES and path.rpartition(".")[2] in _ADAMS
