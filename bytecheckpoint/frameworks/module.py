"""The adapter for ``nn.Module``: plain, DDP, FSDP-2, tensor- and expert-parallel, compiled, pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..errors import UnsupportedTensorError
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .dtensor import dtensor_layout, is_dtensor
from .layout import ParamLayout
from .meta_device import materialize
from .module_tree import (
    Slot,
    fsdp2_modules,
    group_tied,
    has_fsdp1,
    modules_of,
    named_slots,
    named_submodules,
)
from .tensors import tensor_shards
from .tree_capture import Capture
from .tree_target import TreeBuilder

__all__ = ["ModuleAdapter", "choose_stored_name", "parameter_layouts"]

_EXTRA_STATE: Path = ("_extra_state",)


def parameter_layouts(obj: Any) -> dict[int, ParamLayout]:
    """The layout of every parameter of a module, a stage or a list of them, by ``id`` of the parameter.

    A tied parameter has its first name. For FSDP-2, the sharded parameters count, even while the module shows gathered
    ones.
    """
    layouts: dict[int, ParamLayout] = {}
    for group in group_tied([slot for slot in named_slots(modules_of(obj)) if slot.is_parameter]):
        for slot in group:
            if is_dtensor(slot.tensor):
                layout = dtensor_layout(group[0].fqn, slot.tensor)
            else:
                layout = ParamLayout.whole(group[0].fqn, tuple(slot.tensor.shape))
            layouts[id(slot.tensor)] = layout
    return layouts


class ModuleAdapter(Adapter):
    """Parameters and persistent buffers, under their names without the wrappers around the modules.

    Modules that define ``get_extra_state`` contribute values under the paths ``("_extra_state", fqn, ...)``. The
    adapter does not call ``state_dict``, whose hooks may communicate, copy or rename.

    *Tied tensors* (one memory under several names) are stored under the first name; the other names are aliases. A tied
    target is filled once, from the first of its names that is stored. If another of its names was stored separately, it
    is left unread, and a note in the report lists it. An untied target gets the same bytes under each name.
    """

    name: ClassVar[str] = "module"

    def recognizes(self, obj: object) -> bool:
        modules = modules_of(obj)
        return bool(modules) and not any(map(has_fsdp1, modules))

    def slots(self, modules: Sequence[nn.Module]) -> list[Slot]:
        """The tensors to store. A subclass leaves out those that its wrapper keeps elsewhere."""
        return [slot for slot in named_slots(modules) if slot.persistent]

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        return parameter_layouts(obj)

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source = SectionSource()
        modules = modules_of(obj)
        for group in group_tied(self.slots(modules)):
            fqn = group[0].fqn
            if group[0].tensor.is_meta:
                raise UnsupportedTensorError(
                    f"{context.section}: {fqn} is on the meta device and has no values; load or initialize it first"
                )
            source.metas[fqn], shards = tensor_shards(fqn, group[0].tensor)
            source.shards.extend(shards)
            source.aliases.update({slot.fqn: fqn for slot in group[1:]})
            # Running statistics diverge between ranks; like DDP, the first rank's are stored.
            if not group[0].is_parameter and not is_dtensor(group[0].tensor):
                source.pinned.add(fqn)
        extra = _ExtraState(modules)
        if extra.owners:
            capture = Capture(context, source)
            capture.visit(extra, _EXTRA_STATE)
            capture.finish()
            source.digests.clear()  # replicas of extra state are not compared
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        modules = modules_of(obj)
        target = SectionTarget()
        for group in group_tied(self.slots(modules)):
            _add_target(target, group, context, stored)
        _note_transient_meta(modules, context)
        extra = _ExtraState(modules)
        restore = TreeBuilder(context, stored, target).visit(extra, _EXTRA_STATE) if extra.owners else None

        def apply(values: Mapping[Path, Any]) -> None:
            for sub in (sub for module in modules for sub in fsdp2_modules(module)):
                sub.reshard()  # otherwise the next forward pass would use gathered copies of the old values
            if restore is not None:
                restore(values)

        target.apply = apply
        return target


def _add_target(target: SectionTarget, group: list[Slot], context: Context, stored: StoredSection) -> None:
    names = [slot.fqn for slot in group]
    fqn = choose_stored_name(names, target, context, stored)
    tensor = group[0].tensor
    if tensor.is_meta and fqn in stored.metas:
        tensor = materialize(group, context)
    target.metas[fqn], shards = tensor_shards(fqn, tensor)
    target.shards.extend(shards)
    target.aliases.update({name: fqn for name in names if name != fqn})


def choose_stored_name(names: Sequence[str], target: SectionTarget, context: Context, stored: StoredSection) -> str:
    """The name from which a tied tensor is filled, the first stored one. The target may ignore the others."""
    known = [name for name in names if name in stored.metas]
    if not known:
        return names[0]
    target.ignorable.update(known[1:])
    sources = {name: stored.aliases.get(name, name) for name in known}
    separate = [name for name in known if sources[name] != sources[known[0]]]
    if separate:
        context.notes.append(
            f"{context.section}: {', '.join(names)} are one tensor here but were stored separately; it was filled from "
            f"{known[0]}, and {', '.join(separate)} were left unread"
        )
    return known[0]


def _note_transient_meta(modules: Sequence[nn.Module], context: Context) -> None:
    empty = [slot.fqn for slot in named_slots(modules) if not slot.persistent and slot.tensor.is_meta]
    if empty:
        context.notes.append(
            f"{context.section}: these non-persistent buffers are still on the meta device; they are never stored, so "
            f"initialize them yourself: {', '.join(empty)}"
        )


class _ExtraState:
    """The modules' extra state as one object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.owners: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for module in modules:
            for fqn, sub in named_submodules(module):
                if id(sub) not in seen and type(sub).get_extra_state is not nn.Module.get_extra_state:
                    self.owners[fqn] = sub
                seen.add(id(sub))

    def state_dict(self) -> dict[str, Any]:
        return {fqn: module.get_extra_state() for fqn, module in self.owners.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for fqn, extra in state.items():
            self.owners[fqn].set_extra_state(extra)
