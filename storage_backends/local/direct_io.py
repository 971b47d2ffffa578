"""Reads and writes past the page cache (``O_DIRECT``): at the device's rate, with no dirty pages to flush.

Every page of a file goes one way only. Pages that a piece covers wholly may be written directly; pages that it covers
in part (its head and its tail) are always written through the page cache. Pieces do not overlap, so no page is ever
written both ways, and nothing has to be kept coherent by hand.

Direct transfers want aligned memory, and a device takes one long run of memory far faster than five hundred pages that
lie apart. So reads, and writes of what is not aligned, go through a bounce buffer: one for each thread, on one huge
page, short enough to stay in the processor's cache, where the second copy costs little.

All functions raise ``OSError``, but never because a file system refuses ``O_DIRECT``: they do the rest without it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from .page_cache import REFUSALS
from .posix import libc_function, read_scattered_at, write_at

__all__ = ["MIN_READ", "MIN_WRITE", "PAGE", "DirectFile", "read_direct", "write_direct"]

PAGE = max(mmap.PAGESIZE, 4096)
"""What offsets in a file are aligned to: the unit of the page cache; no device has larger blocks."""

MIN_WRITE = 256 << 10
"""Shorter pieces are written through the page cache: each direct write is a round trip to the device."""

MIN_READ = 256 << 10
"""Shorter reads go through the page cache, which reads ahead."""

_BOUNCE = 2 << 20
_BOUNCE_PAGES = _BOUNCE // PAGE
_LONGEST = 1 << 30  # bytes of one write; the kernel takes a little less than 2 GiB

_WIPE_ON_FORK = 18  # madvise(2), Linux 4.14
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN = 152

_Bytes = npt.NDArray[np.uint8]


class DirectFile:
    """An open file once more, with ``O_DIRECT``. ``flags`` are those of the access (``O_RDONLY``, ``O_WRONLY``).

    ``memory`` is the alignment that it wants of addresses. ``refused`` becomes true when the file system, having opened
    it, turns a transfer down. Raises ``OSError`` where it cannot be opened so.
    """

    def __init__(self, fd: int, flags: int) -> None:
        self.memory = _memory_alignment(fd)
        if not self.memory:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        # Not by its name, which may mean another file by now.
        self.fd = os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
        self.refused = False

    def write(self, data: memoryview, offset: int) -> int:
        """Whole pages, at the beginning of one; the number of bytes written, fewer where ``write_at`` can tell why."""
        done = 0
        for part in self._aligned_parts(data):
            try:
                count = os.pwrite(self.fd, part, offset + done)
            except OSError as error:
                self._note_refusal(error)
                break
            done += count
            if count < len(part):
                break
        return done

    def chunks(self, offset: int, length: int) -> Iterator[_Bytes]:
        """The bytes from ``offset`` on, ``length`` of them; fewer where ``read_scattered_at`` can tell why.
        Each chunk is good until the next is asked for."""
        array, memory = _own_bounce()
        end = offset + length
        while offset < end:
            start = offset // PAGE * PAGE
            pages = -(-(end - start) // PAGE)
            # Evenly, rather than a few bytes at the end on a round trip of their own.
            pages = -(-pages // -(-pages // _BOUNCE_PAGES))
            wanted = min(end - start, pages * PAGE)
            try:
                count = os.preadv(self.fd, [memory[: pages * PAGE]], start)
            except OSError as error:
                self._note_refusal(error)
                return
            if start + count <= offset:
                return
            yield array[offset - start : min(count, wanted)]
            offset = start + min(count, wanted)

    def read(self, memory: memoryview, offset: int) -> int:
        """Whole pages, from the beginning of one, into memory aligned alike; the number of bytes, fewer where
        ``read_scattered_at`` can tell why."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.fd, [memory[done:]], offset + done)
            except OSError as error:
                self._note_refusal(error)
                break
            done += count
            if count == 0 or count % PAGE:
                break
        return done

    def close(self) -> None:
        os.close(self.fd)

    def _aligned_parts(self, data: memoryview) -> Iterator[memoryview]:
        source = _as_array(data)
        if source.ctypes.data % self.memory == 0:
            yield from (data[at : at + _LONGEST] for at in range(0, len(data), _LONGEST))
            return
        array, memory = _own_bounce()
        for at in range(0, len(data), _BOUNCE):
            length = min(_BOUNCE, len(data) - at)
            # Not a slice assignment of memoryviews: that holds the interpreter lock.
            np.copyto(array[:length], source[at : at + length])
            yield memory[:length]

    def _note_refusal(self, error: OSError) -> None:
        if error.errno not in REFUSALS:
            raise error
        self.refused = True


def write_direct(file: DirectFile, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``: whole pages directly, the rest through ``fd``, which has the same file."""
    start, stop = -(-offset // PAGE) * PAGE, (offset + len(data)) // PAGE * PAGE
    if file.refused or stop - start < MIN_WRITE:
        write_at(fd, data, offset)
        return
    done = start + file.write(data[start - offset : stop - offset], start)
    write_at(fd, data[: start - offset], offset)
    write_at(fd, data[done - offset :], done)


def read_direct(file: DirectFile, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """``read_scattered_at``, directly as far as that goes; ``fd`` has the same file."""
    left = deque(buffer for buffer in buffers if len(buffer))
    done = 0
    for chunk in file.chunks(offset, sum(map(len, left))):
        done += len(chunk)
        while len(chunk):
            buffer = left.popleft()
            count = min(len(chunk), len(buffer))
            np.copyto(_as_array(buffer)[:count], chunk[:count])
            chunk = chunk[count:]
            if count < len(buffer):
                left.appendleft(buffer[count:])
    return done + read_scattered_at(fd, [*left], offset + done)


class _Own(threading.local):
    bounce: tuple[_Bytes, memoryview] | None = None


_own = _Own()


def _own_bounce() -> tuple[_Bytes, memoryview]:
    """This thread's bounce buffer, as an array and as memory."""
    if _own.bounce is None:
        block = mmap.mmap(-1, 2 * _BOUNCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(block, np.uint8)
        start = -array.ctypes.data % _BOUNCE
        # A child that is forked in the middle of a transfer gets zeros, and no claim to the pages.
        for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
            with suppress(OSError):
                block.madvise(advice)
        with suppress(OSError):
            block.madvise(_POPULATE_WRITE, start, _BOUNCE)
        _own.bounce = array[start : start + _BOUNCE], memoryview(block)[start : start + _BOUNCE]
    return _own.bounce


def _as_array(data: memoryview) -> _Bytes:
    return np.frombuffer(data, np.uint8)


def _memory_alignment(fd: int) -> int:
    """What statx says of direct transfers: the alignment of memory, 0 where there are none. A page where it does not
    say (kernels before 6.1, most network file systems): only trying can tell then."""
    statx = libc_function("statx")
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), found) != 0:
        return PAGE
    (mask,) = struct.unpack_from("I", found)
    memory, offset = struct.unpack_from("II", found, _STATX_DIO_MEM_ALIGN)
    if not mask & _STATX_DIOALIGN:
        return PAGE
    return int(memory) if offset <= PAGE else 0
