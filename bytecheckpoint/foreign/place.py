"""A folder or a file of another system, as its reader sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from ..errors import KeyNotFoundError
from ..storage_backends import open_backend
from ..storage_backends.base import StorageBackend

__all__ = ["Place", "open_parent"]


@dataclass(frozen=True)
class Place:
    """A folder, or one file in it.

    Attributes:
        url: The path as the caller passed it.
        backend: Storage backend whose root is the folder.
        name: The file's key in the folder; empty if the path is the folder itself.
    """

    url: str
    backend: StorageBackend
    name: str = ""

    @classmethod
    def of_file(cls, url: str, storage_options: Mapping[str, Any], deadline_s: float | None = None) -> Self | None:
        """Return the place of the file at a URL; None if there is no such file. Raises ``StorageError``.

        ``deadline_s`` limits each call of the place's backend, in seconds.
        """
        folder, _, name = url.rpartition("/")
        if "::" in url or not name or name in (".", "..") or folder.endswith(":/"):
            return None
        place = cls(url, open_parent(url, storage_options, deadline_s), name)
        try:
            place.backend.stat(name)
        except KeyNotFoundError:
            return None
        return place

    @cached_property
    def children(self) -> Sequence[str]:
        """The names directly in the folder; those of folders end in a slash."""
        return self.backend.list_children("")


def open_parent(url: str, storage_options: Mapping[str, Any], deadline_s: float | None = None) -> StorageBackend:
    """Return the backend of the folder that holds the file at a URL. ``deadline_s`` limits each call of it."""
    folder = url.rpartition("/")[0]
    backend = open_backend(folder or ("/" if url.startswith("/") else "."), **dict(storage_options))
    if deadline_s is not None:
        backend.deadline_s = deadline_s
    return backend
