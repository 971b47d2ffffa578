"""Extent after extent from a store to where its bytes are wanted, checked on the way.

What the page cache has is read straight into the tensors, several of them with one call, and hashed while it is in the
processor's cache. What it has not comes from the device, in whole pages, into a bounce buffer on huge pages, which the
device fills much faster than the pages of a tensor; from there it is hashed and copied, in the processor's cache too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter

from xxhash import xxh3_64_intdigest

from ...errors import CorruptionError, StorageError
from ...storage_backends.base import ObjectReader
from ...trace import Timings
from .bounce import Bounce, BounceRing
from .chunk_check import ChunkCheck, Fault
from .read_plan import ReadPlan
from .stored_files import OpenFiles, StoredFiles

__all__ = ["Fetcher"]

_STRAIGHT = 64 << 10  # bytes that are better read into place one by one than copied there
_MIN_DIRECT = 256 << 10  # less is read through the page cache: each direct read is a round trip to the device
_LARGEST_PAGE = 64 << 10


class Fetcher:
    """Fetches the extents of one plan. Thread-safe. ``on_read`` is called with numbers of bytes that were fetched."""

    def __init__(
        self,
        source: StoredFiles,
        plan: ReadPlan,
        files: OpenFiles,
        ring: BounceRing,
        *,
        checked: bool,
        on_read: Callable[[int], None],
        timings: Timings,
    ) -> None:
        self._source, self._plan, self._files, self._ring = source, plan, files, ring
        self._checked = checked
        self._timings = timings
        self._on_read = on_read

    def fetch(self, extents: range, on_fault: Fault, on_wait: Callable[[bool], None] = lambda direct: None) -> None:
        """Fetch extents that follow each other in one file. Raises ``CorruptionError`` and ``StorageError``, and what
        ``on_fault`` raises, which hears of chunks that are not what was saved. ``on_wait`` is called where the bytes
        are not at hand in memory, and told whether they will come directly from a device."""
        plan = self._plan
        first, last = plan.starts[extents[0]], plan.starts[extents[-1] + 1] - 1
        file, begin, length = plan.file[first], plan.begin[first], plan.end[last] - plan.begin[first]
        with self._files.use(file, plan.row[first]) as opened, ExitStack() as stack:
            page = 0
            if not opened.is_at_hand(begin, length):
                page = opened.direct_pages() if length >= _MIN_DIRECT else 0
                on_wait(page > 0)
            check = ChunkCheck(self._source, file, on_fault) if self._checked else None
            lend = _Lend(self._ring, plan.most + 2 * _LARGEST_PAGE, stack)
            turn = _Turn(self._source, plan, file, opened, page, check, lend, self._timings)
            for extent in extents:
                self._on_read(turn.fetch(plan.blocks(extent)))


class _Turn:
    """One thread's dealing with some extents of one file."""

    def __init__(
        self,
        source: StoredFiles,
        plan: ReadPlan,
        file: int,
        opened: ObjectReader,
        page: int,
        check: ChunkCheck | None,
        lend: _Lend,
        timings: Timings,
    ) -> None:
        self._source, self._plan, self._file, self._opened = source, plan, file, opened
        self._page, self._check, self._lend = page, check, lend
        self._timings = timings
        self._verify_s = 0.0  # since the last read
        self._copied = 0  # bytes, likewise

    def fetch(self, blocks: range) -> int:
        """Fetch an extent; returns its bytes."""
        plan = self._plan
        begin, end = plan.begin[blocks[0]], plan.end[blocks[-1]]
        # A block that is longer than any extent comes in pieces.
        step = end - begin if end - begin <= plan.most else plan.size
        for low in range(begin, end, step):
            high = min(low + step, end)
            self._lend.settle()
            try:
                if self._page:
                    self._read_direct(blocks, low, high)
                else:
                    self._read_cached(blocks, low, high)
            except CorruptionError:
                raise
            except StorageError as error:
                raise self._named(blocks, low, high, error) from error
        return end - begin

    def _end_read(self, begin: float, nbytes: int) -> float:
        """Note a read that began then, and what time it is now."""
        end = perf_counter()
        self._timings.worked("read", begin, end - begin, nbytes)
        return end

    def _end_delivery(self, begin: float, nbytes: int) -> None:
        """Note what was done since ``begin`` with the bytes of the last read. Checking and copying alternate, block by
        block; they are noted one after the other."""
        verify_s, copied = self._verify_s, self._copied
        self._verify_s, self._copied = 0.0, 0
        if self._check is not None:
            self._timings.worked("verify", begin, verify_s, nbytes)
        if copied:
            self._timings.worked("copy", begin + verify_s, perf_counter() - begin - verify_s, copied)

    def _read_direct(self, blocks: range, low: int, high: int) -> None:
        bounce = self._lend()
        origin = low // self._page * self._page
        length = -(-(high - origin) // self._page) * self._page
        begun = perf_counter()
        done = self._opened.read_direct(origin, bounce.view[:length])
        begun = self._end_read(begun, done)
        if origin + done < high:
            raise StorageError(f"the file ends at byte {origin + done}")
        self._deliver(blocks, low, high, bounce, origin)
        self._end_delivery(begun, high - low)

    def _read_cached(self, blocks: range, low: int, high: int) -> None:
        plan = self._plan
        buffers: list[memoryview] = []
        straight: list[memoryview | None] = []
        at = low  # where the last buffer ends
        for block in blocks:
            begin, end = max(plan.begin[block], low), min(plan.end[block], high)
            view = plan.memory(block, begin, end) if plan.target[block] and end - begin >= _STRAIGHT else None
            straight.append(view)
            if view is not None:
                if begin > at:
                    buffers.append(self._lend().view[at - low : begin - low])
                buffers.append(view)
                at = end
        if at < high:
            buffers.append(self._lend().view[at - low : high - low])
        begun = perf_counter()
        self._opened.read(low, buffers)
        begun = self._end_read(begun, high - low)
        for block, view in zip(blocks, straight):
            if view is not None:
                self._verify(block, max(plan.begin[block], low), view)
        rest = [block for block, view in zip(blocks, straight) if view is None]
        if rest:
            self._deliver(rest, low, high, self._lend(), low)
        self._end_delivery(begun, high - low)

    def _deliver(self, blocks: Sequence[int], low: int, high: int, bounce: Bounce, origin: int) -> None:
        """Check and copy out what of these blocks is in ``[low, high)``; ``bounce`` begins with byte ``origin``."""
        plan = self._plan
        # Of blocks that follow each other here and in memory: each copy is a wait for the interpreter lock.
        first, past, where = low, low, 0
        for block in blocks:
            begin, end, target = plan.begin[block], plan.end[block], plan.target[block]
            if begin < low:
                begin, target = low, target and target + low - begin
            end = min(end, high)
            self._verify(block, begin, bounce.view[begin - origin : end - origin])
            self._copied += end - begin
            if not target:
                for place in plan.places(block):
                    place.put(bounce, origin, begin, end)
            elif begin == past and target == where + past - first:
                past = end
            else:
                if first < past:
                    bounce.copy_out(first - origin, past - first, where)
                first, past, where = begin, end, target
        if first < past:
            bounce.copy_out(first - origin, past - first, where)

    def _verify(self, block: int, begin: int, data: memoryview) -> None:
        check, plan = self._check, self._plan
        if check is None:
            return
        begun = perf_counter()
        length = len(data)
        if length > check.chunk_size or length != plan.end[block] - plan.begin[block]:
            check.feed(plan.row[block], plan.shard[block], begin, data)
        elif xxh3_64_intdigest(data) != plan.checksum[block]:
            check.feed(plan.row[block], plan.shard[block], begin, data)  # which says what is wrong
        self._verify_s += perf_counter() - begun

    def _named(self, blocks: range, low: int, high: int, error: StorageError) -> StorageError | CorruptionError:
        plan = self._plan
        size = self._source.present_size(self._file)
        block = next((block for block in blocks if plan.end[block] > size), blocks[0])
        begin, end = max(plan.begin[block], low), min(plan.end[block], high)
        return self._source.read_error(self._file, plan.row[block], begin, end, error)


class _Lend:
    """The one bounce buffer of a thread's turn, borrowed when it is first asked for."""

    def __init__(self, ring: BounceRing, nbytes: int, stack: ExitStack) -> None:
        self._ring, self._nbytes, self._stack = ring, nbytes, stack
        self._bounce: Bounce | None = None

    def settle(self) -> None:
        """Make it free for the next bytes."""
        if self._bounce is not None:
            self._bounce.settle()

    def __call__(self) -> Bounce:
        if self._bounce is None:
            self._bounce = self._stack.enter_context(self._ring.lend(self._nbytes))
        return self._bounce
