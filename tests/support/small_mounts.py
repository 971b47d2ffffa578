"""File systems of a test's own: tiny ones that fill up, and read-only ones. Skips where mounting is not allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tiny_disk(at: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes."""
    at.mkdir(parents=True)
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)):
        pytest.skip("mounting is not allowed here")
    try:
        yield at
    finally:
        _run("umount", str(at))


@contextmanager
def read_only(at: Path) -> Iterator[None]:
    """The mounted file system takes no writes, not even from root."""
    if not _run("mount", "-o", "remount,ro", str(at)):
        pytest.skip("remounting is not allowed here")
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(at))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
