"""Mount small file systems: tiny ones that fill up, read-only ones, and ones whose device fails.

The tests are skipped if mounting is not allowed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

_LOOP_SET_STATUS64, _LOOP_GET_STATUS64 = 0x4C04, 0x4C05
_LOOP_INFO64_BYTES, _SIZE_LIMIT_AT = 232, 32
_FIBMAP = 1
_BUSY_S = time_limit(20)


@contextmanager
def tiny_disk(at: Path, size: int) -> Iterator[Path]:
    """Mount a file system of ``size`` bytes."""
    at.mkdir(parents=True)
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)):
        pytest.skip("mounting is not allowed here")
    try:
        yield at
    finally:
        _run("umount", str(at))


@contextmanager
def read_only(at: Path) -> Iterator[None]:
    """Make the mounted file system refuse writes, even from root."""
    if not _run("mount", "-o", "remount,ro", str(at)):
        pytest.skip("remounting is not allowed here")
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(at))


@dataclass(frozen=True)
class Ext4Disk:
    """A real ext4 on a loop device, mounted at ``path``. It can be pickled, and any process can break and repair it."""

    path: str
    device: str

    @property
    def _other(self) -> Path:
        return Path(self.path) / "of-another-writer"

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Fill the file system, except for ``leave`` bytes."""
        fd = os.open(self._other, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size, step = os.fstat(fd).st_size, max(0, self.free_bytes() - leave)
            # Metadata uses some space too, so the last step may be too large.
            while step >= 4096:
                try:
                    os.posix_fallocate(fd, size, step)
                    size += step
                    step = min(step, max(0, self.free_bytes() - leave))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self) -> None:
        """Remove the file that fills the file system."""
        self._other.unlink(missing_ok=True)

    def remount(self, mode: str) -> None:
        """Remount as "ro" or "rw". The kernel refuses "ro" while a file is open for writing, so this waits."""
        give_up_at = time.monotonic() + _BUSY_S
        while not _run("mount", "-o", f"remount,{mode}", self.path):
            assert time.monotonic() < give_up_at, f"{self.path} cannot be remounted {mode}"
            time.sleep(0.002)

    def abort(self) -> None:
        """Make the file system read-only immediately, as the kernel does after an error in the metadata."""
        assert _run("mount", "-o", "remount,abort", self.path)

    def fail_from(self, byte: int) -> None:
        """Limit the device to ``byte`` bytes: transfers beyond them raise I/O errors."""
        self._limit(byte)

    def first_byte_of(self, file: str) -> int:
        """Return the offset on the device at which the data of ``file`` begins."""
        fd = os.open(file, os.O_RDONLY)
        try:
            blocks = -(-os.fstat(fd).st_size // os.fstatvfs(fd).f_bsize)
            numbers = [struct.unpack("i", fcntl.ioctl(fd, _FIBMAP, struct.pack("i", at)))[0] for at in range(blocks)]
            return int(min(filter(None, numbers))) * os.fstatvfs(fd).f_bsize
        finally:
            os.close(fd)

    def mend(self) -> None:
        """Restore and remount the device, because an ext4 refuses writes after an error.

        No process may have a file open there.
        """
        self._limit(0)
        give_up_at = time.monotonic() + _BUSY_S
        while not _run("umount", self.path):
            assert time.monotonic() < give_up_at, f"{self.path} is still in use"
            time.sleep(0.01)
        assert _run("mount", "-t", "ext4", self.device, self.path)

    def _limit(self, size: int) -> None:
        fd = os.open(self.device, os.O_RDWR)
        try:
            info = bytearray(_LOOP_INFO64_BYTES)
            fcntl.ioctl(fd, _LOOP_GET_STATUS64, info)
            struct.pack_into("Q", info, _SIZE_LIMIT_AT, size)
            fcntl.ioctl(fd, _LOOP_SET_STATUS64, bytes(info))
        finally:
            os.close(fd)


@contextmanager
def ext4_disk(at: Path, size: int) -> Iterator[Ext4Disk]:
    """Mount an ext4 in an image of ``size`` bytes. Skips the test, with the reason, if that is impossible."""
    image = at.with_suffix(".image")
    at.mkdir(parents=True)
    with image.open("wb") as opened:
        opened.truncate(size)
    # No lazy initialisation: the kernel would write to the device at unpredictable times.
    options = ("-q", "-F", "-m", "0", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
    if not _run("mkfs.ext4", *options, str(image)):
        pytest.skip("there is no mkfs.ext4 here")
    device = _output("losetup", "--find", "--show", str(image))
    if device is None:
        pytest.skip("there are no loop devices here (or no right to them)")
    try:
        if not _run("mount", "-t", "ext4", device, str(at)):
            pytest.skip("mounting an ext4 is not allowed here")
        yield Ext4Disk(str(at), device)
    finally:
        if not _run("umount", str(at)):
            # Lazily: after a failed test, an open file must not keep the mount.
            _run("umount", "-l", str(at))
        _run("losetup", "--detach", device)


def _run(*command: str) -> bool:
    return _output(*command) is not None


def _output(*command: str) -> str | None:
    """Return the output of a command, None if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
