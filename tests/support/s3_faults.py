"""A proxy between an S3 client and a server, which damages what passes through it."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

from bytecheckpoint.testing import time_limit

__all__ = ["Exchange", "FaultProxy", "fault_proxy"]


def _error(status: bytes, code: bytes, header: bytes = b"") -> bytes:
    body = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>-</Message></Error>' % code
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, header, len(body), body)


_ERRORS = {
    "refuse": _error(b"503 Slow Down", b"SlowDown"),
    "ended": _error(b"404 Not Found", b"NoSuchUpload"),
    "broken": _error(b"500 Internal Server Error", b"InternalError"),
    "expired": _error(b"400 Bad Request", b"ExpiredToken"),
    "nowhere": _error(b"301 Moved Permanently", b"PermanentRedirect"),
    "elsewhere": _error(b"301 Moved Permanently", b"PermanentRedirect", b"x-amz-bucket-region: eu-west-1\r\n"),
    "skewed": _error(b"403 Forbidden", b"RequestTimeTooSkewed"),
    "denied": _error(b"403 Forbidden", b"AccessDenied"),
}
_ERRORS["applied"] = _ERRORS["refuse"]

_DENIED = _error(b"403 Forbidden", b"AccessDenied")
_NOT_IMPLEMENTED = _error(b"501 Not Implemented", b"NotImplemented")
_IF_MATCH = re.compile(rb"(?i)(\r\nif-match: )([^\r]+)")
_CONDITIONS = re.compile(rb"(?i)\r\nif-(?:none-)?match: [^\r]+")


@dataclass
class Exchange:
    """A request, before it is passed on.

    ``number`` counts requests of the same ``kind`` from 1. ``start`` is the first byte that it asks for. ``key`` is the
    access key that signs it.
    """

    kind: str
    number: int
    part: int | None
    path: str
    start: int = 0
    key: str = ""


Rule = Callable[[Exchange], str | None]
"""Returns what to do with a request:

