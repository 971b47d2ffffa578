"""Deliver a checkpoint's weights to an engine: each rank reads only the parts that its parameters hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..control.base import Operation
from ..loading.shared_reads.negotiation import ShareReads
from ..loading.shared_reads.run import read_together
from ..tensors.geometry import Box
from .layouts.parts import BoxView, StridedView, box_to_read
from .layouts.recording import Copy, Recorder
from .push.sources import CheckpointSectionSource

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
        self._source = CheckpointSectionSource(checkpoint, section)
        self.table = self._source.table
        self._metas = dict(self.table.rows)
        self.recorder = Recorder(self._read_view)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, recorded tensor)`` pairs for a model's ``load_weights``, including tied names. Reads nothing."""
        return self.recorder.tensors(self.table.metas())

    def tensors_read_by_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same pairs, for a loader that is not followed by ``deliver``: each of its copies reads what it needs."""
        return Recorder(self._read_view, self._copy_now).tensors(self.table.metas())

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
            for copy in others:
                self._copy_now(copy)
        return DeliveryReport(
            requested,
            sum(out.nbytes for _, _, out in direct),
            self._checkpoint.stats.read,
            received,
            tuple(sorted({name for name, _ in self.recorder.seen})),
        )

    def loaded(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """``(name, box, part of a parameter)`` for each copy that was delivered."""
        for copy in self.recorder.copies:
            yield copy.name, self._box_view(copy.name, copy.view).box, copy.target

    def _direct_read(self, copy: Copy) -> _Part | None:
        """The read, with a cast, that replaces ``copy``; None if the elements are in a different order."""
        found = self._box_view(copy.name, copy.view)
        target = found.undo(copy.target)
        return None if target is None else (self._rows[copy.name], found.box, target)

    def _copy_now(self, copy: Copy) -> None:
        if not copy.target.is_meta:  # else the engine only counts elements
            with torch.no_grad():
                copy.target.copy_(self._read_view(copy.name, copy.view))

    def _read_view(self, name: str, view: StridedView) -> torch.Tensor:
        found = self._box_view(name, view)
        return found.apply(self._source.fetch([(name, found.box)])[0], view)

    def _box_view(self, name: str, view: StridedView) -> BoxView:
        return box_to_read(self._metas[name].shape, view)
