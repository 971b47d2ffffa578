"""A folder or a file of another system, as its reader sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from typing_extensions import Self

from ..storage_backends import open_backend
from ..storage_backends.base import StorageBackend

__all__ = ["Place", "split_url"]

_FILE_SUFFIXES = (".safetensors",)


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
    def of(cls, url: str, backend: StorageBackend, storage_options: Mapping[str, Any]) -> Self:
        """Return the place of a URL, whose own backend is ``backend``."""
        folder, name = split_url(url)
        return cls(url, open_backend(folder, **dict(storage_options)) if name else backend, name)

    @cached_property
    def children(self) -> Sequence[str]:
        """The names directly in the folder; those of folders end in a slash."""
        return self.backend.list_children("")


def split_url(url: str) -> tuple[str, str]:
    """Return the folder, and the name of the file in it if ``url`` names a file of a known kind."""
    if not url.endswith(_FILE_SUFFIXES) or "::" in url:
        return url, ""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name
