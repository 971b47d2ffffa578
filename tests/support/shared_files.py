"""A model of a root with incremental checkpoints, which are saved, overwritten, removed and retained in any order.

A crash is an exception at any storage operation, after which the dead process can neither write nor clean up. A removal
also runs in the middle of a save, and a save in the middle of a removal, between any two of their storage operations.
In the end, a new job removes everything that no committed checkpoint refers to.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sorted_arguments import save_in_job

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import attempts, lease, sweep
from bytecheckpoint.checkpoint.lease import LEASE_KEY, hold_root
from bytecheckpoint.checkpoint.lineage import ROLLBACK_KEY
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.engine.objects import OBJECTS, files_of
from bytecheckpoint.engine.writing import FileWriter
from bytecheckpoint.errors import CheckpointNotFoundError, KeyNotFoundError, NotACheckpointError
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, decode
from bytecheckpoint.manager.housekeeping import Committed, expendable
from bytecheckpoint.runtime.threads import Threads
from bytecheckpoint.saving.commit import SaveCommit
from bytecheckpoint.saving.engine import SharedSaves
from bytecheckpoint.storage_backends import registry
from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import FaultRule, FaultyBackend
from bytecheckpoint.transfer import transfer

__all__ = ["CHANGES", "CHUNK", "GRACE_S", "OPERATIONS", "STEPS", "Crash", "Saved", "SharedFiles", "check", "number_at"]

GRACE_S = 24 * 3600.0  # after which the attempts of others count as left behind
STEPS = st.integers(1, 4)
NAMES = ("frozen", "slow", "fast")
CHANGES = st.sets(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=4)  # a tensor, and one of its chunks
OPERATIONS = st.integers(1, 40)  # of a save or a removal; the last ones of most of them do not exist
CHUNK = 256

_log = logging.getLogger("bytecheckpoint")


class Crash(BaseException):
    """Not an ``Exception``, so that no handler treats it as an ordinary failure."""


class Fuse:
    """Acts before the storage operation number ``left``: runs ``action``, or without one, crashes from then on.

    With an ``error``, that is raised from then on; ``is_once`` limits it to one operation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # transfers have several threads
        self.left: int | None = None
        self.action: Callable[[], None] | None = None
        self.error: BaseException = Crash()
        self.is_once = False

    def count(self, call: object) -> None:
        with self._lock:
            if self.left is None:
                return
            self.left -= 1
            if self.left > 0:
                return
            action = self.action
            if action is not None or self.is_once:
                self.left = self.action = None
        if action is None:
            raise self.error
        action()

    @contextmanager
    def lit(
        self,
        at: int,
        action: Callable[[], None] | None = None,
        *,
        error: BaseException | None = None,
        is_once: bool = False,
    ) -> Iterator[None]:
        self.error, self.is_once = error or Crash(), is_once
        self.left, self.action = at, action
        try:
            yield
        finally:
            self.left = self.action = None


class Saved(NamedTuple):
    """What a load must return, and the number and the step of the save."""

    number: int
    tensors: dict[str, torch.Tensor]
    step: int


