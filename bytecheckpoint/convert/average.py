"""Average the tensors of several checkpoints into a new one, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from ..checkpoint.attempts import new_attempt, remove_attempt
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.index import Index
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.manifest_file import commit
from ..checkpoint.selection import Exclusion
from ..errors import MismatchError, UsageError
from ..format.manifest.document import timestamp
from ..loading.matching import fault_lines
from ..runtime.arguments import check_arguments
from ..runtime.modes import default_modes
from ..tensors.dtypes import DType
from .diff import TensorComparison, value_diffs
from .reshard import chosen_part, whole_files
from .rewriter import PIECE_BYTES, OutputTensor, Progress, Rewriter, cleanup_on_failure, refuse_checkpoint

_ADVICE = {
    "section": "",
    "missing": "not in all checkpoints",
    "shape": "stored with different shapes",
    "dtype": "stored with different dtypes",
    "rank": "saved for single ranks",
    "value": "plain values that differ",
    "integer": "not averaged, because they have no floating-point dtype of 16 bits or more, and differ",
}


@dataclass(frozen=True)
class AverageReport:
    """The result of ``average``.

    Attributes:
        url: URL of the new checkpoint.
        sections: Names of its sections.
        averaged: Number of tensors that were averaged.
        copied: Number of tensors that are equal in all checkpoints and have no dtype that is averaged.
        weights: The weight of each checkpoint, of which the sum is 1.
        bytes_read: Bytes read from all checkpoints.
    """

    url: str
    sections: tuple[str, ...]
    averaged: int
    copied: int
    weights: tuple[float, ...]
    bytes_read: int


@default_modes()
def average(
    checkpoints: Sequence[Checkpoint],
    target: AnyLocation,
    *,
    weights: Sequence[float] | None = None,
    sections: Sequence[str] = ("model",),
    exclude: Sequence[str] = (),
    step: int | None = None,
    progress: Progress = lambda nbytes: None,
) -> AverageReport:
    """Commit a checkpoint with the average of each floating-point tensor. Holds some tens of MiB at a time.

    Tensors of 16 bits are summed in float32, others in float64, in the order of the checkpoints; the result is rounded
    once, to the stored dtype. Tensors of other dtypes and plain values must be equal. The layouts of the checkpoints
    may differ, and other systems may have written them. After a failure nothing remains at the target.

    Args:
        checkpoints: At least two checkpoints, from ``bcp.open``.
        target: Where to put the new checkpoint.
        weights: One finite number for each checkpoint, with a positive sum, by which they are divided; by default all
            are equal.
        sections: The sections to average; others are left out.
        exclude: Shell patterns; tensors and values whose full names match one are left out.
        step: The step to store with the checkpoint.
        progress: Called with the number of bytes written since the last call.

    Returns:
        A report.

    Raises:
        UsageError: An argument is invalid.
        NameNotFoundError: A checkpoint lacks a section.
        MismatchError: Names, shapes, dtypes, plain values or integers differ, or a pattern matches nothing. Lists all.
        StateError: A section holds an object that this library does not read.
        KeyExistsError: The target already holds a checkpoint.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    shares = _shares(checkpoints, weights)
    step = check_arguments({"step": step})["step"]
    if not sections:
        raise UsageError("an average needs at least one section")
    store = Location.of(target).open()
    for one in checkpoints:
        refuse_checkpoint(store, one.url)
    excluded = Exclusion(exclude)
    contents = [_Contents.of(one, sections, excluded) for one in checkpoints]
    excluded.require_matches(checkpoints[0].url, checkpoints[0])
    attempt = new_attempt()
    with cleanup_on_failure(lambda: remove_attempt(store, attempt)), ExitStack() as stack:
        readers = [stack.enter_context(Rewriter(one.index)) for one in contents]
        _compare(checkpoints, contents, readers)
        manifest = replace(
            contents[0].part.manifest,
            step=step,
            created=timestamp(),
            metadata={"averaged": [one.url for one in checkpoints], "weights": list(shares)},
        )
        part = replace(contents[0].part, manifest=manifest, crcs=None)
        sources = [(reader, one.rows) for reader, one in zip(readers, contents, strict=True)]
        averager = stack.enter_context(_Averager(part, sources, shares))
        new = averager.write_all(store, attempt, whole_files(part, checkpoints[0], attempt), progress)
        stack.close()  # checks the CRC-32s of other systems' files
        commit(store, new, may_replace=False)
    metas = [manifest.tensors.meta_of(row) for row in range(len(manifest.tensors))]
    averaged = sum(_is_averaged(meta.dtype) for meta in metas)
    return AverageReport(
        store.url,
        tuple(one.name for one in manifest.sections),
        averaged,
        len(metas) - averaged,
        shares,
        sum(reader.bytes_read for reader in readers),
    )


