"""What a pickle contains besides plain values: names of classes, objects of unknown classes, storages and tensors.

All of them are inert: reading an attribute runs nothing that the file chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...errors import FormatError
from ...tensors.dtypes import DType


class Global(NamedTuple):
    """The name of a class or function. Nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class Instance:
    """An object of a class, or the result of a call, that this library does not interpret.

    Keyword arguments, and what a subclass of list, set or dict contains, are not kept.

    Attributes:
        cls: The class or function.
        args: The positional arguments. An enum member has its value; from some versions of Python, ``cls`` is
            ``builtins.getattr`` and the arguments are the class and the member's name.
        state: What the object's ``__getstate__`` returned; usually a dict of attributes. None without a state.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes that ``state`` lists; those of slots included. Empty if the state is something else."""
        parts = self.state if type(self.state) is tuple and len(self.state) == 2 else (self.state,)
        if not all(part is None or type(part) is dict for part in parts):
            return {}
        return {name: value for part in parts if part for name, value in part.items() if type(name) is str}

    def __repr__(self) -> str:
        return f"<{self.cls}>"


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes that one or more tensors view.

    Attributes:
        key: Its name in the archive.
        dtype: The element type; ``uint8`` for an untyped storage.
        file: The file, as a key of the storage backend.
        offset: The first byte in the file.
        nbytes: The length in bytes.
        crc32: The CRC-32 of all bytes, or None if the archive has none.
    """

    key: str
    dtype: DType
    file: str
    offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, eq=False, slots=True)
class TensorRef:
    """A tensor as a view of stored bytes, which lie inside the storage.

    Attributes:
        storage: The storage. Tensors that shared memory have the same object.
        dtype: The element type.
        shape: The shape; empty for a 0-d tensor.
        strides: The distance of neighbors in each dimension, in elements; 0 in dimensions that were expanded.
        start: The first element, counted from the beginning of the storage. Any number for an empty tensor.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def __post_init__(self) -> None:
        """Check the bounds. Raises ``FormatError``."""
        if len(self.shape) != len(self.strides) or len(self.shape) > 64:
            raise FormatError(f"a tensor has shape {self.shape!r:.100} and strides {self.strides!r:.100}")
        for number in (self.start, *self.shape, *self.strides):
            if type(number) is not int or not 0 <= number < 1 << 62:
                raise FormatError(f"a tensor has {number!r:.100} as a length, a stride or an offset")
        if prod(max(length, 1) for length in self.shape) * self.dtype.itemsize >= 1 << 62:  # more than torch can name
            raise FormatError(f"a tensor has the shape {self.shape!r:.100}")
        size = self.storage.nbytes // self.dtype.itemsize
        if self.span and self.start + self.span > size:
            raise FormatError(
                f"a tensor of shape {self.shape!r:.100} and strides {self.strides!r:.100} at element {self.start} "
                f"reaches outside its storage {self.storage.key!r:.50} of {size} elements"
            )

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all elements in bytes. It exceeds the storage if dimensions were expanded."""
        return self.numel * self.dtype.itemsize

    @property
    def span(self) -> int:
        """The number of elements from the first to the last one in the storage, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def file(self) -> str:
        """The file, as a key of the storage backend."""
        return self.storage.file

    @property
    def offset(self) -> int:
        """The first byte of the first element in the file."""
        return self.storage.offset + self.start * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file in row-major order without gaps."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def is_whole(self) -> bool:
        """Whether it is its whole storage in order, so that the storage's CRC-32 covers exactly its bytes."""
        return self.is_contiguous and self.start == 0 and self.nbytes == self.storage.nbytes
