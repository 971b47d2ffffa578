"""Plan the reads of one load, and run them into the memory of its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..control.base import Operation
from ..engine.reading.reader import ShardReader
from ..engine.tensor_bytes import as_bytes, copy_elements, is_plain
from ..errors import StateError
from ..tensors.derived import DerivedTensor, is_derived
from ..tensors.geometry import Box
from ..tensors.shards import Shard
from .shared_reads.exchange import ReadRequest
from .shared_reads.negotiation import Answer, ReadOffer
from .shared_reads.run import PlannedReads, plan_reads, run_reads


@dataclass(frozen=True)
class ShardReads:
    """The reads of this rank, the tensors that they fill through buffers, and derived tensors, filled one by one."""

    planned: PlannedReads
    buffered: Sequence[_Buffered]
    derived: Sequence[Sequence[tuple[int, Box, DerivedTensor]]]  # the parts of each


@dataclass(frozen=True)
class ReadCounts:
    """Bytes of one load on this rank: from storage, from other ranks, and requested; requested ones without a check.

    ``over_reads`` is as in ``LoadReport``.
    """

    read: int
    unchecked: int
    received: int
    requested: int
    over_reads: dict[str, tuple[int, int]]


def plan_shard_reads(
    reader: ShardReader, rows: Sequence[int], shards: Sequence[Shard], offer: ReadOffer, answer: Answer
) -> ShardReads:
    """Plan to fill ``shards`` from the manifest's tensors ``rows``. Raises ``StateError`` for a meta shard."""
    derived: dict[int, list[tuple[int, Box, DerivedTensor]]] = {}
    buffered: list[_Buffered] = []
    parts: list[ReadRequest] = []
    for row, shard in zip(rows, shards, strict=True):
        tensor = shard.tensor
        if is_derived(tensor):
            derived.setdefault(id(tensor.whole), []).append((row, shard.box, tensor))
            continue
        if tensor.is_meta:
            raise StateError(f"{shard.fqn} is on the meta device and has no memory to load into; call to_empty() first")
        if tensor.requires_grad:
            tensor = tensor.detach()
        # Lazily conjugated and negated views have other values in their memory.
        if not is_plain(tensor):
            destination = _Buffered(shard.fqn, tensor)
            if destination.memory is not tensor:
                buffered.append(destination)
                tensor = destination.memory
        parts.append(ReadRequest(row, shard.box, tensor))
    return ShardReads(plan_reads(reader, parts, offer, answer), buffered, list(derived.values()))


def read_shards(op: Operation, reads: ShardReads) -> ReadCounts:
    """Fill every shard. Raises as ``run_reads``, and ``StateError`` for an expanded tensor of unequal elements."""
    received = run_reads(op, reads.planned)
    for destination in reads.buffered:
        destination.finish()
    reader = reads.planned.reader
    nbytes = reads.planned.nbytes
    for parts in reads.derived:
        whole = parts[0][2].whole
        buffer = _buffer(whole, sum(tensor.numel() for *_, tensor in parts))
        alone = plan_reads(reader, [ReadRequest(row, box, tensor.view_of(buffer)) for row, box, tensor in parts])
        reader.read(alone.own)
        nbytes += alone.nbytes
        whole.assign(buffer)
    unchecked = 0 if reader.verify else max(nbytes - received - reader.stats.checked, 0)
    return ReadCounts(reader.stats.read, unchecked, received, nbytes, reader.stats.over_reads)


def _buffer(whole: DerivedTensor, requested: int) -> torch.Tensor:
    """Memory for all of a derived tensor. Where not all elements are requested, the others keep their values."""
    if requested == whole.numel():
        return torch.empty(whole.shape, dtype=whole.dtype)
    values = whole.compute().to("cpu", copy=True, memory_format=torch.contiguous_format)
    whole.release(whole.nbytes)
    return values


class _Buffered:
    """A tensor whose elements share memory, or are computed from it: it is read into a buffer of its shape and dtype.

    ``memory`` is the buffer, or the tensor itself if that needs none.
    """

    def __init__(self, fqn: str, tensor: torch.Tensor) -> None:
        self._fqn, self._tensor = fqn, tensor
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        self._expanded_dims = [d for d, (stride, size) in enumerate(steps) if stride == 0 and size > 1]
        is_lazy = tensor.is_conj() or tensor.is_neg()
        self.memory = torch.empty(tensor.shape, dtype=tensor.dtype) if self._expanded_dims or is_lazy else tensor

    def finish(self) -> None:
        """Copy an expanded tensor's values out of the buffer, once all bytes are read and verified.

        Raises ``StateError`` if elements that share memory have different stored values.
        """
        if not self._expanded_dims:
            copy_elements(self._tensor, self.memory)
            return
        first = self._first(self.memory)
        if not torch.equal(as_bytes(first.expand(self.memory.shape).contiguous()), as_bytes(self.memory)):
            raise StateError(
                f"{self._fqn}: the tensor in memory is expanded (shape {tuple(self._tensor.shape)}, strides "
                f"{self._tensor.stride()}), so its elements share memory, but their stored values differ; call "
                f".contiguous() before loading to give each element its own memory"
            )
        copy_elements(self._first(self._tensor), first)

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first element of each expanded dimension."""
        for d in self._expanded_dims:
            tensor = tensor.narrow(d, 0, 1)
        return tensor
