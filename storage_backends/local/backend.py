"""Files below a directory of this machine: local disks, NFS, Lustre, FUSE mounts.

``put`` writes a temporary file beside its target and renames it. ``create`` writes in place, because the names that
the library gives to data files are never used twice, and a rename of a 100 GB file buys nothing: what makes it count
is the manifest. Both reach the disk (``fsync`` of the file and of every directory on its way) before they return.

Temporary files begin with ``.bcp-tmp-``; a killed process may leave one. They are no objects: never listed, never
readable, and removed when a ``delete`` leaves nothing else in their directory.
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
from typing import Any, ClassVar

from typing_extensions import Buffer

from ..errors import KeyExistsError, KeyNotFoundError, StorageError, StorageFullError, UnsupportedURLError
from .base import ObjectReader, ObjectStat, ObjectWriter, StorageBackend
from .direct_io import DirectFile
from .keys import TEMPORARY, check_children_prefix, check_key, check_prefix, is_object_key
from .local_directories import drop_leftovers, inside, link_exclusive, make_directories, mark_in_use
from .local_objects import LocalReader, LocalWriter
from .pieces import PieceMap, byte_view
from .posix import free_bytes, map_os_error, sync_directory, write_at
from .tree import list_tree, may_follow, tree_has_objects

__all__ = ["LocalBackend"]

_log = logging.getLogger(__name__)

# A delete in another process may remove a directory between our mkdir and our open, as often as it likes.
_TRIES = 16

_FILE_URL = re.compile(r"(?:file|local)://(?:localhost)?(?P<path>/.*)", re.DOTALL)


class LocalBackend(StorageBackend):
    """Objects as files below the directory ``root``, which need not exist yet. Holds no descriptors between calls.

    A key whose path leaves the root through a symbolic link is refused with ``StorageError``. (The check is made on
    the tree as it is at the call: it protects from what a checkpoint contains, not from somebody who rewrites the
    directory at the same time and could change the files anyway.)

    With ``direct_io``, long writes, and long reads of what the page cache does not have, go past it, wherever the file
    system takes them so. Turn it off where several processes of a machine read the same files one after the other.
    """

    schemes: ClassVar[tuple[str, ...]] = ("file", "local")
    atomic_writer: bool = False
    read_size: int = 2 << 20  # one huge page, which stays in the processor's cache until it was checked and copied

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool = True) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self.direct_io = direct_io

    @classmethod
    def from_url(cls, url: str, **options: Any) -> LocalBackend:
        """A path (``~`` is expanded) or ``file:///path``, taken literally: no percent-decoding. The one option is
        ``direct_io``."""
        direct_io = options.pop("direct_io", True)
        if options or type(direct_io) is not bool:
            raise UnsupportedURLError(
                f"local storage takes no option but direct_io (True or False), got {sorted(options) or direct_io!r} "
                f"for {url!r}"
            )
        if not url.startswith(tuple(f"{scheme}://" for scheme in cls.schemes)):
            return cls(os.path.expanduser(url), direct_io=direct_io)
        found = _FILE_URL.fullmatch(url)
        if found is None:
            raise UnsupportedURLError(f"{url!r}: a file URL is file:///absolute/path, with three slashes and no host")
        return cls(found["path"], direct_io=direct_io)

    @property
    def url(self) -> str:
        return self._root

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        action = f"writing {key!r} in {self._root}"
        view = byte_view(data)
        place = link_exclusive if if_absent else os.replace

        def attempt(path: str) -> None:
            temporary = os.path.join(os.path.dirname(path), TEMPORARY + secrets.token_hex(8))
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                mark_in_use(fd)
                write_at(fd, view, 0)
                os.fsync(fd)
                place(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(fd)

        path = self._with_directories(key, action, attempt, needed=len(view))
        self.sync_directories(path, action)

    def create(self, key: str, size: int) -> ObjectWriter:
        action = f"writing {key!r} in {self._root}"
        pieces = PieceMap(action, size)

        def attempt(path: str) -> int:
            # Unlinking first, not truncating, leaves those who are reading the old object their bytes.
            with suppress(FileNotFoundError):
                os.unlink(path)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

        opened: list[int] = []
        path = self._with_directories(key, action, lambda path: opened.append(attempt(path)), needed=size)
        writer = LocalWriter(self, path, action, opened[0], size, pieces)
        try:
            writer.reserve()
        except BaseException:
            writer.abort()
            raise
        return writer

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        self.read_scattered(key, offset, [buffer])

    def read_scattered(self, key: str, offset: int, buffers: Sequence[Buffer]) -> None:
        # No descriptor is kept: one that outlived the call would go on reading an object that was replaced.
        with self._open(key) as opened:
            opened.read_once(offset, buffers)

    def open_object(self, key: str) -> ObjectReader:
        return self._open(key)

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        with self._open(key) as opened:
            if max_size is not None and opened.size > max_size:
                raise StorageError(
                    f"reading {key!r} in {self._root}: it has {opened.size} bytes, at most {max_size} were expected"
                )
            content = bytearray(opened.size)
            opened.read(0, [content])
            return bytes(content)

    def stat(self, key: str) -> ObjectStat:
        action = f"looking at {key!r} in {self._root}"
        try:
            found = os.stat(self._resolve(key, action))
        except OSError as error:
            raise self.map_error(error, action, reading=True) from error
        if not stat.S_ISREG(found.st_mode):
            raise KeyNotFoundError(f"{action}: it is not a file")
        return ObjectStat(key, found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}")

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        return self._list(prefix)

    def _list(self, prefix: str) -> Iterator[ObjectStat]:
        action = f"listing {prefix!r} in {self._root}"
        head = prefix[: prefix.rfind("/") + 1]
        start, top = self._resolve_directory(head, action)
        try:
            for key, found in list_tree(start, head, top, is_object_key):
                if key.startswith(prefix):
                    version = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
                    yield ObjectStat(key, found.st_size, version)
        except OSError as error:
            raise self.map_error(error, action, reading=True) from error

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        action = f"listing {prefix!r} in {self._root}"
        start, top = self._resolve_directory(prefix, action)
        names: list[str] = []
        try:
            with os.scandir(start) as entries:
                for entry in entries:
                    if not is_object_key(entry.name) or not may_follow(entry, top):
                        continue
                    if entry.is_dir():
                        if tree_has_objects(entry.path, top, is_object_key):
                            names.append(entry.name + "/")
                    elif entry.is_file():
                        names.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self.map_error(error, action, reading=True) from error
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        parents: set[str] = set()
        for key in keys:
            action = f"deleting {key!r} in {self._root}"
            path = self._locate(key, action)
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                pass
            except OSError as error:
                raise self.map_error(error, action, reading=False) from error
            parents.add(os.path.dirname(path))
        for parent in sorted(parents, key=len, reverse=True):
            self.prune(parent)

    def free_bytes(self) -> int | None:
        return free_bytes(self._root)

    # What the writer, or a reader, of one file shares with its backend.

    def open_direct(self, fd: int, flags: int) -> DirectFile | None:
        """``fd`` for transfers past the page cache; None where that is turned off or the file system has none."""
        if not self.direct_io:
            return None
        try:
            return DirectFile(fd, flags)
        except OSError as error:
            self.give_up_direct(f"opening a file with O_DIRECT: {error.strerror}")
            return None

    def give_up_direct(self, why: str) -> None:
        """From here on everything goes through the page cache."""
        if self.direct_io:
            self.direct_io = False
            _log.debug("%s: no direct I/O on this file system, the page cache is used (%s)", self._root, why)

    def map_error(self, error: OSError, action: str, *, reading: bool, needed: int | None = None) -> StorageError:
        """``error`` as a member of the errors tree; ``needed`` bytes make the message of a full disk say how full."""
        self._check_root(action)
        mapped = map_os_error(error, action, absent_is_missing_key=reading)
        if isinstance(mapped, StorageFullError) and needed is not None:
            free = free_bytes(self._root)
            detail = "unknown" if free is None else f"{free} bytes"
            return StorageFullError(f"{mapped} (needed: {needed} bytes, free on this file system: {detail})")
        return mapped

    def prune(self, directory: str) -> None:
        """Remove ``directory`` and its parents as long as they hold no object, up to but without the root."""
        top = os.path.realpath(self._root)
        while directory != top and inside(directory, top):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not drop_leftovers(directory):
                    return
                continue
            directory = os.path.dirname(directory)

    def sync_directories(self, path: str, action: str) -> None:
        """Make every name on the way from the root down to the file ``path`` durable."""
        top = os.path.realpath(self._root)
        directory = os.path.dirname(path)
        try:
            # All of them, not only those this process made: another rank may have made one and not synced it yet.
            while inside(directory, top):
                sync_directory(directory)
                if directory == top:
                    return
                directory = os.path.dirname(directory)
        except OSError as error:
            raise self.map_error(error, action, reading=False) from error

    def _open(self, key: str) -> LocalReader:
        action = f"reading {key!r} in {self._root}"
        return LocalReader(self, self._resolve(key, action), action)

    def _with_directories(self, key: str, action: str, attempt: Callable[[str], None], *, needed: int) -> str:
        """Run ``attempt`` on the path of ``key`` with its directories made; again where they vanish meanwhile."""
        path = self._locate(key, action)
        for tries_left in reversed(range(_TRIES)):
            try:
                make_directories(os.path.dirname(path))
                attempt(path)
            except FileNotFoundError as error:
                if not tries_left:
                    raise self.map_error(error, action, reading=False) from error
            except FileExistsError as error:
                raise KeyExistsError(f"{action}: the key is taken") from error
            except OSError as error:
                self.prune(os.path.dirname(path))
                raise self.map_error(error, action, reading=False, needed=needed) from error
            else:
                break
        return path

    def _locate(self, key: str, action: str) -> str:
        """The path of ``key`` with the links in its directories resolved, its last component left as it is."""
        top = self._top_for(key, action)
        parent, name = os.path.split(key)
        return os.path.join(self._followed(top, parent, action), name)

    def _resolve(self, key: str, action: str) -> str:
        """The path of ``key`` with all links resolved: what a read opens."""
        return self._followed(self._top_for(key, action), key, action)

    def _top_for(self, key: str, action: str) -> str:
        """The resolved root, for a key that may be an object's."""
        check_key(key)
        if any(component.startswith(TEMPORARY) for component in key.split("/")):
            raise StorageError(f"{action}: names that begin with {TEMPORARY!r} are reserved")
        return os.path.realpath(self._root)

    def _followed(self, top: str, below: str, action: str) -> str:
        """The path ``below`` the resolved root with all links resolved; refused where they lead out of the root."""
        path = top
        for component in below.split("/"):
            path = os.path.join(path, component)
            # Rarely is there a link. realpath would look at every component of the root again.
            if os.path.islink(path):
                path = os.path.realpath(os.path.join(top, below))
                if not inside(path, top):
                    raise StorageError(f"{action}: refused: a symbolic link leads out of the root, to {path}")
                return path
        return path

    def _resolve_directory(self, prefix: str, action: str) -> tuple[str, str]:
        """The directory that ``prefix`` ends in and the root, both with all links resolved."""
        self._check_root(action)
        top = os.path.realpath(self._root)
        directory = os.path.realpath(os.path.join(top, prefix))
        if not inside(directory, top):
            raise StorageError(f"{action}: refused: a symbolic link leads out of the root, to {directory}")
        return directory, top

    def _check_root(self, action: str) -> None:
        try:
            mode = os.stat(self._root).st_mode
        except OSError:
            return
        if not stat.S_ISDIR(mode):
            raise StorageError(f"{action}: the root {self._root} is a file, not a directory; give another path")
