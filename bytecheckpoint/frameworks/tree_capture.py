"""Flatten a tree into tensors under dotted names and plain values under their paths."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Set
from itertools import islice
from typing import Any

import torch

from ..errors import NameCollisionError, UnserializableError, UnsupportedTensorError
from ..format.values.types import MAX_DEPTH, Container, path_name
from ..tensors.shards import Path, SectionSource
from .base import Context
from .digests import tensor_digest
from .module_tree import has_fsdp1, tie_key
from .rng import RNGState
from .tensors import TensorKind, address_of, describe_plain, tensor_kind, tensor_shards
from .tree_paths import PathIndex, kind_of
from .unsupported import require_supported

ROOT_TENSOR: Path = ("tensor",)
"""The path of a tensor that is a section by itself."""


class Capture:
    """One walk over a tree, which adds to ``source``. It is complete after ``finish``.

    ``found`` has path and tensor by name, and whether the tensor belongs to this rank only.
    """

    def __init__(self, context: Context, source: SectionSource | None = None) -> None:
        self.context = context
        self.source = SectionSource() if source is None else source
        self.found: dict[str, tuple[Path, torch.Tensor, bool]] = {}
        self._stored = 0  # how many of them are in the source
        self._memory = SameMemory()

    def finish(self) -> SectionSource:
        """Add the tensors, and markers for those whose names do not determine their paths."""
        if not self._store_together():
            self.store_found()
        index = PathIndex.of(self.source.values)
        ambiguous, path_of = index.ambiguous, index.path_of
        for fqn, (path, _, own) in self.found.items():
            if path_of(fqn) != path or (ambiguous and path_name(path[:-1]) in ambiguous):
                self._put(path, Container("tensor"), own=own)
        return self.source

    def store_found(self) -> None:
        """Add the tensors that were found since the last call."""
        for fqn, (_, tensor, own) in islice(self.found.items(), self._stored, None):
            self.store(fqn, tensor, own=own)
        self._stored = len(self.found)

    def _store_together(self) -> bool:
        """Do what ``store_found`` does, in a third of the time; False if the tensors are not plain or share memory."""
        found = dict(islice(self.found.items(), self._stored, None))
        shards = describe_plain(list(found), [tensor for _, tensor, _ in found.values()], self._memory.addresses)
        if shards is None:
            return False
        self.source.add({shard.fqn: shard.meta for shard in shards}, shards)
        self.source.per_rank.update(fqn for fqn, (_, _, own) in found.items() if own)
        if self.context.world_size > 1:
            shared = (shard for shard in shards if shard.fqn not in self.source.per_rank)
            self.source.digests.update((shard.fqn, tensor_digest(shard.meta, shard.tensor)) for shard in shared)
        return True

    def visit(self, node: Any, path: Path = (), *, own: bool = False) -> None:
        """Add everything at and below ``path``, with ``own`` as values of this rank only."""
        if len(path) > MAX_DEPTH:
            raise UnserializableError(
                f"{self._where(path)} is nested more than {MAX_DEPTH} levels deep, or contains itself"
            )
        if isinstance(node, torch.Tensor):
            self._find(path_name(path or ROOT_TENSOR), (path or ROOT_TENSOR, node, own))
            return
        where = self._where(path)
        kind = kind_of(node, where, root=not path)
        if kind == "per_rank":
            self.visit(node.value, path, own=True)
        elif kind == "stateful":
            state = state_of(node, where)
            self._branch(state, "mapping" if state else "leaf", path, own=own or isinstance(node, RNGState))
        else:
            self._branch(node, kind, path, own=own)

    def _branch(self, node: Any, kind: str, path: Path, *, own: bool) -> None:
        if kind == "leaf":
            self._put(path, {} if not path and isinstance(node, Mapping) and not node else node, own=own)
            return
        marker = _marker(node, kind, path)
        if marker is not None:
            self._put(path, marker, own=own)
        prefix = f"{path_name(path)}." if path else ""
        for key, child in node.items() if kind == "mapping" else enumerate(node):
            if isinstance(child, torch.Tensor):
                self._find(f"{prefix}{key}", ((*path, key), child, own))
            else:
                self.visit(child, (*path, key), own=own)

    def _put(self, path: Path, value: Any, *, own: bool) -> None:
        self.source.values[path] = value
        if own:
            self.source.per_rank.add(path)

    def _find(self, fqn: str, found: tuple[Path, torch.Tensor, bool]) -> None:
        other = self.found.setdefault(fqn, found)
        if other is not found:
            raise NameCollisionError(
                f"{self._where(found[0])}: the paths {other[0]!r} and {found[0]!r} both yield the tensor name {fqn!r}; "
                "rename one key"
            )

    def store(self, fqn: str, tensor: torch.Tensor, *, own: bool = False) -> None:
        """Add a tensor under a name that no other one has."""
        if tensor.is_meta:
            raise UnsupportedTensorError(
                f"{self.context.section}.{fqn} is on the meta device and has no values to store; materialize it first"
            )
        # A single rank's tensor is stored under a name with its rank, which has no tied names.
        kind = tensor_kind(tensor)
        first = None if own else self._memory.first_name(fqn, tensor, kind)
        if first is not None:
            self.source.aliases[fqn] = first
            return
        metas, shards = tensor_shards(fqn, tensor, kind)
        self.source.add(metas, shards)
        if own:
            self.source.per_rank.add(fqn)
        elif self.context.world_size > 1 and not kind.is_distributed:
            self.source.digests[fqn] = tensor_digest(metas[fqn], shards[0].tensor)

    def _where(self, path: Path) -> str:
        return path_name((self.context.section, *path))


def state_of(obj: Any, where: str) -> Mapping[Any, Any]:
    """``obj.state_dict()``. Raises ``UnserializableError`` for an object whose state would be wrong inside a tree."""
    require_supported(obj, f"{where}: an object of type {type(obj).__module__}.{type(obj).__qualname__}")
    if isinstance(obj, torch.optim.Optimizer):
        raise UnserializableError(
            f"{where} is an optimizer inside a tree, where its state could not be resharded; make it a separate "
            f"section, as in {{'optimizer': optimizer}} or {{'optimizer': [first, second]}}"
        )
    if isinstance(obj, torch.nn.Module) and has_fsdp1(obj):
        raise UnserializableError(
            f"{where} is an FSDP-1 module inside a tree, where saving would gather it on every rank; make it a "
            f"separate section, as in {{'ema': module}}"
        )
    state = obj.state_dict()
    if not isinstance(state, Mapping) or not all(type(key) is str or type(key) is int for key in state):
        raise UnserializableError(
            f"{where}: state_dict() of {type(obj).__module__}.{type(obj).__qualname__} returned a "
            f"{type(state).__qualname__} and not a mapping with str or int keys; wrap the result in a dict"
        )
    return state


class SameMemory:
    """Names of plain tensors by their memory, to find tied tensors."""

    def __init__(self) -> None:
        # References keep the tensors alive: reused memory would look like a tie.
        self._by_address: dict[int, tuple[str, torch.Tensor]] = {}
        self._first: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}

    @property
    def addresses(self) -> Set[int]:
        """Where the tensors begin."""
        return self._by_address.keys()

    def first_name(self, fqn: str, tensor: torch.Tensor, kind: TensorKind) -> str | None:
        """The name of an earlier tensor with exactly the same memory.

        If there is none, remembers this tensor. A tensor that is empty, not plain or on the meta device is never tied.
        """
        address = address_of(tensor) if kind.is_plain else 0
        if not address:
            return None
        found = self._by_address.setdefault(address, (fqn, tensor))
        if found[1] is tensor:
            return None if found[0] == fqn else found[0]
        # Few tensors begin at the address of another one; they may have another length, shape or dtype.
        self._first.setdefault(tie_key(found[1]), found)
        first, _ = self._first.setdefault(tie_key(tensor, kind), (fqn, tensor))
        return None if first == fqn else first


def _marker(node: Any, kind: str, path: Path) -> Container | None:
    if kind != "mapping":
        return Container(kind, len(node))
    mapping = "OrderedDict" if type(node) is OrderedDict else "dict"
    if len(node) > 1:
        return Container(mapping, keys=tuple(node))
    if not path:
        return None
    children = (getattr(child, "value", child) for child in node.values())
    holds_tensor = any(isinstance(child, torch.Tensor) for child in children)
    return Container(mapping) if holds_tensor or mapping == "OrderedDict" else None
