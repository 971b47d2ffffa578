"""One tensor of a checkpoint, which is read when it is indexed or loaded."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import TensorIndexError, UsageError
from ..format.manifest.document import Manifest
from ..runtime.arguments import check_arguments
from ..runtime.modes import default_modes
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta, ShardMeta
from ..tensors.shards import torch_dtype


class _Holder(Protocol):
    """What a ``StoredTensor`` needs of its ``Checkpoint``."""

    @property
    def manifest(self) -> Manifest: ...

    def read(self, parts: Sequence[tuple[int, Box, torch.Tensor]]) -> None: ...


class StoredTensor:
    """One tensor of a checkpoint. Nothing is read until it is indexed or loaded.

    Attributes:
        name: Full name of the tensor in the checkpoint.
        meta: Its dtype and global shape.

    Example:
        >>> tensor = bcp.open("runs/7b/step-1000")["model.wte.weight"]
        >>> tensor.shape, tensor.dtype
        ((50257, 768), torch.float32)
        >>> rows = tensor[0:128]
    """

    def __init__(self, checkpoint: _Holder, name: str, row: int) -> None:
        """Refer to a tensor. ``Checkpoint`` calls this.

        Args:
            checkpoint: The checkpoint that holds the tensor.
            name: Full name of the tensor.
            row: Row of the tensor in the manifest.
        """
        self._checkpoint, self._row = checkpoint, row
        self.name = name
        self.meta: BasicMeta = checkpoint.manifest.tensors.meta_of(row)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return torch_dtype(self.meta)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.meta.nbytes

    @property
    def shards(self) -> list[ShardMeta]:
        """The boxes in which the tensor is stored."""
        return [ShardMeta(self.name, box) for box in self._checkpoint.manifest.boxes_of(self._row)]

    def load(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the whole tensor, and check its bytes.

        Args:
            device: Device of the result.

        Returns:
            A new tensor of the stored shape and dtype.

        Raises:
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        return self.read(Box.whole(self.shape), device)

    @default_modes()
    def read(self, box: Box, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read one box of the tensor, and check its bytes. Reads whole checksum chunks around the box.

        Args:
            box: Offsets and lengths in each dimension, inside the tensor.
            device: Device of the result.

        Returns:
            A new tensor with the shape of ``box``.

        Raises:
            UsageError: The box is not inside the tensor, or there is no such device.
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        if len(box.lengths) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise UsageError(f"{self.name}: the box {box} is not inside a tensor of shape {list(self.shape)}")
        out = torch.empty(box.lengths, dtype=self.dtype, device=check_arguments({"device": device})["device"])
        self._checkpoint.read([(self._row, box, out)])
        return out

    @default_modes()
    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice, as ``torch.Tensor`` would return it.

        Args:
            index: Integers, slices with positive steps, and ``...``.

        Returns:
            A new CPU tensor.

        Raises:
            TensorIndexError: The index is out of range or not supported.
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        box, rest = _index_box(index, self.shape, self.name)
        return self.read(box)[rest]

    def __repr__(self) -> str:
        """Show the name, dtype and shape."""
        return f"<StoredTensor {self.name} {self.meta}>"


def _index_box(index: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the box that contains an index expression, and the index that remains inside this box."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]  # "in" would compare tensors element by element
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise TensorIndexError(f"{name}: {index!r} does not index a tensor of shape {shape}")
    fill = [slice(None)] * (len(shape) - len(items) + len(dots))
    at = dots[0] if dots else len(items)
    items = items[:at] + fill + items[at + len(dots) :]
    offsets: list[int] = []
    lengths: list[int] = []
    rest: list[Any] = []
    for d, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            try:
                start, stop, step = item.indices(size)
            except (TypeError, ValueError) as error:
                raise TensorIndexError(f"{name}: {item!r} in dimension {d} is not a slice of integers") from error
            if step < 0:
                raise TensorIndexError(f"{name}: a negative step in dimension {d} is not supported")
            offsets.append(start if stop > start else 0)
            lengths.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
            continue
        row = _integer(item)
        if row is None or not -size <= row < size:
            raise TensorIndexError(
                f"{name}: index {item!r} is out of range or unsupported in dimension {d} of size {size}; use integers, "
                f"slices and ..., or load() the tensor and index that"
            )
        offsets.append(row % size)
        lengths.append(1)
        rest.append(0)
    return Box(tuple(offsets), tuple(lengths)), tuple(rest)


def _integer(item: Any) -> int | None:
    """An index as an integer; None if it is something else, such as a mask or a list of indices."""
    is_mask = isinstance(item, (bool, np.bool_)) or str(getattr(item, "dtype", "")).endswith("bool")
    if is_mask or getattr(item, "ndim", 0) != 0:
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None
