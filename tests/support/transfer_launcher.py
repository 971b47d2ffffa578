"""Run ``bcp`` in real processes that start quickly."""

from __future__ import annotations

import signal
import subprocess

from warm_python import WarmProcess, warm_python

from bytecheckpoint.testing import time_limit

__all__ = ["Launcher"]

_CODE = """
import sys
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.storage_backends.remote import parts
from bytecheckpoint.transfer.copying import copy_checkpoint
from bytecheckpoint.transfer.transfer import Transfer

window, *arguments = sys.argv[1:]
parts.PART_BYTES = 5 << 20  # the smallest that S3 accepts
for function in (copy, copy_checkpoint, Transfer.__init__):
    function.__kwdefaults__["window"] = int(window)
sys.exit(cli(arguments, standalone_mode=False))
"""


class Launcher:
    """Starts one command at a time."""

    _process: WarmProcess

    def start(self, *arguments: object, window: int) -> int:
        """Start ``bcp`` with these arguments, and return the process id."""
        command = ["-W", "ignore", "-c", _CODE, str(window), *map(str, arguments)]
        self._process = warm_python().start(command, stdout=subprocess.DEVNULL, stderr=2)
        return self._process.pid

    def wait(self) -> int:
        """Wait for the command; return its exit code, negative for a signal."""
        return self._process.wait(time_limit(120))

    def kill(self, pid: int) -> None:
        assert pid == self._process.pid
        self._process.kill()
        assert self.wait() == -signal.SIGKILL
