"""Compare two checkpoints: names, shapes, dtypes and values, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.values import StoredValue
from ..errors import UsageError
from ..planners.extents import split_box
from ..runtime.modes import default_modes
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from .rewriter import PIECE_BYTES, Progress, Rewriter

_PIECE_BYTES = PIECE_BYTES // 2  # both sides are held; where they differ, as float64 with temporaries
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDiff:
    """A tensor that differs between the two checkpoints.

    Attributes:
        name: Full name of the tensor.
        kind: "shape", "dtype" (the values are compared as numbers) or "values".
        a: Dtype and shape in the first checkpoint.
        b: Dtype and shape in the second checkpoint.
        differing: Number of elements that differ; None if they were not compared.
        elements: Number of elements; None if they were not compared.
        max_abs: Largest absolute difference; NaN if an element is not a number, None if they were not compared.
    """

    name: str
    kind: Literal["shape", "dtype", "values"]
    a: str
    b: str
    differing: int | None = None
    elements: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class ValueDiff:
    """A plain value that differs, or that only one checkpoint has.

    Attributes:
        name: Full name of the value.
        a: Text of the value in the first checkpoint, or "absent".
        b: Text of the value in the second checkpoint, or "absent".
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class DiffReport:
    """The result of ``diff``.

    Attributes:
        a: URL of the first checkpoint.
        b: URL of the second checkpoint.
        only_a: Names of tensors that only the first checkpoint has, with tied names.
        only_b: Names of tensors that only the second checkpoint has, with tied names.
        tensors: Tensors that differ: first those of other shapes, then by the largest difference, NaN before all.
        values: Plain values that differ.
        compared: Number of tensors that both have.
        skipped: Number of these that were not read, because their checksums are equal.
        bytes_read: Bytes read from both checkpoints.
    """

    a: str
    b: str
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    tensors: tuple[TensorDiff, ...] = ()
    values: tuple[ValueDiff, ...] = ()
    compared: int = 0
    skipped: int = 0
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return not (self.only_a or self.only_b or self.tensors or self.values)


@default_modes()
def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress = lambda nbytes: None,
) -> DiffReport:
    """Compare two checkpoints. Layouts, files, steps, times and metadata are not compared.

    Shards that both checkpoints store as the same box with the same checksums are not read: the manifests state that
    they are equal. Use ``Checkpoint.verify`` to check the files. All other shards are read and compared in pieces of a
    few MiB.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        values: Compare elements and plain values too, not only names, shapes and dtypes.
        rtol: Relative tolerance. With both tolerances 0, elements are equal if their bits are equal: then NaN equals
            itself, and 0.0 differs from -0.0. Otherwise they are equal if ``|a - b| <= atol + rtol * |b|``, or if both
            are NaN.
        atol: Absolute tolerance.
        progress: Called with the number of bytes compared since the last call.

    Returns:
        A report.

    Raises:
        UsageError: A tolerance is negative or not finite.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise UsageError(f"tolerances must be finite numbers of at least 0: rtol {rtol}, atol {atol}")
    names_a, names_b = _names(a), _names(b)
    with Rewriter(a.index) as read_a, Rewriter(b.index) as read_b:
        comparison = TensorComparison(a, b, read_a, read_b, rtol, atol)
        found: list[TensorDiff] = []
        for name in sorted(names_a.keys() & names_b.keys()):
            row_a, row_b = names_a[name], names_b[name]
            one = comparison.compare(name, row_a, row_b, values=values)
            if one is not None:
                found.append(one)
            progress(a.manifest.tensors.meta_of(row_a).nbytes)
        bytes_read = read_a.bytes_read + read_b.bytes_read
    return DiffReport(
        a.url,
        b.url,
        tuple(sorted(names_a.keys() - names_b.keys())),
        tuple(sorted(names_b.keys() - names_a.keys())),
        tuple(sorted(found, key=_order)),
        tuple(value_diffs(a.index.values(), b.index.values())) if values else (),
        len(names_a.keys() & names_b.keys()),
        comparison.skipped,
        bytes_read,
    )


def _order(one: TensorDiff) -> tuple[int, float, str]:
    """Sort the largest difference to the front; before it what was not compared, or has no number."""
    if one.max_abs is None or math.isnan(one.max_abs):
        return (0 if one.max_abs is None else 1), 0.0, one.name
    return 2, -one.max_abs, one.name


def _names(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the manifest row of every name, with tied names."""
    rows = {name: row for row, name in enumerate(checkpoint.manifest.tensors.names) if name}
    return rows | {alias: rows[name] for alias, name in checkpoint.aliases.items()}


