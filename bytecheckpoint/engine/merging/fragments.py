"""The bytes that a rank contributes to tensors that are stored whole: staged, or still in the caller's tensors."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from ...tensors.derived import dense_values, is_derived
from ...tensors.shards import Shard
from ..files import FileImage
from ..staging.pieces import copy_flat_range
from ..staging.staging import Staging
from ..tensor_bytes import as_bytes, is_plain

FRAGMENTS = "fragments"
"""The kind of an image that is staged but never becomes a file."""

_ALIGNMENT_BYTES = 16  # of every shard's first byte; enough for any dtype


def fragment_image(shards: Sequence[Shard]) -> FileImage:
    """Return an image of consecutive shards: their layout in staging memory before they are merged."""
    nbytes = [shard.box.numel * shard.meta.dtype.itemsize for shard in shards]
    ends = list(accumulate(-(-n // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for n in nbytes))
    return FileImage("", "", FRAGMENTS, b"", [0, *ends[:-1]] if ends else [], nbytes, shards)


class Fragments(ABC):
    """Provides the bytes of some of this rank's shards, in row-major order, by the shard's row in the local plan.

    Thread-safe, as long as each byte is requested and released by one thread.
    """

    def begin(self) -> None:  # noqa: B027 - optional to override
        """Prepare for the other calls. Called once, when the training loop no longer waits for the save."""

    needs_buffer: bool = False
    """Whether ``parts`` uses its ``buffer``."""

    @abstractmethod
    def parts(self, row: int, start: int, stop: int, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield bytes ``[start, stop)`` of a shard, in order, as flat uint8 tensors.

        Each tensor is valid until the next is requested. Bytes that must be copied first go through ``buffer`` (uint8,
        a multiple of 16 long), which the caller owns.
        """

    @abstractmethod
    def copy(self, row: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill ``out`` with bytes ``[start, stop)`` of a shard."""

    @abstractmethod
    def release(self, row: int, start: int, stop: int) -> None:
        """Declare that these bytes are not needed again."""

    def fail(self, error: BaseException) -> None:  # noqa: B027 - optional to override
        """Stop reading the caller's tensors: ``parts`` and ``copy`` raise ``error`` from now on."""


class LiveFragments(Fragments):
    """Fragments in the caller's tensors, which must not change during the merge. Create it on the caller's thread."""

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self._tensors = {
            row: shard.tensor if is_derived(shard.tensor) else shard.tensor.detach() for row, shard in shards.items()
        }
        self._failure: BaseException | None = None
        for device in {tensor.device for tensor in self._tensors.values() if not tensor.is_cpu}:
            # Other threads copy on their own streams, which do not wait for the caller's stream.
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
        return dense_values(self._tensors[row])

    def release(self, row: int, start: int, stop: int) -> None:
        """Forget values that were computed. The caller owns all other tensors."""
        tensor = self._tensors[row]
        if is_derived(tensor):
            tensor.release(stop - start)


class StagedFragments(Fragments):
    """Fragments in the staged ``image`` of the shards ``rows``; releasing them gives staging memory back."""

    def __init__(self, staging: Staging, image: FileImage, rows: Sequence[int]) -> None:
        self._staging, self._image, self._rows = staging, image, rows
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._pieces = list(self._staging.pieces_of(self._image))
        self._begins = [piece.start for piece in self._pieces]
        self._offset = dict(zip(self._rows, self._image.offsets, strict=True))
        self._left = [0] * len(self._pieces)  # bytes of each piece that have not been released
        for offset, nbytes in zip(self._image.offsets, self._image.nbytes, strict=True):
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
        unused = []
        with self._lock:
            for index, count in self._within(self._offset[row] + start, self._offset[row] + stop):
                self._left[index] -= count
                if not self._left[index]:
                    unused.append(index)
        for index in unused:
            self._staging.release(self._pieces[index])

    def _tensor(self, index: int, at: int, count: int) -> torch.Tensor:
        piece = self._pieces[index]
        view = self._staging.content(piece)[at - piece.start : at - piece.start + count]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces that contain bytes ``[start, stop)`` of the image, and the number of these bytes in each."""
        index = bisect_right(self._begins, start) - 1
        while start < stop:
            count = min(stop, self._pieces[index].stop) - start
            yield index, count
            start, index = start + count, index + 1
