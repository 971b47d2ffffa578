"""Deliver a checkpoint's weights to an engine: each rank reads only the parts that its parameters hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..control.base import Operation
from ..loading.shared_reads.negotiation import ShareReads
from ..loading.shared_reads.run import read_together
from ..planners.extents import runs_of
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype
from .layouts.parts import StridedView, box_to_read
from .layouts.recording import Copy, Recorder

_SCRATCH_BYTES = 256 << 20  # in use at a time for reads that cannot go directly to a parameter

_Part = tuple[int, Box, torch.Tensor]


@dataclass(frozen=True)
class DeliveryReport:
    """What a delivery moved, in bytes.

    Attributes:
        requested: Bytes that went into parameters.
        direct: Bytes of these that were read directly into place, without an intermediate copy.
        read: Bytes that were read from storage.
        received: Bytes that other ranks sent.
        seen: Names of the tensors whose values the loader computed with.
    """

    requested: int
    direct: int
    read: int
    received: int
    seen: tuple[str, ...]


class StoredWeights:
    """The tensors of one section of a checkpoint, under the model's own names.

    Args:
        checkpoint: An open checkpoint.
        section: The section that holds the model.

    Raises:
        NameNotFoundError: The checkpoint has no such section.

    Example:
        >>> weights = StoredWeights(bcp.open(path))
        >>> model.load_weights(weights.tensors())   # records the copies, reads nothing
        >>> report = weights.deliver(operation)     # reads
    """

    def __init__(self, checkpoint: Checkpoint, section: str = "model") -> None:
        self._checkpoint, self._rows = checkpoint, checkpoint.section_rows(section, -1)
        self.recorder = Recorder(self._read_view)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, recorded tensor)`` pairs for a model's ``load_weights``, including tied names. Reads nothing."""
        return self._recorded(self.recorder)

    def tensors_read_by_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same pairs, for a loader that is not followed by ``deliver``: each of its copies reads what it needs."""
        return self._recorded(Recorder(self._read_view, self._copy_now))

    def _recorded(self, recorder: Recorder) -> Iterator[tuple[str, torch.Tensor]]:
        return recorder.tensors((name, *self._stored(name)[1:]) for name in self._rows)

    def deliver(self, op: Operation, share_reads: ShareReads = "auto") -> DeliveryReport:
        """Read what the loader copied into the parameters.

        Args:
            op: An operation in which all ranks call this method.
            share_reads: Whether ranks forward bytes that several of them request, as for ``bytecheckpoint.load``.

        Returns:
            The bytes that were requested, read and received.

        Raises:
            CorruptionError: Stored bytes do not match their checksums.
            StorageError: Storage cannot be read.
        """
        requested = 0
        direct: list[_Part] = []
        others: list[Copy] = []
        for copy in self.recorder.copies:
            requested += copy.target.nbytes
            part = self._direct_read(copy)
            if part is None:
                others.append(copy)
            else:
                direct.append(part)
        received = read_together(op, self._checkpoint, direct, share_reads=share_reads)
        with op.phase("read"):
            for batch in runs_of(others, self._scratch_bytes, _SCRATCH_BYTES):
                self._read_and_copy(batch)
        return DeliveryReport(
            requested,
            sum(out.nbytes for _, _, out in direct),
            self._checkpoint.stats.read,
            received,
            tuple(sorted({name for name, _ in self.recorder.seen})),
        )

    @property
    def metas(self) -> dict[str, BasicMeta]:
        """The dtype and shape of each stored tensor."""
        return {name: self._checkpoint.manifest.tensors.meta_of(row) for name, row in self._rows.items()}

    def loaded(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """``(name, box, part of a parameter)`` for each copy that was delivered."""
        for copy in self.recorder.copies:
            yield copy.name, box_to_read(self._stored(copy.name)[1], copy.view).box, copy.target

    def _direct_read(self, copy: Copy) -> _Part | None:
        """The read, with a cast, that replaces ``copy``; None if the elements are in a different order."""
        row, shape, _ = self._stored(copy.name)
        found = box_to_read(shape, copy.view)
        target = found.undo(copy.target)
        return None if target is None else (row, found.box, target)

    def _copy_now(self, copy: Copy) -> None:
        if not copy.target.is_meta:  # else the engine only counts elements
            self._read_and_copy([copy])

    def _read_and_copy(self, copies: Sequence[Copy]) -> None:
        parts: list[_Part] = []
        views: list[torch.Tensor] = []
        for copy in copies:
            part, view = self._scratch_read(copy.name, copy.view)
            parts.append(part)
            views.append(view)
        self._checkpoint.read(parts)
        with torch.no_grad():
            for copy, view in zip(copies, views, strict=True):
                copy.target.copy_(view)

    def _read_view(self, name: str, view: StridedView) -> torch.Tensor:
        part, values = self._scratch_read(name, view)
        self._checkpoint.read([part])
        return values

    def _scratch_read(self, name: str, view: StridedView) -> tuple[_Part, torch.Tensor]:
        """A read into newly allocated memory, and the requested view of that memory."""
        row, shape, dtype = self._stored(name)
        found = box_to_read(shape, view)
        part = torch.empty(found.box.lengths, dtype=dtype)
        return (row, found.box, part), found.apply(part, view)

    def _scratch_bytes(self, copy: Copy) -> int:
        _, shape, dtype = self._stored(copy.name)
        return box_to_read(shape, copy.view).box.numel * dtype.itemsize

    def _stored(self, name: str) -> tuple[int, tuple[int, ...], torch.dtype]:
        """The manifest row, shape and dtype of a stored tensor."""
        row = self._rows[name]
        meta = self._checkpoint.manifest.tensors.meta_of(row)
        return row, meta.shape, torch_dtype(meta)
