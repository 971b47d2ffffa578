"""The read-only handle on a checkpoint: names, shapes, slices, values, and verification.

It needs neither ``torch.distributed`` nor a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engine.reading.reader import Reader, ReadPart, ReadStats
from ..engine.reading.verify import verify_files
from ..engine.resources import IOEngine
from ..engine.tensor_bytes import box_view
from ..errors import NameNotFoundError, StateError, TensorIndexError, UsageError
from ..format.hf_index import model_directory
from ..format.manifest import Manifest
from ..format.values import decode_value, path_name
from ..planners import plan_load
from ..storage_backends import join
from ..storage_backends.base import StorageBackend
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta, ShardMeta
from ..tensors.shards import Path, torch_dtype
from ..tensors.tables import BoxTable
from .manifest_file import read_manifest
from .values import stored_values

__all__ = ["Checkpoint", "StoredTensor", "VerifyReport"]


@dataclass(frozen=True)
class VerifyReport:
    """The result of ``Checkpoint.verify``.

    Attributes:
        url: URL of the checkpoint.
        files: Number of files that were checked.
        bytes_checked: Number of bytes that were checked.
        problems: A message for each fault. If there are none, all stored bytes equal the saved ones.
    """

    url: str
    files: int
    bytes_checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.problems


class StoredTensor:
    """One tensor of a checkpoint. Nothing is read until it is indexed or loaded.

    Attributes:
        name: Full name of the tensor in the checkpoint.
        meta: Its dtype and global shape.

    Example:
        >>> tensor = bcp.open("runs/7b/step-1000")["model.wte.weight"]
        >>> tensor.shape, tensor.dtype
        ((50257, 768), torch.float32)
        >>> rows = tensor[0:128]
    """

    def __init__(self, checkpoint: Checkpoint, name: str, row: int) -> None:
        """Refer to a tensor. ``Checkpoint`` calls this.

        Args:
            checkpoint: The checkpoint that holds the tensor.
            name: Full name of the tensor.
            row: Row of the tensor in the manifest.
        """
        self._checkpoint, self._row = checkpoint, row
        self.name = name
        self.meta: BasicMeta = checkpoint.manifest.tensors.meta_of(row)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return torch_dtype(self.meta)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.meta.nbytes

    @property
    def shards(self) -> list[ShardMeta]:
        """The boxes in which the tensor is stored."""
        manifest = self._checkpoint.manifest
        rows = manifest.shards_of(self._row)
        return [ShardMeta(self.name, manifest.shards.box_of(row)) for row in range(rows.start, rows.stop)]

    def load(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read the whole tensor, and check its bytes.

        Args:
            device: Device of the result.

        Returns:
            A new tensor of the stored shape and dtype.

        Raises:
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        return self.read(Box.whole(self.shape), device)

    def read(self, box: Box, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read one box of the tensor, and check its bytes. Reads whole checksum chunks around the box.

        Args:
            box: Offsets and lengths in each dimension, inside the tensor.
            device: Device of the result.

        Returns:
            A new tensor with the shape of ``box``.

        Raises:
            UsageError: The box is not inside the tensor.
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        if len(box.lengths) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise UsageError(f"{self.name}: the box {box} is not inside a tensor of shape {list(self.shape)}")
        out = torch.empty(box.lengths, dtype=self.dtype, device=device)
        self._checkpoint.read([(self._row, box, out)])
        return out

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice, as ``torch.Tensor`` would return it.

        Args:
            index: Integers, slices with positive steps, and ``...``.

        Returns:
            A new CPU tensor.

        Raises:
            TensorIndexError: The index is out of range or not supported.
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        box, rest = _index_box(index, self.shape, self.name)
        return self.read(box)[rest]

    def __repr__(self) -> str:
        """Show the name, dtype and shape."""
        return f"<StoredTensor {self.name} {self.meta}>"


class Checkpoint(Mapping[str, StoredTensor]):
    """A read-only checkpoint: maps full tensor names (``model.wte.weight``, tied names too) to ``StoredTensor``.

    ``bcp.open`` returns it. Thread-safe. Reads only the bytes that are requested, in whole checksum chunks.

    Attributes:
        backend: Storage backend whose root is the checkpoint.
        manifest: The decoded manifest.
        reader: The reader that ``read`` uses.

    Example:
        >>> checkpoint = bcp.open("s3://runs/7b/step-1000")
        >>> checkpoint.step, sorted(checkpoint)[:2]
        (1000, ['model.h.0.attn.bias', 'model.h.0.attn.weight'])
        >>> rows = checkpoint["model.wte.weight"][0:128]     # reads only these rows
        >>> checkpoint.verify().ok
        True
    """

    has_checksums = True
    """Whether the manifest's checksums are those of the stored bytes."""

    def __init__(self, backend: StorageBackend, manifest: Manifest, engine: IOEngine, *, verify: bool = True) -> None:
        """Create a handle from a decoded manifest. Use ``bcp.open`` instead.

        Args:
            backend: Storage backend whose root is the checkpoint.
            manifest: The checkpoint's manifest.
            engine: Threads and memory for reads.
            verify: Check all bytes that are read against their checksums.
        """
        self.backend = backend
        self.manifest = manifest
        self._engine = engine
        self.reader = Reader(backend, manifest, engine.io, verify=verify, bounce_pool=engine.bounce_pool)
        self._aliases = dict(manifest.aliases)

    @classmethod
    def open(cls, backend: StorageBackend, engine: IOEngine, *, verify: bool = True) -> Checkpoint:
        """Read and validate the manifest. Use ``bcp.open`` instead.

        Args:
            backend: Storage backend whose root is the checkpoint.
            engine: Threads and memory for reads.
            verify: Check all bytes that are read against their checksums.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: There is no checkpoint, or it cannot be read. The message states what is there instead.
            StorageError: The store failed.
        """
        return cls(backend, read_manifest(backend), engine, verify=verify)

    @property
    def stats(self) -> ReadStats:
        """Bytes read through this handle and bytes requested, without plain values and ``verify``."""
        return self.reader.stats

    @property
    def url(self) -> str:
        """URL of the checkpoint."""
        return self.backend.url

    @property
    def model_directory(self) -> str | None:
        """URL of the directory, inside the checkpoint, from which Hugging Face libraries and vLLM load the model.

        None unless the checkpoint was saved with ``layout="whole"``.
        """
        directory = model_directory(self.manifest)
        return None if directory is None else join(self.url, directory)

    @property
    def step(self) -> int | None:
        """The step that was passed to ``save``."""
        return self.manifest.step

    @property
    def created(self) -> str:
        """Time of the save: UTC, RFC 3339."""
        return self.manifest.created

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The ``metadata`` that was passed to ``save``."""
        return self.manifest.metadata

    @property
    def world_size(self) -> int:
        """Number of ranks that saved the checkpoint."""
        return self.manifest.world_size

    @property
    def sections(self) -> Sequence[str]:
        """Names of the sections, such as "model" and "optimizer"."""
        return [section.name for section in self.manifest.sections]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Maps each tied name to the name under which its bytes are stored."""
        return self._aliases

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor without reading it.

        Args:
            name: Full name of the tensor, or a tied name.

        Returns:
            The tensor.

        Raises:
            NameNotFoundError: The checkpoint has no tensor of this name. Also a ``KeyError``.
        """
        row = self.manifest.tensor_row(self._aliases.get(name, name))
        if row is None:
            raise NameNotFoundError(f"no tensor {name!r} in {self.url}")
        return StoredTensor(self, name, row)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, tied names last."""
        yield from self.manifest.tensors.names
        yield from self._aliases

    def __len__(self) -> int:
        """Return the number of names, with tied names."""
        return len(self.manifest.tensors) + len(self._aliases)

    def section_values(self, section: str, rank: int = 0) -> dict[Path, Any]:
        """Read a section's plain values.

        Args:
            section: Name of the section.
            rank: Rank of the save whose own values are included, in addition to those that all ranks share.

        Returns:
            The values by path, the sequence of keys that leads to each of them.

        Raises:
            NameNotFoundError: The section is not stored.
            StateError: A value was stored as a pickle.
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        if self.manifest.section_index(section) is None:
            raise NameNotFoundError(f"{self.url} has no section {section!r}; it has {', '.join(self.sections)}")
        values = stored_values(self.backend, self.manifest, section=section, ranks=(rank,))
        shared_first = sorted(values, key=lambda value: value.rank is not None)
        encoded = {value.path: value.encoded for value in shared_first}
        return {path: decode_value(data, where=f"{section}.{path_name(path)}") for path, data in encoded.items()}

    def read(self, parts: Sequence[tuple[int, Box, torch.Tensor]]) -> None:
        """Fill tensors with boxes of stored tensors, and check the bytes.

        Args:
            parts: For each tensor to fill: the manifest row of the stored tensor, the box of it to read, and the tensor
                of this shape. It may be on any device, and have another dtype: then the values are cast.

        Raises:
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        requested = BoxTable.build([(row, box) for row, box, _ in parts])
        plan = plan_load(self.manifest.tensors, self.manifest.shards, requested)
        self.reader.read(
            [
                ReadPart(stored, box, box_view(parts[index][2], box, parts[index][1]))
                for index, stored, box in plan.rows()
            ]
        )

    def require_checksums(self) -> None:
        """Check that the stored bytes can be verified.

        Raises:
            StateError: Another library wrote the files, which have no checksums.
        """
        if not self.has_checksums:
            raise StateError(
                f"{self.url} holds files of another library, which have no checksums to check; convert them into a "
                f"checkpoint first: bcp import"
            )

    def checked_reader(self) -> Reader:
        """Create a new reader that checks every byte, even if this handle was opened with ``verify=False``.

        Returns:
            The reader.

        Raises:
            StateError: Another library wrote the files, which have no checksums.
        """
        self.require_checksums()
        return Reader(self.backend, self.manifest, self._engine.io, bounce_pool=self._engine.bounce_pool)

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> VerifyReport:
        """Read every byte of every file and compare it with the manifest. Uses bounded memory.

        Args:
            progress: Called in the calling thread with the number of bytes checked since the last call.

        Returns:
            A report that lists all faults. They are not raised.

        Raises:
            StateError: Another library wrote the files, which have no checksums.
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
        """Show the URL, step, number of tensors and size."""
        size = f"{len(self.manifest.tensors)} tensors, {self.manifest.nbytes} bytes"
        return f"<Checkpoint {self.url} step={self.step} {size}>"


def _index_box(index: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the box that contains an index expression, and the index that remains inside this box."""
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) > 1 or len(items) - items.count(Ellipsis) > len(shape):
        raise TensorIndexError(f"{name}: {index!r} does not index a tensor of shape {shape}")
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
                raise TensorIndexError(f"{name}: a negative step in dimension {d} is not supported")
            offsets.append(start if stop > start else 0)
            lengths.append(max(stop - start, 0))
            rest.append(slice(None, None, step))
        elif isinstance(item, (int, np.integer)) and not isinstance(item, bool) and -size <= item < size:
            offsets.append(int(item) % size)
            lengths.append(1)
            rest.append(0)
        else:
            raise TensorIndexError(
                f"{name}: index {item!r} is out of range or unsupported in dimension {d} of size {size}"
            )
    return Box(tuple(offsets), tuple(lengths)), tuple(rest)
