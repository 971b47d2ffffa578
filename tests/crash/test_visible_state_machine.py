"""Save, overwrite, crash, remove and copy checkpoints in any order, and compare the root with a plain dictionary.

One process makes hundreds of runs of up to fifty steps. A crash is an exception that ends a save at a named step
without any cleanup, which leaves the same files as SIGKILL (``test_failure_matrix`` kills real processes).
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sampling
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.engine.writing import FileWriter
from bytecheckpoint.errors import CheckpointError, CorruptionError, NoValidCheckpointError
from bytecheckpoint.manager.housekeeping import Committed, expendable
from bytecheckpoint.saving.commit import SaveCommit

pytestmark = pytest.mark.sampled(2, of="long searches")

STEPS = st.integers(1, 6)
AGES = st.sampled_from((0, 0, 1, 2))  # days since a save, for its manifest
POINTS = [
    *(f"save.{step}" for step in telemetry.SAVE_STEPS if step != "merge"),
    "save.write.file",
    "save.write.complete",
    "save.commit.before",
    "save.commit.after",
]
COMMITTED = {"save.commit.after", "save.clean"}


_log = logging.getLogger("bytecheckpoint")


class _Crash(BaseException):
    """Not an ``Exception``, so that no handler treats it as an ordinary failure."""


@contextmanager
def _crash_at(point: str) -> Iterator[None]:
    def die(name: str, event: str) -> None:
        if name == point and event in ("enter", "point"):
            raise _Crash

    # A killed process does not clean up.
    cleanups = [(SaveCommit, "remove_files"), (FileWriter, "abandon")]
    with ExitStack() as stack:
        for owner, name in cleanups:
            stack.enter_context(mock.patch.object(owner, name))
        stack.callback(telemetry.observe(die))
        yield


@contextmanager
def _days_ago(age: int) -> Iterator[None]:
    def then() -> str:
        return (datetime.now(UTC) - timedelta(days=age)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    with mock.patch("bytecheckpoint.saving.record.timestamp", then):
        yield


def _state(value: float) -> dict[str, Any]:
    return {
        "tree": {"tensor": torch.full((5,), value), "value": value, "list": [value, {"deep": torch.ones(3) * value}]}
    }


def _value(url: Path | str) -> float:
    """Load a checkpoint, and return the one value that all of it must contain."""
    state: dict[str, Any] = {"tree": {}}
    bcp.load(url, state)
    tree = state["tree"]
    found = {*tree["tensor"].tolist(), tree["value"], tree["list"][0], *tree["list"][1]["deep"].tolist()}
    assert len(found) == 1, f"a mixture of {found}"
    return float(found.pop())


class VisibleState(RuleBasedStateMachine):
    """``seen`` maps names below the root to the value that a load must return.

    ``steps`` maps them to the stored step, and ``ages`` to the days since the save that the manifest states.
    ``traces`` are names with leftovers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="bytecheckpoint-model-"))
        self.seen: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self.ages: dict[str, int] = {}
        self.broken: set[str] = set()
        self.traces: set[str] = set()
        self.abandoned: set[str] = set()
        self.number = 0.0
        _log.setLevel(logging.CRITICAL)  # thousands of saves fail on purpose

    def teardown(self) -> None:
        _log.setLevel(logging.NOTSET)
        shutil.rmtree(self.root)

    def _next(self) -> float:
        self.number += 1
        return self.number

    def _committed(self, name: str, value: float, step: int | None = None, age: int = 0) -> None:
        self.seen[name], self.steps[name] = value, int(name[5:]) if step is None else step
        self.ages[name] = age
        self.broken.discard(name)
        self.abandoned.discard(name)

    def _gone(self, name: str) -> None:
        del self.seen[name]
        self.broken.discard(name)
        self.abandoned.discard(name)

    def _order(self) -> list[str]:
        """Return the checkpoints from the oldest to the newest."""

        def key(name: str) -> tuple[object, ...]:
            # Values count saves, so they have the order of the times of one day. A copy keeps step and time.
            return name not in self.abandoned, self.steps[name], -self.ages[name], self.seen[name], name

        return sorted(self.seen, key=key)

    @rule(step=STEPS, asynchronous=st.booleans(), age=AGES)
    def save(self, step: int, asynchronous: bool, age: int) -> None:
        name, value = f"step-{step}", self._next()
        with _days_ago(age):
            bcp.save(self.root / name, _state(value), step=step, async_save=asynchronous).result()
        self._committed(name, value, age=age)

    @rule(step=STEPS, point=st.sampled_from(POINTS), asynchronous=st.booleans())
    def save_and_crash(self, step: int, point: str, asynchronous: bool) -> None:
        name, value = f"step-{step}", self._next()
        with _crash_at(point), suppress(_Crash):
            bcp.save(self.root / name, _state(value), step=step, async_save=asynchronous).result()
            assert point in COMMITTED  # once the manifest is written, the save must succeed
        if point in COMMITTED:
            self._committed(name, value)
        elif (self.root / name).exists():
            self.traces.add(name)

    @rule(
        steps=st.lists(STEPS, min_size=1, max_size=4),
        last=st.none() | st.integers(1, 3),
        hours=st.none() | st.sampled_from((12, 36)),
        every=st.none() | st.integers(2, 3),
    )
    def manage(self, steps: list[int], last: int | None, hours: float | None, every: int | None) -> None:
        """Run a job with a manager, which saves, and removes the checkpoints that no rule keeps."""
        keep = bcp.Retention(last=last, last_hours=hours, every_steps=every)
        with bcp.CheckpointManager(self.root, keep=keep) as manager:
            for step in steps:
                name, value = f"step-{step}", self._next()
                if manager.save(step, _state(value), force=True) is None:
                    continue  # this step was saved last
                manager.wait()
                self.abandoned |= {one for one in self.seen if self.steps[one] > step}  # the job has gone back
                self._committed(name, value)
                committed = [
                    Committed(one, int(one[5:]), is_abandoned=one in self.abandoned, created=-86_400.0 * self.ages[one])
                    for one in self._order()
                ]
                for gone in expendable(keep, committed):
                    self._gone(gone.name)

    @rule(step=STEPS)
    def remove(self, step: int) -> None:
        name = f"step-{step}"
        if name in self.seen:
            shutil.rmtree(self.root / name)
            self._gone(name)
            self.traces.discard(name)

    @rule(source=STEPS, into=STEPS)
    def copy(self, source: int, into: int) -> None:
        """A managed job takes a name for the step: a copy may have the name of a later one, which is looked into."""
        one, other = f"step-{source}", f"step-{into}"
        if one in self.seen and one not in self.broken and other not in self.seen and into > self.steps[one]:
            copy(bcp.open(self.root / one), str(self.root / other))
            self._committed(other, self.seen[one], self.steps[one], self.ages[one])

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
    def every_checkpoint_is_complete(self) -> None:
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
    def latest_is_the_highest_valid_step(self) -> None:
        valid = [name for name in self._order() if name not in self.broken | self.abandoned]
        if valid:
            found = bcp.latest(self.root)
            assert found is not None
            assert Path(found.url).name == valid[-1]
            assert _value(found.url) == self.seen[valid[-1]]
        elif self.broken or self.abandoned or any((self.root / name).exists() for name in self.traces):
            with pytest.raises(NoValidCheckpointError):
                bcp.latest(self.root)
        else:
            assert bcp.latest(self.root) is None


TestVisibleState = VisibleState.TestCase
TestVisibleState.settings = settings(
    max_examples=sampling.examples(100, 15),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
