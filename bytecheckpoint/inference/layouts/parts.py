"""Parts of stored tensors that one rank of an inference engine requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...tensors.dtypes import DType
from ...tensors.geometry import Box

__all__ = ["Part", "without_duplicates"]


@dataclass(frozen=True)
class Part:
    """``box`` of the tensor ``name`` of shape ``shape``, cast to ``dtype``."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def without_duplicates(parts: Iterable[Part]) -> list[Part]:
    """``parts`` in order, without those that another part of the same dtype contains."""
    by_name: dict[tuple[str, DType], list[Part]] = {}
    distinct = list(dict.fromkeys(parts))
    for part in distinct:
        by_name.setdefault((part.name, part.dtype), []).append(part)
    largest = {
        one
        for same in by_name.values()
        for one in same
        if len(same) == 1 or not any(other != one and other.box.contains(one.box) for other in same)
    }
    return [part for part in distinct if part in largest]
