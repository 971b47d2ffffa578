"""Encode the pieces of a file: each chunk becomes a frame, and the frames of a piece replace it in its own memory.

A frame is never longer than its chunk, so the staging memory of a piece has room for its frames, which are written from
there. The length of a frame is known only after encoding. So the place of a piece in the file is known once all pieces
before it are encoded: whichever thread encodes the last of them gets all pieces that can be written then.

A chunk whose checksum an older checkpoint has at the same place has no frame here; the manifest refers to that
checkpoint's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..codecs import Codec, PlainCodec
from ..format.checksums import Checksums, checksum_column, checksum_of, empty_checksums
from ..tensors.tables import Int64
from .checksums import ChunkHasher
from .files import FileImage

Release = Callable[[], object]
"""Called exactly once, from any thread, when a file no longer needs a piece's memory."""


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of one file: the codec's name, and the stored bytes of each frame.

    ``checksums`` are those of the frames that are shorter than their chunks; any other frame is its chunk. ``source``
    is 0, or the number of the other file that has the frame; ``offset`` are the positions of these frames.
    """

    codec: str
    length: Int64
    checksums: Checksums
    source: Int64
    offset: Int64

    @property
    def stored(self) -> int:
        """Bytes of the frames that the file itself has."""
        return int(self.length[self.source == 0].sum())


@dataclass(frozen=True, eq=False)
class UnencodedPiece:
    """Whole parts ``[first, past)`` of a file: the bytes ``carried`` from earlier pieces, then ``data`` from ``start``.

    ``is_shared`` states which of them are not stored here.
    """

    number: int
    first: int
    past: int
    start: int
    carried: bytearray
    data: memoryview
    release: Release
    is_shared: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class EncodedPiece:
    """Bytes to write at ``offset``, one part after the other. ``release`` returns their memory."""

    offset: int
    parts: tuple[memoryview, ...]
    release: Release


class ChunkEncoder:
    """Encodes the chunks of one file. Call ``cut`` from one thread, ``encode`` from any, ``finish`` after the last.

    A file consists of parts, each in one or several pieces: its head, which is not encoded, and its chunks, which
    ``hasher`` hashes before they are cut.
    """

    def __init__(self, image: FileImage, chunk_size: int, codec: Codec, hasher: ChunkHasher) -> None:
        self._codec, self._hasher, self._base = codec, hasher, image.base
        ends, widths = [len(image.head)], [0]
        for offset, nbytes, width in zip(image.offsets, image.nbytes, image.widths, strict=True):
            begin = len(image.head) + offset
            chunks = range(begin + chunk_size, begin + nbytes, chunk_size)
            ends += [*chunks, begin + nbytes] if nbytes else []
            widths += [width] * (len(ends) - len(widths))
        self._ends, self._widths = np.array(ends, np.int64), widths
        self._is_shared = np.zeros(len(ends), bool)
        self._cut = 0  # parts
        self._pieces = 0
        self._carried = bytearray()  # of a part that is not complete
        self._lock = threading.Lock()
        self._encoded: dict[int, tuple[tuple[memoryview, ...], Release]] = {}  # that have no place yet
        self._placed = 0  # pieces
        self._size = 0
        self._lengths: dict[int, Int64] = {}  # by piece; 0 for a part that is not stored here
        self._checksums: dict[int, bytes] = {}  # by part, of encoded frames

    def cut(self, start: int, data: memoryview, release: Release, nbytes: int | None = None) -> UnencodedPiece | None:
        """Divide the next bytes of the file into parts. Returns None, and releases them, if they complete no part.

        At most one incomplete part is copied, to be encoded with the next piece. If the base has all parts, ``data``
        may be empty, and ``nbytes`` is how many bytes it stands for.
        """
        stop = start + (len(data) if nbytes is None else nbytes)
        first, past = self._cut, int(np.searchsorted(self._ends, stop, side="right"))
        if past == first:
            self._carried += data
            release()
            return None
        whole = int(self._ends[past - 1]) - start
        is_shared = self._compare(first, past)
        piece = UnencodedPiece(self._pieces, first, past, start, self._carried, data[:whole], release, is_shared)
        self._carried = bytearray(data[whole:])
        self._cut, self._pieces = past, self._pieces + 1
        return piece

    def encode(self, piece: UnencodedPiece) -> list[EncodedPiece]:
        """Encode a piece in place. Returns the pieces whose place in the file is known now, in order."""
        ends = self._ends[piece.first : piece.past]
        begins = np.append(self._ends[piece.first - 1] if piece.first else 0, ends[:-1])
        lengths, checksums = np.zeros(len(ends), np.int64), dict[int, bytes]()
        carried, done = memoryview(b""), 0
        for part in np.flatnonzero(~piece.is_shared).tolist():
            size, width = int(ends[part] - begins[part]), self._widths[piece.first + part]
            begin = max(int(begins[part]) - piece.start, 0)
            chunk = piece.data[begin : int(ends[part]) - piece.start]
            if part == 0 and piece.carried:
                frame = carried = self._frame(memoryview(piece.carried + chunk), width)
            else:
                frame = self._frame(chunk, width)
                if frame is not chunk or done < begin:
                    moved = piece.data[done : done + len(frame)]
                    np.copyto(np.frombuffer(moved, np.uint8), np.frombuffer(frame, np.uint8))  # they may overlap
                    frame = moved
                done += len(frame)
            lengths[part] = len(frame)
            if len(frame) < size:
                checksums[piece.first + part] = checksum_of(frame)
        with self._lock:
            self._lengths[piece.number] = lengths
            self._checksums |= checksums
            self._encoded[piece.number] = (carried, piece.data[:done]), piece.release
            return [*self._place()]

    def finish(self) -> tuple[int, Frames]:
        """Return the size of the file, all of whose pieces are encoded, and its frames."""
        order = range(self._pieces)
        length = np.concatenate([np.empty(0, np.int64), *map(self._lengths.__getitem__, order)])[1:]
        checksums = empty_checksums(len(length))
        encoded = sorted(self._checksums)
        checksums[np.array(encoded, np.int64) - 1] = checksum_column(map(self._checksums.__getitem__, encoded))
        source, offset = np.zeros_like(length), length[:0]
        if self._base is not None:
            base, shared = self._base, self._is_shared[1:]
            length[shared], checksums[shared] = base.length[shared], base.frame_checksum[shared]
            source[shared], offset = base.source[shared], base.offset[shared]
        is_encoded = length < np.diff(self._ends)
        return self._size, Frames(self._codec.name, length, checksums[is_encoded], source, offset)

    def _compare(self, first: int, past: int) -> npt.NDArray[np.bool_]:
        """Return which parts the base has; the head is none of them."""
        chunks, base = slice(max(first - 1, 0), past - 1), self._base
        if base is not None:
            is_equal = self._hasher.completed(chunks) == base.checksum[chunks]
            self._is_shared[chunks.start + 1 : past] = is_equal & base.is_usable[chunks]
        return self._is_shared[first:past]

    def _frame(self, chunk: memoryview, width: int) -> memoryview:
        """Return the frame of a chunk, which may be the chunk itself."""
        if not width or isinstance(self._codec, PlainCodec):
            return chunk
        frame = self._codec.encode(chunk, width)
        return memoryview(frame) if len(frame) < len(chunk) else chunk

    def _place(self) -> Iterable[EncodedPiece]:
        while self._placed in self._encoded:
            parts, release = self._encoded.pop(self._placed)
            yield EncodedPiece(self._size, parts, release)
            self._placed += 1
            self._size += sum(map(len, parts))
