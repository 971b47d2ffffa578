"""Whether a checkpoint will fit, known before the first byte of it is copied."""

from __future__ import annotations

from ...errors import StorageFullError
from ...storage_backends.base import StorageBackend

__all__ = ["check_space"]


def check_space(backend: StorageBackend, nbytes: int) -> None:
    """Raise ``StorageFullError``, with both numbers, where the store can tell that ``nbytes`` do not fit.

    What an overwritten checkpoint takes does not count as free: it stays until the new one is committed.
    """
    free = backend.free_bytes()
    if free is not None and free < nbytes:
        raise StorageFullError(
            f"{backend.url}: this checkpoint takes {nbytes:,} bytes, and {free:,} are free there. Nothing was written; "
            f"free space, keep fewer checkpoints, or save elsewhere"
        )
