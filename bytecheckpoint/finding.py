"""Finding the newest checkpoint below a root that can be loaded: names are hints, and every candidate is proved."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .engine.writing.commit import ATTEMPT_MARK, read_manifest
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    NoValidCheckpointError,
    UnsupportedVersionError,
)
from .manifest import MANIFEST_KEY, Manifest
from .storage_backends import join, open_backend
from .storage_backends.base import StorageBackend

__all__ = ["Found", "check_files", "find_newest", "number_in"]

_NUMBER_AT_END = re.compile(r"(\d+)$")
_NAMED_AT_MOST = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A committed checkpoint in the folder ``name`` of a root, with all its files."""

    name: str
    backend: StorageBackend
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step stored with it, else the number in its name, else -1."""
        return number_in(self.name) if self.manifest.step is None else self.manifest.step


def find_newest(
    root: str | os.PathLike[str],
    *,
    excluding: Container[str] = (),
    allow_fresh: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Found | None:
    """The checkpoint of the highest step among the direct children of ``root`` that holds: its manifest decodes, and
    every file it names is there in full length. What does not hold is passed over with a warning.

    Children whose names end in a number are tried from the highest number down, until one holds. ``excluding`` are
    names that the caller found to be bad. None where nothing was ever saved. Raises ``NoValidCheckpointError`` where
    there are traces of saves but no such checkpoint, unless ``allow_fresh``; ``UnsupportedVersionError`` where the
    newest is of a newer library; ``StorageError`` where the store does not answer.
    """
    options = dict(storage_options or {})
    top = open_backend(root, **options)
    holding: list[Found] = []
    problems: list[str] = []
    for name in sorted(_children(top), key=number_in, reverse=True):
        if number_in(name) >= 0 and any(number_in(found.name) >= 0 for found in holding):
            continue
        if name in excluding:
            problems.append(f"{name}: it was tried already")
            continue
        try:
            holding.append(_proved(name, open_backend(join(top.url, name), **options)))
        except CheckpointNotFoundError:
            continue  # removed since it was listed
        except UnsupportedVersionError:
            raise  # it may well hold, and what comes before it is older than anybody thinks
        except CheckpointError as error:
            if _has_traces(top, name):
                problems.append(f"{name}: {error}")
                _log.warning("passed over: %s", error)
    if holding:
        return max(holding, key=lambda found: (found.step, found.name))
    if problems and not allow_fresh:
        listed = "".join(f"\n  {problem}" for problem in problems[:_NAMED_AT_MOST])
        more = len(problems) - _NAMED_AT_MOST
        raise NoValidCheckpointError(
            f"no checkpoint below {top.url} can be loaded, although there are traces of saves:{listed}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nRepair one, or give allow_fresh=True to start anew."
        )
    return None


def check_files(backend: StorageBackend, manifest: Manifest) -> None:
    """Raise ``CorruptionError`` unless every file is there in full length. Reads names and sizes only."""
    wanted: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for key, size in zip(manifest.files.name, manifest.files.size.tolist(), strict=True):
        wanted[key.partition("/")[0]][key] = size
    faults = []
    for folder, sizes in wanted.items():
        stored = {stat.key: stat.size for stat in backend.list(f"{folder}/")}
        faults += [
            f"{key} is missing" if key not in stored else f"{key} has {stored[key]} bytes instead of {size}"
            for key, size in sizes.items()
            if stored.get(key) != size
        ]
    if faults:
        more = f" and {len(faults) - _NAMED_AT_MOST} more" if len(faults) > _NAMED_AT_MOST else ""
        raise CorruptionError(f"{backend.url}: {'; '.join(faults[:_NAMED_AT_MOST])}{more}")


def number_in(name: str) -> int:
    """The number that ``name`` ends in; -1 where it ends in none."""
    number = _NUMBER_AT_END.search(name)
    return int(number[1]) if number else -1


def _proved(name: str, backend: StorageBackend) -> Found:
    manifest = read_manifest(backend)
    check_files(backend, manifest)
    return Found(name, backend, manifest)


def _children(root: StorageBackend) -> Iterator[str]:
    for child in root.list_children(""):
        if child.endswith("/") and not child.startswith(ATTEMPT_MARK):
            yield child[:-1]


def _has_traces(root: StorageBackend, name: str) -> bool:
    children = root.list_children(f"{name}/")
    return any(child == MANIFEST_KEY or child.startswith(ATTEMPT_MARK) for child in children)
