"""Find the adapter for an object, among built-in adapters, installed plug-ins and registered adapters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import nn

from ..errors import UnknownObjectError, UsageError
from .base import Adapter
from .deepspeed.model import DeepSpeedAdapter
from .deepspeed.optimizer import DeepSpeedOptimizerAdapter
from .fsdp1 import FSDP1Adapter
from .layout import ParamLayout
from .megatron.model import MegatronModelAdapter
from .megatron.optimizer import MegatronOptimizerAdapter
from .module import ModuleAdapter
from .optimizer import OptimizerAdapter
from .optimizer_state_dict import StateTreeAdapter
from .tree import CapturedAdapter, StatefulAdapter
from .unsupported import require_supported

ENTRY_POINT_GROUP = "bytecheckpoint.frameworks"

# Adapters of equal priority are tried in this order.
_BUILT_IN: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        DeepSpeedAdapter(),
        DeepSpeedOptimizerAdapter(),
        MegatronModelAdapter(),
        MegatronOptimizerAdapter(),
        FSDP1Adapter(),
        ModuleAdapter(),
        OptimizerAdapter(),
        CapturedAdapter(),
        StatefulAdapter(),
        StateTreeAdapter(),
    )
}

# Adapters that recognize objects by what they look like, and not by the classes of one framework.
_GENERAL = frozenset({"fsdp1", "module", "optimizer", "stateful", "tree"})

# What users call the wrappers that the module adapter supports.
_SYNONYMS = dict.fromkeys(("ddp", "fsdp2", "pipeline", "torch", "tp"), "module")

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_registered: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> None:
    """Register an adapter for all later saves and loads of this process. Thread-safe.

    Of several adapters that recognize an object, the one with the highest ``priority`` serves it. At equal priority, a
    registered adapter takes precedence over those of installed packages, and both over built-in ones. Register the
    adapter on every rank. An adapter cannot be removed again.

    An installed package needs no call: it declares an entry point of the group ``bytecheckpoint.frameworks``, with the
    adapter's name as the key and the adapter class as the value.

    Args:
        adapter: The adapter. One instance serves all calls and threads.

    Raises:
        UsageError: Another adapter already has this name.

    Example:
        >>> bcp.register_adapter(TableAdapter())
        >>> bcp.save(path, {"table": Table(...)})    # recognized by TableAdapter
    """
    with _lock:
        if adapter.name in _BUILT_IN or adapter.name in _SYNONYMS or adapter.name in _registered:
            raise UsageError(f"an adapter named {adapter.name!r} exists already; give this one another name")
        _registered[adapter.name] = adapter


def adapter_names() -> list[str]:
    """Return every name that ``framework=`` accepts: adapters and their synonyms."""
    with _lock:
        return sorted({*_BUILT_IN, *_SYNONYMS, *_registered, *_plug_ins()})


def find_adapter(obj: Any, framework: str | None = None, *, section: str = "") -> Adapter:
    """Return the adapter that recognizes an object, or of several, the one with the highest priority.

    Args:
        obj: The object.
        framework: The name of the adapter to use instead. It must recognize ``obj`` if that is a model. For another
            object (an optimizer, plain values) that it does not recognize, the search continues as without a name.
        section: The name of the object's section, for error messages.

    Returns:
        The adapter.

    Raises:
        UnknownObjectError: No adapter recognizes ``obj``, the named adapter does not recognize the model, no adapter
            has the name, or ``obj`` keeps parameters or state where the adapter does not look.
    """
    adapter = _choose_adapter(obj, framework, section)
    if adapter.name in _GENERAL:
        require_supported(obj, _place(section, obj))
    return adapter


def _choose_adapter(obj: Any, framework: str | None, section: str) -> Adapter:
    if framework is not None:
        forced = _adapter_named(framework)
        if forced.recognizes(obj):
            return forced
        if _is_model(obj):
            raise UnknownObjectError(
                f"{_place(section, obj)} is not supported by framework={framework!r}; leave framework out to find the "
                f"adapter automatically, or pass another name: {', '.join(adapter_names())}"
            )
    for adapter in _candidates():
        if adapter.recognizes(obj):
            return adapter
    raise UnknownObjectError(
        f"no adapter supports {_place(section, obj)}. The adapters {', '.join(adapter_names())} support modules, "
        "optimizers, objects with state_dict() and load_state_dict(), and mappings or lists of tensors and plain "
        "values. For another kind, subclass bytecheckpoint.frameworks.base.Adapter and call register_adapter(), or "
        f"declare an entry point of the group {ENTRY_POINT_GROUP!r}"
    )


def parameter_layouts(obj: Any) -> dict[int, ParamLayout]:
    """Return the layouts of a model's parameters by ``id``, from the adapter that serves it; empty for others."""
    return find_adapter(obj).parameter_layouts(obj)


def _place(section: str, obj: object) -> str:
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if isinstance(obj, (list, tuple)):
        kind += f" of {', '.join(sorted({type(item).__qualname__ for item in obj})) or 'nothing'}"
    return f"section {section!r}: an object of type {kind}" if section else f"an object of type {kind}"


def _is_model(obj: object) -> bool:
    if isinstance(obj, (list, tuple)):
        return bool(obj) and all(map(_is_model, obj))
    return isinstance(obj, nn.Module) or isinstance(getattr(obj, "submod", None), nn.Module)


def _candidates() -> Sequence[Adapter]:
    with _lock:
        plug_ins = [found for found in _plug_ins().values() if isinstance(found, Adapter)]
        adapters = [*_registered.values(), *plug_ins, *_BUILT_IN.values()]
    return sorted(adapters, key=lambda adapter: -adapter.priority)


def _adapter_named(name: str) -> Adapter:
    with _lock:
        known = _SYNONYMS.get(name, name)
        if known in _registered:
            return _registered[known]
        if known in _BUILT_IN:
            return _BUILT_IN[known]
        found = _plug_ins().get(known)
    if isinstance(found, Adapter):
        return found
    if found is not None:
        raise UsageError(found)
    raise UnknownObjectError(f"framework={name!r} names no adapter; the known ones are: {', '.join(adapter_names())}")


@cache  # entry_points() reads a file of every installed package
def _plug_ins() -> dict[str, Adapter | str]:
    """The adapters of installed packages by name, or why one cannot be loaded."""
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in {*_BUILT_IN, *_SYNONYMS}]
    return {point.name: _load_plug_in(point) for point in points}


def _load_plug_in(point: EntryPoint) -> Adapter | str:
    try:
        made = point.load()
        adapter = made() if isinstance(made, type) else made
        problem = "is not a bytecheckpoint Adapter"
    except Exception as error:  # noqa: BLE001 - a broken plug-in must not prevent other objects from being saved
        adapter, problem = None, f"cannot be loaded: {error}"
    if isinstance(adapter, Adapter):
        return adapter
    _log.warning("plug-in %r (%s) %s", point.name, point.value, problem)
    return f"plug-in {point.name!r} ({point.value}) {problem}"
