"""Damage a checkpoint on a local disk, and undo the damage afterwards.

This module does not use the library: it derives the contents of a file from its name and its safetensors header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

MANIFEST = "manifest.msgpack"


def with_version(raw: bytes, version: int) -> bytes:
    """Return the manifest with another version, which is the byte after the magic string."""
    changed = raw[:16] + bytes([version]) + raw[17:-16]
    return changed + xxhash.xxh3_128_digest(changed)


def keys_of(root: Path) -> list[str]:
    """Return every file below ``root`` as a key, in order."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def data_begin(file: Path) -> int:
    """Return the offset of the data in a safetensors file, and the size of any other file."""
    if file.suffix != ".safetensors":
        return file.stat().st_size
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def tensor_at(file: Path, offset: int) -> str:
    """Return the name of the tensor that contains this byte, without the box, or "" outside the data."""
    begin = data_begin(file)
    if offset < begin:
        return ""
    with file.open("rb") as opened:
        opened.seek(8)
        header = json.loads(opened.read(begin - 8))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if first <= offset - begin < last:
            return str(name).partition("[")[0]
    return ""


def regions(file: Path) -> list[tuple[int, int]]:
    """Return the ranges whose damage has different effects: length field, header text, padding, data; or the file."""
    size = file.stat().st_size
    begin = data_begin(file)
    if file.suffix != ".safetensors":
        return [(0, size)]
    with file.open("rb") as opened:
        text = len(opened.read(begin).rstrip(b" "))
    return [(low, high) for low, high in ((0, 8), (8, text), (text, begin), (begin, size)) if high > low]


@contextmanager
def flipped(file: Path, offset: int, bit: int = 0) -> Iterator[None]:
    """Flip one bit."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        old = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([old[0] ^ (1 << bit)]))
    try:
        yield
    finally:
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(old)


@contextmanager
def replaced(file: Path, content: bytes | None) -> Iterator[None]:
    """Replace the contents of the file, or remove the file."""
    old = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(old)


@contextmanager
def swapped(one: Path, other: Path) -> Iterator[None]:
    """Exchange the names of two files."""
    aside = one.with_name("aside")

    def swap() -> None:
        os.rename(one, aside)
        os.rename(other, one)
        os.rename(aside, other)

    swap()
    try:
        yield
    finally:
        swap()
