"""Trees of tensors, plain values and stateful objects: everything in the state that is neither model nor optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ..shards import Path, SectionSource, SectionTarget, StoredSection
from ..values import MAX_DEPTH, path_name
from .base import Adapter, Context
from .per_rank import PerRank, PerRankState
from .tree_capture import Capture
from .tree_paths import kind_of
from .tree_target import build_target

__all__ = ["TreeAdapter", "per_rank_policies"]

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    set,
    frozenset,
    range,
    slice,
    np.generic,
    np.ndarray,
    torch.dtype,
    torch.device,
)


class TreeAdapter(Adapter):
    """Nested mappings (str or int keys), lists and tuples.

    Mappings are flattened; so are lists and tuples that hold a tensor, mapping or stateful object; everything else is
    a leaf. On loading, tensors are filled, values replaced in the container that holds them, tuples rebuilt. An empty
    mapping takes everything stored below it; a list of plain values takes whatever list is stored. Stateful objects
    get the stored state as it is. A tensor that is a whole section is stored under the name ``tensor``.
    """

    name: ClassVar[str] = "tree"
    priority: ClassVar[int] = -20

    def recognizes(self, obj: object) -> bool:
        return obj is None or isinstance(obj, (Mapping, list, tuple, torch.Tensor, PerRank, *_PLAIN))

    def capture(self, obj: Any, context: Context) -> SectionSource:
        capture = Capture(context)
        capture.visit(obj)
        return capture.finish()

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        return build_target(obj, context, stored)

    def per_rank_policies(self, obj: Any) -> dict[Path, str]:
        return per_rank_policies(obj)


def per_rank_policies(obj: Any) -> dict[Path, str]:
    """The policy of every ``PerRank`` and ``PerRankState`` in a tree, by path.

    Also under the path that a tensor's dotted name alone would suggest, for those who know only the name.
    """
    found: dict[Path, str] = {}
    _collect(obj, (), found)
    return {**{tuple(path_name(path).split(".")) if path else (): policy for path, policy in found.items()}, **found}


def _collect(node: Any, path: Path, found: dict[Path, str]) -> None:
    if len(path) > MAX_DEPTH:
        return
    kind = kind_of(node, path_name(path), root=not path)
    if kind == "per_rank":
        found[path] = node.on_resize
        _collect(node.value, path, found)
    elif kind == "stateful" and isinstance(node, PerRankState):
        found[path] = node.on_resize
    elif kind == "mapping":
        for key, child in node.items():
            _collect(child, (*path, key), found)
    elif kind in ("list", "tuple"):
        for index, child in enumerate(node):
            _collect(child, (*path, index), found)
