"""The staged bytes of one save: copied piece by piece into arena blocks, released piece by piece once they are written.

See ``pieces`` for how the images of a save's files map to the arena's blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress

import torch

from ...errors import DeadlineError
from ...telemetry.trace import Timings
from ..blocks import Block
from ..files import FileImage
from .arena import Arena
from .device_copy_out import DeviceCopyOut, cuda_devices
from .pieces import Piece, copy_piece, parts, split_images

# Mean bytes per tensor below which copying is mostly Python work, so that more threads only compete for the GIL.
_SMALL_TENSOR_BYTES = 128 << 10


class Staging:
    """The staged bytes of one save. Thread-safe.

    An asynchronous save calls ``fill``, which copies everything before anything is written. With ``on_demand`` (a
    synchronous save) nothing is copied ahead: ``content`` copies a piece when the writer asks for it, in order, so that
    a few blocks suffice.

    Behind a gate, ``fill_early`` copies the tensors that may change at any time, and ``fill`` copies the late ones.
    ``verify_unchanged`` checks once, before the late copies count, that nothing changed them in between.
    """

    def __init__(
        self,
        arena: Arena,
        images: Sequence[FileImage],
        timings: Timings,
        *,
        deadline_s: float | None = None,
        on_demand: int | None = None,
        fresh: int | None = None,
    ) -> None:
        """Divide ``images`` into pieces. ``on_demand`` limits the number of blocks; None selects ``fill``.

        ``fresh`` limits the blocks that copying may allocate, see ``Arena.acquire``.
        """
        self.images = list(images)
        self.pieces = split_images(images, arena.block_size)
        self.on_demand = on_demand is not None
        self._arena, self._timings, self._deadline_s = arena, timings, deadline_s
        self.blocks = needed = self.pieces[-1].block + 1 if self.pieces else 0
        self._max_blocks = needed if on_demand is None else on_demand
        self._fresh = fresh
        self.fits = arena.make_room(min(needed, self._max_blocks))
        """Whether all pieces fit into memory at once when earlier saves have released theirs."""
        self._unreleased = [0] * needed  # pieces of each block that are not released
        self._used = [0] * needed  # bytes of each block
        for piece in self.pieces:
            self._unreleased[piece.block] += 1
            self._used[piece.block] = piece.offset + piece.nbytes
        self._blocks: dict[int, Block] = {}
        self._claiming = threading.Lock()  # acquired before _changed
        self._changed = threading.Condition()
        self._claimed = 0
        self._copied = [False] * len(self.pieces)
        self._uncopied = len(self.pieces)
        self._copying = 0  # threads
        self._failure: BaseException | None = None
        self._cancelled_by: BaseException | None = None
        devices = cuda_devices(images)
        self._device = DeviceCopyOut(devices) if devices else None
        self._events: dict[int, list[torch.cuda.Event]] = {}
        self._is_late: Callable[[torch.Tensor], bool] | None = None
        self._verifying = threading.Lock()
        self._check_unchanged: Callable[[], None] | None = None

    # -- copying -------------------------------------------------------------------------------------------------

    def fill(self, executor: Executor | None = None, helpers: int = 0) -> None:
        """Copy all pieces that no thread has claimed, with up to ``helpers`` idle threads of ``executor``.

        Returns when every piece is copied, or when ``cancel`` was called. Raises what any thread failed with. Copies
        from CUDA devices are only queued then; ``is_copied`` reports when they are complete.
        """
        tasks = []
        if executor is not None and self._device is None and not self._has_small_tensors():
            tasks = [executor.submit(self._fill_some) for _ in range(min(helpers, len(self.pieces) - 1))]
        try:
            try:
                self._fill_some()
            finally:
                started = [task for task in tasks if not task.cancel()]
                wait(started)
            for task in started:
                task.result()
            with self._changed:
                self._changed.wait_for(lambda: self._failure or not self._uncopied)
                self._raise_failure()
        except BaseException as error:
            if error is not self._cancelled_by:
                raise

    def fill_early(self, is_late: Callable[[torch.Tensor], bool], check_unchanged: Callable[[], None]) -> None:
        """Copy all tensors except the late ones; everything must fit into memory.

        ``check_unchanged`` raises if a late tensor has changed since the call of ``save``.
        """
        self._is_late, self._check_unchanged = is_late, check_unchanged
        try:
            for image in self.images:
                if all(is_late(shard.tensor) for shard in image.shards):
                    continue
                for piece in self.pieces_of(image):
                    if not all(is_late(tensor) for tensor, *_ in parts(image, piece.start, piece.stop)):
                        with self._claiming:
                            self._provide_block(piece)
                        self._events[piece.index] = self._copy_into(piece, lambda tensor: not is_late(tensor))
        except BaseException as error:
            self.fail(error)
            raise

    @property
    def is_on_device(self) -> bool:
        """Whether copies, once queued, complete on a device without a host thread."""
        return self._device is not None

    def make_caller_wait(self) -> None:
        """Make the calling thread's device streams wait for the copies that are queued."""
        if self._device is not None:
            self._device.make_caller_wait()

    def wait_changeable(self, timeout_s: float | None) -> None:
        """Return when the calling thread may change the late tensors; help to copy the rest.

        Raises nothing: if the save fails, the tensors may change too.
        """
        with suppress(Exception):
            self._fill_some()
        if self._device is not None:
            self.verify_unchanged()
            self.make_caller_wait()
        elif not self.wait_copied(timeout_s):
            self.fail(DeadlineError(f"an optimizer step has waited {timeout_s} s for the state to be copied"))

    def verify_unchanged(self) -> None:
        """Fail the save if a late tensor changed before it was copied. Only the first call checks."""
        with self._verifying:
            check, self._check_unchanged = self._check_unchanged, None
            if check is None:
                return
            try:
                check()
            except Exception as error:  # noqa: BLE001 - the save fails, not the caller
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

    def is_copied(self) -> bool:
        """Return whether no tensor is read any more: all are copied, on devices too, or copying has failed."""
        with self._changed:
            is_copied = self._has_no_copies() and all(map(torch.cuda.Event.query, self._all_events()))
        if is_copied:
            self.verify_unchanged()
        return is_copied

    def wait_copied(self, timeout_s: float | None = None) -> bool:
        """Wait until ``is_copied``; return False if that took longer than ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(self._has_no_copies, timeout_s):
                return False
            events = self._all_events()
        for event in events:
            event.synchronize()
        self.verify_unchanged()
        return True

    def _has_small_tensors(self) -> bool:
        nbytes = sum(piece.nbytes for piece in self.pieces)
        return nbytes < _SMALL_TENSOR_BYTES * sum(len(image.shards) for image in self.images)

    def _has_no_copies(self) -> bool:
        return not self._copying and (not self._uncopied or self._failure is not None)

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
        """Claim the next piece, and provide its block."""
        with self._claiming:
            if self._failure is not None or self._claimed == len(self.pieces):
                return None
            piece = self.pieces[self._claimed]
            self._provide_block(piece)
            self._claimed += 1
            return piece

    def _provide_block(self, piece: Piece) -> None:
        """Acquire the piece's block, unless another piece has. Waits for memory."""
        if piece.block in self._blocks:
            return
        end = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._blocks) < self._max_blocks, self._deadline_s)
            self._raise_failure()
            if len(self._blocks) >= self._max_blocks:
                raise DeadlineError(f"no piece was written within {self._deadline_s} s; storage is too slow or hangs")
        timeout_s = None if end is None else max(0.0, end - time.monotonic())
        block = self._arena.acquire(timeout_s, last=self.on_demand, fresh=self._fresh)
        with self._changed:
            if self._failure is None:
                self._blocks[piece.block] = block
                return
        self._arena.release(block)
        self._raise_failure()

    def _copy(self, piece: Piece) -> None:
        events = self._copy_into(piece, self._is_late)
        with self._changed:
            self._events.setdefault(piece.index, []).extend(events)
        self._note_copied(piece)

    def _note_copied(self, piece: Piece) -> None:
        with self._changed:
            self._copied[piece.index] = True
            is_last = self._uncopied == 1
            if not is_last:
                self._uncopied -= 1
                self._changed.notify_all()
        if is_last:
            # Before the state counts as copied: a late tensor that changed must fail the save.
            if self._device is None:
                self.verify_unchanged()
            with self._changed:
                self._uncopied = 0
                self._changed.notify_all()
            for image in self.images:
                image.release_tensors()

    def _copy_into(self, piece: Piece, only: Callable[[torch.Tensor], bool] | None) -> list[torch.cuda.Event]:
        with self._changed:
            self._raise_failure()
            block = self._blocks[piece.block]
            self._copying += 1
        try:
            with self._timings.measure("copy", piece.nbytes):
                block.fault_in(self._used[piece.block])
                if self._device is not None:
                    return self._device.copy_piece(piece.image, piece.start, piece.stop, block, piece.offset, only)
                copy_piece(piece.image, piece.start, piece.stop, block, piece.offset, only)
                return []
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    # -- writing -------------------------------------------------------------------------------------------------

    def content(self, piece: Piece) -> memoryview:
        """Return the piece's bytes, valid until the piece is released.

        Waits until ``fill`` has copied the piece, or copies it now. Raises what copying failed with.
        """
        if self.on_demand:
            self._provide_block(piece)
            self._copy(piece)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._copied[piece.index])
            self._raise_failure()
        for event in self._events.get(piece.index, ()):
            event.synchronize()
        return self._blocks[piece.block].view[piece.offset : piece.offset + piece.nbytes]

    def release(self, piece: Piece) -> None:
        """Release a piece that is written, or never will be. A block returns to the arena with its last piece."""
        with self._changed:
            self._unreleased[piece.block] -= 1
            if self._unreleased[piece.block]:
                return
            block = self._blocks.pop(piece.block, None)
            self._changed.notify_all()
        if block is not None:
            self._arena.release(block)

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Stop copying; every waiter raises ``error``. Has no effect after the first failure, or when all is copied."""
        with self._changed:
            if self._uncopied and self._failure is None:
                self._failure = error
                self._changed.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Stop copying because writing failed with ``error``. ``fill`` returns without raising it."""
        with self._changed:
            if self._uncopied and self._failure is None:
                self._cancelled_by = error
        self.fail(error)

    def discard(self, error: BaseException) -> None:
        """Stop copying, wait for running copies, and release all memory. No piece may be in use by a writer."""
        self.fail(error)
        self.wait_copied()
        with self._changed:
            blocks = list(self._blocks.values())
            self._blocks.clear()
            self._changed.notify_all()
        for block in blocks:
            self._arena.release(block)
        for image in self.images:
            image.release_tensors()

    def pieces_of(self, image: FileImage) -> Iterator[Piece]:
        """Yield the pieces of one image, in order."""
        return (piece for piece in self.pieces if piece.image is image)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
