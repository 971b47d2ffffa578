"""What one rank of an inference engine wants of stored tensors: boxes of them, in the type that it holds them in."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import DType
from ..geometry import Box

__all__ = ["Part"]


@dataclass(frozen=True)
class Part:
    """``box`` of the tensor ``name``, whose whole shape is ``shape``, as ``dtype``."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize
