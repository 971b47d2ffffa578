"""What is different between two checkpoints: names, shapes, dtypes, and values, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .checkpoint import Checkpoint
from .errors import StateError
from .geometry import Box
from .planners import slabs
from .rewriting import PIECE, Progress, Rewriter
from .stored_values import StoredValue, stored_values

__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff"]

_PIECE = PIECE // 2  # both sides are held, and as float64 with temporaries where they differ
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDiff:
    """A tensor that both have and that is not the same. ``kind`` is "shape", "dtype" (then values were compared as
    numbers) or "values". ``differing`` of ``elements`` elements differ, by at most ``max_abs`` (nan where one is no
    number; None where they were not compared)."""

    name: str
    kind: str
    a: str
    b: str
    differing: int | None = None
    elements: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class ValueDiff:
    """A plain value that differs, or that only one has (the other then is the text ``absent``)."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class DiffReport:
    """``only_a`` and ``only_b`` are names of tensors (tied names too). ``compared`` tensors were looked at, ``skipped``
    of them were equal by their checksums alone."""

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
        return not (self.only_a or self.only_b or self.tensors or self.values)


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    values: bool = True,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress = lambda nbytes: None,
) -> DiffReport:
    """Compare names, shapes, dtypes and, with ``values``, every element and plain value.

    With both tolerances 0, elements are equal if their bits are (so NaN equals itself, and 0.0 is not -0.0); else if
    ``|a - b| <= atol + rtol * |b|``, or both are NaN. Layouts, files, steps, times and metadata are not compared.

    A shard that both store as the same box under the same checksums is equal and is not read: this says what the two
    manifests promise, and ``verify`` whether the files keep it. Everything else is read, checked and compared in
    pieces of a few MiB. Raises ``CorruptionError``, ``StorageError``.
    """
    if rtol < 0 or atol < 0:
        raise StateError(f"tolerances cannot be negative: rtol {rtol}, atol {atol}")
    names_a, names_b = _names(a), _names(b)
    with Rewriter(a) as read_a, Rewriter(b) as read_b:
        comparison = _Comparison(a, b, read_a, read_b, _closeness(rtol, atol))
        found: list[TensorDiff] = []
        for name in sorted(names_a.keys() & names_b.keys()):
            row_a, row_b = names_a[name], names_b[name]
            one = comparison.metas_differ(name, row_a, row_b)
            if values and (one is None or one.kind == "dtype"):
                one = comparison.compare(name, row_a, row_b) or one
            if one is not None:
                found.append(one)
            progress(a.manifest.tensors.meta_of(row_a).nbytes)
        bytes_read = read_a.bytes_read + read_b.bytes_read
    return DiffReport(
        a.url,
        b.url,
        tuple(sorted(names_a.keys() - names_b.keys())),
        tuple(sorted(names_b.keys() - names_a.keys())),
        tuple(found),
        tuple(_value_diffs(a, b)) if values else (),
        len(names_a.keys() & names_b.keys()),
        comparison.skipped,
        bytes_read,
    )


def _names(checkpoint: Checkpoint) -> dict[str, int]:
    """Every name, tied ones too, with the row that its bytes are in."""
    rows = {name: row for row, name in enumerate(checkpoint.manifest.tensors.names)}
    return rows | {alias: rows[name] for alias, name in checkpoint.aliases.items()}


Differs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _closeness(rtol: float, atol: float) -> Differs | None:
    """Which elements of two tensors of numbers differ; None for comparison by bits."""
    if rtol == 0 and atol == 0:
        return None

    def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        close = (a - b).abs() <= atol + rtol * b.abs()
        return ~(close | (a == b) | ((a != a) & (b != b)))

    return differs


@dataclass
class _Comparison:
    a: Checkpoint
    b: Checkpoint
    read_a: Rewriter
    read_b: Rewriter
    differs: Differs | None
    skipped: int = 0
    _done: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    def metas_differ(self, name: str, row_a: int, row_b: int) -> TensorDiff | None:
        meta_a, meta_b = self.a.manifest.tensors.meta_of(row_a), self.b.manifest.tensors.meta_of(row_b)
        if meta_a == meta_b:
            return None
        return TensorDiff(name, "shape" if meta_a.shape != meta_b.shape else "dtype", str(meta_a), str(meta_b))

    def compare(self, name: str, row_a: int, row_b: int) -> TensorDiff | None:
        """Tied names lead to one row and are compared once."""
        meta_a, meta_b = self.a.manifest.tensors.meta_of(row_a), self.b.manifest.tensors.meta_of(row_b)
        same_type = meta_a.dtype == meta_b.dtype
        if not same_type and "bits" in (meta_a.dtype.kind, meta_b.dtype.kind):
            return None
        if (row_a, row_b) not in self._done:
            boxes = self._unequal(row_a, row_b) if same_type else [Box.whole(meta_a.shape)]
            self.skipped += not boxes
            self._done[row_a, row_b] = self._elements(row_a, row_b, boxes)
        differing, max_abs = self._done[row_a, row_b]
        if differing == 0 and same_type:
            return None
        kind = "values" if same_type else "dtype"
        return TensorDiff(name, kind, str(meta_a), str(meta_b), differing, meta_a.numel, max_abs)

    def _unequal(self, row_a: int, row_b: int) -> list[Box]:
        """The boxes that have to be read: all, but those that both store alike."""
        mine, theirs = self.a.manifest.shards_of(row_a), self.b.manifest.shards_of(row_b)
        boxes = [self.a.manifest.shards.box_of(row) for row in range(mine.start, mine.stop)]
        if boxes != [self.b.manifest.shards.box_of(row) for row in range(theirs.start, theirs.stop)]:
            return [box for box in [Box.whole(self.a.manifest.tensors.shape_of(row_a))] if box.numel]
        unequal = []
        for number, box in enumerate(boxes):
            at_a = self.a.manifest.byte_meta(mine.start + number)
            at_b = self.b.manifest.byte_meta(theirs.start + number)
            if (at_a.chunk_size, at_a.checksums) != (at_b.chunk_size, at_b.checksums):
                unequal.append(box)
        return unequal

    def _elements(self, row_a: int, row_b: int, boxes: Sequence[Box]) -> tuple[int, float]:
        """How many elements of the boxes differ, and by how much at most."""
        differing, max_abs = 0, 0.0
        itemsize = self.a.manifest.tensors.meta_of(row_a).dtype.itemsize
        for box in boxes:
            for piece in slabs(box, box, itemsize, _PIECE, 0):
                count, largest = _compare(self.read_a.read(row_a, piece), self.read_b.read(row_b, piece), self.differs)
                differing += count
                max_abs = largest if largest != largest or largest > max_abs else max_abs
        return differing, max_abs


def _compare(a: torch.Tensor, b: torch.Tensor, differs: Differs | None) -> tuple[int, float]:
    a, b = a.reshape(-1), b.reshape(-1)
    if a.dtype == b.dtype:
        unequal = _bits_differ(a, b)
        if not unequal.any():
            return 0, 0.0
        if not _is_number(a.dtype):
            return int(unequal.sum()), float("nan")
        a, b = _as_numbers(a[unequal]), _as_numbers(b[unequal])
        unequal = unequal[unequal]
    else:
        a, b = _as_numbers(a), _as_numbers(b)
        unequal = ~((a == b) | ((a != a) & (b != b)))
    if differs is not None:
        unequal = differs(a, b)
    if not unequal.any():
        return 0, 0.0
    gap = (a[unequal] - b[unequal]).abs()
    return int(unequal.sum()), float("nan") if bool((gap != gap).any()) else float(gap.max())


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.complex128:  # no integer is as wide
        differ: torch.Tensor = torch.view_as_real(a).view(torch.int64) != torch.view_as_real(b).view(torch.int64)
        return differ.any(1)
    carrier = _SAME_SIZE[a.dtype.itemsize]
    return a.view(carrier) != b.view(carrier)


def _is_number(dtype: torch.dtype) -> bool:
    try:
        _as_numbers(torch.empty(0, dtype=dtype))
    except (RuntimeError, TypeError):  # opaque bits
        return False
    return True


def _as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _value_diffs(a: Checkpoint, b: Checkpoint) -> Iterator[ValueDiff]:
    values_a = {value.name: value for value in stored_values(a)}
    values_b = {value.name: value for value in stored_values(b)}
    for name in sorted(values_a.keys() | values_b.keys()):
        one, other = values_a.get(name), values_b.get(name)
        if one is None or other is None or one.encoded != other.encoded:
            yield ValueDiff(name, _shown(one), _shown(other))


def _shown(value: StoredValue | None) -> str:
    if value is None:
        return "absent"
    text = repr(value.decode())
    return text if len(text) <= 200 else f"{text[:197]}..."
