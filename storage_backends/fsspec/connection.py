"""A connection to an fsspec file system."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any, Literal

import fsspec
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ...errors import UnsupportedURLError

__all__ = ["Connection", "connect", "reject_caches"]

Kind = Literal["objects", "file", "memory", "others"]

# Protocols whose pipe_file(mode="create") is one conditional request. The base class checks first, then writes.
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})


@dataclass(frozen=True)
class Connection:
    """A file system that was created in process ``pid``, and the path ``root`` in it.

    Threads may share it if ``is_shareable``. ``has_conditional_put`` is true if the store decides ``if_absent``.
    """

    fs: Any
    root: str
    pid: int
    kind: Kind
    has_conditional_put: bool

    @property
    def is_shareable(self) -> bool:
        return self.kind != "others"

    def path(self, key: str) -> str:
        """Return the file system's path of a key or prefix."""
        if not key:
            return self.root
        return f"{self.root.rstrip('/')}/{key}" if self.root else key

    def key(self, path: str) -> str | None:
        """Return the key of a path; None if it is not below the root."""
        root = self.root.strip("/")
        path = path.lstrip("/")
        if not root:
            return path
        return path[len(root) + 1 :] if path.startswith(root + "/") else None


def connect(url: str, options: dict[str, Any]) -> Connection:
    """Create a file system that is not in fsspec's instance cache, which other code may share and reconfigure."""
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    while isinstance(fs, DirFileSystem):
        root = f"{fs.path.rstrip('/')}/{root}".rstrip("/") if root else fs.path
        fs = fs.fs
    listings = getattr(fs, "dircache", None)
    if isinstance(listings, DirCache):
        listings.clear()
        listings.use_listings_cache = False
    kind = _kind(fs)
    return Connection(fs, root, os.getpid(), kind, kind == "objects" and _has_conditional_put(fs))


def reject_caches(url: str) -> None:
    """Raise ``UnsupportedURLError`` for a chain through one of fsspec's caches.

    A cache would serve an old manifest after a checkpoint has been saved again.
    """
    for link in url.split("::"):
        scheme = link.partition("://")[0] if "://" in link else link
        try:
            served = fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError):
            continue
        if issubclass(served, CachingFileSystem):
            raise UnsupportedURLError(
                f"{url!r}: {scheme!r} may serve objects that have been replaced; pass the URL without it"
            )


def _kind(fs: Any) -> Kind:
    if isinstance(fs, LocalFileSystem):
        return "file"
    if isinstance(fs, MemoryFileSystem):
        return "memory"
    return "objects" if getattr(fs, "async_impl", False) else "others"


def _has_conditional_put(fs: Any) -> bool:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    method = getattr(fs, "_pipe_file", None)
    # Older releases (s3fs before 2024.10) accept the argument among **kwargs, ignore it, and overwrite.
    return bool(protocols & _CONDITIONAL) and method is not None and "mode" in inspect.signature(method).parameters
