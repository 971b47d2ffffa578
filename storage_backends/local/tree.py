"""List a directory tree as sorted keys. Functions raise ``OSError``, but skip what vanishes while they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from .directories import is_within

__all__ = ["has_objects", "list_tree", "should_follow"]

_log = logging.getLogger(__name__)


def list_tree(
    directory: str, prefix: str, top: str, accept: Callable[[str], bool], parents: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield ``(key, stat)`` of every regular file below ``directory``, in key order.

    One directory at a time is in memory. Keys begin with ``prefix`` (empty, or ending in ``/``). A symbolic link is
    followed if it stays below ``top`` (a resolved path) and does not lead back to one of ``parents``; other links are
    logged and left out.
    """
    here = os.path.realpath(directory)
    for entry in _sorted_entries(directory):
        if not accept(entry.name):
            continue
        try:
            if not should_follow(entry, top, (*parents, here)):
                continue
            if entry.is_dir():
                yield from list_tree(entry.path, f"{prefix}{entry.name}/", top, accept, (*parents, here))
            elif entry.is_file():
                yield prefix + entry.name, entry.stat()
        except FileNotFoundError:
            continue


def has_objects(directory: str, top: str, accept: Callable[[str], bool]) -> bool:
    """Whether ``list_tree`` would yield anything. Stops at the first file."""
    return next(iter(list_tree(directory, "", top, accept)), None) is not None


def should_follow(entry: os.DirEntry[str], top: str, parents: tuple[str, ...] = ()) -> bool:
    """Whether ``list_tree`` visits an entry.

    It visits everything but symbolic links that leave ``top`` or lead back to one of ``parents``, which it logs.
    """
    if not entry.is_symlink():
        return True
    target = os.path.realpath(entry.path)
    if not is_within(target, top):
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
