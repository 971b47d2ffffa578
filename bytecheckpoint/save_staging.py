"""How one save copies the state: all of it before the call returns, behind a gate, as fast as it is written where
memory is short, or just before it is written where the caller waits for that anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from .engine.files import FileImage
from .engine.merging.fragments import Fragments, LiveFragments, StagedFragments, fragment_image
from .engine.resources import Engine
from .engine.staging.staging import Staging
from .errors import DeadlineError, StateError
from .gating import SaveGate
from .shards import Shard
from .trace import Timings

__all__ = ["StateCopy"]

_TURN_IN_CALLBACK_S = 10.0  # for a save in a done callback, which may be what the save that is being staged waits for
_BLOCKS_AHEAD = 2  # of a synchronous save, beside one for each thread that writes


class StateCopy:
    """The copy of the state of one save. Made and begun by the caller; ``wait_copied`` is for who writes.

    ``staging`` holds the files' images, and ``fragments`` are the shards that become parts of whole tensors: staged
    too, or still the caller's.
    """

    def __init__(
        self,
        engine: Engine,
        images: Sequence[FileImage],
        fragments: Mapping[int, Shard],
        timings: Timings,
        deadline_s: float,
        *,
        waits: bool,
    ) -> None:
        """``waits``: the caller does, for the end of the save. Otherwise no other save fills memory until ``begin`` is
        over (or, behind a gate, the copy)."""
        self._engine, self._timings, self._deadline_s, self._waits = engine, timings, deadline_s, waits
        self._filled: Future[None] | None = None
        self._turn = ExitStack()
        self.fragments: Fragments
        self._fits = True
        if waits:
            self.fragments = LiveFragments(fragments)
            ring = engine.io_threads + _BLOCKS_AHEAD
            self.staging = Staging(engine.arena, images, timings, deadline_s=deadline_s, on_demand=ring)
            return
        staged = fragment_image(list(fragments.values()))
        self.staging = Staging(engine.arena, [staged, *images], timings, deadline_s=deadline_s)
        self._fits = self.staging.fits
        if self._fits:
            self.fragments = StagedFragments(self.staging, staged, list(fragments))
        else:
            # They are not needed in the order in which they would be staged, so they stay where they are.
            self.fragments = LiveFragments(fragments)
            self.staging = Staging(engine.arena, images, timings, deadline_s=deadline_s)

    def begin(self, gated: Mapping[str, Any] | None, write: Callable[[], Future[None]]) -> None:
        """Return when the caller may change the state, or, where it waits, at once.

        ``gated`` is the state where a gate is wanted. ``write`` makes writing begin, where staging waits for that; it
        returns what is done when the caller's fragments are not needed any more.
        """
        if self._waits:
            return
        with self._turn:
            self._turn.enter_context(self._own_turn())
            self._check_callback()
            if not self._fits:
                # Writing gives back the memory that staging waits for.
                self._timings.pipelined = True
                write().result()
                self.staging.fill()
            elif gated is None:
                self.staging.fill(self._engine.io, self._engine.copy_helpers)
            else:
                self._fill_behind_gate(gated, self._turn.pop_all())
                return
            self.staging.hold_caller()
        self._timings.count("stage", sum(image.size for image in self.staging.images))

    def wait_copied(self) -> None:
        """Behind a gate, wait until everything is copied, and was not changed. Raises what the copy met."""
        if self._filled is not None:
            self._filled.result()
            self.staging.wait_settled()
            self._timings.count("stage", sum(image.size for image in self.staging.images))

    def fail(self, error: BaseException) -> None:
        """Read no more of the caller's tensors, unless all are copied: then this changes nothing."""
        self.staging.fail(error)
        self.fragments.fail(error)

    def _fill_behind_gate(self, state: Mapping[str, Any], turn: ExitStack) -> None:
        """Copy what may change at any time; the rest is copied in the background, until when ``turn`` is held."""

        def fill() -> None:
            with turn:
                self.staging.fill()

        try:
            gate = SaveGate(state, self.staging.images)
            gate.shut(self.staging, self._deadline_s)
            self._engine.add_gate(gate)
            if self.staging.is_on_device:
                self.staging.fill()  # the device is told in a moment, and copies by itself
            self._filled = self._engine.copier.submit(fill)
        except BaseException:
            turn.close()
            raise

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Be the only save that fills staging memory: two that each had half of it would wait for ever."""
        turn, deadline_s = self._engine.arena.turn, self._deadline_s
        if self._engine.is_background_thread:
            deadline_s = min(deadline_s, _TURN_IN_CALLBACK_S)
        if not turn.acquire(timeout=deadline_s):
            raise DeadlineError(f"another save of this process has been copying its state for {deadline_s} s")
        try:
            yield
        finally:
            turn.release()

    def _check_callback(self) -> None:
        """Inside a done callback this is the very thread that gives memory back."""
        waits = not self._fits or self._engine.arena.would_wait(self.staging.blocks)
        if waits and self._engine.is_background_thread:
            raise StateError(
                "a save inside the done callback of another would have to wait for staging memory, and for the very "
                "thread that runs the callback; raise the memory budget, or save from another thread"
            )
