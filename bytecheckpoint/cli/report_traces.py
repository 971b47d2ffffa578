"""The saves, loads and pushes in the traces of a job's ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import UsageError
from ..telemetry.trace import LOAD_STEPS, SAVE_STEPS
from ..telemetry.trace_files import read_events
from .report_data import Column, TimedOperation

_MOST_RANKS = 1 << 20


_SOURCES = {"read": "store", "read tier": "tier", "exchange": "other ranks"}
"""The work of a load that brings bytes, and where these come from."""


@dataclass
class _Traced:
    """One operation: by rank and step, when it began and how long it took, in microseconds, and its bytes.

    ``sources`` are bytes by source and rank.
    """

    steps: dict[tuple[int, str], tuple[float, float, int]] = field(default_factory=dict)
    sources: dict[str, Counter[int]] = field(default_factory=dict)


_Found: TypeAlias = dict[tuple[str, str, int], _Traced]
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
    ordered = sorted(found.items(), key=lambda one: min(one[1].steps.values()))
    return [_operation(*key, traced, hosts) for key, traced in ordered]


def _add(events: Iterable[Mapping[str, Any]], found: _Found, hosts: dict[int, str]) -> None:
    count: dict[tuple[str, str, int], int] = {}
    spans = []
    for event in events:
        if event.get("name") == "process_name":
            hosts[int(event["pid"])] = str(event["args"]["name"]).rpartition(" on ")[2]
        elif event["ph"] == "X" and (event["name"].startswith(f"{event['cat']}.") or _source(event)):
            spans.append(event)
    for event in sorted(spans, key=lambda one: float(one["ts"])):
        kind, rank, arguments = str(event["cat"]), int(event["pid"]), event["args"]
        if not 0 <= rank < _MOST_RANKS:
            raise ValueError(f"there is no rank {rank}")
        url, nbytes = str(arguments["checkpoint"]), int(arguments.get("bytes", 0))
        number = count.setdefault((kind, url, rank), 0)
        if (source := _source(event)) is not None:
            if (kind, url, number) in found:  # it follows the step that it is part of
                found[kind, url, number].sources.setdefault(source, Counter())[rank] += nbytes
            continue
        step = event["name"][len(kind) + 1 :]
        while (rank, step) in found.setdefault((kind, url, number), _Traced()).steps:
            number = count[kind, url, rank] = number + 1
        found[kind, url, number].steps[rank, step] = float(event["ts"]), float(event["dur"]), nbytes


def _source(event: Mapping[str, Any]) -> str | None:
    return _SOURCES.get(event["name"]) if event["cat"] == "load" else None


def _operation(kind: str, url: str, number: int, traced: _Traced, hosts: Mapping[int, str]) -> TimedOperation:
    steps = traced.steps
    ranks, first = 1 + max(rank for rank, _ in steps), min(steps.values())[0]
    named = SAVE_STEPS if kind == "save" else LOAD_STEPS if kind == "load" else ()
    present = dict.fromkeys(step for _, step in sorted(steps, key=lambda key: steps[key][0]))
    order = [*(step for step in named if step in present), *(step for step in present if step not in named)]
    columns: list[dict[str, Column]] = [{step: np.full(ranks, np.nan) for step in order} for _ in range(3)]
    for (rank, step), (begin, duration, nbytes) in steps.items():
        for column, value in zip(columns, ((begin - first) / 1e6, duration / 1e6, nbytes), strict=True):
            column[step][rank] = value
    name = url.rstrip("/").rpartition("/")[2] + (f" ({number + 1})" if number else "")
    sources = {
        source: np.array([nbytes[rank] for rank in range(ranks)], np.float64)
        for source, nbytes in sorted(traced.sources.items())
    }
    return TimedOperation(kind, name, ranks, columns[1], columns[2], columns[0], hosts, sources)
