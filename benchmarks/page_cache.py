"""Query the page cache for a checkpoint's files, fill it or evict from it before a load is timed."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np

__all__ = ["evict", "resident", "sync_tree", "tree_bytes", "warm"]

_PIECE = 8 << 20


def sync_tree(path: str) -> None:
    """Sync all files and directories at and below ``path``, and the directory that contains it."""
    for file in _files(path):
        _sync(file)
    for folder, _, _ in os.walk(path):
        _sync(folder)
    _sync(os.path.dirname(path))


def tree_bytes(path: str) -> int:
    """Return the bytes of all files at and below ``path``."""
    return sum(os.path.getsize(file) for file in _files(path))


def evict(path: str) -> float:
    """Evict the files at and below ``path`` from the page cache; return the share of their pages that remains.

    The kernel silently keeps dirty and mapped pages, so check the share: 0.0 means that the next read is cold on this
    machine (a hypervisor may have another cache).
    """
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return resident(path)


def warm(path: str) -> float:
    """Read the files at and below ``path`` into the page cache; return the share of their pages in it."""
    buffer = bytearray(_PIECE)
    for file in _files(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return resident(path)


def resident(path: str) -> float:
    """Return the share of all pages at and below ``path`` that is in the page cache, according to mincore(2)."""
    pages = present = 0
    for file in _files(path):
        if size := os.path.getsize(file):
            with open(file, "rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) as mapping:
                seen = _mincore(mapping)
            pages += len(seen)
            present += int((seen & 1).sum())
    return present / pages if pages else 0.0


def _mincore(mapping: mmap.mmap) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    seen = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), ctypes.c_void_p(seen.ctypes.data)) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return seen


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
