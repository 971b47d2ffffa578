"""Add a product of two stored factors to a stored tensor, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tensors.geometry import Box

__all__ = ["LowRank", "ReadBox"]

ReadBox = Callable[[int, Box], torch.Tensor]
"""Returns a box of the tensor in a row of the manifest."""


@dataclass(frozen=True)
class LowRank:
    """What is added to a matrix: ``scale * up @ down``, or its transpose.

    ``down`` and ``up`` are rows of the manifest, with the shapes (rank, columns) and (rows, rank).
    """

    down: int
    up: int
    rank: int
    scale: float
    transposed: bool = False

    def added_to(self, block: torch.Tensor, box: Box, read: ReadBox) -> torch.Tensor:
        """Return the sum for ``block``, the box of the matrix, in float32 (float64 if the block is)."""
        (row, column), (rows, columns) = box.offsets, box.lengths
        if self.transposed:
            row, column, rows, columns = column, row, columns, rows
        dtype = torch.promote_types(block.dtype, torch.float32)
        down = read(self.down, Box((0, column), (self.rank, columns))).to(dtype)
        up = read(self.up, Box((row, 0), (rows, self.rank))).to(dtype)
        product = up @ down
        return torch.add(block.to(dtype), product.T if self.transposed else product, alpha=self.scale)
