"""Find the newest complete checkpoint below a root, and list everything below one.

A folder's name is only a hint. A folder is a checkpoint if its manifest decodes, and a complete one if every file that
the manifest names has its full size.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from ..engine.objects import OBJECTS, files_of
from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    NoValidCheckpointError,
    UnsupportedVersionError,
    UsageError,
)
from ..format.manifest.document import Manifest, Summary
from ..format.manifest.envelope import MANIFEST_KEY
from ..runtime import DEFAULT_DEADLINE_S
from ..runtime.messages import listed
from ..runtime.threads import Threads
from ..storage_backends.base import StorageBackend
from .attempts import ATTEMPT_PREFIX, attempts_among
from .lineage import Abandoned, OrderKey, abandoned_in, order_key, series_of, step_of, trailing_number
from .location import Location
from .manifest_file import read_manifest, read_summary
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

_MOST_PROBLEMS_SHOWN = 10
_MOST_FILES_SHOWN = 3
_READERS = 16  # folders that are listed and read at the same time
_MOST_SEARCHES = 10  # for a root whose checkpoints are replaced faster than they are opened

# In a folder whose name ends in a number: a checkpoint of training, and not a model that was downloaded.
_TRAINING_FILE = re.compile(r"trainer_state\.json|\.metadata|.*\.(pt|pth|ckpt|distcp)")

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
        return step_of(self.name, self.manifest)

    def order_key(self, abandoned: Container[str] = ()) -> OrderKey:
        """The key by which checkpoints are sorted from the oldest to the newest."""
        return order_key(self.name, self.manifest, abandoned)


def find_newest(
    root: Location,
    *,
    excluding: Container[str] = (),
    allow_fresh: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint among the direct children of ``root``: the last one by ``order_key``.

    Those that rollbacks have abandoned, and those that were saved on an exception, are ignored. Of names that differ in
    a number at their end only, the highest number is opened first; if it is the step that is stored there, the others
    are not opened. Reads manifests, names and sizes only. A warning names each damaged checkpoint.

    Args:
        root: Folder whose children are checkpoints.
        excluding: Names of children that the caller found to be damaged.
        allow_fresh: Return None, instead of raising, if saves left traces but no complete checkpoint.
        deadline_s: How long one request to the store may take, in seconds.

    Returns:
        The checkpoint, or None if nothing was ever saved below ``root``.

    Raises:
        UsageError: ``root`` is a checkpoint itself.
        NoValidCheckpointError: Saves left traces but no complete checkpoint, or there are checkpoints of other systems
            only, and ``allow_fresh`` is False.
        UnsupportedVersionError: A newer library wrote the newest checkpoint.
        StorageError: The store failed.
    """
    top = open_nearest(root, deadline_s)
    seen = _search(root, top, excluding, deadline_s)
    if seen.first is not None:
        return seen.first
    check_is_root(top)
    if not seen.on_exception and top.list_children(f"{OBJECTS}/"):
        seen.problems[OBJECTS] = "incremental saves began, and none was committed"
    for name in seen.on_exception:
        _log.warning("%s is ignored, because it was saved on an exception; it can be loaded by its path", name)
    if (seen.problems or seen.foreign) and not allow_fresh:
        raise _no_valid_checkpoint(top, seen)
    return None


def _no_valid_checkpoint(top: StorageBackend, seen: _Seen) -> NoValidCheckpointError:
    problems = [f"{name}: {problem}" for name, problem in seen.problems.items()]
    problems += [
        f"{name}: another system saved it ({', '.join(files)}); bcp.load and bcp.open read many of them by their path"
        for name, files in seen.foreign.items()
    ]
    shown = "".join(f"\n  {problem}" for problem in problems[:_MOST_PROBLEMS_SHOWN])
    more = len(problems) - _MOST_PROBLEMS_SHOWN
    found = "saves left traces" if seen.problems else "there are checkpoints of other systems"
    remedy = "Repair one of them" if seen.problems else "Load one of them by its path"
    return NoValidCheckpointError(
        f"no checkpoint below {top.url} can be loaded, although {found} there:{shown}"
        + (f"\n  and {more} more" if more > 0 else "")
        + f"\n{remedy}, or pass allow_fresh=True to start from scratch."
    )


