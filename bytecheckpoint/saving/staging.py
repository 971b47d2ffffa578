"""The ``stage`` step: how one save copies the state.

A synchronous save copies on demand, a few blocks at a time, just before each piece is written. An asynchronous save
copies everything before the call returns; if the state does not fit into the staging memory that is faulted in, it
copies as fast as writing releases memory. Behind a gate, most of it is copied after the call has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import Any

from ..engine.files import FileImage
from ..engine.merging.fragments import Fragments, LiveFragments, StagedFragments, fragment_image
from ..engine.staging.device_copy_out import block_preparation
from ..engine.staging.staging import Staging
from ..errors import DeadlineError, UsageError
from ..runtime.gc_pause import paused
from ..telemetry.trace import Timings
from ..tensors.shards import Shard
from .engine import SaveEngine
from .gating import SaveGate

_TURN_IN_CALLBACK_S = 10.0  # a save in a done callback may block the very save that it waits for
_BLOCKS_AHEAD = 2  # of a synchronous save, in addition to one for each thread that writes


class CopyMode(Enum):
    """When the state of a save is copied."""

    ON_DEMAND = auto()  # while the caller waits for the end of the save
    AHEAD = auto()  # before the call returns
    GATED = auto()  # late tensors after the call has returned, the rest before
    PIPELINED = auto()  # before the call returns, as fast as writing releases memory or it is faulted in


class StateCopy:
    """The copy of the state of one save.

    ``staging`` holds the images of this rank's files. ``fragments`` are the shards that become parts of whole tensors:
    staged as well, or still in the caller's tensors. The caller's thread creates it, reserves memory and copies; the
    thread that writes calls ``wait_copied``.
    """

    def __init__(
        self,
        engine: SaveEngine,
        images: Sequence[FileImage],
        fragments: Mapping[int, Shard],
        timings: Timings,
        *,
        deadline_s: float,
        is_async: bool,
        gate: bool,
    ) -> None:
        """Choose the mode and make room in the arena. Copies nothing yet."""
        self._engine, self._timings, self._deadline_s = engine, timings, deadline_s
        self._late_copy: Future[None] | None = None
        self._reserved = ExitStack()
        self.waits_for_merge = False
        """Whether copying may only begin after the merge stage, which reads the tensors, and after earlier saves."""
        self.fragments: Fragments
        arena, few = engine.arena, engine.io_threads + _BLOCKS_AHEAD
        if not is_async:
            self.mode = CopyMode.ON_DEMAND
            self.fragments = LiveFragments(fragments)
            self.staging = Staging(arena, images, timings, deadline_s=deadline_s, on_demand=few)
            return
        staged = fragment_image(list(fragments.values()))
        self.staging = Staging(arena, [staged, *images], timings, deadline_s=deadline_s)
        goal = arena.goal(self.staging.blocks)
        # A save in a done callback must not wait for its own thread, and stalls no training.
        is_resident = goal - arena.blocks <= few or engine.is_background_thread
        if self.staging.fits and is_resident:
            self.mode = CopyMode.GATED if gate else CopyMode.AHEAD
            self.fragments = StagedFragments(self.staging, staged, list(fragments))
        else:
            self.mode = CopyMode.PIPELINED
            self.waits_for_merge = bool(fragments) or not self.staging.fits
            # The merge stage needs fragments in another order than staging would copy them, so they stay in place.
            self.fragments = LiveFragments(fragments)
            self.staging = Staging(arena, images, timings, deadline_s=deadline_s, fresh=few)
            timings.pipelined = True
            engine.grow_arena(goal, block_preparation(images))

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Make this the only save that fills staging memory, until its copy is complete.

        Two saves that held half of the memory each would deadlock. Behind a gate the reservation outlives the block.

        Raises:
            DeadlineError: Another save held the reservation for too long.
            UsageError: The caller is a done callback, and the save would have to wait for the callback's own thread.
        """
        with self._reserved:
            if self.mode is not CopyMode.ON_DEMAND:
                self._reserve()
            yield

    def copy(self, state: Mapping[str, Any]) -> None:
        """Copy what the mode copies before the call returns. Then the caller may change these tensors.

        ``state`` is what the caller saves; a gate watches its optimizers and modules.
        """
        if self.mode is CopyMode.ON_DEMAND:
            return
        if self.mode is CopyMode.GATED:
            self._copy_behind_gate(state)
            return
        if self.mode is CopyMode.AHEAD:
            self.staging.fill(self._engine.io, self._engine.copy_helpers)
        else:
            self.staging.fill()
        self.staging.make_caller_wait()
        self._count_staged()

    def wait_copied(self) -> None:
        """Behind a gate, wait until everything is copied. Raises what the copy failed with."""
        if self._late_copy is not None:
            self._late_copy.result()
            self.staging.wait_copied()
            self._count_staged()

    def fail(self, error: BaseException) -> None:
        """Stop reading the caller's tensors. Has no effect once everything is copied."""
        self.staging.fail(error)
        self.fragments.fail(error)

    def _copy_behind_gate(self, state: Mapping[str, Any]) -> None:
        """Copy what may change at any time. A helper thread copies the rest and ends the reservation."""
        with paused():
            gate = SaveGate(state, self.staging.images)
        gate.close(self._engine, self.staging, self._deadline_s)
        if self.staging.is_on_device:
            self.staging.fill()  # this only queues the copies on device streams
        reserved = self._reserved.pop_all()

        def copy_late() -> None:
            with reserved:
                self.staging.fill()

        try:
            self._late_copy = self._engine.helpers.submit(copy_late)
        except BaseException:
            reserved.close()
            raise

    def _reserve(self) -> None:
        turn, deadline_s = self._engine.arena.turn, self._deadline_s
        if self._engine.is_background_thread:
            deadline_s = min(deadline_s, _TURN_IN_CALLBACK_S)
        if not turn.acquire(timeout=deadline_s):
            raise DeadlineError(f"another save of this process has been copying its state for {deadline_s} s")
        self._reserved.callback(turn.release)
        waits = self.mode is CopyMode.PIPELINED or self._engine.arena.would_wait(self.staging.blocks)
        if waits and self._engine.is_background_thread:
            raise UsageError(
                "a save inside the done callback of another save would wait for staging memory that only the thread "
                "of the callback can release; raise the memory budget, or save from another thread"
            )

    def _count_staged(self) -> None:
        self._timings.count("stage", sum(piece.nbytes for piece in self.staging.pieces))
