"""Use a store before and after a fork, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from bytecheckpoint.testing import time_limit

__all__ = ["use_in_forked_child"]

_SCRIPT = """
import os, sys
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend

options = eval(sys.argv[2])
backend = FsspecBackend(sys.argv[1], **options)
backend.put("object", b"from the parent")
child = os.fork()
if child == 0:
    try:
        assert backend.get("object") == b"from the parent"
        backend.put("child", b"from the child")
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert backend.get("object") == b"from the parent"
if not sys.argv[1].startswith("memory"):
    assert backend.get("child") == b"from the child"
backend.close()
"""


def use_in_forked_child(url: str, options: dict[str, Any]) -> None:
    """Use a backend, fork, and use it in both processes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, url, repr({k: v for k, v in options.items() if k != "client"})],
        capture_output=True,
        text=True,
        timeout=time_limit(120),
    )
    assert done.returncode == 0, done.stderr
