"""Progress of a push while it runs, and the report of a finished one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Progress = Callable[[str, int, int], None]
"""Called with a stage of ``PushReport.seconds``, the bytes written in it, and their expected total; both are 0 in a
stage that writes nothing."""

_log = logging.getLogger(__name__)


class ProgressReporter:
    """Calls one ``Progress`` function. When that raises, the error is logged and the function is not called again."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._stage, self._done, self._total = "", 0, 0

    def begin(self, stage: str, total: int = 0) -> None:
        """Begin a stage, or what this stage writes: ``total`` bytes."""
        self._stage, self._done, self._total = stage, 0, total
        self._report()

    def add(self, nbytes: int) -> None:
        """Count bytes that were written."""
        self._done += nbytes
        self._report()

    def _report(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._stage, self._done, self._total)
        except Exception:  # noqa: BLE001 - the caller's progress bar must not fail the push
            _log.exception("push: the progress function raised and will not be called again")
            self._progress = None


@dataclass(frozen=True)
class WorkerReport:
    """What one worker of an engine received.

    Attributes:
        engine: The name of the engine.
        worker: The number of the worker in its engine.
        host: The worker's host name.
        requested: Bytes that the worker requested.
        sent: Bytes of these that senders sent.
        unchanged: Bytes of these that the worker copied from the version that it served.
        kept: Bytes of these that the worker's memory already held.
    """

    engine: str
    worker: int
    host: str
    requested: int
    sent: int
    unchanged: int
    kept: int


@dataclass(frozen=True)
class PushReport:
    """What a push did. Every rank gets the same report.

    Attributes:
        version: The version that the engines serve now.
        seconds: Seconds by stage: ``describe``, ``plan``, ``prepare``, ``write``, ``verify``, ``apply``; where weights
            are streamed, ``stream`` in place of the last three.
        workers: A report for each worker of all engines.
        written: Bytes that left each rank.
        engine_bytes: Bytes of all tensors of the senders, which a broadcast of the model would send to each
            worker.
        mode: How much of the version workers held in memory; see ``memory_bytes`` of ``Pusher``.
        failed: The engines that do not serve the version, as ``quorum`` of ``Pusher`` allows, and why.
    """

    version: int | str
    seconds: dict[str, float]
    workers: list[WorkerReport]
    written: list[int]
    engine_bytes: int = field(default=0)
    mode: Literal["double", "streamed"] = "double"
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds of all stages together."""
        return sum(self.seconds.values())

    def plain(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> PushReport:
        """Make a report from plain data.

        Args:
            values: The result of ``plain``.

        Returns:
            The report.
        """
        workers = [WorkerReport(**worker) for worker in values["workers"]]
        return cls(**{**values, "workers": workers})
