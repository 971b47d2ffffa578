"""A directory tree seen as sorted keys. Raises ``OSError``; what vanishes meanwhile is skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

__all__ = ["list_tree", "may_follow", "tree_has_objects"]

_log = logging.getLogger(__name__)


def list_tree(
    directory: str, prefix: str, top: str, accept: Callable[[str], bool], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, os.stat_result]]:
    """``(key, stat)`` of every regular file below ``directory``, in key order, one directory in memory at a time.

    Keys begin with ``prefix`` ("" or ending in "/"). A symbolic link is followed as long as it stays below ``top``
    (a resolved path) and does not lead back to where we came from (``above``); any other is reported and left out.
    """
    here = os.path.realpath(directory)
    for entry in _scan(directory):
        if not accept(entry.name):
            continue
        try:
            if not may_follow(entry, top, (*above, here)):
                continue
            if entry.is_dir():
                yield from list_tree(entry.path, f"{prefix}{entry.name}/", top, accept, (*above, here))
            elif entry.is_file():
                yield prefix + entry.name, entry.stat()
        except FileNotFoundError:
            continue


def tree_has_objects(directory: str, top: str, accept: Callable[[str], bool]) -> bool:
    """Whether ``list_tree`` would yield anything. Stops at the first file."""
    return next(iter(list_tree(directory, "", top, accept)), None) is not None


def may_follow(entry: os.DirEntry[str], top: str, above: tuple[str, ...] = ()) -> bool:
    """True for what is no symbolic link, and for a link that stays below ``top`` and leads to nothing ``above``."""
    if not entry.is_symlink():
        return True
    target = os.path.realpath(entry.path)
    if target != top and not target.startswith(top.rstrip("/") + "/"):
        _log.warning("not listing %s: it leads out of %s, to %s", entry.path, top, target)
        return False
    if target in above:
        _log.warning("not listing %s: it leads back to %s", entry.path, target)
        return False
    return True


def _scan(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # "a/x" comes after "a.b" and "a-b": a directory sorts as its name with the slash that its keys have there.
    return sorted(found, key=lambda entry: entry.name + "/" if _is_directory(entry) else entry.name)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
