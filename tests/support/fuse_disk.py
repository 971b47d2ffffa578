"""A FUSE file system that shows a directory and fails where it is told to: below it is the kernel, not a patched call.

Speaks the kernel's protocol over ``/dev/fuse`` itself, so it needs neither libfuse nor a package, only the right to
mount. The server is a process of its own; rules come to it by a file, so that any process of a test can set them.
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

_SERVER = Path(__file__).with_name("fuse_server.py")


@dataclass(frozen=True)
class FuseRule:
    """``operation`` ("write", "read", "fsync", "fallocate", "rename", "create", "unlink", "mkdir") on a file whose
    path below the mount matches the shell pattern ``name`` fails with ``errno``, from byte ``begin`` on."""

    operation: str
    errno: int
    name: str = "*"
    begin: int = 0


@dataclass(frozen=True)
class FuseDisk:
    """Mounted at ``path``. Can be pickled; any process may set rules."""

    path: str
    control: str

    def fail(self, *rules: FuseRule) -> None:
        """These rules hold from now on, and no others."""
        temporary = f"{self.control}.{os.getpid()}"
        Path(temporary).write_text(json.dumps([asdict(rule) for rule in rules]))
        os.replace(temporary, self.control)

    def mend(self) -> None:
        self.fail()


@contextmanager
def fuse_disk(at: Path) -> Iterator[FuseDisk]:
    """What is written there lies in the directory ``<at>.below``. Skips where FUSE cannot be mounted."""
    below, control = at.with_suffix(".below"), at.with_suffix(".rules")
    at.mkdir(parents=True)
    below.mkdir()
    disk = FuseDisk(str(at), str(control))
    disk.mend()
    command = [sys.executable, "-I", str(_SERVER), str(at), str(below), str(control)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "mounted\n":
            _, why = server.communicate(timeout=10)
            pytest.skip(f"no FUSE file system can be mounted here: {why.strip().splitlines()[-1:]}")
        yield disk
    finally:
        # Lazily: what still holds a file there must not keep the mount of a failed test.
        subprocess.run(["umount", "-l", str(at)], capture_output=True, check=False)
        server.kill()
        server.communicate()
