"""What a rank contributes to tensors that are stored whole: bytes of its shards, staged or as they are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from ...shards import Shard
from ..files import FileImage
from ..staging.piece_copy import copy_flat_range, is_plain
from ..staging.staging import Staging
from ..tensor_bytes import as_bytes

__all__ = ["FRAGMENTS", "Fragments", "LiveFragments", "StagedFragments", "fragment_image"]

FRAGMENTS = "fragments"
"""The kind of an image that is staged, and never becomes a file."""

_ALIGNMENT = 16  # of every shard's first byte, for any dtype


def fragment_image(shards: Sequence[Shard]) -> FileImage:
    """Shards one after the other as they lie in staging memory on their way to whole tensors."""
    nbytes = [shard.box.numel * shard.meta.dtype.itemsize for shard in shards]
    ends = list(accumulate(-(-n // _ALIGNMENT) * _ALIGNMENT for n in nbytes))
    return FileImage("", "", FRAGMENTS, b"", [0, *ends[:-1]] if ends else [], nbytes, shards)


class Fragments(ABC):
    """The bytes of some of this rank's shards, each in row-major order, by the shard's row in its local plan.

    For several threads, each byte being asked for and released by one of them.
    """

    def begin(self) -> None:  # noqa: B027 - nothing to do for some
        """Called once, before all else, when no caller waits for it any more."""

    needs_buffer: bool = False
    """Whether ``parts`` uses the buffer it is given."""

    @abstractmethod
    def parts(self, row: int, start: int, stop: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Bytes ``[start, stop)`` of a shard, in order, in flat uint8 tensors that are good until the next is asked
        for. ``buffer`` (uint8, a multiple of 16 long) is the caller's, for what has to be copied first."""

    @abstractmethod
    def copy(self, row: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill ``out`` with bytes ``[start, stop)`` of a shard."""

    @abstractmethod
    def release(self, row: int, start: int, stop: int) -> None:
        """These bytes are not needed again."""

    def fail(self, error: BaseException) -> None:  # noqa: B027 - nothing to do for what was staged
        """Where the caller's tensors are read, read no more of them: ``parts`` and ``copy`` raise ``error``."""


class LiveFragments(Fragments):
    """Those that are still in the caller's tensors, which do not change meanwhile. Made on the caller's thread."""

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self._tensors = {row: shard.tensor.detach() for row, shard in shards.items()}
        self._failure: BaseException | None = None
        for device in {tensor.device for tensor in self._tensors.values() if not tensor.is_cpu}:
            # Other threads copy, on streams that know nothing of what the caller's stream still has to do.
            torch.accelerator.current_stream(device).synchronize()
        self.needs_buffer = not all(tensor.is_cpu and is_plain(tensor) for tensor in self._tensors.values())

    def parts(self, row: int, start: int, stop: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        tensor = self._tensor(row)
        if tensor.is_cpu and is_plain(tensor):
            yield as_bytes(tensor)[start:stop]
            return
        for begin in range(start, stop, len(buffer)):
            out = buffer[: min(len(buffer), stop - begin)]
            copy_flat_range(out, tensor, begin)
            yield out

    def copy(self, row: int, start: int, stop: int, out: torch.Tensor) -> None:
        copy_flat_range(out, self._tensor(row), start)

    def fail(self, error: BaseException) -> None:
        self._failure = error

    def _tensor(self, row: int) -> torch.Tensor:
        if self._failure is not None:
            raise self._failure
        return self._tensors[row]

    def release(self, row: int, start: int, stop: int) -> None:
        """Tensors are the caller's."""


class StagedFragments(Fragments):
    """Those of ``image``, whose spans are the shards ``rows`` in this order; memory goes back as they are released."""

    def __init__(self, staging: Staging, image: FileImage, rows: Sequence[int]) -> None:
        self._staging, self._image, self._rows = staging, image, rows
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._pieces = list(self._staging.of(self._image))
        self._begins = [piece.start for piece in self._pieces]
        self._offset = dict(zip(self._rows, self._image.offsets))
        self._left = [0] * len(self._pieces)  # bytes of each piece that are still needed
        for offset, nbytes in zip(self._image.offsets, self._image.nbytes):
            for index, count in self._within(offset, offset + nbytes):
                self._left[index] += count

    def parts(self, row: int, start: int, stop: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        at = self._offset[row] + start
        for index, count in self._within(at, self._offset[row] + stop):
            yield self._tensor(index, at, count)
            at += count

    def copy(self, row: int, start: int, stop: int, out: torch.Tensor) -> None:
        at, done = self._offset[row] + start, 0
        for index, count in self._within(at, self._offset[row] + stop):
            out[done : done + count].copy_(self._tensor(index, at, count))
            at, done = at + count, done + count

    def release(self, row: int, start: int, stop: int) -> None:
        over = []
        with self._lock:
            for index, count in self._within(self._offset[row] + start, self._offset[row] + stop):
                self._left[index] -= count
                if not self._left[index]:
                    over.append(index)
        for index in over:
            self._staging.give_back(self._pieces[index])

    def _tensor(self, index: int, at: int, count: int) -> torch.Tensor:
        piece = self._pieces[index]
        view = self._staging.content(piece)[at - piece.start : at - piece.start + count]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The pieces that bytes ``[start, stop)`` of the image lie in, and how many of them in each."""
        index = bisect_right(self._begins, start) - 1
        while start < stop:
            count = min(stop, self._pieces[index].stop) - start
            yield index, count
            start, index = start + count, index + 1
