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

__all__ = [
    "ChunkHasher",
    "FileImage",
    "Span",
    "as_bytes",
    "chunk_checksums",
    "copy_elements",
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


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def copy_elements(out: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """``out[...] = source``; between equal types bit by bit, so that also those torch cannot compute with survive."""
    with torch.no_grad():
        if out.dtype == source.dtype and not any(t.is_conj() or t.is_neg() for t in (out, source)):
            carrier = _CARRIERS[out.dtype.itemsize]
            out, source = out.view(carrier), source.view(carrier)
        out.copy_(source, non_blocking=non_blocking)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor, sharing storage."""
    flat = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def chunk_checksums(data: memoryview, chunk_size: int) -> list[int]:
    """xxh3-64 of consecutive pieces of ``chunk_size`` bytes. Releases the interpreter lock while it hashes."""
    return [xxhash.xxh3_64_intdigest(data[at : at + chunk_size]) for at in range(0, len(data), chunk_size)]


class ChunkHasher:
    """xxh3-64 of consecutive ``chunk_size`` bytes of what is fed in pieces of any length; each item begins anew."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self.checksums: list[int] = []

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + self._chunk_size - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            at += len(part)
            if self._filled == self._chunk_size:
                self.end_item()

    def end_item(self) -> None:
        """Close the last, shorter chunk of an item."""
        if self._filled:
            self.checksums.append(self._hash.intdigest())
            self._hash.reset()
            self._filled = 0
