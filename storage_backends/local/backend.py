"""The backend for files below a directory: local disks, NFS, Lustre, FUSE mounts.

``put`` writes a temporary file next to its target and renames it. With ``if_version``, it locks the file that it
replaces (``flock``); a file system without locks cannot decide between two writers at the same moment. ``create``
writes in place, because the library never uses the name of a data file twice and a file counts only once the manifest
refers to it. Both sync the file and every directory on its path before they return.

The names of temporary files begin with ``.bcp-tmp-``. A killed process may leave one. Temporary files are never listed
and never readable, and are removed when a ``delete`` leaves nothing else in their directory.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import unquote

from typing_extensions import Buffer

from ...errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError, UnsupportedURLError
from ..base import Conditions, ObjectReader, ObjectStat, ObjectWriter, StorageBackend
from ..buffers import byte_view, check_max_size
from ..keys import TEMPORARY_PREFIX, check_children_prefix, check_key, check_prefix, is_object_key
from ..posix import flush, free_bytes, refresh, staleness_s, write_at
from .objects import LocalReader, LocalWriter
from .root import (
    LocalRoot,
    is_readable_below,
    is_within,
    link_exclusive,
    lock_temporary,
    make_directories,
    renew_directories,
    replace_exclusive,
    supports_exclusive_names,
)

_log = logging.getLogger(__name__)

# A delete in another process may remove a directory between mkdir and open, repeatedly.
_MAX_TRIES = 16

_FILE_URL = re.compile(r"(?:file|local)://(?:localhost)?(?P<path>/.*)", re.DOTALL | re.IGNORECASE)


class LocalBackend(StorageBackend):
    """Objects as files below a directory. No descriptor stays open between calls.

    A key whose path leaves the root through a symbolic link is rejected with ``StorageError``. The check protects from
    the contents of a checkpoint, not from a process that changes the directory at the same time and could change the
    files anyway.
    """

    schemes: ClassVar[tuple[str, ...]] = ("file", "local")
    atomic_writer: bool = False
    is_remote: bool = False
    # One huge page, which stays in the processor's cache until it has been verified and copied.
    read_size: int = 2 << 20

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool = True) -> None:
        """Create a backend for a directory.

        Args:
            root: The directory. It need not exist.
            direct_io: Whether long writes, and what a load reads and is not in the page cache, bypass the page cache
                if the file system supports it. Turn it off if several processes of a machine read the same files
                one after the other.

        Raises:
            StorageError: The path is relative, and the working directory was removed.
            UnsupportedURLError: The encoding of file names lacks a character of the path.
        """
        path = absolute_path(root)
        _check_encodable(path)
        self._root = LocalRoot(path, direct_io=direct_io)

    def path_of(self, key: str) -> str:
        """Return the file of an object, with all symbolic links resolved. Raises ``StorageError`` for a bad key."""
        return self._resolve(key, f"reading {key!r} in {self._root.path}")

    @property
    def direct_io(self) -> bool:
        """Whether this backend still uses direct I/O; false once the file system has refused it."""
        return self._root.direct_io

    @classmethod
    def from_url(cls, url: str, **options: Any) -> LocalBackend:
        """Open a path (``~`` is expanded) or ``file:///path``, which is taken literally, without percent-decoding.

        Args:
            url: The path or URL.
            **options: Only ``direct_io``, true or false.

        Returns:
            The backend.

        Raises:
            UnsupportedURLError: The URL or an option is not valid.
        """
        direct_io = options.pop("direct_io", True)
        if options or type(direct_io) is not bool:
            raise UnsupportedURLError(
                f"local storage takes no option but direct_io (True or False), got {sorted(options) or direct_io!r} "
                f"for {url!r}"
            )
        return cls(local_path(url), direct_io=direct_io)

    @property
    def url(self) -> str:
        return self._root.path

    def conditions(self) -> Conditions:
        return self._conditions

    @cached_property
    def _conditions(self) -> Conditions:
        return Conditions(if_absent=supports_exclusive_names(self._root.path), if_version=True)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        action = f"writing {key!r} in {self._root.path}"
        view = byte_view(data)
        version = ""

        def place(temporary: str, path: str) -> None:
            if if_absent:
                link_exclusive(temporary, path)
            elif not if_version:
                os.replace(temporary, path)
            elif not replace_exclusive(temporary, path, lambda found: _version(found) == if_version):
                raise KeyChangedError(f"{action}: the object was replaced or deleted")

        def attempt(path: str) -> None:
            nonlocal version
            temporary = os.path.join(os.path.dirname(path), TEMPORARY_PREFIX + secrets.token_hex(8))
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                lock_temporary(fd)
                write_at(fd, view, 0)
                os.fsync(fd)
                flush(fd)
                version = _version(os.fstat(fd))
                place(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                with suppress(OSError):
                    os.close(fd)

        path = self._create_file(key, action, attempt, needed=len(view))
        self._root.sync_directories(path, action)
        return version

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        action = f"writing {key!r} in {self._root.path}"
        writer = LocalWriter(self._root, action, size)
        self._create_file(key, action, writer.create_file, needed=size)
        try:
            writer.prepare(reserve=not at_most)
        except BaseException:
            writer.abort()
            raise
        return writer

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        # A descriptor that is kept open would continue to read an object that has been replaced.
        with self._open(key) as opened:
            opened.read(offset, [buffer])

    def open_object(self, key: str) -> ObjectReader:
        return self._open(key)

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        action = f"reading {key!r} in {self.url}"
        try:
            return self._read_all(key, action, max_size)
        except StorageError as error:
            # NFS: it was replaced after it was opened.
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.ESTALE:
                raise
        return self._read_all(key, action, max_size)

    def _read_all(self, key: str, action: str, max_size: int | None) -> tuple[bytes, str]:
        with self._open(key) as opened:
            check_max_size(action, opened.size, max_size)
            content = opened.read_all(max_size)
            check_max_size(action, len(content), max_size)
            return content, _version(opened.found)

    def stat(self, key: str) -> ObjectStat:
        action = f"looking at {key!r} in {self._root.path}"
        path = self._resolve(key, action)
        refresh(path)
        with self._root.translated_errors(action, reading=True):
            found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise KeyNotFoundError(f"{action}: it is not a file")
        return _object_stat(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        return self._list(prefix)

    def _list(self, prefix: str) -> Iterator[ObjectStat]:
        action = f"listing {prefix!r} in {self._root.path}"
        head = prefix[: prefix.rfind("/") + 1]
        start, top = self._resolve_directory(head, action)
        with self._root.translated_errors(action, reading=True):
            for key, found in _list_tree(start, head, top):
                if key.startswith(prefix):
                    yield _object_stat(key, found)

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        action = f"listing {prefix!r} in {self._root.path}"
        start, top = self._resolve_directory(prefix, action)
        names: list[str] = []
        with (
            self._root.translated_errors(action, reading=True),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(start) as entries,
        ):
            for entry in entries:
                if not is_object_key(entry.name) or not _should_follow(entry, top):
                    continue
                if entry.is_dir():
                    if _has_objects(entry.path, top):
                        names.append(entry.name + "/")
                elif entry.is_file() or entry.is_symlink():  # reading a broken link raises an error that names it
                    names.append(entry.name)
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        parents: set[str] = set()
        failures: list[StorageError] = []
        for key in keys:
            try:
                parents.add(os.path.dirname(self._delete(key)))
            except StorageError as error:
                failures.append(error)
        for parent in sorted(parents, key=len, reverse=True):
            self._root.remove_empty_directories(parent)
        for failure in failures:
            raise failure

    def _delete(self, key: str) -> str:
        action = f"deleting {key!r} in {self._root.path}"
        path = self._locate(key, action)
        if path != os.path.join(self._root.resolved(), key):
            raise StorageError(
                f"{action}: refused: a directory in it is a symbolic link; nothing is removed through one"
            )
        with (
            self._root.translated_errors(action, reading=False),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            os.unlink(path)
        return path

    def staleness_s(self) -> float:
        return self._staleness_s

    @cached_property
    def _staleness_s(self) -> float:
        return staleness_s(self._root.path)

    def free_bytes(self) -> int | None:
        return free_bytes(self._root.path)

    def _open(self, key: str) -> LocalReader:
        action = f"reading {key!r} in {self._root.path}"
        return LocalReader(self._root, self._resolve(key, action), action)

    def _create_file(self, key: str, action: str, attempt: Callable[[str], None], *, needed: int) -> str:
        """Create the directories of ``key``, then call ``attempt`` with its path; retry if a directory vanishes."""
        path = self._locate(key, action)
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                make_directories(os.path.dirname(path))
                attempt(path)
            except FileNotFoundError as error:
                if not tries_left:
                    raise self._root.map_error(error, action, reading=False) from error
                if tries_left < _MAX_TRIES - 2:
                    with suppress(OSError):
                        renew_directories(os.path.dirname(path))
            except FileExistsError as error:
                raise KeyExistsError(f"{action}: the key is taken") from error
            except KeyChangedError:
                self._root.remove_empty_directories(os.path.dirname(path))
                raise
            except OSError as error:
                self._root.remove_empty_directories(os.path.dirname(path))
                raise self._root.map_error(error, action, reading=False, needed=needed) from error
            else:
                break
        return path

    def _locate(self, key: str, action: str) -> str:
        """Return the path of ``key`` with the links in its directories resolved, but not in its last component.

        The last component is what a write replaces.
        """
        top = self._top_for(key, action)
        parent, name = os.path.split(key)
        return os.path.join(self._followed(top, parent, action), name)

    def _resolve(self, key: str, action: str) -> str:
        """Return the path of ``key`` with all symbolic links resolved, for reading."""
        return self._followed(self._top_for(key, action), key, action, is_readable_below)

    def _top_for(self, key: str, action: str) -> str:
        """Check the key and return the resolved root."""
        check_key(key)
        _check_encodable(key)
        if any(component.startswith(TEMPORARY_PREFIX) for component in key.split("/")):
            raise StorageError(f"{action}: names that begin with {TEMPORARY_PREFIX!r} are reserved")
        return self._root.resolved()

    def _followed(self, top: str, below: str, action: str, accept: Callable[[str, str], bool] = is_within) -> str:
        """Resolve all symbolic links in ``below``, a path below the resolved root; reject links that leave the root."""
        path = top
        for component in below.split("/"):
            path = os.path.join(path, component)
            # Links are rare, and realpath would check every component of the root again.
            if os.path.islink(path):
                link, path = path, os.path.realpath(os.path.join(top, below))
                if not accept(path, top):
                    raise StorageError(f"{action}: refused: a symbolic link leads out of the root, to {path}")
                if not os.path.exists(link):
                    raise StorageError(
                        f"{action}: it is a symbolic link to {path}, which does not exist; restore the file, or remove "
                        f"the link"
                    )
                return path
        return path

    def _resolve_directory(self, prefix: str, action: str) -> tuple[str, str]:
        """Return the directory in which ``prefix`` ends, and the root, both resolved."""
        _check_encodable(prefix)
        self._root.check_is_directory(action)
        top = self._root.resolved()
        directory = os.path.realpath(os.path.join(top, prefix)) if prefix else top
        if not is_within(directory, top):
            raise StorageError(f"{action}: refused: a symbolic link leads out of the root, to {directory}")
        return directory, top


def local_path(url: str) -> str:
    """Return the path of a file URL, without its escapes, or of a path. Raises ``UnsupportedURLError``."""
    if not url.lower().startswith(tuple(f"{scheme}://" for scheme in LocalBackend.schemes)):
        return os.path.expanduser(url)
    found = _FILE_URL.fullmatch(url)
    if found is None:
        raise UnsupportedURLError(f"{url!r}: a file URL is file:///absolute/path, with three slashes and no host")
    return unquote(found["path"])


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path that does not depend on the working directory any more. Raises ``StorageError``."""
    try:
        return os.path.abspath(os.fspath(path))
    except FileNotFoundError as error:
        raise StorageError(f"{path}: the working directory was removed; pass an absolute path") from error