def _shares(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None) -> tuple[float, ...]:
    if len(checkpoints) < 2:
        raise UsageError("an average needs at least two checkpoints")
    given = [1.0] * len(checkpoints) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(checkpoints):
        raise UsageError(f"{len(given)} weights for {len(checkpoints)} checkpoints; give one for each")
    total = math.fsum(given)
    if not all(map(math.isfinite, given)) or not total > 0:
        raise UsageError(f"weights must be finite, with a positive sum, not {given}")
    return tuple(weight / total for weight in given)


def _is_averaged(dtype: DType) -> bool:
    # The values of 8-bit floats are meaningless without the scales of the quantized tensor.
    return dtype.kind in ("float", "complex") and dtype.itemsize >= 2


@dataclass(frozen=True)
class _Contents:
    """What is averaged of one checkpoint: a part of its index, which has its plain values, and rows by full name."""

    index: Index
    part: Index
    rows: Mapping[str, int]

    @classmethod
    def of(cls, checkpoint: Checkpoint, sections: Sequence[str], exclude: Exclusion) -> _Contents:
        for name in sections:
            checkpoint.require_section(name)
        part = chosen_part(checkpoint.index, {name: name for name in sections}, exclude)
        rows = {full: row for row, full in enumerate(checkpoint.manifest.tensors.names) if full}
        kept = [full for full in part.manifest.tensors.names if full in rows]
        return cls(checkpoint.index, part, {full: rows[full] for full in kept})


def _compare(checkpoints: Sequence[Checkpoint], contents: Sequence[_Contents], readers: Sequence[Rewriter]) -> None:
    """Raise ``MismatchError`` with all differences between the first checkpoint and each of the others."""
    first = contents[0]
    faults = [("rank", full, "") for full, row in first.rows.items() if first.index.manifest.scope[row] >= 0]
    for checkpoint, other, reader in zip(checkpoints[1:], contents[1:], readers[1:], strict=True):
        faults += [
            ("missing", full, f"not in {(other if full in first.rows else first).index.url}")
            for full in first.rows.keys() ^ other.rows.keys()
        ]
        comparison = TensorComparison(checkpoints[0], checkpoint, readers[0], reader)
        for full in first.rows.keys() & other.rows.keys():
            row = first.rows[full]
            is_averaged = _is_averaged(first.index.manifest.tensors.meta_of(row).dtype)
            found = comparison.compare(full, row, other.rows[full], values=not is_averaged)
            if found is not None and found.kind == "values":
                faults.append(("integer", full, ""))
            elif found is not None:
                faults.append((found.kind, full, f"{found.a} in {first.index.url}, {found.b} in {other.index.url}"))
        differing = value_diffs(first.part.foreign_values, other.part.foreign_values)
        faults += [("value", value.name, f"in {first.index.url} and {other.index.url}") for value in differing]
    if faults:
        head = f"the checkpoints cannot be averaged ({len(faults)} fault(s)); nothing was written:"
        raise MismatchError("\n".join([head, *fault_lines(faults, (), _ADVICE)]), list(faults))


class _Averager(Rewriter):
    """Writes the averages of ``sources``, which have the tensors of ``part`` in rows of other numbers, by name."""

    piece_bytes = PIECE_BYTES // 8  # several are held at once, in wider dtypes

    def __init__(
        self, part: Index, sources: Sequence[tuple[Rewriter, Mapping[str, int]]], shares: Sequence[float]
    ) -> None:
        super().__init__(part)
        self._names = list(part.manifest.tensors.names)
        self._sources, self._shares = sources, shares

    def _read_all(self, batch: Sequence[OutputTensor]) -> list[torch.Tensor]:
        sums: list[torch.Tensor] = []
        for (reader, rows), share in zip(self._sources, self._shares, strict=True):
            found = reader._read_all([replace(one, row=rows[self._names[one.row]]) for one in batch])
            if not sums:
                sums = [
                    _start(tensor, share) if _is_averaged(one.dtype) else tensor
                    for tensor, one in zip(found, batch, strict=True)
                ]
                continue
            for total, tensor, one in zip(sums, found, batch, strict=True):
                if _is_averaged(one.dtype):
                    total.add_(tensor.to(total.dtype), alpha=share)
        return [total.to(one.torch_dtype) for total, one in zip(sums, batch, strict=True)]


def _start(tensor: torch.Tensor, share: float) -> torch.Tensor:
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else torch.float64
    return tensor.to(torch.promote_types(tensor.dtype, dtype)).mul_(share)
