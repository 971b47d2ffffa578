"""What goes once a new checkpoint stands: checkpoints that no rule keeps, and what dead jobs left half-made."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..engine.writing.commit import ATTEMPT_MARK, job_of, read_manifest, remove_attempt
from ..errors import CheckpointError, KeyNotFoundError
from ..finding import number_in
from ..handle import SaveHandle
from ..manifest import MANIFEST_KEY, Manifest
from ..storage_backends import join, open_backend
from .retention import Kept, Retention

__all__ = ["METRICS_KEY", "STEP_NAME", "Housekeeping"]

METRICS_KEY = "metrics"
"""Where a checkpoint's metrics are in its metadata."""

STEP_NAME = "step-{}"

_log = logging.getLogger(__name__)


class Housekeeping:
    """On rank 0, in one thread of its own. Only folders that are named as the manager names them are touched, and never
    what a manifest that stays names. ``expect``, ``forget`` and ``follow`` are for the thread that trains."""

    def __init__(
        self,
        root: str,
        options: Mapping[str, Any],
        retention: Retention,
        metric: str | None,
        job: bytes,
    ) -> None:
        self._root, self._options = root, dict(options)
        self._backend = open_backend(root, **self._options)
        self._retention, self._metric, self._job = retention, metric, job
        self._committed: list[Kept] | None = None  # in the order of their commits; None: not known
        self._lock = threading.Lock()
        self._expected: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bcp-housekeeping")

    def expect(self, name: str) -> None:
        """A save of this job to ``name`` is about to begin: until it has ended nothing there is looked at or removed,
        whether it is the old checkpoint or the new one. Followed by ``follow``, or ``forget`` where none came of it."""
        with self._lock:
            self._expected[name] += 1

    def forget(self, name: str) -> None:
        """The save to ``name`` has ended."""
        with self._lock:
            self._expected[name] -= 1

    def follow(self, save: SaveHandle, name: str, step: int, metrics: Mapping[str, float]) -> None:
        """Once this save has ended, and well, put it on the books and remove what may go then. Returns at once."""
        self._thread.submit(self._tidy, save, name, step, metrics)

    def close(self) -> None:
        """Finish what is to be done, and end the thread."""
        self._thread.shutdown(wait=True)

    def _tidy(self, save: SaveHandle, name: str, step: int, metrics: Mapping[str, float]) -> None:
        failed = save.exception() is not None
        self.forget(name)
        if failed:
            self._committed = None  # what was there before may be there still
            return
        try:
            if self._committed is None:
                self._committed = self._look_around()
            self._committed = [kept for kept in self._committed if kept.name != name]
            self._committed.append(Kept(name, step, metrics.get(self._metric or "")))
            for kept in self._retention.expendable(self._committed):
                self._committed.remove(kept)
                self._remove(kept.name)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed, housekeeping must not fail it
            _log.warning("%s: old checkpoints could not be removed: %s", self._root, error, exc_info=True)
            self._committed = None

    def _look_around(self) -> list[Kept]:
        """What earlier jobs committed, in the order of the commits; what dead jobs left half-made there is removed."""
        found: list[tuple[str, Kept]] = []
        for name in self._folders():
            with self._lock:
                if self._expected[name]:
                    continue
            children = self._backend.list_children(f"{name}/")
            attempts = [child[:-1] for child in children if child.startswith(ATTEMPT_MARK) and child.endswith("/")]
            manifest = None
            if MANIFEST_KEY in children:
                try:
                    manifest = read_manifest(open_backend(join(self._root, name), **self._options))
                except CheckpointError as error:
                    _log.warning("left as it is: %s", error)
                    continue
                found.append((manifest.created, Kept(name, number_in(name), self._metric_of(manifest))))
            self._remove_dead(name, [one for one in attempts if manifest is None or one != manifest.attempt])
        return [kept for _, kept in sorted(found, key=lambda one: (one[0], one[1].step))]

    def _folders(self) -> Sequence[str]:
        names = (child[:-1] for child in self._backend.list_children("") if child.endswith("/"))
        return [name for name in names if name == STEP_NAME.format(number_in(name))]

    def _remove_dead(self, name: str, attempts: Sequence[str]) -> None:
        """The lease is this job's, so whatever other job left an attempt does not live any more. An attempt without a
        job is of a save without a manager, and nobody can tell."""
        for attempt in attempts:
            if job_of(attempt) not in (b"", self._job):
                _log.info("%s: removing %s/%s, left by a job that ended", self._root, name, attempt)
                remove_attempt(self._backend, f"{name}/{attempt}")

    def _remove(self, name: str) -> None:
        """Manifest first: at no moment is there half a checkpoint."""
        with self._lock:
            # A save to this name that begins after this has files of its own, and puts a manifest of its own.
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
        value = metrics.get(self._metric) if isinstance(metrics, Mapping) else None
        return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None
