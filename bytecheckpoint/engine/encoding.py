"""Encode the pieces of a file: each chunk becomes a frame, and the frames of a piece replace it in its own memory.

A frame is never longer than its chunk, so the staging memory of a piece has room for its frames, which are written from
there. The length of a frame is known only after encoding. So the place of a piece in the file is known once all pieces
before it are encoded: whichever thread encodes the last of them gets all pieces that can be written then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..codecs import Codec
from ..tensors.tables import Int64
from .files import FileImage

__all__ = ["ChunkEncoder", "EncodedPiece", "Frames", "UnencodedPiece"]

Release = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of one file: the codec's name, the stored bytes of each frame, and their checksums."""

    codec: str
    length: Int64
    checksum: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class UnencodedPiece:
    """Whole parts ``[first, past)`` of a file: the bytes ``carried`` from earlier pieces, then ``data``."""

    number: int
    first: int
    past: int
    carried: bytearray
    data: memoryview
    release: Release


@dataclass(frozen=True, eq=False)
class EncodedPiece:
    """Bytes to write at ``offset``, one part after the other. ``release`` returns their memory."""

    offset: int
    parts: tuple[memoryview, ...]
    release: Release


class ChunkEncoder:
    """Encodes the chunks of one file. Call ``cut`` from one thread, ``encode`` from any, ``finish`` after the last.

    A file consists of parts, each in one or several pieces: its head, which is not encoded, and its chunks.
    """

    def __init__(self, image: FileImage, chunk_size: int, codec: Codec) -> None:
        self._codec = codec
        ends, widths = [len(image.head)], [0]
        for offset, nbytes, width in zip(image.offsets, image.nbytes, image.widths):
            begin = len(image.head) + offset
            chunks = range(begin + chunk_size, begin + nbytes, chunk_size)
            ends += [*chunks, begin + nbytes] if nbytes else []
            widths += [width] * (len(ends) - len(widths))
        self._ends, self._widths = np.array(ends, np.int64), widths
        self._cut = 0  # parts
        self._pieces = 0
        self._carried = bytearray()  # of a part that is not complete
        self._lock = threading.Lock()
        self._encoded: dict[int, tuple[tuple[memoryview, ...], Release]] = {}  # that have no place yet
        self._placed = 0  # pieces
        self._size = 0
        self._lengths: dict[int, Int64] = {}  # by piece, as are the checksums
        self._checksums: dict[int, npt.NDArray[np.uint64]] = {}

    def cut(self, start: int, data: memoryview, release: Release) -> UnencodedPiece | None:
        """Divide the next bytes of the file into parts. Returns None, and releases them, if they complete no part.

        At most one incomplete part is copied, to be encoded with the next piece.
        """
        first, past = self._cut, int(np.searchsorted(self._ends, start + len(data), side="right"))
        if past == first:
            self._carried += data
            release()
            return None
        whole = int(self._ends[past - 1]) - start
        piece = UnencodedPiece(self._pieces, first, past, self._carried, data[:whole], release)
        self._carried = bytearray(data[whole:])
        self._cut, self._pieces = past, self._pieces + 1
        return piece

    def encode(self, piece: UnencodedPiece) -> list[EncodedPiece]:
        """Encode a piece in place. Returns the pieces whose place in the file is known now, in order."""
        memory = np.frombuffer(piece.data, np.uint8)
        ends = self._ends[piece.first : piece.past]
        sizes = np.diff(ends, prepend=self._ends[piece.first - 1] if piece.first else 0).tolist()
        lengths: list[int] = []
        checksums: list[int] = []
        carried = memoryview(b"")
        read = done = 0
        for size, width in zip(sizes, self._widths[piece.first : piece.past]):
            if read == 0 and piece.carried:
                read = size - len(piece.carried)
                frame = carried = self._frame(memoryview(piece.carried + piece.data[:read]), width)
            else:
                frame = self._frame(piece.data[read : read + size], width)
                np.copyto(memory[done : done + len(frame)], np.frombuffer(frame, np.uint8))  # they may overlap
                read += size
                frame = piece.data[done : done + len(frame)]
                done += len(frame)
            if width:
                lengths.append(len(frame))
                checksums.append(xxh3_64_intdigest(frame))
        with self._lock:
            self._lengths[piece.number] = np.array(lengths, np.int64)
            self._checksums[piece.number] = np.array(checksums, np.uint64)
            self._encoded[piece.number] = (carried, piece.data[:done]), piece.release
            return [*self._place()]

    def finish(self) -> tuple[int, Frames]:
        """Return the size of the file, all of whose pieces are encoded, and its frames."""
        order = range(self._pieces)
        length = np.concatenate([np.empty(0, np.int64), *map(self._lengths.__getitem__, order)])
        checksum = np.concatenate([np.empty(0, np.uint64), *map(self._checksums.__getitem__, order)])
        return self._size, Frames(self._codec.name, length, checksum)

    def _frame(self, chunk: memoryview, width: int) -> memoryview:
        """Return the frame of a chunk, which may be the chunk itself."""
        if not width:
            return chunk
        frame = self._codec.encode(chunk, width)
        return memoryview(frame) if len(frame) < len(chunk) else chunk

    def _place(self) -> Iterable[EncodedPiece]:
        while self._placed in self._encoded:
            parts, release = self._encoded.pop(self._placed)
            yield EncodedPiece(self._size, parts, release)
            self._placed += 1
            self._size += sum(map(len, parts))
