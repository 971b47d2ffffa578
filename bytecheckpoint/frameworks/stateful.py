"""Objects with ``state_dict`` and ``load_state_dict``: LR schedulers, GradScaler, data loaders, RNG states."""

from __future__ import annotations

from typing import ClassVar

from .tree import TreeAdapter
from .tree_paths import is_stateful

__all__ = ["StatefulAdapter"]


class StatefulAdapter(TreeAdapter):
    """An object that is a section of its own; its state dict is stored as a tree.

    On loading, tensors of ``state_dict()`` that have the stored dtype and shape are filled in place, the others are
    made anew, and ``load_state_dict`` is called once with the whole stored state.
    """

    name: ClassVar[str] = "stateful"
    priority: ClassVar[int] = -10

    def recognizes(self, obj: object) -> bool:
        return is_stateful(obj)
