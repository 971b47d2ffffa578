"""How the images of a save's files map to the arena's blocks.

The ranges of bytes that the images stage are laid out one after another, each as far from the start of a page as in
its file, and this sequence is divided into blocks. A *piece* is the part of one range in one block. Pieces are copied,
hashed, written and released one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..blocks import PAGE
from ..files import FileImage

__all__ = ["Piece", "split_images"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes ``[start, stop)`` of a file, staged at byte ``offset`` of the block with number ``block``."""

    index: int
    image: FileImage
    start: int
    stop: int
    block: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.stop - self.start


def split_images(images: Sequence[FileImage], block_size: int) -> list[Piece]:
    """Divide all images into pieces, in order. Without gaps, each starts on a page, in the file and in memory."""
    pieces: list[Piece] = []
    position = 0
    for image in images:
        for start, end in image.staged_ranges():
            position += (start - position) % PAGE
            while start < end:
                block, offset = divmod(position, block_size)
                stop = min(start + block_size - offset, end)
                pieces.append(Piece(len(pieces), image, start, stop, block, offset))
                position += stop - start
                start = stop
    return pieces
