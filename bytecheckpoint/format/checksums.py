"""Checksums: the XXH3-128 of a range of bytes, as 16 bytes, and columns of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

CHECKSUM_BYTES = 16

Checksums = npt.NDArray[np.void]
"""A column of checksums, each an item of 16 bytes."""

_CHECKSUM = np.dtype(f"V{CHECKSUM_BYTES}")


def checksum_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the checksum of bytes. Releases the GIL while it hashes."""
    return xxhash.xxh3_128_digest(data)


def checksum_column(values: bytes | Iterable[bytes]) -> Checksums:
    """Return the column of these checksums, or of checksums back to back."""
    return np.frombuffer(values if isinstance(values, bytes) else b"".join(values), _CHECKSUM)


def empty_checksums(count: int = 0) -> Checksums:
    """Return a writable column of zeros."""
    return np.zeros(count, _CHECKSUM)
