"""Who stays when a sender is killed in the middle of an update, and sends the engine's workers away.

They wait for a next word without a bound, and connect again to the name that they were given. A process that outlives
the sender takes over these names and says the last word. It is this file, run as a script that imports nothing of the
library.
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

__all__ = ["Guard"]

_PATIENCE_S = 600.0  # for workers that are stopped
_LOOK_MS = 100
_LINGER_MS = 1000
_CLOSING_S = 5.0


class Guard:
    """Of one sender, for one update after the other."""

    def __init__(self) -> None:
        # In a session of its own, so that what ends the sender's terminal or group does not end it too.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, last_words: Mapping[str, Sequence[bytes]]) -> None:
        """From now on, if this process ends, whoever is connected to one of these names is told so; nobody, where there
        are none."""
        what = {name: [word.hex() for word in words] for name, words in last_words.items()}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: then nobody stays
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Nothing of an update is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _last_line(parent: int) -> bytes:
    """What the parent had said last when it ended."""
    said = b""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    # Children of the parent's may hold its end of the pipe.
    with contextlib.suppress(ProcessLookupError):
        poller.register(os.pidfd_open(parent), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if 0 not in ready:
            break
        more = os.read(0, 1 << 16)
        if not more:
            break
        said = b"\n".join((said + more).split(b"\n")[-2:])
    return said.rpartition(b"\n")[0]


def _send_away(last_words: Mapping[str, Sequence[bytes]]) -> None:
    import zmq

    end = time.monotonic() + _PATIENCE_S
    context = zmq.Context()
    left = {name: context.socket(zmq.DEALER) for name in last_words}
    unbound = set(left)
    while left and time.monotonic() < end:
        for name in list(unbound):
            with contextlib.suppress(zmq.ZMQError):  # the parent's is not yet gone
                left[name].bind(name)
                unbound.remove(name)
        for name in [name for name, socket in left.items() if socket.poll(0, zmq.POLLOUT)]:
            for word in last_words[name]:
                left[name].send_multipart([b"", word])
            left.pop(name).close(_LINGER_MS)
        select.select([], [], [], _LOOK_MS / 1000)
    for socket in left.values():
        socket.close(0)
    context.term()


def _main() -> None:
    del sys.path[0]  # where modules of this library have names that others may have too
    line = _last_line(int(sys.argv[1]))
    last_words = json.loads(line or b"{}")
    if last_words:
        _send_away({name: [bytes.fromhex(word) for word in words] for name, words in last_words.items()})


if __name__ == "__main__":
    _main()
