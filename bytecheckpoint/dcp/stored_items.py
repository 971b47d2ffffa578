"""List what a checkpoint stores as DCP would name it, and rebuild single items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ..checkpoint.checkpoint import Checkpoint
from ..convert.state_dicts import Refused, StoredTensorRef, options_by_name, section_state
from ..frameworks.tree_paths import find_all, replace_all
from ..tensors.metadata import Path
from .items import METADATA_KEY


@dataclass
class StoredItems:
    """The items of a checkpoint under DCP's names: tensors, and plain values, which may contain ``StoredTensorRef``.

    ``paths`` are the keys that lead to each item, as DCP's planner records them; None if the planner did not flatten.
    ``others`` are further names of values: the hyper-parameters of each parameter of an optimizer, as a flattened state
    dict of it has them. A state dict that is made from the checkpoint does not get them.
    """

    items: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, rank: int, allow_pickle: bool) -> StoredItems:
        """List all items for one rank: shared ones and those that this rank of the save had alone.

        Raises:
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        found = checkpoint.metadata.get(METADATA_KEY)
        stored = found if isinstance(found, Mapping) else {}
        state: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for section in checkpoint.sections:
            tree = section_state(checkpoint, section, rank=rank, allow_pickle=allow_pickle)
            if section == stored.get("top_level") and isinstance(tree, Mapping):
                state.update(tree)
            else:
                state[section] = tree
                options = options_by_name(tree) or {}
                others.update({f"{section}.{name}": value for name, value in options.items()})
        return cls.of_state(state, others) if stored.get("flattened", True) else cls(state)

    @classmethod
    def of_state(cls, state: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> StoredItems:
        """Flatten a tree with ``StoredTensorRef`` as DCP's planner does."""
        # Tensors without memory make DCP's own rules for lists of tensors apply.
        items, paths = flatten_state_dict(replace_all(state, StoredTensorRef, _placeholder))
        found = {
            name: replace_all(item, torch.Tensor, lambda tensor: StoredTensorRef(tensor.row))
            for name, item in items.items()
        }
        return cls(found, paths, dict(others or {}))

    def __contains__(self, name: str) -> bool:
        return name in self.items or name in self.others

    def __getitem__(self, name: str) -> Any:
        return self.items[name] if name in self.items else self.others[name]

    def value(self, name: str, tensors: Mapping[int, torch.Tensor]) -> Any:
        """Return a plain item, with ``tensors`` by row in the place of those inside it.

        Raises:
            StateError: A value is stored as a pickle.
        """
        refused = find_all(self[name], Refused)
        if refused:
            raise refused[0].error
        return replace_all(self[name], StoredTensorRef, lambda found: tensors[found.row])

    def rows_inside(self, name: str) -> list[int]:
        """Return the rows of the tensors inside an item."""
        return [found.row for found in find_all(self[name], StoredTensorRef)]


class _Placeholder(torch.Tensor):
    """A tensor without elements that refers to a stored one."""

    row: int


def _placeholder(found: StoredTensorRef) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.float32).as_subclass(_Placeholder)
    made.row = found.row
    return made
