"""The figures of a run of the failure matrix, from all processes that run a part of it."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_cells import Cell
from crash_state import WrongLoad


@dataclass
class CellFigures:
    """The figures of one cell.

    ``noticed_s`` is the time from the fault (or from the end of the killed process) to the last survivor's error, and
    ``ended_s`` the time from the fault to the end of the killed process. ``loads`` counts the checkpoints that were
    compared bit by bit after the fault.
    """

    cell: Cell
    loads: int = 0
    noticed_s: float = 0.0
    ended_s: float = 0.0


@dataclass
class Report:
    """Collects figures in memory, and adds them to ``file`` at the end. It replaces the file of another run."""

    file: str | None
    figures: list[CellFigures] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong_loads: int = 0

    @contextmanager
    def of(self, figures: CellFigures) -> Iterator[None]:
        self.figures.append(figures)
        try:
            yield
        except BaseException as error:
            self.failed.append(str(figures.cell))
            # A rank's error arrives as text.
            self.wrong_loads += WrongLoad.__name__ in f"{type(error).__name__} {error}"
            raise

    def write(self) -> None:
        if self.file is None:
            return
        path = Path(self.file)
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        with open(path.with_name(path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = json.loads(path.read_text()) if path.exists() else {}
            parts = known.get("parts", []) if known.get("run") == run else []
            parts.append(self._part())
            path.write_text(json.dumps({"run": run, **_sum(parts), "parts": parts}, indent=1) + "\n")

    def _part(self) -> dict[str, Any]:
        died = [one.noticed_s for one in self.figures if one.cell.kills]
        stopped = [one.noticed_s for one in self.figures if one.cell.fault == "stop"]
        return {
            "cells": len(self.figures),
            "failed": self.failed,
            "by_fault": dict(Counter(one.cell.fault for one in self.figures)),
            "kills": len(died),
            "stops": len(stopped),
            "torn_files": sum(one.cell.fault == "torn" for one in self.figures),
            "loads_compared": sum(one.loads for one in self.figures),
            "wrong_loads": self.wrong_loads,
            "slowest_end_of_a_killed_process_s": max((one.ended_s for one in self.figures), default=0.0),
            "slowest_notice_of_a_death_s": max(died, default=0.0),
            "slowest_notice_of_a_stop_s": max(stopped, default=0.0),
        }


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name.startswith("slowest"):
                total[name] = max(total.get(name, 0.0), value)
            elif isinstance(value, dict):
                total[name] = dict(Counter(total.get(name, {})) + Counter(value))
            else:
                total[name] = total.get(name, type(value)()) + value
    return total
