"""A connection to an fsspec file system."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import fsspec
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ...errors import StorageError, UnsupportedURLError
from .deadline import BoundedFileSystem

__all__ = ["Connection", "connect", "reject_caches"]

_T = TypeVar("_T")

Kind = Literal["objects", "file", "memory", "others"]

# Protocols whose pipe_file(mode="create") is one conditional request. The base class checks first, then writes.
# Releases that know it name one of these arguments; others ignore it among **kwargs, and overwrite.
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_HDFS_NATIVE = "hdfs_native.fsspec"  # Hadoop's own client, which pyarrow uses, has no rename that replaces
_MODES = frozenset({"mode", "overwrite"})  # adlfs has the second


@dataclass(frozen=True)
class Connection:
    """A file system that was created in process ``pid``, and the path ``root`` in it.

    Threads may share it if ``is_shareable``. ``has_conditional_put`` is true if the store decides ``if_absent``, and
    ``has_rename`` if ``mv`` is atomic, and replaces a file only when asked to.
    """

    fs: Any
    root: str
    pid: int
    kind: Kind
    has_conditional_put: bool
    has_rename: bool = False

    @property
    def is_shareable(self) -> bool:
        return self.kind != "others" or self.has_rename

    @property
    def name(self) -> str:
        """The name of the file system's class."""
        return type(self.fs.fs if isinstance(self.fs, BoundedFileSystem) else self.fs).__name__

    @property
    def is_stuck(self) -> bool:
        """Whether a call has not returned by its deadline, and may still use the file system."""
        return isinstance(self.fs, BoundedFileSystem) and self.fs.is_stuck

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that uses the file system; raises ``TimeoutError`` after the deadline."""
        return self.fs.call(function, *arguments) if isinstance(self.fs, BoundedFileSystem) else function(*arguments)

    def path(self, key: str) -> str:
        """Return the file system's path of a key or prefix.

        Raises:
            StorageError: The file system would use another path.
        """
        if not key:
            return self.root
        path = f"{self.root.rstrip('/')}/{key}" if self.root else key
        # Some parse paths as URLs, and drop a query or fragment: two keys would be one object.
        if ("?" in key or "#" in key) and not self.fs._strip_protocol(path).endswith(key):
            raise StorageError(f"{key!r}: {self.name} cannot store names with '?' or '#'; choose another")
        return path

    def key(self, path: str) -> str | None:
        """Return the key of a path; None if it is not below the root."""
        root = self.root.strip("/")
        path = path.lstrip("/")
        if not root:
            return path
        return path[len(root) + 1 :] if path.startswith(root + "/") else None


def connect(url: str, options: dict[str, Any], deadline: Callable[[], float]) -> Connection:
    """Create a file system that is not in fsspec's instance cache, which other code may share and reconfigure.

    ``deadline`` returns how long a call to a store may take, in seconds.
    """
    fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    while isinstance(fs, DirFileSystem):
        root = f"{fs.path.rstrip('/')}/{root}".rstrip("/") if root else fs.path
        fs = fs.fs
    listings = getattr(fs, "dircache", None)
    if isinstance(listings, DirCache):
        listings.clear()
        listings.use_listings_cache = False
    kind = _kind(fs)
    has_rename = type(fs).__module__ == _HDFS_NATIVE
    has_conditional_put = has_rename or (kind == "objects" and _has_conditional_put(fs))
    bounded = fs if kind in ("file", "memory") else BoundedFileSystem(fs, deadline)
    return Connection(bounded, root, os.getpid(), kind, has_conditional_put, has_rename)


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
    return (
        bool(protocols & _CONDITIONAL)
        and method is not None
        and bool(_MODES & inspect.signature(method).parameters.keys())
    )
