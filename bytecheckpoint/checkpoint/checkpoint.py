"""A read-only handle on one committed checkpoint: names, metas, slices, values, and proof that every byte holds.

Needs no ``torch.distributed`` and no model. Slicing reads just the bytes it returns (in whole checksum chunks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .engine.reading.reader import Reader, ReadPart, ReadStats
from .engine.reading.stored_files import read_stored_file
from .engine.reading.verify import verify_files
from .engine.resources import Engine
from .engine.writing.commit import read_manifest
from .errors import StateError
from .geometry import Box
from .hf_index import model_directory
from .manifest import COMPANION, Manifest
from .metadata import BasicMeta, ShardMeta
from .planners import plan_load
from .shards import Path, torch_dtype
from .storage_backends import join
from .storage_backends.base import StorageBackend
from .tables import BoxTable
from .values import decode_value, decode_values_file, path_name

__all__ = ["Checkpoint", "StoredTensor", "VerifyReport", "cut", "encoded_values"]


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found. ``problems`` are the messages of every fault; none means that every stored byte is the
    one that was saved."""

    url: str
    files: int
    bytes_checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


class StoredTensor:
    """One tensor of a checkpoint; nothing is read until it is indexed or loaded."""

    def __init__(self, checkpoint: Checkpoint, name: str, row: int) -> None:
        self._checkpoint, self._row = checkpoint, row
        self.name = name
        self.meta: BasicMeta = checkpoint.manifest.tensors.meta_of(row)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.meta)

    @property
    def nbytes(self) -> int:
        return self.meta.nbytes

    @property
    def shards(self) -> list[ShardMeta]:
        """The boxes it is stored in."""
        manifest = self._checkpoint.manifest
        rows = manifest.shards_of(self._row)
        return [ShardMeta(self.name, manifest.shards.box_of(row)) for row in range(rows.start, rows.stop)]

    def load(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The whole tensor, verified."""
        return self.read(Box.whole(self.shape), device)

    def read(self, box: Box, device: torch.device | str = "cpu") -> torch.Tensor:
        """One box of it, verified. Raises ``CorruptionError`` naming file and range; ``StateError`` for a box that is
        not inside the tensor."""
        if len(box.lengths) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise StateError(f"{self.name}: the box {box} is not inside a tensor of shape {list(self.shape)}")
        out = torch.empty(box.lengths, dtype=self.dtype, device=device)
        self._checkpoint.read([(self._row, box, out)])
        return out

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As for a tensor, with integers, slices (positive steps) and ``...``; reads only the bytes around it."""
        box, rest = _index_box(index, self.shape, self.name)
        return self.read(box)[rest]

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name} {self.meta}>"