@dataclass
class TensorComparison:
    """Compares tensors of two checkpoints. Without tolerances, bits are compared."""

    a: Checkpoint
    b: Checkpoint
    read_a: Rewriter
    read_b: Rewriter
    rtol: float = 0.0
    atol: float = 0.0
    skipped: int = 0
    _done: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    def compare(self, name: str, row_a: int, row_b: int, *, values: bool = True) -> TensorDiff | None:
        """Compare two rows. Tied names share a row, which is compared once."""
        meta_a, meta_b = self.a.manifest.tensors.meta_of(row_a), self.b.manifest.tensors.meta_of(row_b)
        same_type = meta_a.dtype == meta_b.dtype
        if meta_a.shape != meta_b.shape:
            return TensorDiff(name, "shape", str(meta_a), str(meta_b))
        if not values or (not same_type and "bits" in (meta_a.dtype.kind, meta_b.dtype.kind)):
            return None if same_type else TensorDiff(name, "dtype", str(meta_a), str(meta_b))
        if (row_a, row_b) not in self._done:
            boxes = self._boxes_to_read(row_a, row_b) if same_type else [Box.whole(meta_a.shape)]
            self.skipped += not boxes
            self._done[row_a, row_b] = self._elements(row_a, row_b, boxes)
        differing, max_abs = self._done[row_a, row_b]
        if differing == 0 and same_type:
            return None
        return TensorDiff(
            name, "values" if same_type else "dtype", str(meta_a), str(meta_b), differing, meta_a.numel, max_abs
        )

    def _boxes_to_read(self, row_a: int, row_b: int) -> list[Box]:
        """Return the boxes that must be read: all except those with equal boxes and checksums."""
        sides = [(self.a.manifest, row_a), (self.b.manifest, row_b)]
        boxes, boxes_b = (manifest.boxes_of(row) for manifest, row in sides)
        if not (self.a.index.has_checksums and self.b.index.has_checksums) or boxes != boxes_b:
            return [box for box in [Box.whole(self.a.manifest.tensors.shape_of(row_a))] if box.numel]
        unequal = []
        for number, box in enumerate(boxes):
            at_a, at_b = (manifest.byte_meta(manifest.shards_of(row).start + number) for manifest, row in sides)
            if (at_a.chunk_size, at_a.checksums) != (at_b.chunk_size, at_b.checksums):
                unequal.append(box)
        return unequal

    def _elements(self, row_a: int, row_b: int, boxes: Sequence[Box]) -> tuple[int, float]:
        """Return the number of elements that differ, and the largest difference."""
        differing, max_abs = 0, 0.0
        dtype = self.a.manifest.tensors.meta_of(row_a).dtype
        for box in boxes:
            for piece in split_box(box, box, dtype.itemsize, _PIECE_BYTES, 0):
                count, largest = self._compare(self.read_a.read(row_a, piece), self.read_b.read(row_b, piece), dtype)
                differing += count
                max_abs = largest if largest != largest or largest > max_abs else max_abs
        return differing, max_abs

    def _compare(self, a: torch.Tensor, b: torch.Tensor, dtype: DType) -> tuple[int, float]:
        a, b = a.reshape(-1), b.reshape(-1)
        if a.dtype == b.dtype:
            unequal = _bits_differ(a, b)
            if not unequal.any():
                return 0, 0.0
            if dtype.kind == "bits":
                return int(unequal.sum()), float("nan")
            a, b = _as_numbers(a[unequal]), _as_numbers(b[unequal])
            unequal = unequal[unequal]
        else:
            a, b = _as_numbers(a), _as_numbers(b)
            unequal = ~((a == b) | ((a != a) & (b != b)))
        if self.rtol or self.atol:
            unequal = ~(((a - b).abs() <= self.atol + self.rtol * b.abs()) | (a == b) | ((a != a) & (b != b)))
        if not unequal.any():
            return 0, 0.0
        gap = (a[unequal] - b[unequal]).abs()
        return int(unequal.sum()), float("nan") if bool((gap != gap).any()) else float(gap.max())


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.complex128:  # torch has no integer of this width
        differ: torch.Tensor = torch.view_as_real(a).view(torch.int64) != torch.view_as_real(b).view(torch.int64)
        return differ.any(1)
    carrier = _CARRIERS[a.dtype.itemsize]
    return a.view(carrier) != b.view(carrier)


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def value_diffs(a: Iterable[StoredValue], b: Iterable[StoredValue]) -> Iterator[ValueDiff]:
    """Yield the plain values that differ, without the order of keys."""
    values_a, values_b = {value.name: value for value in a}, {value.name: value for value in b}
    for name in sorted(values_a.keys() | values_b.keys()):
        one, other = values_a.get(name), values_b.get(name)
        if one is not None and other is not None and one.encoded == other.encoded:
            continue
        if not all(value is None or value.only_orders_keys for value in (one, other)):
            yield ValueDiff(name, _value_text(one), _value_text(other))


def _value_text(value: StoredValue | None) -> str:
    if value is None:
        return "absent"
    text = repr(value.decode())
    return text if len(text) <= 200 else f"{text[:197]}..."
