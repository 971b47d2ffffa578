"""Reads and writes that bypass the page cache (``O_DIRECT``), at the device's rate and without dirty pages to flush.

A page of a file is written in one way only. Pages that a write covers completely may be written directly; the pages at
its head and tail that it covers in part always go through the page cache. Writes do not overlap, so no page is written
both ways, and the two paths need no coherence.

Direct transfers need aligned memory, and a device transfers one long run of memory much faster than 500 scattered
pages. Callers read into such memory. Writes of unaligned data go through a bounce buffer: one per thread, in one huge
page, small enough to stay in the processor's cache, where the second copy is cheap.

All functions raise ``OSError``. If a file system refuses ``O_DIRECT``, they use the page cache for the rest.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..posix import UNSUPPORTED, libc_function, write_at

PAGE = max(mmap.PAGESIZE, 4096)
"""The alignment of file offsets in bytes: the unit of the page cache. No device has larger blocks."""

MIN_WRITE = 256 << 10
"""Bytes from which a write is direct: each direct write is a round trip to the device."""

_BOUNCE = 2 << 20  # bytes: one huge page
_MAX_WRITE_BYTES = 1 << 30  # the kernel accepts a little less than 2 GiB

_WIPE_ON_FORK = 18  # madvise(2), Linux 4.14
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN = 152

_Bytes = npt.NDArray[np.uint8]


class DirectFile:
    """A second descriptor of an open file, with ``O_DIRECT``; ``flags`` is ``O_RDONLY`` or ``O_WRONLY``.

    ``memory`` is the required alignment of addresses. ``refused`` becomes true if the file system rejects a transfer.
    Raises ``OSError`` if the file cannot be opened for direct I/O.
    """

    def __init__(self, fd: int, flags: int) -> None:
        self.memory = _memory_alignment(fd)
        if not self.memory:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        # The file's name may refer to another file by now.
        self.fd = os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
        self.refused = False

    def write(self, data: memoryview, offset: int) -> int:
        """Write whole pages at the beginning of a page.

        Returns the number of bytes written, fewer if ``write_at`` must report the cause.
        """
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

    def read(self, memory: memoryview, offset: int) -> int:
        """Read whole pages, from the beginning of a page, into aligned memory.

        Returns the number of bytes, fewer if ``read_scattered_at`` must report the cause.
        """
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
        source = np.frombuffer(data, np.uint8)
        if source.ctypes.data % self.memory == 0:
            yield from (data[at : at + _MAX_WRITE_BYTES] for at in range(0, len(data), _MAX_WRITE_BYTES))
            return
        array, memory = _own_bounce()
        for at in range(0, len(data), _BOUNCE):
            length = min(_BOUNCE, len(data) - at)
            # A slice assignment of memoryviews would hold the interpreter lock.
            np.copyto(array[:length], source[at : at + length])
            yield memory[:length]

    def _note_refusal(self, error: OSError) -> None:
        if error.errno not in UNSUPPORTED:
            raise error
        self.refused = True


def write_direct(file: DirectFile, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``: whole pages directly, the rest through ``fd``, the same file."""
    start, stop = -(-offset // PAGE) * PAGE, (offset + len(data)) // PAGE * PAGE
    if file.refused or stop - start < MIN_WRITE:
        write_at(fd, data, offset)
        return
    done = start + file.write(data[start - offset : stop - offset], start)
    write_at(fd, data[: start - offset], offset)
    write_at(fd, data[done - offset :], done)


class _Own(threading.local):
    bounce: tuple[_Bytes, memoryview] | None = None


_own = _Own()


def _own_bounce() -> tuple[_Bytes, memoryview]:
    """Return this thread's bounce buffer, as an array and as a memoryview."""
    if _own.bounce is None:
        block = mmap.mmap(-1, 2 * _BOUNCE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(block, np.uint8)
        start = -array.ctypes.data % _BOUNCE
        # A child that is forked during a transfer gets zeros instead of the pages.
        for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
            with suppress(OSError):
                block.madvise(advice)
        with suppress(OSError):
            block.madvise(_POPULATE_WRITE, start, _BOUNCE)
        _own.bounce = array[start : start + _BOUNCE], memoryview(block)[start : start + _BOUNCE]
    return _own.bounce


def _memory_alignment(fd: int) -> int:
    """Return the memory alignment that statx reports for direct I/O; 0 if the file has none.

    A page if statx does not report it (kernels before 6.1, most network file systems).
    """
    statx = libc_function("statx")
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), found) != 0:
        return PAGE
    (mask,) = struct.unpack_from("I", found)
    memory, offset = struct.unpack_from("II", found, _STATX_DIO_MEM_ALIGN)
    if not mask & _STATX_DIOALIGN:
        return PAGE
    return int(memory) if offset <= PAGE else 0
