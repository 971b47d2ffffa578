"""The other door into vLLM: its own weight transfer (``--weight-transfer-config '{"backend": "bcp"}'``).

vLLM carries requests to its workers by ``update_weights``, but brings no answers back. So each worker sends its answer
to the sender itself, to a port that came with the request, sealed with a key that came the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ...errors import DeadlineError, EngineError
from .engines import Engine, HttpEngine, LocalEngine
from .tcp_wire import NONCE_BYTES, own_hosts, receive

__all__ = ["NativeEngine", "post_answer"]

_HEAD = struct.Struct("!IIQ")  # worker, workers, bytes of the answer
_MAX_ANSWER = 1 << 30
_CONNECT_S = 5.0
_LOOK_S = 0.1


class NativeEngine(Engine):
    """A vLLM engine with the transfer backend "bcp" and no worker extension, by HTTP or of this process. vLLM's own
    version of the weights is set with each push."""

    def __init__(self, engine: HttpEngine | LocalEngine) -> None:
        self.name = engine.name
        self._engine = engine
        self._key = secrets.token_hex(NONCE_BYTES)
        self._listener = socket.create_server(("", 0))

    def call(self, request: str, timeout_s: float) -> list[str]:
        end = time.monotonic() + timeout_s
        # With each request, as others may ask the same engine in turn: who has it give to another, say.
        asked = {"request": request, "hosts": list(own_hosts()), "key": self._key}
        asked["port"] = self._listener.getsockname()[1]
        # Answers come while vLLM is still at the request.
        over = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="bcp-push-answers") as thread:
            answers = thread.submit(self._collect, end, over)
            try:
                # A session for each request: one that a sender leaves open when it dies cannot be opened again.
                self._step("start_weight_update", {}, end)
                self._step("update_weights", {"update_info": asked}, end)
                self._step("finish_weight_update", {"weight_version": None}, end)
            except BaseException:
                over.set()
                raise
            return answers.result()

    def pause(self, timeout_s: float) -> None:
        self._engine.pause(timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        end = time.monotonic() + timeout_s
        if changed and version is not None:
            self._step("start_weight_update", {}, end)
            self._step("finish_weight_update", {"weight_version": str(version)}, end)
        self._engine.resume(None, max(end - time.monotonic(), 0.05), changed=changed)

    def close(self) -> None:
        self._listener.close()

    def _step(self, step: str, document: dict[str, object], end: float) -> None:
        self._engine.native(step, document, max(end - time.monotonic(), 0.05))

    def _collect(self, end: float, over: threading.Event) -> list[str]:
        """Of all workers, by number; none of them once it is ``over``."""
        found: dict[int, str] = {}
        workers = 1
        self._listener.settimeout(_LOOK_S)
        while len(found) < workers and not over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() < end:
                    continue
                raise DeadlineError(
                    f"{len(found)} of {workers} workers of {self.name} have sent their answer to this host in time; "
                    f"can they reach its port {self._listener.getsockname()[1]}?"
                ) from None
            with connection, contextlib.suppress(OSError, EngineError):
                connection.settimeout(max(end - time.monotonic(), 0.05))
                number, workers, answer = self._receive(connection)
                found[number] = answer
        return [found[number] for number in sorted(found)]

    def _receive(self, connection: socket.socket) -> tuple[int, int, str]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        head = receive(connection, _HEAD.size)
        number, workers, length = _HEAD.unpack(head)
        if length > _MAX_ANSWER:
            raise EngineError(f"an answer of {length} bytes is refused")
        seal = receive(connection, hashlib.sha256().digest_size)
        answer = receive(connection, length)
        if not hmac.compare_digest(seal, _seal(self._key, nonce, head, answer)):
            raise EngineError("an answer from who does not know the key")
        return number, workers, answer.decode()


def post_answer(hosts: Sequence[str], port: int, key: str, number: int, workers: int, answer: str) -> None:
    """A worker's way back. Raises ``EngineError`` where no host takes the answer."""
    data = answer.encode()
    head = _HEAD.pack(number, workers, len(data))
    tried = []
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
                nonce = receive(connection, NONCE_BYTES)
                connection.sendall(head + _seal(key, nonce, head, data) + data)
                return
        except (OSError, EngineError) as error:
            tried.append(f"{host}: {error}")
    raise EngineError(f"the sender's port {port} cannot be reached ({'; '.join(tried)})")


def _seal(key: str, nonce: bytes, head: bytes, answer: bytes) -> bytes:
    return hmac.new(key.encode(), nonce + head + answer, hashlib.sha256).digest()
