"""Files of a checkpoint as the manifest describes them: their checked heads, and what to say when they are not so."""

from __future__ import annotations

import xxhash

from ..errors import CorruptionError, KeyNotFoundError, StorageError
from ..manifest import Manifest
from ..storage_backends.base import StorageBackend

__all__ = ["missing", "read_stored_file", "unreadable"]


def read_stored_file(backend: StorageBackend, manifest: Manifest, row: int, *, head_only: bool) -> bytes:
    """The checked head of file ``row``: a safetensors header, or all of a values document.

    Raises ``CorruptionError`` where the file is missing, of another size (unless ``head_only``) or changed, and
    ``StorageError`` where the store does not give it out.
    """
    files = manifest.files
    key, size, length = files.name[row], int(files.size[row]), int(files.head_length[row])
    buffer = bytearray(length)
    try:
        if not head_only and (found := backend.stat(key).size) != size:
            raise CorruptionError(f"{backend.url}/{key}: file has {found} bytes, the manifest says {size}")
        backend.read_into(key, 0, buffer)
    except KeyNotFoundError as error:
        raise missing(backend, key, f"section {manifest.sections[int(files.section[row])].name}") from error
    except StorageError as error:
        raise unreadable(backend, key, size, f"its first {length} bytes", error) from error
    if xxhash.xxh3_64_intdigest(buffer) != int(files.head_checksum[row]):
        what = "header" if files.kind[row] == "tensors" else "values"
        section = manifest.sections[int(files.section[row])].name
        raise CorruptionError(
            f"{backend.url}/{key}: checksum mismatch in the {what} of section {section}, bytes [0, {length}): "
            f"this is not the file that was saved (changed, or swapped with another)"
        )
    return bytes(buffer)


def missing(backend: StorageBackend, key: str, where: str) -> CorruptionError:
    """The error for a file that the manifest names and the store does not have."""
    return CorruptionError(
        f"{backend.url}/{key}: file is missing, but the manifest names it for {where}; it was deleted, not copied, "
        f"or the checkpoint was overwritten while it was being read (then load again)"
    )


def unreadable(
    backend: StorageBackend, key: str, size: int, what: str, error: StorageError
) -> CorruptionError | StorageError:
    """Tells a file that was cut from a store that does not answer, which says nothing about the checkpoint."""
    try:
        found = backend.stat(key).size
    except StorageError:
        found = size
    if found == size:
        return type(error)(f"{backend.url}/{key}: cannot read {what}: {error}")
    return CorruptionError(
        f"{backend.url}/{key}: cannot read {what}: the file has {found} bytes, the manifest says {size}; it was cut "
        f"short or replaced; restore it or load an earlier checkpoint"
    )
