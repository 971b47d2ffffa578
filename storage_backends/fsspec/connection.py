"""A connection to an fsspec file system, and the operations on objects that take several of its calls.

All functions may block for as long as the client likes, and raise its exceptions.
"""

from __future__ import annotations

import errno
import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem

from ...errors import StorageError, UnsupportedURLError
from ..keys import TEMPORARY_PREFIX
from ..remote.failures import OutOfRangeError

# Protocols whose pipe_file(mode="create") is one conditional request. The base class checks first, then writes.
# Releases that know it name one of these arguments; others ignore it among **kwargs, and overwrite.
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_HDFS_NATIVE = "hdfs_native.fsspec"  # Hadoop's own client, which pyarrow uses, has no rename that replaces
_MODES = frozenset({"mode", "overwrite"})  # adlfs has the second

# A delete in another thread or process may remove a directory between makedirs and open, repeatedly.
_MAX_TRIES = 16


@dataclass(frozen=True)
class Connection:
    """A file system, and the path ``root`` in it.

    Attributes:
        is_object_store: Whether an object appears as a whole, and the file system may be used by several threads.
        has_conditional_put: Whether the store decides ``if_absent``.
        has_rename: Whether ``mv`` is atomic, and replaces a file only when asked to.
        files: The state of the files with credentials before it was created.
    """

    fs: Any
    root: str
    is_object_store: bool
    has_conditional_put: bool
    has_rename: bool = False
    files: Sequence[object] = ()

    @property
    def is_shareable(self) -> bool:
        """Whether several threads may use it at the same time."""
        return self.is_object_store or self.has_rename

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
            raise StorageError(f"{key!r}: {type(self.fs).__name__} cannot store names with '?' or '#'; choose another")
        return path

    def key(self, path: str) -> str | None:
        """Return the key of a path; None if it is not below the root."""
        root = self.root.strip("/")
        path = path.lstrip("/")
        if not root:
            return path
        return path[len(root) + 1 :] if path.startswith(root + "/") else None

    def put(self, key: str, content: bytes, *, if_absent: bool, is_given_up: Callable[[], bool]) -> None:
        """Store a complete object. Raises ``FileExistsError`` if it exists and must not.

        A file that could be written only after its caller had given up (``is_given_up``) gets no name: it could replace
        what the caller has stored since.
        """
        path = self.path(key)
        if not self.is_object_store:
            temporary = temporary_path(path)
            try:
                with self.open_file(temporary) as file:
                    file.write(content)
                    flush_to_device(file)
                if is_given_up():
                    raise TimeoutError("the file was written too late")
            except BaseException:
                with suppress(Exception):
                    self.remove(temporary)
                raise
            self.publish(temporary, path, len(content), replaces=not if_absent)
        elif not if_absent:
            self.fs.pipe_file(path, content)
        else:
            try:
                self.fs.pipe_file(path, content, mode="create")
            except Exception as error:
                if _is_precondition(error) and self._exists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
                raise

    def read(self, key: str, start: int, end: int) -> Any:
        """Return bytes of an object, fewer if it ends before."""
        try:
            return self.fs.cat_file(self.path(key), start=start, end=end)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            # hdfs-native panics about an offset beyond the end, which is no Exception.
            raise OutOfRangeError(str(error)) from error

    def info(self, key: str) -> dict[str, Any]:
        """Describe an object."""
        self.fs.invalidate_cache()
        info: dict[str, Any] = self.fs.info(self.path(key))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return info

    def find(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the key and the description of each file whose key begins with ``prefix``."""
        found: Any = ()
        with suppress(FileNotFoundError, NotADirectoryError):
            self.fs.invalidate_cache()
            found = self.fs.find(self.path(prefix[: prefix.rfind("/") + 1]), detail=True)
        # adlfs returns a list if the directory is an object.
        infos = [info for info in found.values() if info["type"] == "file"] if isinstance(found, dict) else []
        keys = [(self.key(info["name"]), info) for info in infos]
        return [(key, info) for key, info in keys if key is not None and key.startswith(prefix)]

    def children(self, prefix: str) -> list[tuple[str, bool]]:
        """Return the keys of the files and directories below ``prefix``, and whether each is a file.

        Directories without a file are left out.
        """
        found: list[dict[str, Any]] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            self.fs.invalidate_cache()
            found = self.fs.ls(self.path(prefix), detail=True)
        keys = [(self.key(info["name"].rstrip("/")), info) for info in found]
        return [
            (key, info["type"] == "file")
            for key, info in keys
            if key is not None and (info["type"] == "file" or self.is_object_store or self._has_files(info["name"]))
        ]

    def _has_files(self, directory: str) -> bool:
        return any(files for _, _, files in self.fs.walk(directory))

    def delete(self, key: str) -> None:
        """Delete an object."""
        with suppress(FileNotFoundError):
            self.remove(self.path(key))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        # Object stores accept the deletion of a missing key. On others, the path may be a directory.
        if self.is_object_store or self.fs.isfile(path):
            self.fs.rm_file(path)

    def publish(self, temporary: str, path: str, size: int, *, replaces: bool = True) -> None:
        """Give the finished file ``temporary``, of ``size`` bytes, the name ``path``."""
        fs = self.fs
        if self.has_rename:
            try:
                fs.mv(temporary, path, overwrite=replaces)
            except FileExistsError:
                self.remove(temporary)
                raise
            return
        try:
            fs.mv(temporary, path)
        except Exception:
            if not self._exists(path):
                raise
        # Some stores refuse to rename over an object with an error, others (WebHDFS) silently.
        if self._exists(temporary):
            fs.rm_file(path)
            fs.mv(temporary, path)
        found = fs.info(path)["size"]
        if found != size:
            raise StorageError(f"{path} has {found} bytes after the rename, not the {size} that were written")

    def open_file(self, path: str) -> Any:
        """Create a file and its directory; retry if a delete elsewhere removes the directory in between."""
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                self.fs.makedirs(os.path.dirname(path), exist_ok=True)
                return self.fs.open(path, "wb")
            except FileNotFoundError:
                if not tries_left:
                    raise
            except FileExistsError as error:
                # makedirs also raises this if a directory that it has found is removed before it checks again.
                if not tries_left:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
        raise AssertionError("not reached")

    def remove_empty_directories(self, keys: Iterable[str]) -> None:
        """Remove the directories that the deletion of these objects leaves empty."""
        if not self.is_object_store:
            for directory in sorted({os.path.dirname(self.path(key)) for key in keys}, key=len, reverse=True):
                self._remove_empty(directory)

    def _remove_empty(self, directory: str) -> None:
        """Remove empty directories up to, but without, the root. One that is filled at the same time remains."""
        root = self.path("").rstrip("/")
        while directory.startswith(root + "/") and directory != root:
            try:
                if self.fs.ls(directory, detail=False):
                    return
                self.fs.rmdir(directory)
            except FileNotFoundError:
                pass
            except Exception:  # noqa: BLE001 - clients raise anything about a directory that is not empty any more
                return
            directory = os.path.dirname(directory)

    def _exists(self, path: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(path))


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
    is_object_store = bool(getattr(fs, "async_impl", False))
    has_rename = type(fs).__module__ == _HDFS_NATIVE
    has_conditional_put = has_rename or (is_object_store and _has_conditional_put(fs))
    return Connection(fs, root, is_object_store, has_conditional_put, has_rename)


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


def temporary_path(path: str) -> str:
    """Return a new name for a temporary file in the directory of ``path``."""
    return f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def flush_to_device(file: Any) -> None:
    """Flush a file, and make it durable if it is a file of the operating system."""
    file.flush()
    with suppress(AttributeError, OSError):
        os.fsync(file.fileno())


def _has_conditional_put(fs: Any) -> bool:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    method = getattr(fs, "_pipe_file", None)
    return (
        bool(protocols & _CONDITIONAL)
        and method is not None
        and bool(_MODES & inspect.signature(method).parameters.keys())
    )


def _is_precondition(error: Exception) -> bool:
    """Whether an error means that the key exists: 412, or 409 if two conditional writes collide."""
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EBUSY):
        return True
    return getattr(error, "code", None) in (409, 412) or getattr(error, "status_code", None) in (409, 412)
