"""Which adapter serves which object: the built-in ones, installed plug-ins, and those registered by hand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import nn

from ..errors import BytecheckpointError, StateError, UnknownObjectError
from .base import Adapter
from .layout import ParamLayout

__all__ = ["ENTRY_POINT_GROUP", "adapter_names", "find_adapter", "parameter_layouts", "register_adapter"]

ENTRY_POINT_GROUP = "bytecheckpoint.frameworks"

# In the order in which they are asked, where priorities are equal.
_BUILT_IN = {
    "fsdp1": "fsdp1:FSDP1Adapter",
    "module": "module:ModuleAdapter",
    "optimizer": "optimizer:OptimizerAdapter",
    "stateful": "stateful:StatefulAdapter",
    "tree": "tree:TreeAdapter",
}

# Names under which people know what the module adapter serves.
_SYNONYMS = dict.fromkeys(("ddp", "fsdp2", "pipeline", "torch", "tp"), "module")

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_registered: dict[str, Adapter] = {}
_loaded: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> None:
    """Make an adapter known to this process; it is asked before the built-in ones of its priority.

    Installed packages need no call: an entry point of the group ``bytecheckpoint.frameworks`` whose value is the
    adapter class does the same. Raises ``StateError`` for a name that is taken.
    """
    with _lock:
        if adapter.name in _BUILT_IN or adapter.name in _SYNONYMS or adapter.name in _registered:
            raise StateError(f"an adapter named {adapter.name!r} exists already; give this one another name")
        _registered[adapter.name] = adapter


def adapter_names() -> list[str]:
    """Every name that ``framework=`` takes: adapters, and synonyms of them."""
    with _lock:
        return sorted({*_BUILT_IN, *_SYNONYMS, *_registered, *(point.name for point in _plug_ins())})


def find_adapter(obj: Any, framework: str | None = None, *, section: str = "") -> Adapter:
    """The adapter for ``obj``: of those that recognise it, the one of the highest priority.

    ``framework`` names one instead. It has to recognise ``obj`` where that is a model; other objects of the state
    (an optimizer, plain values) fall back to the adapter found for them. Raises ``UnknownObjectError`` for an object
    that no adapter (or not the named one) recognises and for a name that no adapter has.
    """
    if framework is not None:
        forced = _adapter_named(framework)
        if forced.recognizes(obj):
            return forced
        if _is_model(obj):
            raise UnknownObjectError(
                f"{_place(section, obj)} is not one that framework={framework!r} serves; leave framework out to have "
                f"the adapter found, or name another: {', '.join(adapter_names())}"
            )
    for adapter in _candidates():
        if adapter.recognizes(obj):
            return adapter
    raise UnknownObjectError(
        f"{_place(section, obj)} is known to no adapter. Known are: {', '.join(adapter_names())}; they serve modules, "
        "optimizers, objects with state_dict() and load_state_dict(), and mappings or lists of tensors and plain "
        "values. For another kind, subclass bytecheckpoint.frameworks.base.Adapter and call register_adapter(), or "
        f"install it under the entry point group {ENTRY_POINT_GROUP!r}"
    )


def parameter_layouts(obj: Any) -> dict[int, ParamLayout]:
    """The layouts of a model's parameters by ``id``, from the adapter that serves it; empty for what is no model."""
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
        plug_ins = [adapter for point in _plug_ins() if (adapter := _load_plug_in(point)) is not None]
        adapters = [*_registered.values(), *plug_ins, *map(_built_in, _BUILT_IN)]
    return sorted(adapters, key=lambda adapter: -adapter.priority)


def _adapter_named(name: str) -> Adapter:
    with _lock:
        known = _SYNONYMS.get(name, name)
        if known in _registered:
            return _registered[known]
        if known in _BUILT_IN:
            return _built_in(known)
        for point in _plug_ins():
            if point.name == known:
                return _instance(point)
    raise UnknownObjectError(f"framework={name!r} names no adapter; known are: {', '.join(adapter_names())}")


def _built_in(name: str) -> Adapter:
    if name not in _loaded:
        module, _, attribute = _BUILT_IN[name].partition(":")
        _loaded[name] = getattr(import_module(f".{module}", __package__), attribute)()
    return _loaded[name]


@cache  # it reads a file of every installed package
def _plug_ins() -> tuple[EntryPoint, ...]:
    return tuple(point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in {*_BUILT_IN, *_SYNONYMS})


def _load_plug_in(point: EntryPoint) -> Adapter | None:
    """A broken plug-in must not stop the saving of objects that are none of its business."""
    try:
        return _instance(point)
    except BytecheckpointError as error:
        _log.warning("%s", error)
        return None


def _instance(point: EntryPoint) -> Adapter:
    if point.name not in _loaded:
        try:
            made = point.load()
            adapter = made() if isinstance(made, type) else made
        except Exception as error:
            raise StateError(f"plug-in {point.name!r} ({point.value}) cannot be loaded: {error}") from error
        if not isinstance(adapter, Adapter):
            raise StateError(f"plug-in {point.name!r} ({point.value}) is not a bytecheckpoint Adapter")
        _loaded[point.name] = adapter
    return _loaded[point.name]
