"""A folder or a file of another system, as its reader sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from ..checkpoint.index import Index
from ..checkpoint.location import Location
from ..errors import (
    BytecheckpointError,
    CorruptionError,
    FormatError,
    KeyNotFoundError,
    NameCollisionError,
    PlanError,
    UnserializableError,
)
from ..runtime.threads import Threads
from ..storage_backends.base import StorageBackend
from .archives.torch_archive import read_archive

_THREADS = 16  # that wait for the store

_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_UNNAMED = (NameCollisionError, PlanError, UnserializableError)
"""Errors of this library that do not name the file."""

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class SourcePath:
    """A folder, or one file in it.

    Attributes:
        url: The path as the caller passed it.
        backend: Storage backend whose root is the folder.
        name: The file's key in the folder; empty if the path is the folder itself.
        prefix: Of a folder below the backend's root, what its keys begin with.
    """

    url: str
    backend: StorageBackend
    name: str = ""
    prefix: str = ""

    @classmethod
    def of_file(cls, location: Location, deadline_s: float | None = None) -> Self | None:
        """Return the path of the file at a location; None if there is no such file. Raises ``StorageError``.

        ``deadline_s`` limits each call of its backend, in seconds.
        """
        url = location.url
        folder, _, name = url.rpartition("/")
        if "::" in url or not name or name in (".", "..") or folder.endswith(":/"):
            return None
        source = cls(url, open_parent(location, deadline_s), name)
        try:
            source.backend.stat(name)
        except KeyNotFoundError:
            return None
        return source

    @cached_property
    def children(self) -> Sequence[str]:
        """The names directly in the folder; those of folders end in a slash."""
        return self.backend.list_children(self.prefix)

    def below(self, folder: str) -> SourcePath:
        """Return a folder in this one."""
        return SourcePath(f"{self.url}/{folder}", self.backend, prefix=f"{self.prefix}{folder}/")

    def objects(self, names: Iterable[str], listed_in: str = "") -> list[Any]:
        """Return the objects in several files of ``torch.save``, by their names in this folder.

        Raises ``CorruptionError`` for a missing file, which states where it is listed, and as ``read_archive``.
        """

        def read(name: str) -> Any:
            try:
                return read_archive(self.backend, self.prefix + name)
            except KeyNotFoundError as error:
                why = f", but {listed_in} names it" if listed_in else ""
                raise CorruptionError(f"{self.url}/{name}: file is missing{why}; fetch it again") from error

        return read_all(read, names)


def open_parent(location: Location, deadline_s: float | None = None) -> StorageBackend:
    """Return the backend of the folder that holds the file at a location. ``deadline_s`` limits each call of it."""
    url = location.url
    folder = url.rpartition("/")[0] or ("/" if url.startswith("/") else ".")
    return replace(location, url=folder).open(deadline_s)


def read_all(read: Callable[[_Item], _Found], items: Iterable[_Item]) -> list[_Found]:
    """Return what ``read`` returns for each item; several of them wait for the store at the same time."""
    with Threads(_THREADS, thread_name_prefix="bcp-index") as pool:
        return list(pool.map(read, items))


def read_json(backend: StorageBackend, key: str, max_size: int) -> Any:
    """Return what a file of JSON contains. Raises ``FormatError``, and ``KeyNotFoundError`` if there is none."""
    return parse_json(backend.get(key, max_size=max_size), f"{backend.url}/{key}")


def parse_json(text: bytes, where: str) -> Any:
    """Return what a text in JSON contains. Raises ``FormatError``, which names ``where``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON: {error}") from None


def read_index(read: Callable[[SourcePath], Index | None], source: SourcePath) -> Index | None:
    """Return what a reader of another system's files finds.

    Raises ``FormatError`` also for files whose objects do not fit together as that system's do.
    """
    try:
        return read(source)
    except Exception as error:
        is_named = isinstance(error, BytecheckpointError) and not isinstance(error, _UNNAMED)
        if is_named or not isinstance(error, _FAULTS):
            raise
        raise FormatError(f"{source.url}: its objects are not those of a checkpoint: {error!r:.300}") from error
