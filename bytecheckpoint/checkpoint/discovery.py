"""Find the newest complete checkpoint below a root, and list everything below one.

A folder's name is only a hint. A folder is a checkpoint if its manifest decodes, and a complete one if every file that
the manifest names has its full size.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..engine.objects import OBJECTS, files_of
from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    NotACheckpointError,
    NoValidCheckpointError,
    UnsupportedVersionError,
    UsageError,
)
from ..format.manifest import MANIFEST_KEY, Manifest
from ..runtime import DEFAULT_DEADLINE_S
from ..storage_backends.base import StorageBackend
from .attempts import ATTEMPT_PREFIX
from .location import Location
from .manifest_file import read_manifest
from .nearest import open_nearest
from .sweep import missing_files

METRICS_KEY = "metrics"
"""The key of a checkpoint's metrics in its metadata."""

MILESTONE_KEY = "milestone"
"""The key of a milestone's name in its metadata."""

EXCEPTION_KEY = "bytecheckpoint.exception"
"""The key in the metadata of a checkpoint that was saved because training failed. Only its path leads to it."""

BestMode = Literal["min", "max"]
"""Whether the best checkpoint has the lowest or the highest metric."""

_TRAILING_NUMBER = re.compile(r"(\d+)$")
_MOST_PROBLEMS_SHOWN = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A committed checkpoint in the folder ``name`` of a root; none of its files is missing or truncated."""

    name: str
    backend: StorageBackend
    manifest: Manifest

    @property
    def milestone(self) -> str | None:
        """The name under which the manager keeps it for ever."""
        return milestone_of(self.manifest)

    @property
    def step(self) -> int:
        """The step in the manifest, else the number at the end of the name, else -1."""
        return trailing_number(self.name) if self.manifest.step is None else self.manifest.step


def find_newest(
    root: Location,
    *,
    excluding: Container[str] = (),
    allow_fresh: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the complete checkpoint with the highest step among the direct children of ``root``.

    Children whose names end in a number are tried from the highest number down until one is complete; all other
    children are tried too. Each child that is not complete is skipped with a warning, and so is one that was saved on
    an exception. Reads manifests, names and sizes only.

    Args:
        root: Folder whose children are checkpoints.
        excluding: Names of children that the caller found to be damaged.
        allow_fresh: Return None, instead of raising, if saves left traces but no complete checkpoint.
        deadline_s: How long one request to the store may take, in seconds.

    Returns:
        The checkpoint, or None if nothing was ever saved below ``root``.

    Raises:
        UsageError: ``root`` is a checkpoint itself.
        NoValidCheckpointError: Saves left traces but no complete checkpoint, and ``allow_fresh`` is False.
        UnsupportedVersionError: A newer library wrote the newest checkpoint.
        StorageError: The store failed.
    """
    top = open_nearest(root, deadline_s)
    complete: list[CompleteCheckpoint] = []
    ignored: list[CompleteCheckpoint] = []
    problems: list[str] = []
    for name in sorted(_children(top), key=trailing_number, reverse=True):
        if trailing_number(name) >= 0 and any(trailing_number(found.name) >= 0 for found in complete):
            continue
        if name in excluding:
            problems.append(f"{name}: loading it failed before")
            continue
        try:
            found = open_complete(root, name, deadline_s)
            (ignored if is_exception_save(found.manifest) else complete).append(found)
        except CheckpointNotFoundError:
            continue  # removed after it was listed
        except UnsupportedVersionError:
            raise  # it is probably complete, and resuming from an older one would silently lose work
        except CheckpointError as error:
            if _has_traces_of_saves(top, name):
                problems.append(f"{name}: {error}")
                _log.warning("skipped an invalid checkpoint: %s", error)
    if complete:
        return max(complete, key=lambda found: (found.step, found.name))
    check_is_root(top)
    if not ignored and top.list_children(f"{OBJECTS}/"):
        problems.append(f"{OBJECTS}: incremental saves began, and none was committed")
    for found in ignored:
        _log.warning("%s is ignored, because it was saved on an exception; it can be loaded by its path", found.name)
    if problems and not allow_fresh:
        shown = "".join(f"\n  {problem}" for problem in problems[:_MOST_PROBLEMS_SHOWN])
        more = len(problems) - _MOST_PROBLEMS_SHOWN
        raise NoValidCheckpointError(
            f"no checkpoint below {top.url} can be loaded, although saves left traces there:{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
            + "\nRepair one of them, or pass allow_fresh=True to start from scratch."
        )
    return None


