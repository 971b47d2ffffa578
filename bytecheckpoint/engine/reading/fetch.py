"""Fetch extents from a store into their tensors, and check them on the way.

Bytes in the page cache are read straight into the tensors, several with one call, and hashed while they are in the
processor's cache. All other bytes are read from the device in whole pages into a bounce buffer on huge pages, which
the device fills much faster than the pages of a tensor; from there they are hashed and copied. Encoded bytes pass
through the bounce buffer, and are decoded into the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from ...errors import CorruptionError, StorageError
from ...format.checksums import checksum_of
from ...storage_backends.base import ObjectReader
from ...telemetry.trace import Timings
from ..tensor_bytes import memory_at
from .bounce import BounceBuffer, BouncePool
from .checks import ChunkCheck, CrcCheck
from .frame_reader import FrameReader
from .read_plan import ReadPlan
from .stored_files import Fault, OpenFiles

_MIN_DIRECT_BYTES = 256 << 10  # less goes through the page cache: each direct read is a round trip to the device
_MAX_ALIGNMENT_BYTES = 64 << 10  # the largest page size of any Linux platform


@dataclass(frozen=True, eq=False, kw_only=True)
class Fetcher:
    """Fetches the extents of one plan. Thread-safe. ``on_read`` is called with the bytes of each fetched extent."""

    plan: ReadPlan
    files: OpenFiles
    bounce_pool: BouncePool
    checked: bool
    on_read: Callable[[int], None]
    timings: Timings
    crc_check: CrcCheck | None = None

    def fetch(self, extents: range, on_fault: Fault, on_wait: Callable[[bool], None] = lambda direct: None) -> None:
        """Fetch consecutive extents of one file.

        ``on_fault`` is called for each chunk, and each size, that differs from what was saved. ``on_wait`` is called if
        the bytes are not in the page cache; its argument states whether they are read directly from the device. Raises
        ``CorruptionError``, ``StorageError``, and what ``on_fault`` raises.
        """
        plan, source = self.plan, self.files.source
        first, last = plan.starts[extents[0]], plan.starts[extents[-1] + 1] - 1
        file, begin, length = plan.file[first], plan.begin[first], plan.end[last] - plan.begin[first]
        with self.files.use(file, plan.row[first]) as stored, ExitStack() as stack:
            opened = stored
            # Frames are read whole, so an extent of an encoded file is.
            blocks = map(plan.blocks, extents if source.is_encoded(file) else ())
            longest = max((plan.end[one[-1]] - plan.begin[one[0]] for one in blocks), default=0)
            memory = _Memory(self.bounce_pool, max(plan.max_bytes, longest), longest, stack)
            if longest:
                on_frame = on_fault if self.checked else None
                opened = stack.enter_context(FrameReader(source, file, opened, memory.scratch, on_frame))
            page = 0
            try:
                is_cached = opened.is_cached(begin, length)
            except StorageError as error:  # a broken disk
                raise source.read_error(file, plan.row[first], begin, begin + length, error) from error
            if not is_cached:
                page = opened.direct_alignment() if length >= _MIN_DIRECT_BYTES else 0
                on_wait(page > 0)
            check = ChunkCheck(source, file, on_fault) if self.checked else None
            reads = _FileReads(self, file, opened, page, check, memory)
            for extent in extents:
                self.on_read(reads.fetch(plan.blocks(extent)))
                if self.checked:
                    source.check_size(stored, file, on_fault)


class _Memory:
    """The only bounce buffer of a thread, borrowed on first use: ``nbytes`` of one extent, then ``scratch_bytes``."""

    def __init__(self, pool: BouncePool, nbytes: int, scratch_bytes: int, stack: ExitStack) -> None:
        self.nbytes = nbytes
        self._pool, self._stack = pool, stack
        self._start = nbytes + 2 * _MAX_ALIGNMENT_BYTES
        self._scratch_bytes = scratch_bytes
        self._buffer: BounceBuffer | None = None

    def borrowed(self) -> BounceBuffer:
        """Return the buffer, once no copy out of it runs any more. ``stack`` gives it back."""
        if self._buffer is None:
            self._buffer = self._stack.enter_context(self._pool.lend(self._start + self._scratch_bytes))
        self._buffer.synchronize()
        return self._buffer

    def scratch(self) -> memoryview:
        """Return the memory after that of an extent."""
        return self.borrowed().view[self._start : self._start + self._scratch_bytes]


class _FileReads:
    """Fetches extents of one open file, in one thread. ``page`` is the alignment of direct reads, or 0 for none."""

    def __init__(
        self,
        fetcher: Fetcher,
        file: int,
        opened: ObjectReader,
        page: int,
        check: ChunkCheck | None,
        memory: _Memory,
    ) -> None:
        self._source, self._plan, self._timings = fetcher.files.source, fetcher.plan, fetcher.timings
        self._memory = memory
        self._file, self._opened, self._page, self._check = file, opened, page, check
        self._crc_check = fetcher.crc_check
        self._verify_s = 0.0  # since the last read
        self._copied = 0  # bytes since the last read

    def fetch(self, blocks: range) -> int:
        """Fetch one extent; return its number of bytes."""
        plan = self._plan
        begin, end = plan.begin[blocks[0]], plan.end[blocks[-1]]
        # A block that exceeds the limit of an extent is read in pieces.
        step = end - begin if end - begin <= self._memory.nbytes else plan.size
        for low in range(begin, end, step):
            high = min(low + step, end)
            try:
                if self._page:
                    self._read_direct(blocks, low, high)
                else:
                    self._read_cached(blocks, low, high)
            except CorruptionError:
                raise
            except StorageError as error:
                raise self._describe(blocks, low, high, error) from error
        return end - begin

    def _end_read(self, begin: float, nbytes: int) -> float:
        """Record a read that started at ``begin``; return the current time."""
        end = perf_counter()
        self._timings.record_work("read tier" if self._opened.is_near else "read", begin, end - begin, nbytes)
        return end

    def _end_delivery(self, begin: float, nbytes: int) -> None:
        """Record the work on the last read's bytes since ``begin``.

        Checking and copying alternate block by block; they are recorded as if one followed the other.
        """
        verify_s, copied = self._verify_s, self._copied
        self._verify_s, self._copied = 0.0, 0
        if verify_s:
            self._timings.record_work("verify", begin, verify_s, nbytes)
        if copied:
            self._timings.record_work("copy", begin + verify_s, perf_counter() - begin - verify_s, copied)

    def _read_direct(self, blocks: range, low: int, high: int) -> None:
        buffer = self._memory.borrowed()
        origin = low // self._page * self._page
        length = -(-(high - origin) // self._page) * self._page
        begun = perf_counter()
        done = self._opened.read_direct(origin, buffer.view[:length])
        begun = self._end_read(begun, done)
        if origin + done < high:
            raise StorageError(f"the file ends at byte {origin + done}")
        self._deliver(blocks, low, high, buffer, origin)
        self._end_delivery(begun, high - low)

    def _read_cached(self, blocks: range, low: int, high: int) -> None:
        plan = self._plan
        buffers: list[memoryview] = []
        placed: list[tuple[int, int, memoryview]] = []  # a block, the first byte read of it, and its bytes
        rest: list[int] = []
        at = low  # where the last buffer ends
        # This loop runs once for each of many thousand small tensors.
        for block in blocks:
            begin, end, target = plan.begin[block], plan.end[block], plan.target[block]
            if not target:
                rest.append(block)
                continue
            if begin < low:
                begin, target = low, target + low - begin
            if end > high:
                end = high
            if begin > at:
                buffers.append(self._memory.borrowed().view[at - low : begin - low])
            view = memory_at(target, end - begin)
            buffers.append(view)
            placed.append((block, begin, view))
            at = end
        if at < high:
            buffers.append(self._memory.borrowed().view[at - low : high - low])
        begun = perf_counter()
        self._opened.read(low, buffers)
        begun = self._end_read(begun, high - low)
        self._verify(placed)
        if rest:
            self._deliver(rest, low, high, self._memory.borrowed(), low)
        self._end_delivery(begun, high - low)

    def _deliver(self, blocks: Sequence[int], low: int, high: int, buffer: BounceBuffer, origin: int) -> None:
        """Check these blocks' bytes in ``[low, high)``, and copy them out of ``buffer``, which starts at ``origin``."""
        plan = self._plan
        # One copy for blocks that are adjacent in the file and in memory: each copy may wait for the GIL.
        first, past, where = low, low, 0
        for block in blocks:
            begin, end, target = plan.begin[block], plan.end[block], plan.target[block]
            if begin < low:
                begin, target = low, target and target + low - begin
            end = min(end, high)
            self._verify([(block, begin, buffer.view[begin - origin : end - origin])])
            self._copied += end - begin
            if not target:
                for place in plan.places(block):
                    place.put(buffer, origin, begin, end)
            elif begin == past and target == where + past - first:
                past = end
            else:
                if first < past:
                    buffer.copy_out(first - origin, past - first, where)
                first, past, where = begin, end, target
        if first < past:
            buffer.copy_out(first - origin, past - first, where)

    def _verify(self, read: Sequence[tuple[int, int, memoryview]]) -> None:
        """Check bytes that were read: for each block its number, the first byte, and the bytes."""
        check, crc_check, plan = self._check, self._crc_check, self._plan
        begun = perf_counter()
        if crc_check is not None:
            for _, begin, data in read:
                crc_check.feed(self._file, begin, data)
        if check is not None:
            for block, begin, data in read:
                length = len(data)
                is_chunk = length <= check.chunk_size and length == plan.end[block] - plan.begin[block]
                if not is_chunk or checksum_of(data) != plan.checksum[block]:
                    check.feed(plan.row[block], plan.shard[block], begin, data)  # a chunk again, to report it
        if check is not None or crc_check is not None:
            self._verify_s += perf_counter() - begun

    def _describe(self, blocks: range, low: int, high: int, error: StorageError) -> StorageError | CorruptionError:
        plan = self._plan
        size = self._source.present_size(self._file, error)
        block = next((block for block in blocks if plan.end[block] > size), blocks[0])
        begin, end = max(plan.begin[block], low), min(plan.end[block], high)
        return self._source.read_error(self._file, plan.row[block], begin, end, error)
