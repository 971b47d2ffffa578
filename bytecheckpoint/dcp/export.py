"""Export a checkpoint as a folder that ``torch.distributed.checkpoint`` loads without this library."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.manifest_file import remove_files
from ..convert.rewriter import OutputTensor, Progress, Rewriter, cleanup_on_failure
from ..convert.selection import parse_cast
from ..convert.state_dicts import StoredTensorRef
from ..convert.torch_file import exportable_state, left_out_of, whole_tensor
from ..convert.torch_layout import TorchLayout
from ..errors import KeyExistsError, UsageError
from ..planners.extents import split_box
from .stored_items import StoredItems

_METADATA_KEY = ".metadata"
_CHUNK_BYTES = 64 << 20
"""DCP reads whole chunks, so larger ones make a rank read bytes that it does not need."""


@dataclass(frozen=True)
class DcpExportReport:
    """The result of ``export_dcp``.

    Attributes:
        url: URL of the folder.
        files: Name and bytes of each file.
        tensors: Number of tensors, each counted once if it has several names.
        left_out: Full names of what only ranks other than 0 saved, which is not in the folder.
        bytes_read: Bytes read from the checkpoint.
    """

    url: str
    files: tuple[tuple[str, int], ...]
    tensors: int
    left_out: tuple[str, ...]
    bytes_read: int


def export_dcp(
    checkpoint: Checkpoint,
    target: AnyLocation,
    *,
    section: str | None = None,
    max_file_bytes: int = 5_000_000_000,
    cast: str | torch.dtype | None = None,
    exclude: Sequence[str] = (),
    progress: Progress = lambda nbytes: None,
) -> DcpExportReport:
    """Write a folder as ``torch.distributed.checkpoint.save`` does. Holds a few MiB of tensors at a time.

    Its items have the names that DCP gives to the state ``{"model": ..., "optimizer": ...}``, with the state dicts that
    ``torch.distributed.checkpoint.state_dict`` returns. ``.metadata`` is written last.

    Args:
        checkpoint: The checkpoint to export, from ``bcp.open``.
        target: The new folder.
        section: Write this section alone, with the names of its own state dict.
        max_file_bytes: Size limit of each file. A larger item gets a separate file.
        cast: A floating-point dtype. Floating-point tensors of 16 bits or more are cast to it; others are not.
        exclude: Shell patterns; tensors and values whose full names match one are left out.
        progress: Called with the number of bytes of tensors written since the last call.

    Returns:
        A report.

    Raises:
        NameNotFoundError: The checkpoint has no such section.
        MismatchError: A pattern matches nothing.
        StateError: A value cannot be decoded, for example because it is stored as a pickle, or is not read.
        KeyExistsError: The folder is not empty.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes must be positive, not {max_file_bytes}")
    dtype = parse_cast(cast)
    store = Location.of(target).open()
    if store.list_children(""):
        raise KeyExistsError(f"{store.url} is not empty and was not changed; give another target")
    sections = exportable_state(checkpoint, section, exclude)
    folder = _Folder(lambda row: whole_tensor(checkpoint, row, dtype), max_file_bytes)
    folder.add(StoredItems.of_state(sections if section is None else sections[section]))
    done: list[str] = []
    with cleanup_on_failure(lambda: remove_files(store, done)):
        with Rewriter(checkpoint.index) as rewriter:
            pieces = rewriter.pieces(folder.outputs)
            for file, size in folder.sizes.items():
                done.append(file)
                with store.create(file, size) as writer:
                    for layout, offset in folder.items[file]:
                        layout.write(writer, offset, pieces, progress)
                    writer.complete()
        done.append(_METADATA_KEY)
        store.put(_METADATA_KEY, pickle.dumps(folder.metadata))
    files = (*folder.sizes.items(), (_METADATA_KEY, store.stat(_METADATA_KEY).size))
    left_out = left_out_of(checkpoint, sections)
    return DcpExportReport(store.url, files, len(folder.chunks), left_out, rewriter.bytes_read)


class _Folder:
    """The items of a folder, and where they are.

    Attributes:
        items: Those of each file, in the order of their bytes.
        sizes: Bytes of each file.
        chunks: Those of each tensor, by its row.
        metadata: What ``.metadata`` contains.
    """

    def __init__(self, output: Callable[[int], OutputTensor], max_file_bytes: int) -> None:
        self._output, self._max_file_bytes = output, max_file_bytes
        self.items: dict[str, list[tuple[TorchLayout, int]]] = {}  # by file, with their offsets
        self.sizes: dict[str, int] = {}
        self.chunks: dict[int, list[tuple[OutputTensor, _StorageInfo]]] = {}
        self.metadata = Metadata({}, storage_meta=StorageMeta())
        self._layouts: dict[tuple[Any, ...], TorchLayout] = {}

    @property
    def outputs(self) -> list[OutputTensor]:
        """All tensors in the order of their bytes."""
        return [one for items in self.items.values() for layout, _ in items for one in layout.tensors]

    def add(self, stored: StoredItems) -> None:
        """Place all items."""
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, found in stored.items.items():
            if not isinstance(found, StoredTensorRef):
                self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = self._place(TorchLayout.of(found, self._output))
                continue
            if found.row not in self.chunks:
                self.chunks[found.row] = [(chunk, self._place(layout)) for chunk, layout in self._chunks(found.row)]
            whole = self._output(found.row)
            properties = TensorProperties(dtype=whole.torch_dtype)
            chunks = []
            for number, (chunk, place) in enumerate(self.chunks[found.row]):
                offsets = torch.Size(chunk.box.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.box.lengths)))
                places[MetadataIndex(name, offsets, number)] = place
            self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties, torch.Size(whole.box.lengths), chunks
            )
        self.metadata.storage_data = places
        self.metadata.planner_data = stored.paths

    def _chunks(self, row: int) -> Iterator[tuple[OutputTensor, TorchLayout]]:
        whole = self._output(row)
        for box in list(split_box(whole.box, whole.box, whole.dtype.itemsize, _CHUNK_BYTES, 0)) or [whole.box]:
            chunk = OutputTensor("", row, box, whole.dtype)
            key = whole.dtype, box.lengths
            if key not in self._layouts:
                self._layouts[key] = TorchLayout.of(StoredTensorRef(row), {row: chunk}.__getitem__)
            yield chunk, replace(self._layouts[key], tensors=(chunk,) if chunk.nbytes else ())

    def _place(self, layout: TorchLayout) -> _StorageInfo:
        """Append an item to the last file, or to a new one."""
        file = next(reversed(self.sizes), "")
        if not file or self.sizes[file] + layout.size > self._max_file_bytes:
            file = f"__0_{len(self.sizes)}.distcp"
        place = _StorageInfo(file, self.sizes.get(file, 0), layout.size)
        self.items.setdefault(file, []).append((layout, place.offset))
        self.sizes[file] = place.offset + layout.size
        return place
