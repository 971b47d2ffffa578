"""Recorded copies carried out: each rank reads only the parts of stored tensors that its parameters want."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint import Checkpoint
from ..control.base import Operation
from ..errors import CheckpointError
from ..geometry import Box
from ..reading_together import read_together
from ..shards import torch_dtype
from .recording import Copy, Recorder
from .strided import StridedView, box_of

__all__ = ["Delivered", "StoredWeights"]

_SCRATCH = 256 << 20  # bytes of parts that cannot go straight into place, held at a time

_Part = tuple[int, Box, torch.Tensor]


@dataclass(frozen=True)
class Delivered:
    """``wanted`` bytes went into parameters, ``straight`` of them with no copy on the way. For that, ``read`` bytes
    came from storage and ``received`` from other ranks. ``seen``: tensors whose values the loader computed with."""

    wanted: int
    straight: int
    read: int
    received: int
    seen: tuple[str, ...]


class StoredWeights:
    """The tensors of one section of a checkpoint, under the names that the model itself has for them."""

    def __init__(self, checkpoint: Checkpoint, section: str = "model") -> None:
        if section not in checkpoint.sections:
            raise CheckpointError(
                f"{checkpoint.url} has no section {section!r}; it has {', '.join(checkpoint.sections)}"
            )
        self._checkpoint, self._prefix = checkpoint, f"{section}."
        self.recorder = Recorder(self._read_view)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What ``load_weights`` of a model takes; tied names too. Nothing is read."""
        names = (name for name in self._checkpoint if name.startswith(self._prefix))
        metas = ((name, self._checkpoint[name]) for name in names)
        return self.recorder.tensors(
            (name.removeprefix(self._prefix), stored.shape, stored.dtype) for name, stored in metas
        )

    def deliver(self, op: Operation, share_reads: str = "auto") -> Delivered:
        """Read what was recorded into the parameters, on all ranks of ``op`` at once. Raises as ``read_together``."""
        wanted = 0
        straight: list[_Part] = []
        others: list[Copy] = []
        for copy in self.recorder.copies:
            wanted += copy.target.nbytes
            part = self._straight(copy)
            if part is None:
                others.append(copy)
            else:
                straight.append(part)
        received = read_together(op, self._checkpoint, straight, share_reads=share_reads)
        with op.phase("read"):
            for batch in self._batches(others):
                self._carry_out(batch)
        return Delivered(
            wanted,
            sum(out.nbytes for _, _, out in straight),
            self._checkpoint.stats.read,
            received,
            tuple(sorted({name for name, _ in self.recorder.seen})),
        )

    def _straight(self, copy: Copy) -> _Part | None:
        """The read that puts a copy in place, cast on its way; None where its order of elements is another."""
        row, shape, _ = self._stored(copy.name)
        found = box_of(shape, copy.view)
        if found is None:
            return None
        try:
            return row, found.box, copy.target.permute(found.order).view(found.box.lengths)
        except RuntimeError:  # the target's own strides do not allow it
            return None

    def _carry_out(self, copies: Sequence[Copy]) -> None:
        parts: list[_Part] = []
        views: list[torch.Tensor] = []
        for copy in copies:
            part, view = self._aside(copy.name, copy.view)
            parts.append(part)
            views.append(view)
        self._checkpoint.read(parts)
        with torch.no_grad():
            for copy, view in zip(copies, views, strict=True):
                copy.target.copy_(view)

    def _read_view(self, name: str, view: StridedView) -> torch.Tensor:
        part, values = self._aside(name, view)
        self._checkpoint.read([part])
        return values

    def _aside(self, name: str, view: StridedView) -> tuple[_Part, torch.Tensor]:
        """A read into memory of its own, and the view of that memory that is wanted."""
        row, shape, dtype = self._stored(name)
        found = box_of(shape, view)
        if found is None:
            whole = torch.empty(shape, dtype=dtype)
            return (row, Box.whole(shape), whole), whole.as_strided(view.shape, view.strides, view.offset)
        part = torch.empty(found.box.lengths, dtype=dtype)
        turned = part.reshape([view.shape[d] for d in found.order])
        back = sorted(range(len(found.order)), key=found.order.__getitem__)
        return (row, found.box, part), turned.permute(back)

    def _batches(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        batch: list[Copy] = []
        held = 0
        for copy in copies:
            _, shape, dtype = self._stored(copy.name)
            numel = math.prod(shape) if box_of(shape, copy.view) is None else copy.view.numel
            nbytes = numel * dtype.itemsize
            if batch and held + nbytes > _SCRATCH:
                yield batch
                batch, held = [], 0
            batch.append(copy)
            held += nbytes
        if batch:
            yield batch

    def _stored(self, name: str) -> tuple[int, tuple[int, ...], torch.dtype]:
        manifest = self._checkpoint.manifest
        full = self._prefix + name
        row = manifest.tensor_row(self._checkpoint.aliases.get(full, full))
        assert row is not None
        meta = manifest.tensors.meta_of(row)
        return row, meta.shape, torch_dtype(meta)
