"""A FUSE file system that mirrors a directory and injects errors in the kernel, not in patched functions.

It implements the kernel's protocol over ``/dev/fuse``, so it needs no libfuse and no package, only the right to mount.
The server is a separate process that reads its rules from a file, so that any process of a test can set them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from bytecheckpoint.testing import time_limit

_SERVER = Path(__file__).with_name("fuse_server.py")


@dataclass(frozen=True)
class FuseRule:
    """Makes ``operation`` fail with ``errno`` on files that match the shell pattern ``name``, from byte ``begin`` on.

    ``operation`` is "write", "read", "fsync", "flush", "fallocate", "rename", "link", "lookup", "open", "read and
    write" (an open for both), "create", "unlink" or "mkdir"; ``name`` is compared with the path below the mount. With
    "readdir", listings lack the file. With "statfs", ``name`` is the free space that is reported: "nothing", of a total
    of nothing, "-1" or "unlimited".
    """

    operation: str
    errno: int = 0
    name: str = "*"
    begin: int = 0


@dataclass(frozen=True)
class FuseDisk:
    """The file system mounted at ``path``. It can be pickled, and any process can set its rules."""

    path: str
    control: str

    def fail(self, *rules: FuseRule) -> None:
        """Replace all rules."""
        temporary = f"{self.control}.{os.getpid()}"
        Path(temporary).write_text(json.dumps([asdict(rule) for rule in rules]))
        os.replace(temporary, self.control)

    def mend(self) -> None:
        self.fail()


@contextmanager
def fuse_disk(at: Path, *, other: FuseDisk | None = None, cache_s: int = 0) -> Iterator[FuseDisk]:
    """Mount a file system that stores its files in ``<at>.below``, or where the ``other`` one does, as on another host.

    The kernel caches names and attributes for ``cache_s``. Skips the test if FUSE cannot be mounted.
    """
    below = Path(other.path if other is not None else at).with_suffix(".below")
    control = at.with_suffix(".rules")
    at.mkdir(parents=True)
    below.mkdir(exist_ok=other is not None)
    disk = FuseDisk(str(at), str(control))
    disk.mend()
    command = [sys.executable, "-I", str(_SERVER), str(at), str(below), str(control), str(cache_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "mounted\n":
            _, stderr = server.communicate(timeout=time_limit(10))
            pytest.skip(f"no FUSE file system can be mounted here: {stderr.strip().splitlines()[-1:]}")
        yield disk
    finally:
        # Lazily: after a failed test, an open file must not keep the mount.
        subprocess.run(["umount", "-l", str(at)], capture_output=True, check=False)
        server.kill()
        server.communicate()
