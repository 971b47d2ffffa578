"""A sender's end of a stream into a worker's ring: it writes as far as there is room, and hears when there is more."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgpack
import torch

from ...engine.tensor_bytes import byte_view
from ...errors import EngineError
from .arena import Address, attach
from .device_arena import OpenArena, attach_device
from .device_memory import settle
from .roads import Place, Road, connect
from .tcp_wire import END, FAILED, FRAME, STATUS, TAKEN, TcpAddress, receive, wait_for_ever

__all__ = ["RingRoad", "StreamBroken"]

_MAX_TEXT = 1 << 16


class StreamBroken(EngineError):
    """The worker's end has failed, or does not answer: then it is ``late``. What it says itself tells more."""

    late = False


class RingRoad(Road):
    """``slots`` of the ring, whose memory, that of a device if it is ``on_device``, is mapped where this process
    reaches it; else bytes go over the connection. Raises ``StreamBroken`` where the worker gives up, or has made no
    room for ``deadline_s``."""

    def __init__(
        self, address: TcpAddress, memory: Address | None, slots: int, deadline_s: float, *, on_device: bool = False
    ) -> None:
        self._slots, self._deadline_s = slots, deadline_s
        self._memory: torch.Tensor | None = None
        self._arena: OpenArena | None = None
        self._sending = threading.Lock()
        self._heard = threading.Condition()
        self._taken, self._over, self._failure = 0, False, ""
        self._connection, self._where = connect(address)
        try:
            wait_for_ever(self._connection, sending_s=deadline_s)
            if memory is not None:
                self._attach(memory, on_device)
            self._ear = threading.Thread(target=self._listen, name="bcp-push-ring", daemon=True)
            self._ear.start()
        except BaseException:
            self._connection.close()
            self._give_memory_up()
            raise

    def _attach(self, memory: Address, on_device: bool) -> None:
        if not on_device:
            self._memory = attach(memory)
            return
        self._arena = attach_device(memory)
        if self._arena is not None:
            self._memory = self._arena.memory

    def write(self, place: Place, data: torch.Tensor, digest: int) -> None:
        with self._heard:
            self._wait_until(lambda: place.wave < self._taken + self._slots, "make room")
        if self._memory is not None:
            self._memory[place.offset : place.offset + data.numel()].copy_(data, non_blocking=True)
            settle([data, self._memory])
        self._send(place.chunk, b"" if self._memory is not None else byte_view(data.cpu()), digest)

    def check(self) -> None:
        """Raise what the worker has told of its failure."""
        if self._failure:
            raise StreamBroken(self._failure)

    def finish(self) -> None:
        self._send(END, b"", 0)
        with self._heard:
            self._wait_until(lambda: self._over, "confirm what was sent")
        self._give_memory_up()  # a worker can give a device's memory back only then

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._ear.join()
        self._connection.close()
        self._give_memory_up()

    def _give_memory_up(self) -> None:
        self._memory = None
        if self._arena is not None:
            self._arena.close()

    def _send(self, chunk: int, data: bytes | memoryview, digest: int) -> None:
        try:
            with self._sending:
                self._connection.sendall(FRAME.pack(chunk, len(data), digest))
                if len(data):
                    self._connection.sendall(data)
        except OSError as error:
            with self._heard:
                # Its last words may be on their way.
                self._heard.wait_for(lambda: self._over or self._failure, self._deadline_s)
            raise StreamBroken(
                self._failure or f"the connection to the worker at {self._where} broke: {error}"
            ) from error

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        while True:
            self.check()
            if condition():
                return
            if self._over:
                raise StreamBroken(f"the worker at {self._where} ended the stream")
            before = self._taken
            if not self._heard.wait(self._deadline_s) and self._taken == before:
                broken = StreamBroken(
                    f"the worker at {self._where} did not {what} within {self._deadline_s:g} s; is its process stopped?"
                )
                broken.late = True
                raise broken

    def _listen(self) -> None:
        try:
            while self._hear():
                pass
        except (OSError, EngineError, ValueError, msgpack.UnpackException) as error:
            with self._heard:
                if not self._over:
                    self._failure = self._failure or f"the connection to the worker at {self._where} broke: {error}"
                self._heard.notify_all()

    def _hear(self) -> bool:
        """One frame; False after the last."""
        kind, number = STATUS.unpack(receive(self._connection, STATUS.size))
        if kind == FAILED:
            error, text = msgpack.unpackb(receive(self._connection, min(number, _MAX_TEXT)))
            failure = f"the worker at {self._where} ended the stream: {error}: {text}"
        with self._heard:
            if kind == TAKEN:
                self._taken = number
            elif kind == FAILED:
                self._failure = failure
            else:
                self._over = True
            self._heard.notify_all()
        return bool(kind == TAKEN)