class Checkpoint(Mapping[str, StoredTensor]):
    """Maps full tensor names (``model.wte.weight``; tied names too) to ``StoredTensor``. Thread-safe."""

    has_checksums = True
    """Whether what the manifest has for checksums are those of the bytes."""

    def __init__(self, backend: StorageBackend, manifest: Manifest, engine: Engine, *, verify: bool = True) -> None:
        self.backend = backend
        self.manifest = manifest
        self._engine = engine
        self._reader = Reader(backend, manifest, engine.io, verify=verify, ring=engine.ring)
        self._aliases = dict(manifest.aliases)

    @classmethod
    def open(cls, backend: StorageBackend, engine: Engine, *, verify: bool = True) -> Checkpoint:
        """Read and validate the manifest. Raises a ``CheckpointError`` that says what is there instead."""
        return cls(backend, read_manifest(backend), engine, verify=verify)

    @property
    def reader(self) -> Reader:
        """Through which ``read`` goes."""
        return self._reader

    @property
    def stats(self) -> ReadStats:
        """Bytes read through this handle and bytes asked for, without values and ``verify``."""
        return self._reader.stats

    @property
    def url(self) -> str:
        return self.backend.url

    @property
    def model_directory(self) -> str | None:
        """Where Hugging Face's libraries and vLLM find the model: a directory with an index beside its files, inside
        the checkpoint. None unless it was saved with ``layout="whole"``."""
        directory = model_directory(self.manifest)
        return None if directory is None else join(self.url, directory)

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def created(self) -> str:
        """UTC, RFC 3339."""
        return self.manifest.created

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the caller of ``save`` gave as ``metadata``."""
        return self.manifest.metadata

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return self.manifest.world_size

    @property
    def sections(self) -> Sequence[str]:
        return [section.name for section in self.manifest.sections]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied names and the names their bytes are stored under."""
        return self._aliases

    def __getitem__(self, name: str) -> StoredTensor:
        row = self.manifest.tensor_row(self._aliases.get(name, name))
        if row is None:
            raise KeyError(f"no tensor {name!r} in {self.url}")
        return StoredTensor(self, name, row)

    def __iter__(self) -> Iterator[str]:
        yield from self.manifest.tensors.names
        yield from self._aliases

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self._aliases)

    def section_values(self, section: str, rank: int = 0) -> dict[Path, Any]:
        """A section's plain values by path: those shared by all ranks, and those that saved rank ``rank`` had alone.

        Raises ``StateError`` for a section that is not stored, and for a value that was stored as a pickle.
        """
        if self.manifest.section_index(section) is None:
            raise StateError(f"{self.url} has no section {section!r}; it has {', '.join(self.sections)}")
        shared, own = encoded_values(self.backend, self.manifest, section, rank)
        return {
            path: decode_value(raw, where=f"{section}.{path_name(path)}") for path, raw in {**shared, **own}.items()
        }

    def read(self, parts: Sequence[tuple[int, Box, torch.Tensor]]) -> None:
        """Fill each tensor with a box of the tensor in that manifest row, verified. Raises as ``StoredTensor.read``."""
        wanted = BoxTable.build([(row, box) for row, box, _ in parts])
        plan = plan_load(self.manifest.tensors, self.manifest.shards, wanted)
        self._reader.read(
            [
                ReadPart(stored, piece, cut(parts[want][2], piece, parts[want][1]))
                for want, stored, piece in plan.pieces()
            ]
        )

    def require_checksums(self) -> None:
        """Raise ``StateError`` where nothing that is read can be checked."""
        if not self.has_checksums:
            raise StateError(
                f"{self.url} holds files of another library, which have no checksums to check; make a checkpoint of "
                f"them first: bcp import"
            )

    def checked_reader(self) -> Reader:
        """A reader of its own, which checks every byte also where this handle was opened without. Raises as
        ``require_checksums``."""
        self.require_checksums()
        return Reader(self.backend, self.manifest, self._engine.io, ring=self._engine.ring)

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> VerifyReport:
        """Read every byte of every file and compare it with the manifest, several pieces at once, in bounded memory.

        ``progress`` gets bytes as they are checked, in the caller's thread. Faults are collected, not raised.
        """
        problems: list[str] = []
        checked = 0
        for nbytes, problem in verify_files(self.checked_reader(), self._engine.io):
            if problem:
                problems.append(problem)
            checked += nbytes
            progress(nbytes)
        return VerifyReport(self.url, len(self.manifest.files), checked, tuple(problems))

    def __repr__(self) -> str:
        size = f"{len(self.manifest.tensors)} tensors, {self.manifest.nbytes} bytes"
        return f"<Checkpoint {self.url} step={self.step} {size}>"


def encoded_values(
    backend: StorageBackend, manifest: Manifest, section: str, rank: int
) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """A section's encoded values: those all ranks share, and those of saved rank ``rank`` alone. Checked."""
    index = manifest.section_index(section)
    shared: dict[Path, bytes] = {}
    own: dict[Path, bytes] = {}
    files = manifest.files
    for row in range(len(files)):
        if files.section[row] != index or files.kind[row] in ("tensors", COMPANION):
            continue
        if files.kind[row] == "rank_values" and files.rank[row] != rank:
            continue
        document = read_stored_file(backend, manifest, row, head_only=False)
        for path, is_shared, raw in decode_values_file(document):
            (shared if is_shared else own)[path] = raw
    return shared, own


def cut(out: torch.Tensor, piece: Box, whole: Box) -> torch.Tensor:
    """The view of ``out`` (which holds ``whole``) that holds ``piece``."""
    return out if piece == whole else out[piece.relative_to(whole).slices()]


def _index_box(index: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """The box around an index expression, and what is left of the index inside it."""
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) > 1 or len(items) - items.count(Ellipsis) > len(shape):
        raise IndexError(f"{name}: {index!r} does not index a tensor of shape {shape}")
    fill = [slice(None)] * (len(shape) - len(items) + items.count(Ellipsis))
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items = items[:at] + fill + items[at + 1 :]
    offsets: list[int] = []
    lengths: list[int] = []
    rest: list[Any] = []
    for d, (item, size) in enumerate(zip(items, shape)):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 0:
                raise IndexError(f"{name}: a negative step in dimension {d} is not supported")
            offsets.append(start if stop > start else 0)
            lengths.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool) and -size <= item < size:
            offsets.append(int(item) % size)
            lengths.append(1)
            rest.append(0)
        else:
            raise IndexError(f"{name}: index {item!r} is out of range or unsupported in dimension {d} of size {size}")
    return Box(tuple(offsets), tuple(lengths)), tuple(rest)
