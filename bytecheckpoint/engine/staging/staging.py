"""The bytes of one save on their way through the arena: cut into pieces, filled in order, given back one by one.

See ``pieces`` for how the images of a save's files lie in the arena's blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress

import torch

from ...errors import DeadlineError
from ...trace import Timings
from ..files import FileImage
from .arena import Arena, Block
from .device_copy_out import DeviceCopyOut, cuda_devices
from .piece_copy import copy_piece, parts
from .pieces import Piece, cut

__all__ = ["Staging"]

_CRUMB = 128 << 10  # bytes of a tensor below which copying it is mostly finding it


class Staging:
    """What one save has staged and what it has given back. Thread-safe.

    ``fill`` copies everything before anything is written, as an asynchronous save does. With ``on_demand`` nothing is
    copied ahead: ``content`` copies a piece when it is asked for it, in the order of the tape, so that a few blocks go
    round.

    Behind a gate, ``fill_early`` copies what may change at any time, and ``fill`` the rest, which nobody is to change
    before ``seal``: that looks once whether somebody did, before the copies count.
    """

    def __init__(
        self,
        arena: Arena,
        images: Sequence[FileImage],
        timings: Timings,
        *,
        deadline_s: float | None = None,
        on_demand: int | None = None,
    ) -> None:
        """``on_demand`` is the number of blocks that may go round; None to fill first."""
        self.images = list(images)
        self.pieces = cut(images, arena.block_size)
        self.on_demand = on_demand is not None
        self._arena, self._timings, self._deadline_s = arena, timings, deadline_s
        self.blocks = needed = self.pieces[-1].block + 1 if self.pieces else 0
        self._ring = needed if on_demand is None else on_demand
        self.fits = arena.make_room(min(needed, self._ring))
        """Whether all pieces can lie in memory at once, as far as this save alone goes."""
        self._users = [0] * needed  # pieces of each block that were not given back
        self._used = [0] * needed  # bytes
        for piece in self.pieces:
            self._users[piece.block] += 1
            self._used[piece.block] = piece.place + piece.nbytes
        self._blocks: dict[int, Block] = {}
        self._claiming = threading.Lock()  # taken before _changed
        self._changed = threading.Condition()
        self._claimed = 0
        self._copied = [False] * len(self.pieces)
        self._to_copy = len(self.pieces)
        self._copying = 0
        self._failure: BaseException | None = None
        self._given_up: BaseException | None = None
        devices = cuda_devices(images)
        self._device = DeviceCopyOut(devices) if devices else None
        self._events: dict[int, list[torch.cuda.Event]] = {}
        self._is_late: Callable[[torch.Tensor], bool] | None = None
        self._sealing = threading.Lock()
        self._unchanged: Callable[[], None] | None = None

    # -- filling -------------------------------------------------------------------------------------------------

    def fill(self, executor: Executor | None = None, helpers: int = 0) -> None:
        """Copy all pieces that nobody has begun to copy, with ``helpers`` threads of ``executor`` where it has them to
        spare; returns when every piece is copied, or ``give_up`` was called. Raises what any of them met.

        Copies from CUDA devices are under way then (``is_settled`` tells), and the caller's streams wait for them.
        """
        tasks = []
        if executor is not None and self._device is None and not self._is_of_crumbs():
            tasks = [executor.submit(self._fill_some) for _ in range(min(helpers, len(self.pieces) - 1))]
        try:
            try:
                self._fill_some()
            finally:
                begun = [task for task in tasks if not task.cancel()]
                wait(begun)
            for task in begun:
                task.result()
            with self._changed:
                self._changed.wait_for(lambda: self._failure or not self._to_copy)
                self._raise_failure()
        except BaseException as error:
            if error is not self._given_up:
                raise

    def fill_early(self, is_late: Callable[[torch.Tensor], bool], unchanged: Callable[[], None]) -> None:
        """Copy all tensors but the late ones. Everything has to fit into memory. ``unchanged`` raises if one of the
        late ones was changed since then."""
        self._is_late, self._unchanged = is_late, unchanged
        try:
            for image in self.images:
                if all(is_late(shard.tensor) for shard in image.shards):
                    continue
                for piece in self.of(image):
                    if not all(is_late(tensor) for tensor, *_ in parts(image, piece.start, piece.stop)):
                        with self._claiming:
                            self._provide(piece)
                        self._events[piece.index] = self._copy_into(piece, lambda tensor: not is_late(tensor))
        except BaseException as error:
            self.fail(error)
            raise

    @property
    def is_on_device(self) -> bool:
        """Whether copies run by themselves once they were begun."""
        return self._device is not None

    def hold_caller(self) -> None:
        """Make the calling thread's device streams wait for the copies that were begun."""
        if self._device is not None:
            self._device.hold_caller()

    def let_change(self, timeout_s: float | None) -> None:
        """Return when the calling thread may change the late tensors; helps to copy what is left. Raises nothing: where
        the save fails, they may be changed."""
        with suppress(Exception):
            self._fill_some()
        if self._device is not None:
            self.seal()
            self.hold_caller()
        elif not self.wait_settled(timeout_s):
            self.fail(DeadlineError(f"an optimizer's step has waited {timeout_s} s for the state to be copied"))

    def seal(self) -> None:
        """The late tensors may be changed from now on, as far as they are copied or the device's streams wait for that.
        Fails the save if one was changed before; looks only the first time."""
        with self._sealing:
            unchanged, self._unchanged = self._unchanged, None
            if unchanged is None:
                return
            try:
                unchanged()
            except Exception as error:  # noqa: BLE001 - it is the save that has failed, not the caller
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

    def _is_of_crumbs(self) -> bool:
        """Whether the work is more Python than copying, so that a second thread would only get in the way."""
        return sum(piece.nbytes for piece in self.pieces) < _CRUMB * sum(len(image.shards) for image in self.images)

    def is_settled(self) -> bool:
        """Whether no tensor is read any more: all are copied, those of devices too, or copying has failed."""
        with self._changed:
            settled = self._no_copies() and all(map(torch.cuda.Event.query, self._all_events()))
        if settled:
            self.seal()
        return settled

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Wait until ``is_settled``; False if that took longer."""
        with self._changed:
            if not self._changed.wait_for(self._no_copies, timeout_s):
                return False
            events = self._all_events()
        for event in events:
            event.synchronize()
        self.seal()
        return True

    def _no_copies(self) -> bool:
        return not self._copying and (not self._to_copy or self._failure is not None)

    def _all_events(self) -> list[torch.cuda.Event]:
        return [event for events in self._events.values() for event in events]

    def _fill_some(self) -> None:
        try:
            while (piece := self._claim()) is not None:
                self._copy(piece)
        except BaseException as error:
            self.fail(error)
            raise

    def _claim(self) -> Piece | None:
        """The next piece that nobody has begun to copy, with memory for it."""
        with self._claiming:
            if self._failure is not None or self._claimed == len(self.pieces):
                return None
            piece = self.pieces[self._claimed]
            self._provide(piece)
            self._claimed += 1
            return piece

    def _provide(self, piece: Piece) -> None:
        """Have the piece's block. Waits for memory."""
        if piece.block in self._blocks:
            return
        end = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._blocks) < self._ring, self._deadline_s)
            self._raise_failure()
            if len(self._blocks) >= self._ring:
                raise DeadlineError(f"no piece was written within {self._deadline_s} s; storage is too slow, or hangs")
        block = self._arena.acquire(None if end is None else max(0.0, end - time.monotonic()), last=self.on_demand)
        with self._changed:
            if self._failure is None:
                self._blocks[piece.block] = block
                return
        self._arena.give_back(block)
        self._raise_failure()

    def _copy(self, piece: Piece) -> None:
        events = self._copy_into(piece, self._is_late)
        with self._changed:
            self._events.setdefault(piece.index, []).extend(events)
            self._copied[piece.index] = True
            is_last = self._to_copy == 1
            if not is_last:
                self._to_copy -= 1
                self._changed.notify_all()
        if is_last:
            if self._device is None:
                self.seal()
            with self._changed:
                self._to_copy = 0
                self._changed.notify_all()
            for image in self.images:
                image.release_tensors()

    def _copy_into(self, piece: Piece, only: Callable[[torch.Tensor], bool] | None) -> list[torch.cuda.Event]:
        with self._changed:
            self._raise_failure()
            block = self._blocks[piece.block]
            self._copying += 1
        try:
            with self._timings.working("copy", piece.nbytes):
                block.fault_in(self._used[piece.block])
                if self._device is not None:
                    return self._device.copy_piece(piece.image, piece.start, piece.stop, block, piece.place, only)
                copy_piece(piece.image, piece.start, piece.stop, block, piece.place, only)
                return []
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    # -- writing -------------------------------------------------------------------------------------------------

    def content(self, piece: Piece) -> memoryview:
        """The piece's bytes, good until it is given back: waits until ``fill`` has copied it, or copies it now. Raises
        what filling met."""
        if self.on_demand:
            self._provide(piece)
            self._copy(piece)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._copied[piece.index])
            self._raise_failure()
        for event in self._events.get(piece.index, ()):
            event.synchronize()
        return self._blocks[piece.block].view[piece.place : piece.place + piece.nbytes]

    def give_back(self, piece: Piece) -> None:
        """The piece was written, or never will be: its memory may be used again."""
        with self._changed:
            self._users[piece.block] -= 1
            if self._users[piece.block]:
                return
            block = self._blocks.pop(piece.block, None)
            self._changed.notify_all()
        if block is not None:
            self._arena.give_back(block)

    # -- the end -------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Nothing more is copied, and who waits raises ``error``; the first one counts. Too late when all is copied."""
        with self._changed:
            if self._to_copy and self._failure is None:
                self._failure = error
                self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """``fail``, but it is not for who fills to raise that: writing has failed, and nobody needs the rest."""
        with self._changed:
            if self._to_copy and self._failure is None:
                self._given_up = error
        self.fail(error)

    def release(self, error: BaseException) -> None:
        """``fail``, and give all memory back when no thread copies any more. No piece may be under way to storage."""
        self.fail(error)
        self.wait_settled()
        with self._changed:
            blocks = list(self._blocks.values())
            self._blocks.clear()
            self._changed.notify_all()
        for block in blocks:
            self._arena.give_back(block)
        for image in self.images:
            image.release_tensors()

    def of(self, image: FileImage) -> Iterator[Piece]:
        """The pieces of one image, in order."""
        return (piece for piece in self.pieces if piece.image is image)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
