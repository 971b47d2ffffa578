"""Simulate a failing file system: calls of this process on one folder raise, or write half of the data and die.

The functions of ``os`` and one system call are replaced, below all code of the library, so that its error handling is
tested too. A fault applies only to paths (and descriptors of files) below the folder, and only while it is armed.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable
from typing import Any

from bytecheckpoint.storage_backends.local import root

ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "eacces": errno.EACCES}


_RENAMEAT2 = "rename_exclusive"
"""The function of the library that calls it; ``os`` has none."""


def _owner(name: str) -> Any:
    return root if name == _RENAMEAT2 else os


class FailingDisk:
    """Raises ``fault`` in every call of kind ``call`` below ``folder`` while it is installed and ``is_armed``.

    ``struck`` is called before the first fault. ``call`` is "stat", "free", "open" (to read), "create", "read",
    "write", "sync", "sync-directory", "rename" or "delete".
    """

    def __init__(
        self, folder: str, call: str, fault: str, is_armed: Callable[[], bool], struck: Callable[[], None]
    ) -> None:
        self._folder, self._call, self._fault = os.path.realpath(folder), call, fault
        self._is_armed, self._struck = is_armed, struck
        self._former: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._has_struck = False

    def install(self) -> None:
        for name, wrapped in self._calls().items():
            self._former[name] = getattr(_owner(name), name)
            setattr(_owner(name), name, wrapped)

    def remove(self) -> None:
        while self._former:
            name, function = self._former.popitem()
            setattr(_owner(name), name, function)

    def _calls(self) -> dict[str, Callable[..., Any]]:
        calls: dict[str, dict[str, Callable[..., Any]]] = {
            "stat": {"stat": self._on_path("stat")},
            "free": {"statvfs": self._statvfs},
            "open": {"open": self._open},
            "create": {"open": self._open},
            "read": {"preadv": self._on_descriptor("preadv")},
            "write": {"pwrite": self._pwrite},
            "sync": {name: self._on_descriptor(name) for name in ("fsync", "fdatasync")},
            "sync-directory": {"fsync": self._on_descriptor("fsync", directory=True)},
            "rename": {name: self._on_target(name) for name in ("replace", "link", _RENAMEAT2)},
            "delete": {"unlink": self._on_path("unlink")},
        }
        return calls[self._call]

    def _strikes(self, path: str | bytes | os.PathLike[str]) -> bool:
        if not self._is_armed():
            return False
        found = os.path.realpath(os.fsdecode(path))
        if not f"{found}/".startswith(f"{self._folder}/"):
            return False
        with self._lock:
            # Another thread must not kill the process before ``struck`` has recorded the time.
            if not self._has_struck:
                self._has_struck = True
                self._struck()
        return True

    def _strikes_descriptor(self, fd: int, *, directory: bool = False) -> bool:
        try:
            is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False
        return is_directory == directory and self._strikes(path)

    def _error(self, path: Any = None) -> OSError:
        code = ERRORS[self._fault]
        return OSError(code, os.strerror(code), path) if path is not None else OSError(code, os.strerror(code))

    def _on_path(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and self._strikes(path):
                raise self._error(path)
            return self._former[name](path, *args, **options)

        return call

    def _on_descriptor(self, name: str, *, directory: bool = False) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if self._strikes_descriptor(fd, directory=directory):
                raise self._error()
            return self._former[name](fd, *args)

        return call

    def _open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        kind = "create" if flags & os.O_CREAT else "folder" if flags & os.O_DIRECTORY else "open"
        if kind == self._call and self._strikes(path):
            raise self._error(path)
        return int(self._former["open"](path, flags, *args, **options))

    def _on_target(self, name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            if self._strikes(target):
                raise self._error(target)
            return self._former[name](source, target, **options)

        return call

    def _statvfs(self, path: Any) -> os.statvfs_result:
        found: os.statvfs_result = self._former["statvfs"](path)
        # If the folder does not exist yet, the library queries its parent.
        parent = os.path.realpath(os.fsdecode(path))
        if not f"{self._folder}/".startswith(f"{parent}/") or not self._strikes(self._folder):
            return found
        full = list(found)
        full[3] = full[4] = 0  # free blocks, for root and for others
        return os.statvfs_result(full)

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        if not self._strikes_descriptor(fd):
            return int(self._former["pwrite"](fd, data, offset))
        if self._fault != "torn":
            raise self._error()
        self._former["pwrite"](fd, memoryview(data)[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")
