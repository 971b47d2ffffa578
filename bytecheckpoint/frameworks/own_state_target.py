"""Load into modules that define or customize their own state dict (see ``own_state``).

Parameters and buffers are filled in place. The other entries are read into new memory. ``load_state_dict`` of the
module then gets both, so that its own code and its hooks run as after ``torch.load``. Copying a tensor to itself costs
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from ..tensors.shards import Path, SectionTarget, StoredSection
from .base import Context
from .module_tree import Slot
from .own_state import ENTRY, VERSION, OwnState, is_extra_state, may_rename_on_load, slots_by_owner
from .tree_paths import PathIndex
from .tree_target import TreeBuilder


class OwnStateTarget:
    """The modules of a section that customize their state dicts, as targets of a load.

    ``slots`` are the parameters and buffers that the load fills in place.
    """

    def __init__(
        self,
        owns: Sequence[OwnState],
        slots: Sequence[Slot],
        context: Context,
        stored: StoredSection,
        target: SectionTarget,
    ) -> None:
        self.context, self.stored, self.target = context, stored, target
        self.owns = self._usable(owns, slots)
        self.rooms: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self._parts = {fqn: own for own in self.owns for fqn in own.parts}
        self._value_names = {str(path[1]) for path in stored.values if len(path) > 1 and path[0] == ENTRY}
        owned = slots_by_owner(slots) if self.owns else {}
        self.names: dict[str, OwnState] = {}
        left_out: set[str] = set()
        templates: dict[str, Any] = {}
        for own in self.owns:
            if own.saves:
                entries = own.entries(owned, context.section)
                left_out |= entries.left_out
                templates.update(entries.more)
                self.names.update(dict.fromkeys(entries.more, own))
        resized = self._resized(owned)
        left_out.update(resized)
        self.names.update(resized)
        self.names.update(self._stored_only({slot.fqn for slot in slots}))
        self.slots = [slot for slot in slots if slot.fqn not in left_out] if left_out else slots
        self._request(templates)

    def _usable(self, owns: Sequence[OwnState], slots: Sequence[Slot]) -> list[OwnState]:
        owned = slots_by_owner(slots) if owns else {}
        usable = [own for own in owns if not own.has_other_memory(owned)]
        if len(usable) < len(owns):
            names = ", ".join(own.fqn or type(own.module).__name__ for own in owns if own not in usable)
            self.context.notes.append(
                f"{self.context.section}: the load did not call load_state_dict of {names}, or its hooks, because "
                "FSDP-1 manages parameters in it"
            )
        return usable

    def _resized(self, owned: Mapping[int, Sequence[Slot]]) -> dict[str, OwnState]:
        """Tensors that are stored in another shape, of modules that may accept it."""
        return {
            slot.fqn: own
            for own in self.owns
            for part in own.parts.values()
            if may_rename_on_load(part)
            for slot in owned.get(id(part), ())
            if slot.fqn in self.stored.metas and self.stored.metas[slot.fqn].shape != tuple(slot.tensor.shape)
        }

    def _stored_only(self, known: set[str]) -> dict[str, OwnState]:
        """Stored entries that modules may accept although their present state dicts lack them."""
        found: dict[str, OwnState] = {}
        if not self._parts:
            return found
        strays = [name for name in self.stored.metas if name not in known and not name.startswith(f"{ENTRY}.")]
        for name in (*strays, *self._value_names):
            prefix = name
            while prefix:
                prefix = prefix.rpartition(".")[0]
                if prefix in self._parts:
                    own = self._parts[prefix]
                    part = own.parts[prefix]
                    child = name[len(prefix) + 1 if prefix else 0 :].partition(".")[0]
                    if child not in part._modules and may_rename_on_load(part):
                        found[name] = own
                    break
        return found

    def _request(self, templates: Mapping[str, Any]) -> None:
        builder = TreeBuilder(self.context, self.stored, self.target)
        plain = []
        for name in self.names:
            template = templates.get(name)
            if name in self.stored.metas or isinstance(template, torch.Tensor):
                room = builder.room(name, template if isinstance(template, torch.Tensor) else None)
                if room is not None:
                    self.rooms[name] = room
            elif name in self._value_names:
                plain.append(name)
            else:
                self.target.requested_values.add((ENTRY, name))
        self._restore = TreeBuilder(self.context, self._only(plain), self.target).rebuilt((ENTRY,)) if plain else None
        versions = {path for path in self.stored.values if path and path[0] == VERSION}
        used = {path for path in versions if len(path) > 1 and path[1] in self._parts}
        self.target.requested_values |= used
        self.target.ignorable |= versions - used

    def _only(self, names: Sequence[str]) -> StoredSection:
        """What is stored of these entries that are not tensors."""
        chosen = {path: v for path, v in self.stored.values.items() if path[0] == ENTRY and path[1] in names}
        index = PathIndex.of(self.stored.values, (ENTRY,))
        paths = {name: index.path_of(name) for name in self.stored.metas if name.startswith(f"{ENTRY}.")}
        metas = {name: self.stored.metas[name] for name, path in paths.items() if path[1] in names}
        aliases = {alias: name for alias, name in self.stored.aliases.items() if alias in metas}
        return StoredSection(metas, chosen, aliases)

    def apply(self, values: Mapping[Path, Any]) -> None:
        """Let the modules load what was read. Raises ``StateError``."""
        restored: Mapping[str, Any] = {} if self._restore is None else self._restore(values)
        for own in self.owns:
            state = own.state_dict(self.context.section)
            names = {own.name_of(key): key for key in state if not is_extra_state(key)}
            given: OrderedDict[str, Any] = OrderedDict((key, state[key]) for key in names.values())
            for name in (name for name, owner in self.names.items() if owner is own):
                key = names.get(name, name[len(own.fqn) + 1 if own.fqn else 0 :])
                if name in self.rooms:
                    given[key] = self.rooms[name]
                elif name in restored:
                    given[key] = restored[name]
            given._metadata = self._metadata(own, state, values)  # type: ignore[attr-defined]
            self._load(own, given)

    def _metadata(self, own: OwnState, state: Mapping[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
        """The metadata of the module's present state dict, updated from the stored one."""
        metadata = {key: dict(found) for key, found in getattr(state, "_metadata", {}).items()}
        keys = {own.name_of(key): key for key in metadata}
        for path in (path for path in values if len(path) == 3 and path[0] == VERSION and path[1] in own.parts):
            if path[1] in keys:
                metadata[keys[str(path[1])]][str(path[2])] = values[path]
        return metadata

    def _load(self, own: OwnState, given: Mapping[str, Any]) -> None:
        module = own.module
        is_torch = type(module).load_state_dict is nn.Module.load_state_dict and "load_state_dict" not in vars(module)
        try:
            # What is missing was reported before anything changed.
            result = module.load_state_dict(given, strict=False) if is_torch else module.load_state_dict(given)
        except Exception as error:
            raise StateError(f"{self.context.section}: load_state_dict() of {own} failed: {error!r}") from error
        unexpected = list(getattr(result, "unexpected_keys", ()))
        if unexpected:
            raise StateError(
                f"{self.context.section}: load_state_dict() of {own} does not accept these stored entries: "
                f"{', '.join(map(own.name_of, unexpected))}; its hooks or overrides for saving need a counterpart that "
                "loads what they store"
            )
