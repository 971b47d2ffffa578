"""FSDP-1 (``FullyShardedDataParallel``): flat shards saved and filled where they lie, with no all-gather.

Names are those of the unwrapped model, so any wrap policy, any world size, FSDP-2 or a plain module can load what was
saved here, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..errors import UnsupportedTensorError
from ..shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Context
from .flat_params import FlatParam, OriginalParam, flat_params
from .layout import ParamLayout
from .module import ModuleAdapter
from .module_tree import Slot, has_fsdp1, modules_of
from .tensors import dense_view

__all__ = ["FSDP1Adapter"]


class FSDP1Adapter(ModuleAdapter):
    """Modules with ``FullyShardedDataParallel`` anywhere in their tree; every strategy, ``use_orig_params`` or not.

    What FSDP manages is taken from its flat parameters, in full precision; the rest (buffers, ignored modules, extra
    state) is served as of a plain module. Raises ``StateError`` while the flat parameters are not sharded.
    """

    name: ClassVar[str] = "fsdp1"
    priority: ClassVar[int] = 10

    def recognizes(self, obj: object) -> bool:
        return any(map(has_fsdp1, modules_of(obj)))

    def slots(self, modules: Sequence[nn.Module]) -> list[Slot]:
        flats = flat_params(modules)
        managed = {place for flat in flats for place in flat.owned}
        own = {id(flat.flat) for flat in flats}
        return [
            slot
            for slot in super().slots(modules)
            if id(slot.tensor) not in own and not (slot.is_parameter and (id(slot.owner), slot.attribute) in managed)
        ]

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        layouts = super().parameter_layouts(obj)
        for flat in flat_params(modules_of(obj)):
            layouts.update(flat.parameter_layouts())
        return layouts

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source = super().capture(obj, context)
        for flat in flat_params(modules_of(obj)):
            _add_flat(source, flat, {original.fqns[0]: original.fqns[0] for original in flat.originals})
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        target = super().target(obj, context, stored)
        flats = flat_params(modules_of(obj))
        for flat in flats:
            _add_flat(target, flat, {name.fqns[0]: _choose(name, target, context, stored) for name in flat.originals})
        rest = target.apply

        def apply(values: Mapping[Path, Any]) -> None:
            rest(values)
            for flat in flats:
                flat.forget_gathered()

        target.apply = apply
        return target


def _add_flat(section: SectionSource | SectionTarget, flat: FlatParam, chosen: Mapping[str, str]) -> None:
    """``chosen`` says under which of its tied names each parameter goes, by the first of them."""
    where = flat.originals[0].fqns[0]
    shard = dense_view(where, flat.local_shard())
    if shard.is_meta:
        raise UnsupportedTensorError(
            f"{where}: FSDP's flat parameter is on the meta device; materialise the model first"
        )
    layout = flat.layout.renamed(chosen.__getitem__)
    section.metas.update(layout.metas(shard.dtype))
    section.shards.extend(layout.shards(shard))
    for original in flat.originals:
        name = chosen[original.fqns[0]]
        section.aliases.update({fqn: name for fqn in original.fqns if fqn != name})


def _choose(original: OriginalParam, target: SectionTarget, context: Context, stored: StoredSection) -> str:
    """The first name of a tied parameter that is stored, as in a plain module."""
    known = [fqn for fqn in original.fqns if fqn in stored.metas]
    if not known:
        return original.fqns[0]
    target.ignorable.update(known[1:])
    sources = {fqn: stored.aliases.get(fqn, fqn) for fqn in known}
    separate = [fqn for fqn in known if sources[fqn] != sources[known[0]]]
    if separate:
        context.notes.append(
            f"{context.section}: {', '.join(original.fqns)} are one tensor here but were stored separately; it was "
            f"filled from {known[0]}, and {', '.join(separate)} left unread"
        )
    return known[0]
