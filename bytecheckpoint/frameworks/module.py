"""The adapter for ``nn.Module``: plain, DDP, FSDP-2, tensor- and expert-parallel, compiled, pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import NameCollisionError, UnsupportedTensorError
from ..format.values.types import Container
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .dtensor import dtensor_layout
from .layout import ParamLayout
from .meta_device import materialize
from .module_tree import (
    EXTRA_STATE,
    Slot,
    declared_replicas,
    fsdp2_modules,
    group_tied,
    has_fsdp1,
    modules_of,
    named_slots,
    named_submodules,
    submodules,
)
from .own_state import capture_own_state, find_own_state
from .own_state_target import OwnStateTarget
from .pretrained import target_of_stored_names
from .tensors import tensor_shards
from .tree_capture import Capture
from .tree_target import Restore, TreeBuilder, choose_stored_name
from .unsupported import require_no_masters
from .wrapper_tensors import WRAPPER, held_wrapper, require_same_wrapper

ENGINE_COUNTERS = "_engine"
"""The counters of a DeepSpeed engine have the path ``(ENGINE_COUNTERS, number)``; other modules have none."""

_EXTRA_STATE: Path = (EXTRA_STATE,)


class Packed(ABC):
    """Parameters of which a wrapper keeps this rank's part in a flat tensor.

    ``ties`` has all names of each parameter; ``layout``, and ``frozen`` of those without a gradient, have the first.
    """

    ties: Sequence[tuple[str, ...]]
    layout: ParamLayout
    frozen: frozenset[str]

    @abstractmethod
    def local_shard(self) -> torch.Tensor:
        """The flat tensor, including padding. Raises ``StateError`` while the model does not compute with it."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Drop gathered copies, with which the next forward pass would compute otherwise."""

    def add_to(self, section: SectionSource | SectionTarget, chosen: Mapping[str, str]) -> None:
        """Add the parameters whose first names are in ``chosen``, under the names there."""
        if not chosen:
            return
        fqns = {fqn: shape for fqn, shape in self.layout.fqns.items() if fqn in chosen}
        parts = tuple(part for part in self.layout.parts if part.fqn in chosen)
        layout = self.layout._replace(parts=parts, fqns=fqns)
        section.add(*layout.describe(self.local_shard(), chosen.__getitem__))
        for first, *others in self.ties:
            name = chosen.get(first)
            section.aliases.update({fqn: name for fqn in (first, *others) if name is not None and fqn != name})


class ModuleAdapter(Adapter):
    """Parameters and persistent buffers, under their names without the wrappers around the modules.

    Modules that define ``get_extra_state`` contribute values under the paths ``("_extra_state", fqn, ...)``. The
    adapter calls ``state_dict`` only of modules that customize it (``own_state``): torch's own hooks may communicate.

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

    def packed(self, modules: Sequence[nn.Module]) -> Sequence[Packed]:
        """The parameters that a wrapper keeps in flat tensors; none here."""
        return ()

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        """The layout of every parameter. A tied one has its first name; for FSDP-2, the sharded parameters count."""
        layouts: dict[int, ParamLayout] = {}
        modules = modules_of(obj)
        declared = declared_replicas(modules)
        for group in group_tied([slot for slot in named_slots(modules) if slot.is_parameter]):
            for slot in group:
                if slot.kind.is_dtensor:
                    layout = dtensor_layout(group[0].fqn, slot.tensor)  # type: ignore[arg-type]
                else:
                    ranks = declared.get(id(slot.tensor))
                    layout = ParamLayout.whole(group[0].fqn, tuple(slot.tensor.shape), replica_ranks=ranks)
                layouts[id(slot.tensor)] = layout
        return layouts

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source = SectionSource()
        modules = modules_of(obj)
        named = named_submodules(modules)
        capture = Capture(context, source)
        declared = declared_replicas(modules) if context.world_size > 1 else {}
        for group in group_tied(capture_own_state(find_own_state(named), self.slots(modules), capture)):
            slot = group[0]
            fqn, tensor, kind = slot.fqn, slot.tensor, slot.kind
            if context.trainable_only and all(one.is_parameter and not one.tensor.requires_grad for one in group):
                source.left_out.update((one.fqn,) for one in group)
                continue
            if tensor.is_meta:
                raise UnsupportedTensorError(
                    f"{context.section}: {fqn} is on the meta device and has no values; load or initialize it first"
                )
            if kind.is_wrapper:
                held = held_wrapper(fqn, tensor)
                source.values[_wrapper_path(fqn)] = held.record
                metas, shards = held.metas, held.shards
            else:
                metas, shards = tensor_shards(fqn, tensor, kind)
            _require_free(metas, source.metas)
            source.add(metas, shards)
            if len(group) > 1:
                source.aliases.update({one.fqn + name[len(fqn) :]: name for one in group[1:] for name in metas})
            if kind.is_distributed:
                continue
            if not slot.is_parameter:
                # Running statistics diverge between ranks; like DDP, the first rank's are stored.
                source.pinned.update(metas)
            elif context.world_size > 1:
                source.mark_replicas(metas, declared.get(id(tensor)))
        extra = _ExtraState(named)
        if extra.owners:
            capture.visit(extra, _EXTRA_STATE)
        capture.finish()
        for one in self.packed(modules):
            frozen = one.frozen if context.trainable_only else ()
            source.left_out.update((fqn,) for names in one.ties if names[0] in frozen for fqn in names)
            one.add_to(source, {names[0]: names[0] for names in one.ties if names[0] not in frozen})
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        require_no_masters(modules_of(obj), context.section)
        target = target_of_stored_names(
            modules_of(obj), context, stored, lambda seen: self.make_target(obj, context, seen)
        )
        # What a stored state dict has in addition to the module: that it is a mapping, and the order of its keys.
        target.ignorable.update(path for path, value in stored.values.items() if not path and type(value) is Container)
        return target

    def make_target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        """``target`` without the names that the model's own lists add. A subclass adds what its wrapper keeps."""
        modules = modules_of(obj)
        target = SectionTarget()
        named = named_submodules(modules)
        own = OwnStateTarget(find_own_state(named, loading=True), self.slots(modules), context, stored, target)
        for group in group_tied(own.slots):
            _add_target(target, group, context, stored)
        packed = self.packed(modules)
        for one in packed:
            chosen = {names[0]: choose_stored_name(names, target, context, stored) for names in one.ties}
            one.add_to(target, chosen)
        _note_transient_meta(modules, context)
        target.ignorable.update(path for path in stored.values if path[:1] == (ENGINE_COUNTERS,))
        restore = _extra_state_target(named, context, stored, target)

        def apply(values: Mapping[Path, Any]) -> None:
            for sub in (sub for module in modules for sub in fsdp2_modules(module)):
                sub.reshard()  # otherwise the next forward pass would use gathered copies of the old values
            if restore is not None:
                restore(values)
            own.apply(values)
            for one in packed:
                one.free_gathered()

        target.apply = apply
        return target


