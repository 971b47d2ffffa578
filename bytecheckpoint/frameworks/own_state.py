"""Modules that define their own state dict, by overriding methods of ``nn.Module`` or with hooks.

A save calls ``state_dict`` of such a module and compares the result with the parameters and buffers. If they cover it,
they are stored as usual. Otherwise the entries of the state dict are stored instead, under the names that they have in
it. Code and hooks of torch's own modules and wrappers do not count, since parameters and buffers cover what they add.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import NameCollisionError, StateError, UnserializableError, UnsupportedTensorError
from .module_tree import EXTRA_STATE, Slot, clean_name, has_fsdp1, join_names, submodules, tie_key
from .tree_capture import Capture

ENTRY = "_state_dict"
"""An entry that is not a tensor has the path ``(ENTRY, name, ...)``."""
VERSION = "_metadata"
"""What torch calls the metadata of a module's state dict has the path ``(VERSION, fqn, key)``."""

_SAVE_METHODS = ("state_dict", "_save_to_state_dict")
_SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_LOAD_METHODS = ("load_state_dict", "_load_from_state_dict")
_LOAD_PRE_HOOKS = ("_load_state_dict_pre_hooks",)
_LOAD_HOOKS = (*_LOAD_PRE_HOOKS, "_load_state_dict_post_hooks")

# Not torch.ao, whose modules store packed parameters.
_KNOWN = ("torch.nn.", "torch.distributed.", "torch.jit.", "torch._jit_internal", "torch._dynamo.", "torch.fx.")


