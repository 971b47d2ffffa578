"""Turn what ``torch.save`` stored into trees for the index."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, deque
from typing import Any

import torch

from ..format.values import UnreadObject
from ..tensors.dtypes import DType
from ..tensors.metadata import BasicMeta
from .building import IndexBuilder, StoredLeaf
from .pickles import Global, Instance, Storage, TensorRef, explain

__all__ = ["TorchValues"]


class TorchValues:
    """Converts the objects of one file. Equal views of one storage become one leaf, which is a tied tensor.

    Objects that this library does not read become an ``UnreadObject``, which fails only a load that requests it.
    """

    def __init__(self, builder: IndexBuilder) -> None:
        self._builder = builder
        self._leaves: dict[tuple[Any, ...], StoredLeaf] = {}
        self._storages: dict[tuple[str, int], Storage] = {}

    def tree(self, value: Any) -> Any:
        """Return an interpreted object as a tree of plain values and ``StoredLeaf``s."""
        kind = type(value)
        if kind is TensorRef:
            return self.leaf(value)
        if kind in (dict, OrderedDict):
            if not all(type(key) in (str, int, float, bool, type(None), bytes, tuple) for key in value):
                return UnreadObject("a dict with keys that are objects")
            return kind((key, self.tree(child)) for key, child in value.items())
        if kind in (list, tuple, set, frozenset):
            return kind(self.tree(child) for child in value)
        if kind is deque:
            return deque((self.tree(child) for child in value), value.maxlen)
        if kind is DType:
            return getattr(torch, value.name, UnreadObject(f"the dtype {value.name}"))
        if kind is Instance and value.cls == Global("argparse", "Namespace"):
            return Namespace(**{name: self.tree(child) for name, child in value.attributes.items()})
        if kind in (Instance, Storage):
            return UnreadObject(explain(value))
        if kind is Global:
            return UnreadObject(f"the class or function {value}")
        if kind is Counter:
            return Counter({self.tree(key): self.tree(child) for key, child in value.items()})
        return value

    def leaf(self, tensor: TensorRef) -> StoredLeaf:
        """Return where the bytes of a tensor are."""
        key = (tensor.file, tensor.offset, tensor.dtype, tensor.shape, tensor.strides)
        found = self._leaves.get(key)
        if found is None:
            file = self._file(tensor.storage)
            strides = None if tensor.is_contiguous else tensor.strides
            found = StoredLeaf.whole(BasicMeta(tensor.dtype, tensor.shape), file, tensor.offset, strides)
            self._leaves[key] = found
        return found

    def _file(self, storage: Storage) -> int:
        """The number of the storage's file, whose CRC-32 of the storage is recorded once."""
        file, place = self._builder.file_number(storage.file), (storage.file, storage.offset)
        if storage.crc32 is not None and storage.nbytes and place not in self._storages:
            self._builder.add_crc(file, storage.offset, storage.offset + storage.nbytes, storage.crc32)
        self._storages[place] = storage
        return file
