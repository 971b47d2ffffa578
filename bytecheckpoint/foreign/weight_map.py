"""The index of a model in several files, in Hugging Face's layout: the file of each tensor by name."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..errors import FormatError, KeyNotFoundError
from ..storage_backends.base import StorageBackend

__all__ = ["check_weight_map", "read_weight_map"]

_MAX_INDEX_BYTES = 256 << 20  # refuse a larger index instead of parsing it
_MAX_SHOWN = 5


def read_weight_map(backend: StorageBackend, key: str, suffix: str) -> dict[str, str] | None:
    """Return the file of each name, or None if there is no index.

    All files must be in the folder of the index, with names that end in ``suffix``. Raises ``FormatError``.
    """
    try:
        raw = backend.get(key, max_size=_MAX_INDEX_BYTES)
    except KeyNotFoundError:
        return None
    where = f"{backend.url}/{key}"
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON: {error}") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{where} has no weight_map of names to files")
    odd = sorted({file for file in found.values() if "/" in file or not file.endswith(suffix)})
    if odd:
        raise FormatError(f"{where} names {odd[0]!r:.200}, which is not a {suffix[1:]} file in the same folder")
    return found


def check_weight_map(index: Mapping[str, str], found: Mapping[str, str], url: str, key: str) -> None:
    """Compare the index at ``key`` with the file in which each name was found. Raises ``FormatError``."""
    if found == index:
        return
    faults = [f"{name!r:.200} is not in {file}" for name, file in index.items() if found.get(name) != file]
    faults += [f"{name!r:.200} of {file} is not listed" for name, file in found.items() if name not in index]
    more = f"; and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
    raise FormatError(f"{url}: {key} disagrees with the files: {'; '.join(faults[:_MAX_SHOWN])}{more}")
