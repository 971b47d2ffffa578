"""Recognize the pointers that Git LFS leaves in a clone instead of large files."""

from __future__ import annotations

from ..errors import NotACheckpointError

_START = b"version http"  # no file that this library reads begins so


def refuse_pointer(head: bytes, where: str) -> None:
    """Raise ``NotACheckpointError`` if a file that begins with ``head`` (12 bytes suffice) is such a pointer."""
    if head.startswith(_START):
        raise NotACheckpointError(f"{where} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`")
