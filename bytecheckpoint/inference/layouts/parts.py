"""What one rank of an inference engine wants of stored tensors: boxes of them, in the type that it holds them in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..dtypes import DType
from ..geometry import Box

__all__ = ["Part", "each_once"]


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


def each_once(parts: Iterable[Part]) -> list[Part]:
    """In this order; what is a part of another part, in the same type, is there already."""
    by_name: dict[tuple[str, DType], list[Part]] = {}
    given = list(dict.fromkeys(parts))
    for part in given:
        by_name.setdefault((part.name, part.dtype), []).append(part)
    largest = {
        one
        for same in by_name.values()
        for one in same
        if len(same) == 1 or not any(other != one and other.box.contains(one.box) for other in same)
    }
    return [part for part in given if part in largest]
