"""Remove checkpoints that no retention rule keeps, and unfinished attempts of ended jobs, after each commit."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..checkpoint.attempts import ATTEMPT_PREFIX, job_mark_of, remove_attempt
from ..checkpoint.discovery import trailing_number
from ..checkpoint.manifest_file import read_manifest
from ..errors import CheckpointError, KeyNotFoundError
from ..format.manifest import MANIFEST_KEY, Manifest
from ..save.handle import SaveHandle
from ..storage_backends import join, open_backend
from .options import Retention

__all__ = ["METRICS_KEY", "STEP_NAME", "Committed", "Housekeeping", "expendable"]

METRICS_KEY = "metrics"
"""The key of a checkpoint's metrics in its metadata."""

STEP_NAME = "step-{}"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint. ``metric`` is None if it was saved without the metric; NaN counts as None."""

    name: str
    step: int
    metric: float | None = None


def expendable(retention: Retention, committed: Sequence[Committed]) -> list[Committed]:
    """Return the checkpoints that no rule keeps. ``committed`` lists all of them in the order of their commits."""
    if retention.last is None and retention.every_steps is None and retention.best is None:
        return []
    kept = {one.name for one in committed[-(retention.last or 1) :]}
    if retention.every_steps is not None:
        kept |= {one.name for one in committed if one.step % retention.every_steps == 0}
    if retention.best is not None:
        sign = 1.0 if retention.mode == "min" else -1.0
        measured = [(one.metric, one) for one in committed if one.metric is not None and not math.isnan(one.metric)]
        # Of equal checkpoints the later one wins: it has seen more data.
        measured.sort(key=lambda pair: (sign * pair[0], -pair[1].step))
        kept |= {one.name for _, one in measured[: retention.best]}
    return [one for one in committed if one.name not in kept]


class Housekeeping:
    """Runs on rank 0, in its own thread.

    It touches only folders that are named as the manager names them, and never files of a committed checkpoint that
    is kept. ``expect``, ``forget`` and ``follow`` are called from the training thread.
    """

    def __init__(self, root: str, options: Mapping[str, Any], retention: Retention, job: bytes) -> None:
        self._root, self._options = root, dict(options)
        self._backend = open_backend(root, **self._options)
        self._retention, self._job = retention, job
        self._committed: list[Committed] | None = None  # in the order of their commits; None: unknown
        self._lock = threading.Lock()
        self._expected: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcp-housekeeping")

    def expect(self, name: str) -> None:
        """Protect the folder ``name``, into which this job is about to save, until ``follow`` or ``forget``."""
        with self._lock:
            self._expected[name] += 1

    def forget(self, name: str) -> None:
        """End the protection of ``name``: the save into it has ended."""
        with self._lock:
            self._expected[name] -= 1

    def follow(self, save: SaveHandle, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """Once this save is committed, remove the checkpoints that no rule keeps. Returns at once."""
        self._thread.submit(self._after_save, save, name, step, metrics)

    def close(self) -> None:
        """Finish all work and end the thread."""
        self._thread.shutdown(wait=True)

    def _after_save(self, save: SaveHandle, name: str, step: int, metrics: Mapping[str, float]) -> None:
        failed = save.exception() is not None
        self.forget(name)
        if failed:
            self._committed = None  # an earlier checkpoint of this name may still be there
            return
        try:
            if self._committed is None:
                self._committed = self._scan_root()
            self._committed = [one for one in self._committed if one.name != name]
            self._committed.append(Committed(name, step, metrics.get(self._retention.metric or "")))
            for one in expendable(self._retention, self._committed):
                self._committed.remove(one)
                self._remove(one.name)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed; cleaning up must not fail the save
            _log.warning("%s: old checkpoints could not be removed: %s", self._root, error, exc_info=True)
            self._committed = None

    def _scan_root(self) -> list[Committed]:
        """Return what earlier jobs committed, in the order of the commits, and remove their unfinished attempts."""
        found: list[tuple[str, Committed]] = []
        for name in self._folders():
            with self._lock:
                if self._expected[name]:
                    continue
            children = self._backend.list_children(f"{name}/")
            attempts = [child[:-1] for child in children if child.startswith(ATTEMPT_PREFIX) and child.endswith("/")]
            manifest = None
            if MANIFEST_KEY in children:
                try:
                    manifest = read_manifest(open_backend(join(self._root, name), **self._options))
                except CheckpointError as error:
                    _log.warning("not touched, because it cannot be read: %s", error)
                    continue
                found.append((manifest.created, Committed(name, trailing_number(name), self._metric_of(manifest))))
            self._remove_unfinished(name, [one for one in attempts if manifest is None or one != manifest.attempt])
        return [one for _, one in sorted(found, key=lambda pair: (pair[0], pair[1].step))]

    def _folders(self) -> Sequence[str]:
        names = (child[:-1] for child in self._backend.list_children("") if child.endswith("/"))
        return [name for name in names if name == STEP_NAME.format(trailing_number(name))]

    def _remove_unfinished(self, name: str, attempts: Sequence[str]) -> None:
        """This job holds the lease, so any other job that left an attempt has ended. An attempt without a job mark
        belongs to a save without a manager, which may still be running."""
        for attempt in attempts:
            if job_mark_of(attempt) not in (b"", self._job):
                _log.info("%s: removing %s/%s, left by a job that ended", self._root, name, attempt)
                remove_attempt(self._backend, f"{name}/{attempt}")

    def _remove(self, name: str) -> None:
        """Remove the manifest first, so that readers never see half a checkpoint."""
        with self._lock:
            # A save into this folder that begins later writes its own files and its own manifest.
            if self._expected[name]:
                return
            try:
                manifest = read_manifest(open_backend(join(self._root, name), **self._options))
            except (CheckpointError, KeyNotFoundError) as error:
                _log.warning("not removed: %s", error)
                return
            _log.info("%s: removing %s", self._root, name)
            self._backend.delete([f"{name}/{MANIFEST_KEY}"])
        self._backend.delete([f"{name}/{key}" for key in manifest.files.name])

    def _metric_of(self, manifest: Manifest) -> float | None:
        metrics = manifest.metadata.get(METRICS_KEY)
        value = metrics.get(self._retention.metric) if isinstance(metrics, Mapping) else None
        return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None