@dataclass(frozen=True)
class Entries:
    """The entries of a state dict that are not parameters and buffers themselves, by stored name.

    ``left_out`` are the parameters and buffers that the state dict does not hold under their own names; they are
    stored only as part of ``more``. ``versions`` is the metadata of the customized modules, by fqn. All are empty if
    parameters and buffers cover the state dict.
    """

    more: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    versions: Mapping[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnState:
    """A module that customizes its state dict. ``parts`` are the modules in it, or itself, that do, by fqn."""

    fqn: str
    module: nn.Module
    parts: dict[str, nn.Module]

    @property
    def saves(self) -> bool:
        """Whether the state dict may hold more than parameters, buffers and extra state."""
        return any(customizes_saving(part) for part in self.parts.values())

    def name_of(self, key: str) -> str:
        """The stored name of an entry of the module's state dict."""
        return join_names(self.fqn, clean_name(key))

    def __str__(self) -> str:
        fqn, part = next(((f, p) for f, p in self.parts.items() if customizes_saving(p)), (self.fqn, self.module))
        return f"{fqn or 'the module'} ({type(part).__name__}), which defines its own state dict"

    def state_dict(self, section: str) -> Mapping[str, Any]:
        """The module's state dict. Raises ``StateError``."""
        try:
            state: Mapping[str, Any] = self.module.state_dict()
        except Exception as error:
            raise StateError(f"{section}: state_dict() of {self} failed: {error!r}") from error
        if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
            raise StateError(f"{section}: state_dict() of {self} returned no mapping with str keys")
        return state

    def entries(self, slots: Mapping[int, Sequence[Slot]], section: str) -> Entries:
        """Split the module's state dict; ``slots`` are those of all modules, by ``id`` of their owner."""
        own = {slot.fqn: slot.tensor for slot in self.slots(slots)}
        memory = {tie_key(tensor) for tensor in own.values()}
        returned = self.state_dict(section)
        state = {self.name_of(key): value for key, value in returned.items() if not is_extra_state(key)}
        same = {name for name, value in state.items() if _is_same(value, own.get(name))}
        if all(name in same or (isinstance(v, torch.Tensor) and tie_key(v) in memory) for name, v in state.items()):
            return Entries()
        versions = {fqn: {"version": part._version} for fqn, part in self.parts.items()}
        for key, found in getattr(returned, "_metadata", {}).items():
            if self.name_of(key) in versions:
                versions[self.name_of(key)] = dict(found)
        return Entries({n: v for n, v in state.items() if n not in same}, frozenset(own.keys() - same), versions)

    def slots(self, slots: Mapping[int, Sequence[Slot]]) -> Iterator[Slot]:
        """The parameters and buffers of the module and of those below it."""
        for sub in submodules(self.module):
            yield from slots.get(id(sub), ())

    def has_other_memory(self, slots: Mapping[int, Sequence[Slot]]) -> bool:
        """Whether FSDP-1 keeps parameters elsewhere, so that a state dict would communicate or lack them."""
        own = list(self.slots(slots))
        places, tensors = {(id(slot.owner), slot.attribute) for slot in own}, {id(slot.tensor) for slot in own}
        return has_fsdp1(self.module) or any(
            (id(sub), name) not in places and id(param) not in tensors
            for sub in submodules(self.module)
            for name, param in sub._parameters.items()
            if param is not None
        )


def is_extra_state(key: str) -> bool:
    """Whether an entry of a state dict is extra state, which is stored separately."""
    return key.rpartition(".")[2] == EXTRA_STATE


def customizes_saving(module: nn.Module) -> bool:
    """Whether a module overrides how its state dict is made, or has hooks for it."""
    return _overrides(type(module), _SAVE_METHODS) or _has_hooks(module, _SAVE_METHODS, _SAVE_HOOKS)


def may_rename_on_load(module: nn.Module) -> bool:
    """Whether a module may accept stored names and shapes that differ from its own."""
    return _overrides(type(module), _LOAD_METHODS) or _has_hooks(module, _LOAD_METHODS, _LOAD_PRE_HOOKS)


def find_own_state(named: Iterable[tuple[str, nn.Module]], *, loading: bool = False) -> list[OwnState]:
    """The outermost modules that customize their state dict; with ``loading``, also those that customize loading it.

    Args:
        named: Modules with their names, parents first.
        loading: Whether to find modules that customize only loading.
    """
    methods = (*_SAVE_METHODS, *_LOAD_METHODS) if loading else _SAVE_METHODS
    hooks = (*_SAVE_HOOKS, *_LOAD_HOOKS) if loading else _SAVE_HOOKS
    attributes = frozenset((*methods, *hooks))
    plain: set[type] = set()
    found: list[OwnState] = []
    inside: dict[int, OwnState] = {}
    for fqn, module in named:
        # A fast check for almost all modules.
        held = vars(module)
        if type(module) in plain and not any(map(held.get, attributes)):
            continue
        if not _overrides(type(module), methods):
            plain.add(type(module))
            if not _has_hooks(module, methods, hooks):
                continue
        if id(module) in inside:
            inside[id(module)].parts.setdefault(fqn, module)
            continue
        own = OwnState(fqn, module, {fqn: module})
        found.append(own)
        inside.update((id(sub), own) for sub in submodules(module))
    return found


def slots_by_owner(slots: Iterable[Slot]) -> dict[int, list[Slot]]:
    """Slots by ``id`` of their module."""
    owned: dict[int, list[Slot]] = {}
    for slot in slots:
        owned.setdefault(id(slot.owner), []).append(slot)
    return owned


def capture_own_state(owns: Sequence[OwnState], slots: list[Slot], capture: Capture) -> list[Slot]:
    """Add the state dicts that parameters and buffers do not cover.

    Returns:
        The slots that are still to be stored.

    Raises:
        StateError: A state dict holds something that cannot be stored.
    """
    section = capture.context.section
    owned = slots_by_owner(slots) if owns else {}
    left_out: set[str] = set()
    for own in owns:
        if own.has_other_memory(owned):
            raise StateError(
                f"{section}: cannot store {own}, because FSDP-1 manages parameters in it, and its state dict would "
                "gather them; remove the hook or override, or apply it to modules that FSDP-1 does not wrap"
            )
        entries = own.entries(owned, section)
        if entries.more:
            left_out |= entries.left_out
            _capture_entries(own, entries, capture)
    return [slot for slot in slots if slot.fqn not in left_out] if left_out else slots


def _capture_entries(own: OwnState, entries: Entries, capture: Capture) -> None:
    try:
        for name, value in entries.more.items():
            if isinstance(value, torch.Tensor):
                if name in capture.source.metas or name in capture.source.aliases:
                    raise NameCollisionError(f"{name} is also the name of another tensor; rename one")
                # Like extra state: the module does not state whether ranks hold the same.
                capture.store(name, value)
            else:
                capture.visit(value, (ENTRY, name))
        capture.store_found()
    except (UnsupportedTensorError, UnserializableError, NameCollisionError) as error:
        raise type(error)(f"{capture.context.section}: cannot store {own}: {error}") from error
    capture.visit(entries.versions, (VERSION,))


def _is_same(value: object, tensor: torch.Tensor | None) -> bool:
    if not isinstance(value, torch.Tensor) or tensor is None:
        return False
    if value.numel() == 0:  # memory does not identify it
        return value.shape == tensor.shape and value.dtype == tensor.dtype
    return tie_key(value) == tie_key(tensor)


def _overrides(kind: type, methods: Iterable[str]) -> bool:
    return any(_is_foreign(getattr(kind, name, None)) for name in methods)


def _has_hooks(module: nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> bool:
    """Whether this instance has hooks, or methods that were replaced in it."""
    attributes = vars(module)
    for name in hooks:
        found = attributes.get(name)
        if found and any(map(_is_foreign, found.values())):
            return True
    return not attributes.keys().isdisjoint(methods)


def _is_foreign(function: Any) -> bool:
    """Whether a method or hook is not torch's own."""
    while (inner := getattr(function, "hook", None) or getattr(function, "func", None)) is not None:
        function = inner  # torch's wrapper of hooks, functools.partial
    module = getattr(function, "__module__", None) or ""
    return function is not None and not module.startswith(_KNOWN)