* None: pass it on.
* ``refuse``: reply 503.
* ``ended``: reply that there is no such upload.
* ``broken``: reply 500, as Ceph does when it is to complete an upload that has ended.
* ``expired``, ``skewed``: reply that the token has expired, that the clocks differ.
* ``pages``: pass a listing of objects on with the smallest page.
* ``late``: pass it on, and reply when ``FaultProxy.go_on`` is set.
* ``applied``: pass it on, and reply 503.
* ``denied``: reply 403.
* ``reset``: reset the connection while its body arrives.
* ``stall``: never reply.
* ``deaf``: read no byte of its body, and never reply.
* ``deny``: read no byte of its body, reply 403 and close the connection.
* ``hang``: stop in the middle of the reply's body.
* ``lose``: pass it on, and close the connection instead of replying.
* ``cut``: close the connection in the middle of the reply's body.
* ``flip``: change the last byte of the reply's body.
* ``longer``: reply with the range that ends one byte later.
* ``elsewhere``: reply that the bucket is in another region. ``nowhere``: the same, without the region's name.
* ``shift``: reply with the range that begins one byte later.
* ``ignore``: pass it on without its conditions, as to a store that does not know them.
* ``unquoted``: accept only versions without quotes in its conditions, as Ceph does.
* ``unknown``: reply 501 if it has conditions.
* ``wait``: reply when ``FaultProxy.go_on`` is set.
"""


class FaultProxy:
    """A running proxy at ``url``. Set ``rule`` at any time. ``kinds`` lists the requests that have arrived.

    With ``tls``, it speaks https.
    """

    def __init__(self, server: str, tls: ssl.SSLContext | None = None) -> None:
        address = urlsplit(server)
        self._server = (str(address.hostname), int(address.port or 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = {self._listener}
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, name="fault-proxy")]
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.rule: Rule = lambda exchange: None
        self.kinds: list[str] = []
        self.go_on = threading.Event()
        self.waiting = threading.Semaphore(0)
        self._threads[0].start()

    @property
    def connections(self) -> list[threading.Thread]:
        """The threads of all connections so far; a thread ends with its connection."""
        with self._lock:
            return self._threads[1:]

    def disconnect(self) -> None:
        """Close all connections."""
        with self._lock:
            for one in self._open - {self._listener}:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # no thread may change the state of TLS meanwhile

    def close(self) -> None:
        self.go_on.set()
        with self._lock:
            self._closed = True
            self._listener.shutdown(socket.SHUT_RDWR)
        self.disconnect()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with self._lock:
                    if self._closed:
                        connection.close()
                        return
                    self._open.add(connection)
                    self._threads.append(threading.Thread(target=self._serve, args=(connection,), name="fault-proxy"))
                    self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        secured = connection
        with contextlib.suppress(OSError, EOFError):
            if self._tls is not None:
                secured = self._tls.wrap_socket(connection, server_side=True)
                with self._lock:
                    self._open ^= {connection, secured}
            with secured.makefile("rb") as requests:
                while self._pass_on(secured, requests):
                    pass
        with self._lock:
            self._open.discard(secured)
        secured.close()

    def _pass_on(self, connection: socket.socket, requests: BinaryIO) -> bool:
        """Return false to close the connection."""
        head = _read_head(requests)
        what = self.rule(self._exchange(head))
        if what == "stall":
            requests.read()  # until the client gives up
            return False
        if what == "deaf":
            self.go_on.wait(time_limit(60))
            return False
        if what == "deny":
            connection.sendall(_DENIED)
            return False
        if _header(head, b"expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if what == "reset":
            requests.read(min(1 << 16, int(_header(head, b"content-length") or 0)))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        length = int(_header(head, b"content-length") or 0)
        body = requests.read(length)
        if len(body) < length:  # the client has given up, and the server would wait for the rest
            return False
        if what == "shift":
            first, _, last = _header(head, b"range").partition(b"=")[2].partition(b"-")
            head = head.replace(b"=" + first + b"-" + last, b"=%d-%d" % (int(first) + 1, int(last) + 1))
        if what == "longer":
            last = _header(head, b"range").rpartition(b"-")[2]
            head = head.replace(b"-" + last + b"\r\n", b"-%d\r\n" % (int(last) + 1), 1)
        if what == "ignore":
            head = _CONDITIONS.sub(b"", head)
        if what == "unquoted":
            # The server behind this proxy accepts only quoted ones.
            head = _IF_MATCH.sub(lambda found: b'%s"%s"' % (found[1], b"" if found[2][:1] == b'"' else found[2]), head)
        if what == "unknown" and _CONDITIONS.search(head):
            connection.sendall(_NOT_IMPLEMENTED)
            return True
        if what == "pages":
            head = head.replace(b"list-type=2", b"list-type=2&max-keys=1", 1)
        late = self._ask(head, body) if what == "late" else b""
        if what == "applied":
            self._ask(head, body)
        if what in ("wait", "late"):
            self.waiting.release()
            self.go_on.wait(time_limit(60))
            if self._closed:
                return False
        reply = late or _ERRORS.get(what or "") or self._ask(head, body)
        if head.startswith(b"HEAD "):
            reply = reply[: reply.index(b"\r\n\r\n") + 4]
        if what == "flip":
            reply = reply[:-1] + bytes([reply[-1] ^ 1])
        if what == "lose":
            return False
        connection.sendall(reply[: reply.index(b"\r\n\r\n") + 14] if what in ("cut", "hang") else reply)
        if what == "hang":
            requests.read()  # until the client gives up
        return what not in ("cut", "hang")

    def _exchange(self, head: bytes) -> Exchange:
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        query = parse_qs(urlsplit(target).query, keep_blank_values=True)
        part = int(query["partNumber"][0]) if "partNumber" in query else None
        start = int(_header(head, b"range").partition(b"=")[2].partition(b"-")[0] or 0)
        kind = method.lower()
        if part is not None:
            kind = "part"
        elif "uploads" in query:
            kind = "begin"
        elif "uploadId" in query:
            kind = {"post": "complete", "delete": "abort", "get": "parts"}[kind]
        elif "list-type" in query:
            kind = "list"
        with self._lock:
            self.kinds.append(kind)
            key = _header(head, b"authorization").partition(b"Credential=")[2].partition(b"/")[0].decode()
            return Exchange(kind, self.kinds.count(kind), part, urlsplit(target).path, start, key)

    def _ask(self, head: bytes, body: bytes) -> bytes:
        request, *lines = head.rstrip(b"\r\n").split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
        with socket.create_connection(self._server, time_limit(20)) as server, server.makefile("rb") as replies:
            server.sendall(b"\r\n".join([request, *kept, b"Connection: close", b"", b""]) + body)
            return replies.read().replace(b"Connection: close\r\n", b"", 1)


def _read_head(requests: BinaryIO) -> bytes:
    lines = []
    while (line := requests.readline()) not in (b"", b"\r\n"):
        lines.append(line)
    if not lines:
        raise EOFError
    return b"".join(lines) + b"\r\n"


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return b""


@contextlib.contextmanager
def fault_proxy(server: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    """Run a proxy in front of ``server``."""
    proxy = FaultProxy(server, tls)
    try:
        yield proxy
    finally:
        proxy.close()
