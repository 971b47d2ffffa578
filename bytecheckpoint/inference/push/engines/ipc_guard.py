"""A guard process that releases an engine's workers when the sender of an update is killed.

Workers wait for the sender's next message without a bound, and connect again to the socket name that they were given.
The guard outlives the sender, takes over these names, and sends the last messages. It is this file, run as a script
that imports nothing of the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["ExitGuard"]

_PATIENCE_S = 600.0  # for workers that are stopped
_POLL_MS = 100
_LINGER_MS = 1000
_CLOSING_S = 5.0


class ExitGuard:
    """The guard process of one sender, for one update after another."""

    def __init__(self) -> None:
        # In its own session, so that a signal to the sender's terminal or process group does not end it too.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, last_messages: Mapping[str, Sequence[bytes]]) -> None:
        """Set the messages that workers get if this process ends, by socket name. Replaces earlier ones."""
        plain = {name: [message.hex() for message in messages] for name, messages in last_messages.items()}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed
            self._process.stdin.write(json.dumps(plain).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the guard, when no update is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _last_line(parent: int) -> bytes:
    """Wait for the parent's end, and return the last line that it wrote."""
    received = b""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # Children of the parent may keep its end of the pipe open.
    with contextlib.suppress(ProcessLookupError):
        poller.register(os.pidfd_open(parent), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if 0 not in ready:
            break
        more = os.read(0, 1 << 16)
        if not more:
            break
        received = b"\n".join((received + more).split(b"\n")[-2:])
    return received.rpartition(b"\n")[0]


def _send_last(last_messages: Mapping[str, Sequence[bytes]]) -> None:
    import zmq

    end = time.monotonic() + _PATIENCE_S
    context = zmq.Context()
    left = {name: context.socket(zmq.DEALER) for name in last_messages}
    unbound = set(left)
    while left and time.monotonic() < end:
        for name in list(unbound):
            with contextlib.suppress(zmq.ZMQError):  # the parent's socket still exists
                left[name].bind(name)
                unbound.remove(name)
        for name in [name for name, socket in left.items() if socket.poll(0, zmq.POLLOUT)]:
            for message in last_messages[name]:
                left[name].send_multipart([b"", message])
            left.pop(name).close(_LINGER_MS)
        select.select([], [], [], _POLL_MS / 1000)
    for socket in left.values():
        socket.close(0)
    context.term()


def _main() -> None:
    del sys.path[0]  # modules in this directory must not shadow others
    line = _last_line(int(sys.argv[1]))
    last_messages = json.loads(line or b"{}")
    if last_messages:
        _send_last({name: [bytes.fromhex(one) for one in messages] for name, messages in last_messages.items()})


if __name__ == "__main__":
    _main()
