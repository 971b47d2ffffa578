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
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype
from .layouts.parts import StridedView, box_to_read
from .layouts.recording import Copy, Recorder

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
            for copy in others:
                self._copy_now(copy)
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
            with torch.no_grad():
                copy.target.copy_(self._read_view(copy.name, copy.view))

    def _read_view(self, name: str, view: StridedView) -> torch.Tensor:
        row, shape, dtype = self._stored(name)
        found = box_to_read(shape, view)
        part = torch.empty(found.box.lengths, dtype=dtype)
        self._checkpoint.read([(row, found.box, part)])
        return found.apply(part, view)

    def _stored(self, name: str) -> tuple[int, tuple[int, ...], torch.dtype]:
        """The manifest row, shape and dtype of a stored tensor."""
        row = self._rows[name]
        meta = self._checkpoint.manifest.tensors.meta_of(row)
        return row, meta.shape, torch_dtype(meta)
