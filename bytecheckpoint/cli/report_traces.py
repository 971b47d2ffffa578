"""The saves, loads and pushes in the traces of a job's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import UsageError
from ..telemetry.trace import LOAD_STEPS, SAVE_STEPS
from ..telemetry.trace_files import read_events
from .report_data import Column, TimedOperation

_MOST_RANKS = 1 << 20


_Steps: TypeAlias = dict[tuple[int, str], tuple[float, float, int]]
"""One operation: by rank and step, when it began and how long it took, in microseconds, and its bytes."""

_Found: TypeAlias = dict[tuple[str, str, int], _Steps]
"""By kind, checkpoint, and how often that kind of operation had been seen before."""


def trace_operations(paths: Sequence[Path]) -> list[TimedOperation]:
    """Return the operations, in the order in which they began.

    The n-th save of a checkpoint on one rank is the n-th on every rank. Raises ``UsageError`` if a file is no trace.
    """
    found: _Found = {}
    hosts: dict[int, str] = {}
    for path in paths:
        try:
            _add(read_events(path), found, hosts)
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} is not a trace of this library: {error!r}") from error
    ordered = sorted(found.items(), key=lambda one: min(one[1].values()))
    return [_operation(*key, steps, hosts) for key, steps in ordered]


def _add(events: Iterable[Mapping[str, Any]], found: _Found, hosts: dict[int, str]) -> None:
    count: dict[tuple[str, str, int], int] = {}
    steps = []
    for event in events:
        if event.get("name") == "process_name":
            hosts[int(event["pid"])] = str(event["args"]["name"]).rpartition(" on ")[2]
        elif event["ph"] == "X" and event["name"].startswith(f"{event['cat']}."):
            steps.append(event)
    for event in sorted(steps, key=lambda one: float(one["ts"])):
        kind, rank, arguments = str(event["cat"]), int(event["pid"]), event["args"]
        if not 0 <= rank < _MOST_RANKS:
            raise ValueError(f"there is no rank {rank}")
        step, url = event["name"][len(kind) + 1 :], str(arguments["checkpoint"])
        number = count.setdefault((kind, url, rank), 0)
        while (rank, step) in found.setdefault((kind, url, number), {}):
            number = count[kind, url, rank] = number + 1
        begin, duration = float(event["ts"]), float(event["dur"])
        found[kind, url, number][rank, step] = begin, duration, int(arguments.get("bytes", 0))


def _operation(kind: str, url: str, number: int, steps: _Steps, hosts: Mapping[int, str]) -> TimedOperation:
    ranks, first = 1 + max(rank for rank, _ in steps), min(steps.values())[0]
    named = SAVE_STEPS if kind == "save" else LOAD_STEPS if kind == "load" else ()
    present = dict.fromkeys(step for _, step in sorted(steps, key=lambda key: steps[key][0]))
    order = [*(step for step in named if step in present), *(step for step in present if step not in named)]
    columns: list[dict[str, Column]] = [{step: np.full(ranks, np.nan) for step in order} for _ in range(3)]
    for (rank, step), (begin, duration, nbytes) in steps.items():
        for column, value in zip(columns, ((begin - first) / 1e6, duration / 1e6, nbytes), strict=True):
            column[step][rank] = value
    name = url.rstrip("/").rpartition("/")[2] + (f" ({number + 1})" if number else "")
    return TimedOperation(kind, name, ranks, columns[1], columns[2], columns[0], hosts)