def find_best(
    root: Location,
    metric: str,
    mode: BestMode,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the complete checkpoint with the lowest or highest ``metric`` among the direct children of ``root``.

    Of equal ones, that of the latest step. None if no checkpoint has the metric. Reads the manifests of all.
    """
    sign = 1.0 if mode == "min" else -1.0
    found = (
        (value, one)
        for one in _all_complete(root, deadline_s)
        if (value := metric_of(one.manifest, metric)) is not None
    )
    return min(found, key=lambda pair: (sign * pair[0], -pair[1].step), default=(0.0, None))[1]


def find_milestone(
    root: Location,
    name: str,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the complete checkpoint that was saved as this milestone; of several, that of the latest step."""
    found = (one for one in _all_complete(root, deadline_s) if one.milestone == name)
    return max(found, key=lambda one: one.step, default=None)


def metric_of(manifest: Manifest, metric: str) -> float | None:
    """Return a number in the checkpoint's metrics, or else in its metadata; None if it has none or NaN."""
    metrics = manifest.metadata.get(METRICS_KEY)
    value = metrics.get(metric) if isinstance(metrics, Mapping) else None
    value = manifest.metadata.get(metric) if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def milestone_of(manifest: Manifest) -> str | None:
    """Return the milestone's name in the checkpoint's metadata."""
    name = manifest.metadata.get(MILESTONE_KEY)
    return name if isinstance(name, str) else None


def is_exception_save(manifest: Manifest) -> bool:
    """Whether the checkpoint was saved because training failed, so that its state may be half-way through a step."""
    return isinstance(manifest.metadata.get(EXCEPTION_KEY), Mapping)


def _all_complete(root: Location, deadline_s: float) -> Iterator[CompleteCheckpoint]:
    top = open_nearest(root, deadline_s)
    names = list(_children(top))
    if not names:
        check_is_root(top)
    for name in names:
        try:
            found = open_complete(root, name, deadline_s)
            if not is_exception_save(found.manifest):
                yield found
        except (CheckpointNotFoundError, NotACheckpointError):
            continue
        except CheckpointError as error:
            _log.warning("skipped an invalid checkpoint: %s", error)


def open_complete(root: Location, name: str, deadline_s: float) -> CompleteCheckpoint:
    """Open the checkpoint of this name below ``root``.

    Raises ``CheckpointError`` unless it is complete.
    """
    backend = open_nearest(root.join(name), deadline_s)
    manifest = read_manifest(backend)
    _check_files_complete(backend, manifest)
    return CompleteCheckpoint(name, backend, manifest)


def committed_names(root: StorageBackend) -> set[str]:
    """Return the names of the direct children of ``root`` that have a manifest. Reads names only."""
    return {name for name in _children(root) if MANIFEST_KEY in root.list_children(f"{name}/")}


def check_is_root(backend: StorageBackend) -> None:
    """Raise ``UsageError`` if the folder is a checkpoint, or one that was never committed, and not the root of some."""
    children = backend.list_children("")
    if MANIFEST_KEY in children or any(child.startswith(ATTEMPT_PREFIX) for child in children):
        parent = backend.url.rstrip("/").rpartition("/")[0]
        raise UsageError(
            f"{backend.url} is a checkpoint, and not a folder of checkpoints; pass {parent or 'its parent'} instead, "
            f"or open the checkpoint itself with bcp.open or bcp.load"
        )


def trailing_number(name: str) -> int:
    """Return the number at the end of ``name``, or -1 if it ends in none."""
    number = _TRAILING_NUMBER.search(name)
    return int(number[1]) if number else -1


def _check_files_complete(backend: StorageBackend, manifest: Manifest) -> None:
    """Raise ``CorruptionError`` unless every file has its full size. Reads names and sizes only."""
    expected = files_of(manifest)
    faults = [
        f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {expected[name]}"
        for name, size in missing_files(backend, manifest).items()
    ]
    if faults:
        more = f" and {len(faults) - _MOST_PROBLEMS_SHOWN} more" if len(faults) > _MOST_PROBLEMS_SHOWN else ""
        raise CorruptionError(f"{backend.url}: {'; '.join(faults[:_MOST_PROBLEMS_SHOWN])}{more}")


def _children(root: StorageBackend) -> Iterator[str]:
    for child in root.list_children(""):
        if child.endswith("/") and child != f"{OBJECTS}/" and not child.startswith(ATTEMPT_PREFIX):
            yield child[:-1]


def _has_traces_of_saves(root: StorageBackend, name: str) -> bool:
    children = root.list_children(f"{name}/")
    return any(child == MANIFEST_KEY or child.startswith(ATTEMPT_PREFIX) for child in children)


Status = Literal["checkpoint", "partial", "broken", "other"]


@dataclass(frozen=True)
class Listing:
    """One folder at or below a root.

    Attributes:
        name: Path of the folder below the root; "." is the root.
        url: URL of the folder.
        status: "checkpoint"; "partial" if saves began there and none was committed; "broken" if its manifest cannot be
            read; "other" for anything else.
        problem: Why the folder is not a checkpoint.
        attempts: Attempts that are not part of a committed checkpoint. They belong to saves that failed or are in
            progress.
        step: The step that was stored with the checkpoint.
        created: Time of the save: UTC, RFC 3339.
        world_size: Ranks that saved the checkpoint.
        sections: Names of the checkpoint's sections.
        tensors: Number of tensors.
        files: Number of data files.
        size: Bytes of all data files.
    """

    name: str
    url: str
    status: Status
    problem: str = ""
    attempts: tuple[str, ...] = ()
    step: int | None = None
    created: str = ""
    world_size: int = 0
    sections: tuple[str, ...] = ()
    tensors: int = 0
    files: int = 0
    size: int = 0


def list_checkpoints(root: Location, *, depth: int = 1) -> list[Listing]:
    """List ``root`` and the folders up to ``depth`` levels below it, ordered by step and name.

    Does not descend into checkpoints, and reads manifests only. Raises ``CheckpointNotFoundError`` if nothing is
    stored at ``root``, and ``StorageError``.
    """
    found = list(_list_folder(root, ".", depth))
    if not found:
        raise CheckpointNotFoundError(f"nothing is stored at {root}; check the path")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.name))