def find_best(
    root: Location,
    metric: str,
    mode: BestMode,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the complete checkpoint with the lowest or highest ``metric`` among the direct children of ``root``.

    Of equal ones, the newest. None if no checkpoint has the metric. Reads the manifests of all.
    """
    sign = -1.0 if mode == "min" else 1.0

    def rank(name: str, one: Summary, abandoned: Container[str]) -> tuple[float, OrderKey] | None:
        value = metric_of(one, metric)
        return None if value is None else (sign * value, order_key(name, one, abandoned))

    return _first_by(rank, root, deadline_s)


def find_milestone(
    root: Location,
    name: str,
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CompleteCheckpoint | None:
    """Return the complete checkpoint that was saved as this milestone; of several, the newest."""

    def rank(folder: str, one: Summary, abandoned: Container[str]) -> OrderKey | None:
        return order_key(folder, one, abandoned) if milestone_of(one) == name else None

    return _first_by(rank, root, deadline_s)


_Rank: TypeAlias = Callable[[str, Summary, Container[str]], tuple[Any, ...] | None]
"""Returns the key of a checkpoint, of which the highest decides; None if it does not count. Abandoned attempts are
passed."""


def _first_by(rank: _Rank, root: Location, deadline_s: float) -> CompleteCheckpoint | None:
    """Return the complete checkpoint with the highest rank among the direct children of ``root``; None if none has one.

    Those that were saved on an exception have none.
    """
    top = open_nearest(root, deadline_s)
    seen = _search(root, top, (), deadline_s, rank)
    if not seen.is_any:
        check_is_root(top)
    return seen.first


@dataclass
class _Seen:
    """What a search has found among the direct children of a root."""

    abandoned: frozenset[str]  # attempts
    is_any: bool = False  # there are checkpoints, if only ones that do not count
    first: CompleteCheckpoint | None = None  # the manifests of all may not fit in memory
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the two
    on_exception: list[str] = field(default_factory=list)  # names; of checkpoints that were saved on an exception
    problems: dict[str, str] = field(default_factory=dict)  # by name, why something that a save left is not complete
    damaged: list[str] = field(default_factory=list)  # messages
    foreign: dict[str, list[str]] = field(default_factory=dict)  # by name, files of checkpoints of other systems
    removed: list[str] = field(default_factory=list)  # names; of what was listed, and was not there any more

    def add(self, found: CompleteCheckpoint) -> None:
        with self.lock:
            self.is_any = True
            if self.first is None or found.order_key() > self.first.order_key():
                self.first = found


def _search(
    root: Location, top: StorageBackend, excluding: Container[str], deadline_s: float, rank: _Rank | None = None
) -> _Seen:
    """Search until nothing that was listed has been removed meanwhile, as jobs do after a commit.

    A search that finds nothing is therefore repeated, unless there is nothing, until it finds the same again.
    """
    search = partial(_Search, root, top, deadline_s, rank)
    seen, before = search().run(excluding), None
    for _ in range(_MOST_SEARCHES):
        now = seen.problems, seen.removed
        if not any(now) or now == before or (seen.is_any and not seen.removed):
            break
        seen, before = search().run(excluding), now
    for message in sorted(seen.damaged):
        _log.warning("skipped an invalid checkpoint: %s", message)
    return seen


@dataclass
class _Search:
    """One pass over the children of a root, of which several are read at the same time.

    Without ``rank``, it searches the newest one. With it, it reads the summaries of all, and the manifest of the first.
    """

    root: Location
    top: StorageBackend
    deadline_s: float
    rank: _Rank | None

    def run(self, excluding: Container[str]) -> _Seen:
        children = self.top.list_children("")
        self.seen = seen = _Seen(abandoned_in(self.top, children).attempts)
        names = sorted(folders_of(children), key=trailing_number, reverse=True)
        seen.problems |= {name: "loading it failed before" for name in names if name in excluding}
        names = [name for name in names if name not in excluding]
        with Threads(_READERS, thread_name_prefix="bcp-search") as threads:
            for _ in threads.map(self._find_first, self._groups(names, threads)):
                pass
        seen.removed.sort()
        seen.problems = dict(sorted(seen.problems.items(), key=lambda one: trailing_number(one[0]), reverse=True))
        return seen

    def _groups(self, names: Sequence[str], threads: Threads) -> Iterable[Sequence[str]]:
        """Return names in groups, in each of which the first complete checkpoint is searched."""
        if self.rank is not None:
            ranks = zip(threads.map(self._rank_of, names), names, strict=True)
            return [[name for _, name in sorted([(key, name) for key, name in ranks if key is not None], reverse=True)]]
        series = defaultdict[tuple[str, bool], list[str]](list)
        for name in names:
            series[series_of(name), trailing_number(name) >= 0].append(name)
        return series.values()

    def _rank_of(self, name: str) -> tuple[Any, ...] | None:
        with self._noting(name):
            summary = read_summary(open_nearest(self.root.join(name), self.deadline_s))
            if self.rank is not None and not is_exception_save(summary):
                self.seen.is_any = True
                return self.rank(name, summary, self.seen.abandoned)
        return None

    def _find_first(self, names: Sequence[str]) -> None:
        seen, is_newest = self.seen, self.rank is None
        for name in names:
            with self._noting(name):
                found = open_committed(self.root, name, self.deadline_s)
                if is_newest and found.manifest.attempt in seen.abandoned:
                    command = f"bcp rollback {self.top.display_url} {found.step}"
                    seen.problems[name] = f"a rollback has abandoned it; to take that back: {command}"
                    continue
                _check_files_complete(found.backend, found.manifest)
                if is_exception_save(found.manifest):
                    seen.on_exception.append(name)
                    continue
                seen.add(found)
                if not is_newest or found.manifest.step in (None, trailing_number(name)):
                    return

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Note why a checkpoint cannot be read."""
        try:
            yield
        except CheckpointNotFoundError:
            self.seen.removed.append(name)
        except CheckpointError as error:
            if self.rank is None and isinstance(error, UnsupportedVersionError):
                raise  # it is probably complete, and resuming from an older one would silently lose work
            _note_invalid(self.seen, self.top, name, error)


def _note_invalid(seen: _Seen, top: StorageBackend, name: str, error: CheckpointError) -> None:
    children = top.list_children(f"{name}/")
    if MANIFEST_KEY in children:
        seen.damaged.append(str(error))
    elif not any(child.startswith(ATTEMPT_PREFIX) for child in children):
        files = [child for child in children if _TRAINING_FILE.fullmatch(child)]
        if not children:
            seen.removed.append(name)
        elif files and trailing_number(name) >= 0:
            seen.foreign[name] = files[:_MOST_FILES_SHOWN]
        return
    seen.problems[name] = str(error)  # without a manifest, that of a save in progress or of one that failed


def metric_of(manifest: Summary, metric: str) -> float | None:
    """Return a number in the checkpoint's metrics, or else in its metadata; None if it has none or NaN."""
    metrics = manifest.metadata.get(METRICS_KEY)
    value = metrics.get(metric) if isinstance(metrics, Mapping) else None
    return _number(manifest.metadata.get(metric) if value is None else value)


def metrics_of(manifest: Summary) -> dict[str, float]:
    """Return the numbers in the checkpoint's metrics, without NaN."""
    metrics = manifest.metadata.get(METRICS_KEY)
    found = {str(name): _number(value) for name, value in metrics.items()} if isinstance(metrics, Mapping) else {}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def milestone_of(manifest: Summary) -> str | None:
    """Return the milestone's name in the checkpoint's metadata."""
    name = manifest.metadata.get(MILESTONE_KEY)
    return name if isinstance(name, str) else None


def is_exception_save(manifest: Summary) -> bool:
    """Whether the checkpoint was saved because training failed, so that its state may be half-way through a step."""
    return isinstance(manifest.metadata.get(EXCEPTION_KEY), Mapping)


def open_complete(root: Location, name: str, deadline_s: float) -> CompleteCheckpoint:
    """Open the checkpoint of this name below ``root``.

    Raises ``CheckpointError`` unless it is complete.
    """
    found = open_committed(root, name, deadline_s)
    _check_files_complete(found.backend, found.manifest)
    return found


def open_committed(root: Location, name: str, deadline_s: float) -> CompleteCheckpoint:
    """Open the checkpoint of this name below ``root`` without checking its files.

    Raises ``CheckpointError`` if its manifest cannot be read.
    """
    backend = open_nearest(root.join(name), deadline_s)
    return CompleteCheckpoint(name, backend, read_manifest(backend))


def committed_names(root: StorageBackend, children: Iterable[str]) -> set[str]:
    """Return the names of those ``children`` of ``root`` that have a manifest. Reads names only."""
    return {name for name in folders_of(children) if MANIFEST_KEY in root.list_children(f"{name}/")}


def check_is_root(backend: StorageBackend) -> Sequence[str]:
    """Raise ``UsageError`` if the folder is a checkpoint, or one that was never committed, and not the root of some.

    Returns its children.
    """
    children = backend.list_children("")
    if MANIFEST_KEY in children or any(child.startswith(ATTEMPT_PREFIX) for child in children):
        parent = backend.url.rstrip("/").rpartition("/")[0]
        raise UsageError(
            f"{backend.url} is a checkpoint, and not a folder of checkpoints; pass {parent or 'its parent'} instead, "
            f"or open the checkpoint itself with bcp.open or bcp.load"
        )
    return children


def _check_files_complete(backend: StorageBackend, manifest: Manifest) -> None:
    """Raise ``CorruptionError`` unless every file has its full size. Reads names and sizes only."""
    expected = files_of(manifest)
    faults = [
        f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {expected[name]}"
        for name, size in missing_files(backend, manifest).items()
    ]
    if faults:
        raise CorruptionError(f"{backend.url}: {listed(faults, _MOST_PROBLEMS_SHOWN, '; ')}")


def folders_of(children: Iterable[str]) -> list[str]:
    """Return the names of those children of a root that may be checkpoints."""
    others = f"{OBJECTS}/", ATTEMPT_PREFIX
    return [child[:-1] for child in children if child.endswith("/") and not child.startswith(others)]


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
        files: Number of data files.
        size: Bytes of all data files.
        abandoned: Whether a rollback has abandoned it.
        metrics: The numbers that were saved as its metrics.
        milestone: The name of the milestone that it is.
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
    files: int = 0
    size: int = 0
    abandoned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    milestone: str | None = None


def list_checkpoints(root: Location, *, depth: int = 1) -> list[Listing]:
    """List ``root`` and the folders up to ``depth`` levels below it, ordered by step and name.

    Does not descend into checkpoints, and reads manifests only. Raises ``CheckpointNotFoundError`` if nothing is
    stored at ``root``, and ``StorageError``.
    """
    found: list[Listing] = []
    folders = [(".", Abandoned())]
    with Threads(_READERS, thread_name_prefix="bcp-list") as threads:
        for left in reversed(range(depth + 1)):
            seen = [*threads.map(partial(_list_folder, root, left), folders)]
            found += [one for one, _ in seen if one is not None]
            folders = [below for _, folders_below in seen for below in folders_below]
    if not found:
        raise CheckpointNotFoundError(f"nothing is stored at {root}; check the path")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.name))


