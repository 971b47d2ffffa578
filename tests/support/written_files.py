"""Record what a block of code writes into files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Recorder:
    """Records which files this process opens for writing. An audit hook cannot be removed, so there is one."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: Any) -> None:
        if self.paths is not None and event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.paths.append(str(args[0]))


_recorder: list[_Recorder] = []


@contextmanager
def written_files(folder: str) -> Iterator[list[str]]:
    """Yield the list of files that this process opens for writing, and of files in ``folder`` that anything changes."""
    if not _recorder:
        _recorder.append(_Recorder())
    paths: list[str] = []
    before = _contents(folder)
    _recorder[0].paths = paths
    try:
        yield paths
    finally:
        _recorder[0].paths = None
        paths += [path for path, _ in before.items() ^ _contents(folder).items()]


def _contents(folder: str) -> dict[str, tuple[int, int]]:
    found = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return {path: (os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in found}
