"""Run ``bcp`` in real processes that start quickly: children of a process that has imported the library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Launcher", "launcher"]

_CHILD_PART_BYTES = 5 << 20  # the smallest that S3 accepts


class Launcher:
    """Starts one command at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the launcher has ended"
        return line

    def start(self, *arguments: object, window: int) -> int:
        """Start ``bcp`` with these arguments, and return the process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([window, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def wait(self) -> int:
        """Wait for the command; return its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._read()))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL


@contextmanager
def launcher() -> Iterator[Launcher]:
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Launcher(process)
        assert process.stdin is not None
        process.stdin.close()


def _serve() -> None:
    from bytecheckpoint.cli import cli
    from bytecheckpoint.convert.copy import copy
    from bytecheckpoint.storage_backends.remote import parts
    from bytecheckpoint.transfer.copying import copy_checkpoint
    from bytecheckpoint.transfer.transfer import Transfer

    parts.PART_BYTES = _CHILD_PART_BYTES
    for line in sys.stdin:
        window, *arguments = json.loads(line)
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            for function in (copy, copy_checkpoint, Transfer.__init__):
                function.__kwdefaults__["window"] = window  # type: ignore[index]
            try:
                os._exit(cli(arguments, standalone_mode=False) or 0)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(99)
        os.write(1, f"{pid}\n".encode())
        os.write(1, f"{os.waitpid(pid, 0)[1]}\n".encode())


if __name__ == "__main__":
    _serve()
