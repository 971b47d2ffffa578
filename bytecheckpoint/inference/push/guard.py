"""A guard process that ends what the sender of an update leaves behind when it is killed.

It outlives the sender. Workers of checkpoint-engine wait for the sender's next message without a bound, and connect
again to the socket name that they were given: the guard takes over these names and sends the last messages. Then it
makes a paused engine continue. What it cannot repair, it writes to the standard error of the sender. It is this file,
run as a script that imports nothing of the library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

_PATIENCE_S = 600.0  # for workers that are stopped, and for an engine that loads
_POLL_MS = 100
_LINGER_MS = 1000
_CLOSING_S = 5.0


def tls_of(context: ssl.SSLContext | None) -> dict[str, Any] | None:
    """Return what another process needs to verify the same servers, as plain data. A client's certificate is not part
    of it."""
    if context is None:
        return None
    certificates = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    checks = {"verify": context.verify_mode != ssl.CERT_NONE, "check_hostname": context.check_hostname}
    return {"certificates": certificates, **checks}


def tls_context(tls: Mapping[str, Any] | None) -> ssl.SSLContext | None:
    """Return a context made of a result of ``tls_of``."""
    if tls is None:
        return None
    context = ssl.create_default_context(cadata=tls["certificates"] or None)
    context.check_hostname = tls["check_hostname"]
    context.verify_mode = ssl.CERT_REQUIRED if tls["verify"] else ssl.CERT_NONE
    return context


class ExitGuard:
    """The guard process of one sender, for one update after another. It verifies servers with ``tls``, a result of
    ``tls_of``."""

    def __init__(self, tls: Mapping[str, Any] | None) -> None:
        self._kept: dict[str, Any] = {"tls": tls}
        self._lock = threading.Lock()
        # In its own session, so that a signal to the sender's terminal or process group does not end it too.
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def keep(self, **kept: Any) -> None:
        """Set what to do if this process ends, in place of what these names had before.

        Args:
            kept: ``messages``: those that workers get, as hexadecimal numbers, by socket name. ``resume``: the address
                and headers of a request. ``fault``: a text to report.
        """
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # the guard was killed
            self._kept |= kept
            self._process.stdin.write(json.dumps(self._kept).encode() + b"\n")
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


def _resume(tls: Mapping[str, Any] | None, url: str, headers: Mapping[str, str]) -> None:
    request = urllib.request.Request(url, b"", dict(headers), method="POST")
    https = urllib.request.HTTPSHandler(context=tls_context(tls))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(request, timeout=_PATIENCE_S) as response:
            response.read()
    except (OSError, http.client.HTTPException) as error:
        _report(f"{url} failed: {error!r}; its engine is left paused until the next push")


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # it has no reader any more
        sys.stderr.write(f"bytecheckpoint: the sender of a push was killed; {text}\n")
        sys.stderr.flush()


def _main() -> None:
    del sys.path[0]  # modules in this directory must not shadow others
    kept = json.loads(_last_line(int(sys.argv[1])) or b"{}")
    if kept.get("messages"):
        _send_last({name: [bytes.fromhex(one) for one in messages] for name, messages in kept["messages"].items()})
    if kept.get("resume"):
        _resume(kept["tls"], *kept["resume"])
    if kept.get("fault"):
        _report(kept["fault"])


if __name__ == "__main__":
    _main()