class SharedFiles(RuleBasedStateMachine):
    """``seen`` maps names below the root to what is committed there.

    ``abandoned`` are names and numbers of saves after which a job has gone back. ``passed_s`` is how far the clock of
    attempts is ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = f"incremental-{uuid.uuid4().hex}"
        self.root = f"memory://{self.store}/root"
        self.raw = MemoryBackend(self.store, "root")
        self.seen: dict[str, Saved] = {}
        self.abandoned: set[tuple[str, int]] = set()
        self.passed_s = 0.0
        self.tensors = {name: torch.arange(4.0 * CHUNK / 4) for name in NAMES}
        self.number = 0
        self.fuse = Fuse()
        real = registry._open
        rule = FaultRule(times=None, hook=self.fuse.count)

        def wrapped(text: str, options: dict[str, Any]) -> StorageBackend:
            backend = real(text, options)
            return FaultyBackend(backend, [rule]) if text.startswith("memory:") else backend

        clock = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + self.passed_s})
        with ExitStack() as patches:  # none of them stays if one fails: Hypothesis tears down only what exists
            patches.enter_context(mock.patch.object(attempts, "time", clock))
            # All of it is in one thread: no other one releases a lease in the meantime.
            patches.enter_context(
                mock.patch.object(sweep, "hold_root", lambda root, **_: hold_root(root, patience_s=0))
            )
            patches.enter_context(mock.patch.object(lease, "_SHORT_INTERVAL_S", 1.0))  # that of a dead job must expire
            patches.enter_context(mock.patch.object(registry, "_open", wrapped))
            # Hypothesis repeats steps, so the same operation of a transfer must fail again.
            patches.enter_context(mock.patch.object(transfer, "Threads", lambda count, **names: Threads(1, **names)))
            patches.callback(_log.setLevel, _log.level)
            _log.setLevel(logging.CRITICAL)  # many saves fail on purpose
            self._begin_process()
            self.patches = patches.pop_all()

    def teardown(self) -> None:
        try:
            self._collect()
        finally:
            self.patches.close()
            MemoryBackend.delete_store(self.store)

    def _begin_process(self) -> None:
        """Forget what a process has in memory, and release what it held."""
        session_of().engine.shared = SharedSaves()
        self.raw.delete([LEASE_KEY])

    def _change(self, changes: set[tuple[str, int]]) -> None:
        self.number += 1
        for name, chunk in changes:
            self.tensors[name] = self.tensors[name].clone()
            self.tensors[name][chunk * CHUNK // 4] = -self.number

    def _save(self, step: int, base: str | None, use_async: bool = False) -> None:
        save_in_job(
            f"{self.root}/step-{step}",
            {"tree": dict(self.tensors)},
            use_async=use_async,
            step=step,
            metadata={"metrics": {"n": self.number}},
            base=base,
            chunk_size=CHUNK,
            deadline_s=20,
        ).result()

    def _committed(self, name: str) -> None:
        self.seen[name] = self._saved(int(name[5:]))

    def _saved(self, step: int) -> Saved:
        return Saved(self.number, dict(self.tensors), step)

    def _gone(self, name: str) -> None:
        self.abandoned.discard((name, self.seen.pop(name).number))

    def _went_back(self, step: int) -> None:
        """A job with a manager has saved ``step``."""
        self.abandoned |= {(name, saved.number) for name, saved in self.seen.items() if saved.step > step}

    def _in_order(self) -> list[str]:
        """Return what is committed, from the oldest to the newest."""
        return sorted(self.seen, key=lambda name: (not self._is_abandoned(name), self.seen[name].step))

    def _is_abandoned(self, name: str) -> bool:
        return (name, self.seen[name].number) in self.abandoned

    def _number_of(self, name: str) -> int | None:
        """Return the number of the save that is committed there."""
        return number_at(self.raw, name)

    @rule(step=STEPS, changes=CHANGES, base=st.sampled_from(["auto", "auto", None]), use_async=st.booleans())
    def save(self, step: int, changes: set[tuple[str, int]], base: str | None, use_async: bool) -> None:
        self._change(changes)
        self._save(step, base, use_async)
        self._committed(f"step-{step}")

    @rule(step=STEPS, changes=CHANGES, at=OPERATIONS)
    def save_and_crash(self, step: int, changes: set[tuple[str, int]], at: int) -> None:
        self._change(changes)
        name = f"step-{step}"
        # A killed process does not clean up.
        with (
            suppress(Crash),
            self.fuse.lit(at),
            mock.patch.object(SaveCommit, "remove_files"),
            mock.patch.object(FileWriter, "abandon"),
        ):
            self._save(step, "auto")
        if self._number_of(name) == self.number:
            self._committed(name)
        self._begin_process()

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        remove(f"{self.root}/{name}")
        self._gone(name)
        with pytest.raises((CheckpointNotFoundError, NotACheckpointError)):  # the latter if a copy there has failed
            bcp.open(f"{self.root}/{name}")

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), at=OPERATIONS)
    def remove_and_crash(self, data: st.DataObject, at: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        with suppress(Crash), self.fuse.lit(at):
            remove(f"{self.root}/{name}")
        if self._number_of(name) is None:
            self._gone(name)
        self._begin_process()

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), step=STEPS, changes=CHANGES, at=OPERATIONS)
    def remove_during_a_save(self, data: st.DataObject, step: int, changes: set[tuple[str, int]], at: int) -> None:
        self._change(changes)
        name = data.draw(st.sampled_from(sorted(self.seen)))
        ran = []

        def act() -> None:
            if self._number_of(name) is not None:
                ran.append(self._number_of(name))
                remove(f"{self.root}/{name}")

        with self.fuse.lit(at, act):
            self._save(step, "auto")
        if ran and ran != [self.number]:
            self._gone(name)
        if ran != [self.number]:
            self._committed(f"step-{step}")
        else:
            self._gone(name)  # it was removed after its commit, while the save cleaned up

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), step=STEPS, changes=CHANGES, at=OPERATIONS)
    def save_during_a_removal(self, data: st.DataObject, step: int, changes: set[tuple[str, int]], at: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.seen)))
        if name == f"step-{step}":
            return  # whether the old or the new one is removed depends on the operation
        ran = []

        def act() -> None:
            self._change(changes)
            self._save(step, "auto")
            ran.append(step)

        with self.fuse.lit(at, act):
            remove(f"{self.root}/{name}")
        self._gone(name)
        if ran:
            self._committed(f"step-{step}")

    @rule(steps=st.lists(STEPS, min_size=1, max_size=3), changes=CHANGES, last=st.none() | st.integers(1, 3))
    def manage(self, steps: list[int], changes: set[tuple[str, int]], last: int | None) -> None:
        """Run a job with a manager, which saves, and removes the checkpoints that no rule keeps."""
        keep = bcp.Retention(last=last)
        with bcp.CheckpointManager(self.root, keep=keep, preemption=None, save=bcp.SaveOptions(base="auto")) as manager:
            for step in steps:
                self._change(changes)
                state = {"tree": dict(self.tensors)}
                if manager.save(step, state, force=True, metrics={"n": self.number}) is None:
                    continue  # this step was saved last
                manager.wait()
                self._went_back(step)
                self._committed(f"step-{step}")
                for gone in expendable(keep, [Committed(one, int(one[5:])) for one in self._in_order()]):
                    self._gone(gone.name)

    @rule()
    def restart(self) -> None:
        self._begin_process()

    @invariant()
    def every_checkpoint_loads(self) -> None:
        for name, saved in self.seen.items():
            check(f"{self.root}/{name}", saved.tensors)

    @invariant()
    def discovery_sees_the_committed_ones_only(self) -> None:
        newest = bcp.latest(self.root, allow_fresh=True)
        found = [name for name in self._in_order() if not self._is_abandoned(name)]
        assert (newest is None) == (not found)
        if newest is not None:
            assert newest.url.rpartition("/")[2] == found[-1]

    def _collect(self) -> None:
        """Let the housekeeper of a new job run, and check that it has left nothing that no checkpoint needs."""
        self._begin_process()
        self.passed_s += GRACE_S + 1
        self.number += 1
        with bcp.CheckpointManager(self.root, preemption=None, save=bcp.SaveOptions(base="auto")) as manager:
            manager.save(9, {"tree": dict(self.tensors)}, force=True, metrics={"n": self.number})
        self._committed("step-9")
        self.every_checkpoint_loads()
        needed = set()
        keys = {stat.key for stat in self.raw.list()}
        for key in keys:
            name, _, rest = key.partition("/")
            if rest != "manifest.msgpack":
                continue
            assert name in self.seen
            manifest = decode(self.raw.get(key))
            folder = OBJECTS if manifest.is_shared else name
            needed |= {key, *(f"{folder}/{file}" for file in files_of(manifest))}
        assert keys - {ROLLBACK_KEY} == needed


def number_at(backend: StorageBackend, name: str = "") -> int | None:
    """Return the number of the save that is committed at the root of ``backend``, or in a folder below it."""
    try:
        data = backend.get(f"{name}/{MANIFEST_KEY}" if name else MANIFEST_KEY)
    except KeyNotFoundError:
        return None
    return int(decode(data).metadata["metrics"]["n"])


def check(url: str, tensors: dict[str, torch.Tensor]) -> None:
    loaded = {one: torch.zeros_like(tensor) for one, tensor in tensors.items()}
    bcp.load(url, {"tree": loaded})
    assert all(torch.equal(loaded[one], tensors[one]) for one in tensors), url
