"""File images: what one rank writes, laid out in staging memory exactly as it will be on storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from ..geometry import Box
from ..safetensors_file import HeaderEntry, build_header, shard_name
from ..shards import Shard
from .arena import Slot, page_round
from .tensor_bytes import copy_elements

__all__ = [
    "FileImage",
    "Span",
    "copy_in",
    "place_images",
    "shard_nbytes",
    "tensor_image",
    "values_image",
]


@dataclass(frozen=True)
class Span:
    """A shard's bytes inside its file's data area. ``shard`` is let go once it is staged."""

    shard: Shard | None
    offset: int
    nbytes: int


@dataclass
class FileImage:
    """One file to be written: ``head`` (padded safetensors header, or a whole values document), then ``spans``.

    ``place`` is where the image begins in the slot, a multiple of the page size.
    """

    key: str
    section: str
    kind: str
    head: bytes
    spans: list[Span] = field(default_factory=list)
    place: int = 0

    @property
    def data_size(self) -> int:
        return self.spans[-1].offset + self.spans[-1].nbytes if self.spans else 0

    @property
    def size(self) -> int:
        return len(self.head) + self.data_size

    def head_checksum(self) -> int:
        return xxhash.xxh3_64_intdigest(self.head)

    def release_tensors(self) -> None:
        """Let go of the caller's tensors; their bytes are in the slot."""
        self.spans = [Span(None, span.offset, span.nbytes) for span in self.spans]


def tensor_image(
    key: str, section: str, shards: Sequence[Shard], offsets: Sequence[int], metadata: dict[str, str]
) -> FileImage:
    """The image of a safetensors file that holds ``shards`` in this order at these offsets of its data area."""
    spans = [Span(shard, int(offset), shard_nbytes(shard)) for shard, offset in zip(shards, offsets)]
    entries = [
        HeaderEntry(
            name=shard_name(shard.fqn, shard.box, whole=shard.box == Box.whole(shard.meta.shape)),
            dtype=shard.meta.dtype,
            shape=shard.box.lengths,
            nbytes=span.nbytes,
        )
        for shard, span in zip(shards, spans)
    ]
    return FileImage(key, section, "tensors", build_header(entries, metadata), spans)


def values_image(key: str, section: str, kind: str, document: bytes) -> FileImage:
    """The image of a file of plain values."""
    return FileImage(key, section, kind, document)


def shard_nbytes(shard: Shard) -> int:
    return shard.box.numel * shard.meta.dtype.itemsize


def place_images(images: Sequence[FileImage]) -> int:
    """Lay the images one behind the other, each on a page of its own; returns the bytes needed."""
    place = 0
    for image in images:
        image.place = place
        place += page_round(image.size)
    return place


def copy_in(image: FileImage, slot: Slot) -> None:
    """Copy head and tensors into the slot. Copies from an accelerator are complete when this returns."""
    begin = image.place
    slot.view[begin : begin + len(image.head)] = image.head
    data = begin + len(image.head)
    devices = set()
    for span in image.spans:
        if span.nbytes and span.shard is not None:
            place = slot.tensor[data + span.offset : data + span.offset + span.nbytes]
            source = span.shard.tensor.detach()
            typed = place if source.dtype == torch.uint8 else place.view(source.dtype)
            copy_elements(typed.view(source.shape), source, non_blocking=True)
            devices.add(span.shard.tensor.device)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
