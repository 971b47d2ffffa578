"""Metrics of saves in the text format of Prometheus."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..saving.handle import SaveHandle, SaveResult

_HELP = {
    "saves_total": ("counter", "Saves of this process, by outcome."),
    "last_save_timestamp_seconds": ("gauge", "When the last save was committed."),
    "last_save_step": ("gauge", "The training step of the last committed save."),
    "last_save_bytes": ("gauge", "Bytes that this rank wrote in the last committed save."),
    "last_save_seconds": ("gauge", "How long each step of the last committed save took on this rank."),
}


class PrometheusFile:
    """A text file of metrics for the textfile collector of Prometheus's node exporter. Thread-safe.

    Its methods are callbacks of a ``CheckpointManager``. Each replaces the file atomically. Ranks need a file each.

    Example:
        >>> metrics = PrometheusFile("/var/lib/node_exporter/train.prom", labels={"run": "7b", "rank": "0"})
        >>> callbacks = bcp.Callbacks(
        ...     on_committed=metrics.committed, on_uploaded=metrics.uploaded, on_failed=metrics.failed
        ... )
    """

    def __init__(self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None) -> None:
        """Write nothing yet.

        Args:
            path: The file; its name must end in ``.prom`` for the node exporter.
            labels: Labels of all metrics.
        """
        self._path, self._labels = Path(path), dict(labels or {})
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("committed", "uploaded", "failed"), 0)
        self._last: dict[str, list[tuple[dict[str, str], float]]] = {}

    def committed(self, result: SaveResult) -> None:
        """Count a committed save, and write its figures.

        Args:
            result: The save.
        """
        last: dict[str, list[tuple[dict[str, str], float]]] = {
            "last_save_timestamp_seconds": [({}, time.time())],
            "last_save_bytes": [({}, float(result.bytes_written))],
            "last_save_seconds": [({"step": step}, seconds) for step, seconds in result.seconds.items()],
        }
        if result.step is not None:
            last["last_save_step"] = [({}, float(result.step))]
        self._count("committed", last)

    def uploaded(self, result: SaveResult) -> None:
        """Count an upload from a tier.

        Args:
            result: The save.
        """
        self._count("uploaded")

    def failed(self, handle: SaveHandle, error: BaseException) -> None:
        """Count a failed save.

        Args:
            handle: The save.
            error: Why it failed.
        """
        self._count("failed")

    def _count(self, outcome: str, last: dict[str, list[tuple[dict[str, str], float]]] | None = None) -> None:
        with self._lock:
            self._counts[outcome] += 1
            self._last = self._last if last is None else last
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")  # which the exporter does not read
            new.write_text("".join(f"{line}\n" for line in self._lines()), encoding="utf-8")
            new.replace(self._path)

    def _lines(self) -> Iterator[str]:
        outcomes = [({"outcome": outcome}, float(count)) for outcome, count in self._counts.items()]
        for name, values in {"saves_total": outcomes, **self._last}.items():
            kind, text = _HELP[name]
            yield f"# HELP bytecheckpoint_{name} {text}"
            yield f"# TYPE bytecheckpoint_{name} {kind}"
            for labels, value in values:
                pairs = ",".join(f'{key}="{_escaped(label)}"' for key, label in {**self._labels, **labels}.items())
                yield f"bytecheckpoint_{name}{f'{{{pairs}}}' if pairs else ''} {value!r}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