def _check_encodable(path: str) -> None:
    """Raise ``UnsupportedURLError`` if the encoding of file names lacks a character of a path or key."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UnsupportedURLError(
            f"{path!a} cannot be written in {error.encoding}, the encoding of this process's file names; use a "
            f"UTF-8 locale, or set PYTHONUTF8=1"
        ) from error


def _object_stat(key: str, found: os.stat_result) -> ObjectStat:
    return ObjectStat(key, found.st_size, _version(found))


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _list_tree(
    directory: str, prefix: str, top: str, parents: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield ``(key, stat)`` of every regular file below ``directory``, in key order.

    One directory at a time is in memory, and what vanishes meanwhile is skipped. Keys begin with ``prefix`` (empty, or
    ending in ``/``). A symbolic link is followed if it stays below ``top`` (a resolved path) and does not lead back to
    one of ``parents``; other links are logged and left out. Raises ``OSError``.
    """
    here = os.path.realpath(directory)
    for entry in _sorted_entries(directory):
        if not is_object_key(entry.name):
            continue
        try:
            if not _should_follow(entry, top, (*parents, here)):
                continue
            if entry.is_dir():
                yield from _list_tree(entry.path, f"{prefix}{entry.name}/", top, (*parents, here))
            elif entry.is_file():
                yield prefix + entry.name, entry.stat()
        except FileNotFoundError:
            continue


def _has_objects(directory: str, top: str) -> bool:
    """Whether ``_list_tree`` would yield anything. Stops at the first file."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        if any(is_object_key(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries):
            return True
    return next(iter(_list_tree(directory, "", top)), None) is not None


def _should_follow(entry: os.DirEntry[str], top: str, parents: tuple[str, ...] = ()) -> bool:
    """Whether ``_list_tree`` visits an entry.

    It visits everything but symbolic links that leave ``top`` or lead back to one of ``parents``, which it logs.
    """
    if not entry.is_symlink():
        return True
    target = os.path.realpath(entry.path)
    if not is_readable_below(target, top):
        _log.warning("not listing %s: it leads out of %s, to %s", entry.path, top, target)
        return False
    if target in parents:
        _log.warning("not listing %s: it leads back to %s", entry.path, target)
        return False
    return True


def _sorted_entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # "a/x" sorts after "a.b" and "a-b", so a directory sorts by its name with a slash appended.
    return sorted(found, key=lambda entry: entry.name + "/" if _is_directory(entry) else entry.name)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
