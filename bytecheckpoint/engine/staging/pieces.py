"""What is staged, cut into pieces.

The images of a save's files lie one behind the other on a tape, each on a page of its own, and the tape is cut into the
arena's blocks. A *piece* is the part of one image in one block: it is copied, hashed, written and given back by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..files import FileImage
from .arena import page_round

__all__ = ["Piece", "cut"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes ``[start, stop)`` of a file; they go to ``place`` in block ``block`` of the tape."""

    index: int
    image: FileImage
    start: int
    stop: int
    block: int
    place: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def cut(images: Sequence[FileImage], block_size: int) -> list[Piece]:
    """The pieces of all images in the order of the tape. Each begins on a page, in the file and in memory."""
    pieces: list[Piece] = []
    tape = 0
    for image in images:
        start = 0
        while start < image.size:
            block, place = divmod(tape + start, block_size)
            stop = min(start + block_size - place, image.size)
            pieces.append(Piece(len(pieces), image, start, stop, block, place))
            start = stop
        tape += page_round(image.size)
    return pieces
