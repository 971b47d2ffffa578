"""Read files of ``torch.save``, and turn what they hold into trees for the index."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..checkpoint.index import Index
from ..errors import CorruptionError, KeyNotFoundError, NotACheckpointError, UnsupportedTensorError
from ..format.hf_index import refuse_pointer
from ..format.values.types import UnreadObject
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype
from .archives.torch_archive import OLD_MAGIC, read_archive
from .building import IndexBuilder, StoredBox, StoredLeaf
from .naming import sections_of, step_of
from .pickles.classes import explain
from .pickles.records import Global, Instance, Storage, TensorRef
from .source_path import SourcePath

_MAX_SMALL_BYTES = 16 << 20


class TorchValues:
    """Converts the objects of one file. Equal views of one storage become one leaf, which is a tied tensor.

    Objects that this library does not read become an ``UnreadObject``, which fails only a load that requests it.
    """

    def __init__(self, builder: IndexBuilder) -> None:
        self._builder = builder
        self._leaves: dict[tuple[Any, ...], StoredLeaf] = {}

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
        if kind is Instance and value.cls == Global("_io", "BytesIO") and type(value.state) is tuple:
            return value.state[0] if value.state and type(value.state[0]) is bytes else UnreadObject(explain(value))
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
            storage = tensor.storage
            file = self._builder.file_number(storage.file)
            if storage.crc32 is not None and storage.nbytes:
                self._builder.add_crc(file, storage.offset, storage.offset + storage.nbytes, storage.crc32)
            strides = None if tensor.is_contiguous else tensor.strides
            found = StoredLeaf.whole(BasicMeta(tensor.dtype, tensor.shape), file, tensor.offset, strides)
            self._leaves[key] = found
        return found

    def flat_part(self, tensor: TensorRef, start: int, boxes: Iterable[Box]) -> Iterator[StoredBox]:
        """Return where boxes are that lie back to back in a contiguous tensor, from the element ``start`` on."""
        ((_, file, offset, _),) = self.leaf(tensor).boxes
        offset += start * tensor.dtype.itemsize
        for box in boxes:
            yield StoredBox(box, file, offset)
            offset += box.numel * tensor.dtype.itemsize


def read_small(backend: StorageBackend, tensor: TensorRef) -> torch.Tensor:
    """Read a tensor that is part of a value, such as a loss scale.

    Raises ``UnsupportedTensorError`` for one that is large or not contiguous, and ``CorruptionError`` for one whose
    CRC-32 differs.
    """
    nbytes = tensor.numel * tensor.dtype.itemsize
    if nbytes > _MAX_SMALL_BYTES or not tensor.is_contiguous:
        raise UnsupportedTensorError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.strides)}")
    dtype = torch_dtype(BasicMeta(tensor.dtype, tensor.shape))
    if not nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    data = bytearray(nbytes)
    backend.read_into(tensor.file, tensor.offset, data)
    storage = tensor.storage
    if storage.crc32 is not None and nbytes == storage.nbytes and zlib.crc32(data) != storage.crc32:
        raise CorruptionError(
            f"{backend.url}/{tensor.file}: bytes [{tensor.offset}, {tensor.offset + nbytes}) differ from their CRC-32; "
            f"fetch the file again"
        )
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


_ZIP, _GGUF = b"PK\3\4", b"GGUF"


def read_torch_file(source: SourcePath) -> Index | None:
    """Return the index of one file of ``torch.save``; None if the path is a folder, or another kind of file.

    Raises ``NotACheckpointError`` for a kind of file that is known but not read, ``FormatError`` and
    ``CorruptionError`` for a damaged file.
    """
    if not source.name:
        return None
    try:
        size = source.backend.stat(source.name).size
        magic = bytearray(min(size, 2 + len(OLD_MAGIC)))
        source.backend.read_into(source.name, 0, magic)
    except KeyNotFoundError:
        return None
    if magic.startswith(_GGUF):
        raise NotACheckpointError(
            f"{source.url} is a GGUF file of llama.cpp, whose quantized blocks are not read; use the safetensors files "
            f"that it was converted from"
        )
    refuse_pointer(bytes(magic), source.url)
    if not magic.startswith(_ZIP) and magic[2:] != OLD_MAGIC:
        return None
    builder = IndexBuilder(source.backend, "torch.save")
    tree = TorchValues(builder).tree(read_archive(source.backend, source.name))
    if isinstance(tree, UnreadObject):
        raise NotACheckpointError(
            f"{source.url} holds {tree.what}, pickled as a whole; in a program that has its class, save a dictionary: "
            f"torch.save(model.state_dict(), path)"
        )
    for section, part in sections_of(tree).items():
        builder.add_tree(section, part)
    return builder.build(name=source.name, step=step_of(tree))
