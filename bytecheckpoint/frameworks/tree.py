"""The adapters for trees of tensors and plain values, for stateful objects, and for what is described already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import StateError
from ..format.values.types import MAX_DEPTH, path_name
from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .base import Adapter, Context
from .data_loader import DataLoaderState
from .per_rank import PerRank
from .rng import RNGState
from .tree_capture import Capture
from .tree_paths import is_stateful, kind_of
from .tree_target import build_target

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

    Mappings are flattened, and so are lists and tuples that contain a tensor, mapping or stateful object. Everything
    else is a leaf. A load fills tensors, replaces values in their container, and rebuilds tuples. An empty mapping gets
    everything stored below it, and a list of plain values gets whatever list is stored. Stateful objects get their
    stored state unchanged. A tensor that is a section by itself is stored under the name ``tensor``.
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
        """The policy of every ``PerRank`` and ``RNGState`` in the tree, by path.

        Each is also listed under the path that its dotted name alone suggests, for lookups by a tensor's name.
        """
        found: dict[Path, str] = {}
        _collect_policies(obj, (), found)
        by_name: dict[Path, str] = {}
        for path, policy in found.items():
            by_name[tuple(path_name(path).split(".")) if path else ()] = policy
        return {**by_name, **found}


class StatefulAdapter(TreeAdapter):
    """An object with ``state_dict`` and ``load_state_dict`` as a section; its state dict is stored as a tree.

    A load calls ``load_state_dict`` once with the complete stored state.
    """

    name: ClassVar[str] = "stateful"
    priority: ClassVar[int] = -10

    def recognizes(self, obj: object) -> bool:
        return is_stateful(obj)


def _collect_policies(node: Any, path: Path, found: dict[Path, str]) -> None:
    if isinstance(node, torch.Tensor) or len(path) > MAX_DEPTH:
        return
    kind = kind_of(node, path_name(path), root=not path)
    if kind == "per_rank":
        found[path] = node.on_resize
        _collect_policies(node.value, path, found)
    elif kind == "stateful" and isinstance(node, RNGState):
        found[path] = node.on_resize
    elif kind == "stateful" and isinstance(node, DataLoaderState):
        found[path] = "skip" if node.on_resize == "skip" else "error"
    elif kind == "mapping":
        for key, child in node.items():
            _collect_policies(child, (*path, key), found)
    elif kind in ("list", "tuple"):
        for index, child in enumerate(node):
            _collect_policies(child, (*path, index), found)


@dataclass(frozen=True, eq=False)
class CapturedSection:
    """What this rank holds of a section, as a tree of tensors and values. It can be saved, and not loaded into."""

    source: SectionSource


class CapturedAdapter(Adapter):
    """Saves a ``CapturedSection`` as the tree that it describes."""

    name: ClassVar[str] = "captured"
    kind: ClassVar[str] = "tree"

    def recognizes(self, obj: object) -> bool:
        return type(obj) is CapturedSection

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source: SectionSource = obj.source
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        raise StateError(f"section {context.section!r} was described for a save and cannot be loaded into")