def newest_listed(root: Location, found: Sequence[Listing]) -> str | None:
    """Return the path of the newest of the listed checkpoints, each of which is in a root at or below ``root``.

    None if there is none that is valid, or if a newer library saved it.
    """
    names = [one.name for one in found if one.status == "checkpoint"]
    if "." in names:
        return "."
    newest: list[tuple[OrderKey, str]] = []
    for parent in {name.rpartition("/")[0] for name in names}:
        with suppress(CheckpointError):
            one = find_newest(root.join(parent) if parent else root, allow_fresh=True)
            if one is not None:
                newest.append((one.order_key(), f"{parent}/{one.name}" if parent else one.name))
    return max(newest, default=(None, None))[1]


_Folder: TypeAlias = tuple[str, Abandoned]
"""The path of a folder below a root, and what rollbacks have abandoned in it."""


def _list_folder(root: Location, depth: int, folder: _Folder) -> tuple[Listing | None, list[_Folder]]:
    """Return the listing of one folder, and the folders in it that may have others, if ``depth`` levels are left."""
    name, abandoned = folder
    backend = (root if name == "." else root.join(name)).open()
    children = backend.list_children("")
    attempts = tuple(attempts_among(children))
    if MANIFEST_KEY in children:
        try:
            manifest = read_summary(backend)
        except CheckpointError as error:
            return Listing(name, backend.url, "broken", str(error), attempts), []
        return _committed(
            name, backend.url, manifest, attempts, is_abandoned=manifest.attempt in abandoned.attempts
        ), []
    inner = [child[:-1] for child in children if child.endswith("/") and child[:-1] not in (*attempts, OBJECTS)]
    found = None
    if attempts:
        problem = f"{len(attempts)} save(s) began and none was committed"
        found = Listing(name, backend.url, "partial", problem, attempts)
    elif children and (name != "." or not inner) and (depth == 0 or not inner):
        found = Listing(name, backend.url, "other", f"it has no {MANIFEST_KEY}")
    if depth == 0:
        return found, []
    below = abandoned_in(backend, children)
    return found, [(one if name == "." else f"{name}/{one}", below) for one in inner]


def _committed(name: str, url: str, manifest: Summary, attempts: Sequence[str], *, is_abandoned: bool) -> Listing:
    return Listing(
        name,
        url,
        "checkpoint",
        attempts=tuple(attempt for attempt in attempts if attempt != manifest.attempt),
        step=manifest.step,
        created=manifest.created,
        world_size=manifest.world_size,
        sections=tuple(section.name for section in manifest.sections),
        files=len(manifest.files),
        size=manifest.file_bytes,
        abandoned=is_abandoned,
        metrics=metrics_of(manifest),
        milestone=milestone_of(manifest),
    )
