"""The adapter for FSDP-1 (``FullyShardedDataParallel``): saves and fills flat shards in place, without all-gather.

Names are those of the unwrapped model. So a checkpoint loads under any wrap policy and world size, with FSDP-2 or in a
plain module, and theirs load here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..errors import UnsupportedTensorError
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Context
from .flat_params import FlatParam, OriginalParam, flat_params
from .layout import ParamLayout
from .module import ModuleAdapter, choose_stored_name
from .module_tree import Slot, has_fsdp1, modules_of
from .tensors import dense_view

__all__ = ["FSDP1Adapter"]


class FSDP1Adapter(ModuleAdapter):
    """Modules that contain ``FullyShardedDataParallel``, with every sharding strategy and ``use_orig_params`` setting.

    Parameters that FSDP manages come from its flat parameters, in full precision. Everything else (buffers, ignored
    modules, extra state) is handled as in a plain module. Raises ``StateError`` while the flat parameters are not
    sharded.
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
            if context.trainable_only:
                _leave_out(source, flat.frozen)
        return source

    def make_target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        target = super().make_target(obj, context, stored)
        flats = flat_params(modules_of(obj))
        for flat in flats:
            names = [original.fqns for original in flat.originals]
            _add_flat(target, flat, {tied[0]: choose_stored_name(tied, target, context, stored) for tied in names})
        rest = target.apply

        def apply(values: Mapping[Path, Any]) -> None:
            rest(values)
            for flat in flats:
                flat.free_gathered()

        target.apply = apply
        return target


def _leave_out(source: SectionSource, originals: Sequence[OriginalParam]) -> None:
    """Remove what ``_add_flat`` added for these parameters."""
    names = {fqn for original in originals for fqn in original.fqns}
    source.left_out.update((fqn,) for fqn in names)
    source.shards[:] = [shard for shard in source.shards if shard.fqn not in names]
    for fqn in names:
        source.metas.pop(fqn, None)
        source.aliases.pop(fqn, None)


def _add_flat(section: SectionSource | SectionTarget, flat: FlatParam, chosen: Mapping[str, str]) -> None:
    """Add one flat parameter. ``chosen`` maps the first name of each tied parameter to the name to use."""
    where = flat.originals[0].fqns[0]
    shard = dense_view(where, flat.local_shard())
    if shard.is_meta:
        raise UnsupportedTensorError(
            f"{where}: FSDP's flat parameter is on the meta device; materialize the model before saving or loading"
        )
    metas, shards = flat.layout.describe(shard, chosen.__getitem__)
    section.metas.update(metas)
    section.shards.extend(shards)
    for original in flat.originals:
        name = chosen[original.fqns[0]]
        section.aliases.update({fqn: name for fqn in original.fqns if fqn != name})