def _list_folder(root: Location, name: str, depth: int) -> Iterator[Listing]:
    backend = root.open()
    children = backend.list_children("")
    attempts = [child.rstrip("/") for child in children if child.startswith(ATTEMPT_PREFIX) and child.endswith("/")]
    folders = [child[:-1] for child in children if child.endswith("/") and child[:-1] not in (*attempts, OBJECTS)]
    if MANIFEST_KEY in children:
        try:
            yield _committed(name, backend.url, read_manifest(backend), attempts)
        except CheckpointError as error:
            yield Listing(name, backend.url, "broken", str(error), tuple(attempts))
    elif attempts:
        problem = f"{len(attempts)} save(s) began and none was committed"
        yield Listing(name, backend.url, "partial", problem, tuple(attempts))
    elif children and (name != "." or not folders) and (depth == 0 or not folders):
        yield Listing(name, backend.url, "other", f"it has no {MANIFEST_KEY}")
    if MANIFEST_KEY in children or depth == 0:
        return
    for folder in folders:
        child = folder if name == "." else f"{name}/{folder}"
        yield from _list_folder(root.join(folder), child, depth - 1)


def _committed(name: str, url: str, manifest: Manifest, attempts: Sequence[str]) -> Listing:
    return Listing(
        name,
        url,
        "checkpoint",
        attempts=tuple(attempt for attempt in attempts if attempt != manifest.attempt),
        step=manifest.step,
        created=manifest.created,
        world_size=manifest.world_size,
        sections=tuple(section.name for section in manifest.sections),
        tensors=len(manifest.tensors),
        files=len(manifest.files),
        size=manifest.file_bytes,
    )