def _wrapper_path(fqn: str) -> Path:
    """The path of the record of a tensor that consists of other tensors."""
    return (WRAPPER, fqn)


def _require_free(names: Mapping[str, BasicMeta], taken: Mapping[str, BasicMeta]) -> None:
    for name in names:
        if name in taken:
            raise NameCollisionError(f"{name} is a tensor of the module and also a part of another one; rename it")


def _add_wrapper_target(target: SectionTarget, group: list[Slot], stored: StoredSection) -> None:
    """Fill a tensor that consists of others in place. It must be of the stored class and quantized in the same way."""
    paths = {slot.fqn: _wrapper_path(slot.fqn) for slot in group}
    fqn = next((name for name, path in paths.items() if path in stored.values), group[0].fqn)
    if group[0].tensor.is_meta:
        raise UnsupportedTensorError(
            f"{fqn}: a {type(group[0].tensor).__name__} on the meta device cannot be given memory; call "
            "module.to_empty(device=...) before the load"
        )
    held = held_wrapper(fqn, group[0].tensor)
    if paths[fqn] in stored.values:
        require_same_wrapper(fqn, stored.values[paths[fqn]], held)
    target.add(held.metas, held.shards)
    target.aliases.update({name + part[len(fqn) :]: part for name in paths if name != fqn for part in held.metas})
    target.requested_values.add(paths[fqn])


def _add_target(target: SectionTarget, group: list[Slot], context: Context, stored: StoredSection) -> None:
    if group[0].kind.is_wrapper:
        _add_wrapper_target(target, group, stored)
        return
    names = [slot.fqn for slot in group]
    fqn = choose_stored_name(names, target, context, stored)
    tensor = group[0].tensor
    # A tensor of another shape is not loaded, so memory for it would stay uninitialized.
    if tensor.is_meta and fqn in stored.metas and stored.metas[fqn].shape == tuple(tensor.shape):
        tensor = materialize(group, context)
    target.add(*tensor_shards(fqn, tensor, group[0].kind))
    target.aliases.update({name: fqn for name in names if name != fqn})


def _note_transient_meta(modules: Sequence[nn.Module], context: Context) -> None:
    buffers = (buffer for module in modules for sub in submodules(module) for buffer in sub._buffers.values())
    if not any(buffer is not None and buffer.is_meta for buffer in buffers):
        return
    empty = [slot.fqn for slot in named_slots(modules) if not slot.persistent and slot.tensor.is_meta]
    if empty:
        context.notes.append(
            f"{context.section}: these non-persistent buffers are still on the meta device; they are never stored, so "
            f"initialize them yourself: {', '.join(empty)}"
        )


class _ExtraState:
    """The modules' extra state as one object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        self.owners: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for fqn, module in named:
            if id(module) not in seen and type(module).get_extra_state is not nn.Module.get_extra_state:
                self.owners[fqn] = module
            seen.add(id(module))

    def state_dict(self) -> dict[str, Any]:
        return {fqn: module.get_extra_state() for fqn, module in self.owners.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for fqn, extra in state.items():
            self.owners[fqn].set_extra_state(extra)


def _extra_state_target(
    named: Sequence[tuple[str, nn.Module]], context: Context, stored: StoredSection, target: SectionTarget
) -> Restore | None:
    """Request the modules' extra state: as this adapter stores it, or as the module's own state dict names it."""
    extra = _ExtraState(named)
    if not extra.owners:
        return None
    key = EXTRA_STATE
    keys = {f"{fqn}.{key}" if fqn else key: module for fqn, module in extra.owners.items()}
    held = {path: value for path, value in stored.values.items() if path and path[0] in keys}
    metas = {fqn: meta for fqn, meta in stored.metas.items() if key in fqn and fqn.partition(key)[0] + key in keys}
    # A module that is itself the root has one key in both forms; what follows it distinguishes them.
    below_root = [str(path[1]) for path in held if path[0] == key and len(path) > 1]
    below_root += [fqn[len(key) + 1 :] for fqn in metas if fqn.startswith(f"{key}.")]
    owned = any(name == fqn or name.startswith(f"{fqn}.") for name in below_root for fqn in extra.owners)
    if owned or not (held or metas):
        return TreeBuilder(context, stored, target).visit(extra, _EXTRA_STATE)
    extra.owners = keys
    return TreeBuilder(context, StoredSection(metas, held, stored.aliases), target).visit(extra)
