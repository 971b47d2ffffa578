"""Refuse objects of other frameworks that keep parameters or state where the general adapters do not look.

Such an object looks like a module, an optimizer or an object with a ``state_dict``, but what it shows is only a part, a
copy or nothing. An adapter for it recognizes it first; whatever no such adapter recognizes is refused here, by name.
``tensors.dense_view`` refuses single tensors. Imports nothing: classes are compared by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

from ..errors import StateError, UnknownObjectError
from .module_tree import is_engine, modules_of, named_slots, submodules
from .optimizer_wrappers import as_list, is_optimizer

_GATHER = "Save a state dict of plain tensors that the framework gathers, or use the framework's own checkpoints"
_ENGINE = f"No adapter supports this engine, which may keep parameters elsewhere. {_GATHER}"
_SHARDED = f"It keeps shards of the parameters outside of them. {_GATHER}"
_OFFLOADED = (
    "Hooks of accelerate keep its parameters on another device or on disk, and show them on the meta device. Load the "
    "model without offloading, or remove the hooks with accelerate.hooks.remove_hook_from_submodules"
)
_OPTIMIZER = (
    "No adapter supports this optimizer, which keeps state or full-precision parameters in separate buffers. "
    f"{_GATHER}, or leave the section out"
)

# Names of classes, which also stand for their subclasses.
_MODULES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": _ENGINE,
    "deepspeed.inference.engine.InferenceEngine": _ENGINE,
    "fairscale.nn.data_parallel.fully_sharded_data_parallel.FullyShardedDataParallel": _SHARDED,
}
_MODULE_NAMES = {"MegatronFSDP": _SHARDED, "GeminiDDP": _SHARDED}  # in whatever module their packages have them

# Attributes of every optimizer, which may be long and contain no optimizers.
_OWN_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})

# Packages of optimizers. Their schedulers, loss scalers and data loaders are plain state.
_OPTIMIZERS = ("deepspeed.runtime.", "megatron.core.optimizer.")


def require_supported(obj: Any, where: str) -> None:
    """Raise unless the adapters for modules, optimizers and objects with a state dict see all that ``obj`` holds.

    Args:
        obj: An object that no adapter for its framework recognizes.
        where: The object's place in the state, for the message.

    Raises:
        UnknownObjectError: The object, or a module or optimizer inside it, keeps parameters or state elsewhere.
    """
    for module in modules_of(obj):
        for sub in submodules(module):
            advice = _advice_for_module(sub)
            if advice:
                raise _refusal(where, obj, sub, advice)
    for optimizer in _optimizers(as_list(obj)):
        if _is_foreign_optimizer(optimizer):
            raise _refusal(where, obj, optimizer, _OPTIMIZER)


def require_no_masters(modules: Sequence[nn.Module], section: str) -> None:
    """Raise before a load into parameters that the next step of a ZeRO optimizer overwrites with its own copies."""
    params = (param for module in modules for sub in submodules(module) for param in sub._parameters.values())
    for param in params:
        if getattr(param, "_hp_mapping", None) is not None or hasattr(param, "_z3_optimizer"):
            if any(is_engine(sub) for module in modules for sub in submodules(module)):
                return  # whose adapter loads into the copies, too
            fqn = next((slot.fqn for slot in named_slots(modules) if slot.tensor is param), "a parameter")
            raise StateError(
                f"section {section!r}: {fqn}: DeepSpeed's ZeRO optimizer has a full-precision copy of this "
                "parameter, with which the next step would overwrite what is loaded. Load into the model before "
                "deepspeed.initialize, or pass the engine"
            )


def _advice_for_module(module: nn.Module) -> str | None:
    cls: Any = type(module)
    advice = _advice_for_class(cls)
    if advice:
        return advice
    hook = vars(module).get("_hf_hook")
    hooks = (hook, *getattr(hook, "hooks", ())) if hook is not None else ()
    return _OFFLOADED if any(getattr(one, "offload", False) for one in hooks) else None


@lru_cache(maxsize=1 << 10)  # a model has thousands of modules, of few classes
def _advice_for_class(kind: type) -> str | None:
    for cls in kind.__mro__:
        advice = _MODULES.get(f"{cls.__module__}.{cls.__qualname__}") or _MODULE_NAMES.get(cls.__qualname__)
        if advice:
            return advice
    return None


def _optimizers(pending: list[Any]) -> Iterator[Any]:
    """The objects, and the optimizers among the attributes of optimizers, at any depth."""
    seen: set[int] = set()
    pending = list(pending)
    while pending:
        obj = pending.pop()
        if id(obj) not in seen:
            seen.add(id(obj))
            yield obj
            if is_optimizer(obj):
                held = (value for key, value in getattr(obj, "__dict__", {}).items() if key not in _OWN_ATTRIBUTES)
                pending += [item for value in held for item in as_list(value)]


def _is_foreign_optimizer(obj: object) -> bool:
    classes = [cls for cls in type(obj).__mro__ if cls.__module__.startswith(_OPTIMIZERS)]
    return any(cls.__name__.endswith("Optimizer") for cls in classes) or (bool(classes) and is_optimizer(obj))


def _refusal(where: str, obj: object, part: object, advice: str) -> UnknownObjectError:
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    return UnknownObjectError(
        f"{where} {'cannot be stored or loaded' if part is obj else f'contains a {kind}'}. {advice}"
    )
