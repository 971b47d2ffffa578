"""The result of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import without_userinfo
from ..telemetry.trace import Timings, timings_table


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one rank loaded, left unchanged, and read. Names are full (``<section>.<name>``).

    Attributes:
        url: The checkpoint.
        step: The training step stored with the checkpoint, if any.
        metadata: The metadata that the caller of ``save`` passed.
        saved_world_size: Number of ranks that saved the checkpoint.
        loaded: Names of the tensors and values that were loaded.
        missing: Requested names that the checkpoint does not contain, tolerated by ``strict``.
        unexpected: Stored names that no rank requested, tolerated by ``strict``.
        lazy: Optimizer state that the saved run had not created yet, and other names that the checkpoint may lack.
        left_out: Requested names that the save was asked to leave out (``save(..., trainable_only=True)``); they are
            unchanged.
        mismatched: Maps each tensor that was left unchanged because of its shape, as ``strict="skip_mismatched"``
            allows, to ``(stored shape, shape in memory)``.
        resized: Maps each tensor that was stored with another padding (of a vocabulary) to ``(stored shape, shape in
            memory)``; the common part was loaded.
        sources: Maps each name that was filled from a stored tensor of another name to that full name: a tensor that
            ``rename`` maps to it, a tensor of a model from the optimizer's master weight, or a master weight from the
            model's tensor.
        cast: Maps each name that was cast to ``(stored dtype, dtype in memory)``.
        resumed: Maps each random generator of an ``RNGState``, and each ``DataLoaderState``, to what the load did on
            this rank, and a detail: ``continued`` (exactly where it was saved), ``reseeded`` (a new random stream),
            ``divided`` (all ranks together continue where they were saved) or ``unchanged``.
        notes: Remarks of the adapters, such as tied tensors that were stored separately, and of the storage backend,
            such as files that are not in a tier.
        bytes_read: Bytes that this rank read from storage.
        bytes_unchecked: Bytes that this rank requested and read, but compared with no checksum: ``verify=False``, or
            files of another system that have none. (``torch.save`` stores one for each storage; it is checked where
            this rank reads the whole storage.)
        bytes_received: Bytes that this rank received from ranks that had read them, in the dtypes in memory.
        bytes_requested: Bytes that this rank requested, in the stored dtypes.
        over_reads: Maps stored tensors of which this rank read at least twice as many bytes as it requested, because
            these are small pieces of what is stored, such as columns of rows, to ``(bytes read, bytes requested)``. It
            is empty if that is less than 64 MiB too much.
        timings: Seconds and bytes of each step on this rank.
    """

    url: str = field(repr=False)  # it may contain a password
    step: int | None
    metadata: Mapping[str, Any]
    saved_world_size: int
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    lazy: list[str]
    left_out: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    sources: dict[str, str]
    cast: dict[str, tuple[str, str]]
    resumed: dict[str, tuple[str, str]]
    notes: list[str]
    bytes_read: int
    bytes_unchecked: int
    bytes_received: int
    bytes_requested: int
    over_reads: dict[str, tuple[int, int]]
    timings: Timings

    def __str__(self) -> str:
        kinds = ("missing", "unexpected", "lazy", "left_out", "mismatched", "resized", "cast", "notes", "over_reads")
        counts = {what: len(getattr(self, what)) for what in kinds}
        counted = [f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count]
        parts = [f"{len(self.loaded)} loaded", *counted]
        unchecked = f" ({self.bytes_unchecked} unchecked)" if self.bytes_unchecked else ""
        received = f" and {self.bytes_received} received" if self.bytes_received else ""
        return (
            f"{without_userinfo(self.url)} (step {self.step}): {', '.join(parts)}; "
            f"{self.bytes_read} bytes read{unchecked}{received} for {self.bytes_requested} requested"
        )

    def _repr_html_(self) -> str:
        return timings_table(f"Load of {self}", self.timings)
