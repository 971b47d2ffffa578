"""Whatever is saved, overwritten, broken off, removed and copied, in any order: what can be seen below a root is what a
plain dictionary says.

One process, hundreds of runs of up to fifty steps; crashes are exceptions that end a save at a named step with all of
its cleaning up prevented, which is what a SIGKILL leaves (``test_failure_matrix`` has the real ones).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import bytecheckpoint as bcp
from bytecheckpoint import trace
from bytecheckpoint.copying import copy
from bytecheckpoint.errors import CheckpointError, CorruptionError, NoValidCheckpointError
from bytecheckpoint.manager.retention import Kept, Retention

STEPS = st.integers(1, 6)
POINTS = [
    *(f"save.{step}" for step in trace.SAVE_STEPS if step != "merge"),
    "save.write.file",
    "save.write.complete",
    "save.commit.before",
    "save.commit.after",
]
COMMITTED = {"save.commit.after", "save.clean"}


_log = logging.getLogger("bytecheckpoint")


class _Crash(BaseException):
    """Not an ``Exception``: nothing may take it for a failure that can be handled."""


@contextmanager
def _crash_at(point: str) -> Iterator[None]:
    def die(name: str, event: str) -> None:
        if name == point and event in ("enter", "point"):
            raise _Crash

    # A process that is killed cleans nothing up.
    cleaning = ("saving.remove_attempt", "saving.remove_files", "engine.writing.image_write.ImageWrite.abandon")
    with ExitStack() as stack:
        for name in cleaning:
            stack.enter_context(mock.patch(f"bytecheckpoint.{name}"))
        stack.callback(trace.observe(die))
        yield


def _state(value: float) -> dict[str, Any]:
    return {
        "tree": {"tensor": torch.full((5,), value), "value": value, "list": [value, {"deep": torch.ones(3) * value}]}
    }


def _value(url: Path | str) -> float:
    """The one value that everything in a checkpoint has."""
    state: dict[str, Any] = {"tree": {}}
    bcp.load(url, state)
    tree = state["tree"]
    found = {*tree["tensor"].tolist(), tree["value"], tree["list"][0], *tree["list"][1]["deep"].tolist()}
    assert len(found) == 1, f"a mixture of {found}"
    return float(found.pop())


class VisibleState(RuleBasedStateMachine):
    """``seen`` maps names below the root to what a load must give; ``traces`` are names where something was left."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bytecheckpoint-model-"))
        self.seen: dict[str, float] = {}
        self.created: dict[str, float] = {}
        self.broken: set[str] = set()
        self.traces: set[str] = set()
        self.number = 0.0
        _log.setLevel(logging.CRITICAL)  # thousands of failed saves are part of it

    def teardown(self) -> None:
        _log.setLevel(logging.NOTSET)
        shutil.rmtree(self.root)

    def _next(self) -> float:
        self.number += 1
        return self.number

    def _committed(self, name: str, value: float) -> None:
        self.seen[name] = value
        self.created[name] = value  # which counts up
        self.broken.discard(name)

    def _order(self) -> list[str]:
        """Checkpoints in the order of their commits, as their manifests tell; a copy is as old as what was copied."""
        return sorted(self.seen, key=lambda name: (self.created[name], int(name[5:])))

    @rule(step=STEPS, asynchronous=st.booleans())
    def save(self, step: int, asynchronous: bool) -> None:
        name, value = f"step-{step}", self._next()
        bcp.save(self.root / name, _state(value), step=step, async_save=asynchronous).result()
        self._committed(name, value)

    @rule(step=STEPS, point=st.sampled_from(POINTS), asynchronous=st.booleans())
    def save_and_crash(self, step: int, point: str, asynchronous: bool) -> None:
        name, value = f"step-{step}", self._next()
        with _crash_at(point), suppress(_Crash):
            bcp.save(self.root / name, _state(value), step=step, async_save=asynchronous).result()
            assert point in COMMITTED  # a save that was put is one, whatever came after
        if point in COMMITTED:
            self._committed(name, value)
        elif (self.root / name).exists():
            self.traces.add(name)

    @rule(
        steps=st.lists(STEPS, min_size=1, max_size=4),
        last=st.none() | st.integers(1, 3),
        every=st.none() | st.integers(2, 3),
    )
    def manage(self, steps: list[int], last: int | None, every: int | None) -> None:
        """A job with a manager: saves, and forgets what no rule keeps."""
        with bcp.CheckpointManager(self.root, keep_last=last, keep_every=every) as manager:
            for step in steps:
                name, value = f"step-{step}", self._next()
                if manager.save(step, _state(value), force=True) is None:
                    continue  # the step that was saved last
                manager.wait()
                self._committed(name, value)
                for gone in Retention(last, every).expendable([Kept(one, int(one[5:])) for one in self._order()]):
                    del self.seen[gone.name]
                    self.broken.discard(gone.name)

    @rule(step=STEPS)
    def remove(self, step: int) -> None:
        name = f"step-{step}"
        if name in self.seen:
            shutil.rmtree(self.root / name)
            del self.seen[name]
            self.broken.discard(name)
            self.traces.discard(name)

    @rule(source=STEPS, into=STEPS)
    def copy(self, source: int, into: int) -> None:
        one, other = f"step-{source}", f"step-{into}"
        if one in self.seen and one not in self.broken and other not in self.seen:
            copy(bcp.open(self.root / one), str(self.root / other))
            self._committed(other, self.seen[one])

    @rule(step=STEPS)
    def lose_a_byte(self, step: int) -> None:
        name = f"step-{step}"
        if name in self.seen and name not in self.broken:
            checkpoint = bcp.open(self.root / name)
            file = self.root / name / checkpoint.manifest.files.name[0]
            file.write_bytes(file.read_bytes()[:-1])
            self.broken.add(name)

    @initialize()
    def nothing_is_there(self) -> None:
        assert bcp.latest(self.root) is None

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        for step in range(1, 7):
            name = f"step-{step}"
            if name in self.broken:
                with pytest.raises(CorruptionError):
                    _value(self.root / name)
            elif name in self.seen:
                assert _value(self.root / name) == self.seen[name]
            else:
                with pytest.raises(CheckpointError):
                    bcp.open(self.root / name)

    @invariant()
    def latest_is_the_highest_that_holds(self) -> None:
        holding = [int(name[5:]) for name in self.seen if name not in self.broken]
        if holding:
            found = bcp.latest(self.root)
            assert found is not None
            name = Path(found.url).name
            assert _value(found.url) == self.seen[name]
        elif self.broken or any((self.root / name).exists() for name in self.traces):
            with pytest.raises(NoValidCheckpointError):
                bcp.latest(self.root)
        else:
            assert bcp.latest(self.root) is None


TestVisibleState = VisibleState.TestCase
TestVisibleState.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
