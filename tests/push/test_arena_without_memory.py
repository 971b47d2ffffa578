"""An arena for which there is no memory."""

from __future__ import annotations

import errno
import os

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena


def test_its_file_descriptor_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time, the number may be that of a file which another thread has opened since."""
    closed: list[int] = []
    close = os.close

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    with pytest.raises(EngineError, match=r"no memory for an arena of 1,000 bytes \(No space left on device\)"):
        SharedArena(1000)
    monkeypatch.undo()
    assert len(closed) == 1
