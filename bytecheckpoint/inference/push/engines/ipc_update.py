"""One update of an engine's weights by checkpoint-engine's protocol: what this end says to the workers, and hears.

A request to the engine has each worker connect to a socket of its own, answer what comes there, and return when it has
come to the end. Workers wait there without a bound, and would for ever if this end left without a word. So whatever
goes wrong, who has been called is sent away, also one that only comes later: by an exception that it raises, or, where
an engine is not itself after one, by going to the end at once.

The protocol pickles what it says to workers. Nothing that comes from them is unpickled: it is text.
"""

from __future__ import annotations

import functools
import pickle
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import BytecheckpointError, DeadlineError, EngineError, StateError
from .ipc_buckets import Handle
from .ipc_guard import Guard

__all__ = ["Door", "Update", "zeromq"]

# Takes as many arguments as one that opens memory of a GPU, of which workers replace the last by their own number.
_NO_MEMORY = (functools.partial(torch.empty, dtype=torch.uint8), (0,) * 7)

_LOOK_S = 0.05
_LINGER_MS = 1000  # for words that the kernel has not yet taken
_LATE_S = 4.0  # for an engine to notice that its workers have left
_MAX_TEXT = 8000


def zeromq() -> Any:
    """The module. Raises ``StateError`` where it is not installed."""
    try:
        import zmq
    except ImportError as error:
        raise StateError(
            "checkpoint-engine's protocol needs pyzmq: pip install 'bytecheckpoint[checkpoint-engine]'"
        ) from error
    return zmq


@dataclass
class _Worker:
    device: str
    name: str
    """Of the socket."""
    socket: Any
    began: bool = False
    """Whether it was told where the memory is."""
    owes: bool = False
    """Whether it was told something and has not answered."""


class Door(Protocol):
    """How workers are had to take part in an update."""

    name: str

    @property
    def may_raise(self) -> bool:
        """Whether workers may be sent away by an exception."""

    def have_update(self, names: Mapping[str, str]) -> None:
        """Have workers answer at the sockets of these ``names``, by device; return when the engine says that they are
        through."""


class Update:
    """Each worker gets ``patience_s`` for each answer, and none is waited for beyond ``end``, of ``time.monotonic()``.
    ``guard`` stays where this process is killed.

    For one thread. Ends by ``finish`` or ``give_up``. Until ``join`` says that it is over, another update of the same
    engine must not begin.
    """

    def __init__(self, door: Door, devices: Sequence[str], guard: Guard, patience_s: float, end: float) -> None:
        self._zmq = zeromq()
        self._door, self._guard, self._patience_s, self._end = door, guard, patience_s, end
        self._context = self._zmq.Context()
        # Who knows a name can connect to it, and who can be made to connect to another's runs what is sent there.
        names = {device: f"ipc://@bcp-{secrets.token_hex(16)}" for device in devices}
        # As REQ, but it can say something to who owes an answer.
        self._workers = [
            _Worker(device, name, self._context.socket(self._zmq.DEALER)) for device, name in names.items()
        ]
        for worker in self._workers:
            worker.socket.bind(worker.name)
        self._set_guard(self._workers)
        self._request = _Request(door, names)
        self._farewell: threading.Thread | None = None
        self._unexplained: EngineError | None = None

    def join(self, timeout_s: float) -> bool:
        """Wait until the engine has answered the request, and nothing is left of this; False where that takes
        longer."""
        end = time.monotonic() + timeout_s
        threads = [thread for thread in (self._request, self._farewell) if thread is not None]
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _set_guard(self, workers: Sequence[_Worker]) -> None:
        said = {one.name: self._last_words(one, "the sender of the weights is dead") for one in workers}
        self._guard.watch({name: [pickle.dumps(word) for word in words] for name, words in said.items()})

    def _last_words(self, worker: _Worker, text: str) -> list[Any]:
        if self._door.may_raise:
            return [RuntimeError(text)] * 2  # who has not begun answers the first
        return [None, None] if worker.began else [_NO_MEMORY, None, None]

    def begin(self, handles: Sequence[Handle]) -> None:
        """Tell all workers, when they are there, where the memory is."""
        self._meet()
        self._tell_each(handles)
        self._set_guard(self._workers)

    def _meet(self) -> None:
        end = self._deadline()
        missing = list(self._workers)
        while missing:
            over = not self._request.is_alive()
            missing = [worker for worker in missing if not worker.socket.poll(0, self._zmq.POLLOUT)]
            if missing and over:
                raise EngineError(f"{self._missing(missing)} did not take part in an update: {self._request.text}")
            if missing and time.monotonic() >= end:
                raise DeadlineError(
                    f"{self._missing(missing)} did not begin an update within {self._patience_s:.3g} s; is the engine "
                    "busy, or stopped, or on another host?"
                )
            if missing:
                missing[0].socket.poll(1000 * _LOOK_S, self._zmq.POLLOUT)

    def tell(self, what: Any) -> None:
        """Say the same to all workers; none may owe an answer."""
        self._tell_each([what] * len(self._workers))

    def _tell_each(self, what: Sequence[Any]) -> None:
        for worker, one in zip(self._workers, what, strict=True):
            if not self._send(worker, one):
                raise self._gone(worker)
            worker.began = worker.owes = True

    def hear(self) -> None:
        """Return when no worker owes an answer. Raises what the first says that has failed."""
        end = self._deadline()
        poller = self._zmq.Poller()
        for worker in self._workers:
            if worker.owes:
                poller.register(worker.socket, self._zmq.POLLIN)
        while True:
            owing = [worker for worker in self._workers if worker.owes]
            if not owing:
                return
            ready = dict(poller.poll(1000 * _LOOK_S))
            for worker in owing:
                if worker.socket not in ready and self._is_gone(worker):
                    raise self._gone(worker)
                if worker.socket in ready or worker.socket.poll(0):
                    self._take(worker)
                    poller.unregister(worker.socket)
            late = [worker for worker in owing if worker.owes]
            if late and time.monotonic() >= end:
                raise DeadlineError(
                    f"{self._named(late[0])} did not answer within {self._patience_s:.3g} s; is its process stopped?"
                )

    def finish(self) -> str:
        """All workers have come to the end. What is wrong with the engine's own answer, if anything."""
        if not self.join(self._end - time.monotonic()):
            raise DeadlineError(f"{self._door.name} has all weights, but did not end the update in time")
        self._close(0)
        return self._request.error

    def give_up(self, error: BaseException) -> None:
        """Send all workers away, also those that only come later or were stopped: in a thread, while the engine is at
        the request. What that says is added to ``error`` where a worker cannot say itself what was wrong."""
        text = f"the weights were not sent: {error}"[:_MAX_TEXT]
        self._farewell = threading.Thread(target=self._send_away, args=(text,), name="bcp-push-farewell", daemon=True)
        self._farewell.start()
        if not isinstance(error, DeadlineError):  # else it would be waited for in vain
            self.join(min(_LATE_S, max(self._end - time.monotonic(), _LOOK_S)))
        if error is self._unexplained:
            error.args = (f"{error}: {self._request.text}",)

    def _send_away(self, text: str) -> None:
        left = list(self._workers)
        while True:
            over = not self._request.is_alive()
            for worker in [worker for worker in left if worker.socket.poll(0, self._zmq.POLLOUT)]:
                for word in self._last_words(worker, text):
                    self._send(worker, word)
                left.remove(worker)
                self._set_guard(left)
            if over:
                break
            self._request.join(_LOOK_S)
        self._close(_LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        for worker in self._workers:
            worker.socket.close(linger_ms)
        self._context.term()
        self._guard.watch({})

    def _deadline(self) -> float:
        return min(time.monotonic() + self._patience_s, self._end)

    def _send(self, worker: _Worker, what: Any) -> bool:
        """False where it is gone."""
        try:
            # The empty part is what REQ puts there, for REP.
            worker.socket.send_multipart([b"", pickle.dumps(what)], flags=self._zmq.DONTWAIT)
        except self._zmq.Again:
            return False
        return True

    def _take(self, worker: _Worker) -> None:
        said = worker.socket.recv_multipart()[-1].decode(errors="replace")
        worker.owes = False
        if said:
            raise EngineError(f"{self._named(worker)} failed:\n{said[-_MAX_TEXT:].rstrip()}")

    def _is_gone(self, worker: _Worker) -> bool:
        """Who has left is not written to. What it said before is there all the same."""
        return not worker.socket.poll(0, self._zmq.POLLOUT) and not worker.socket.poll(0)

    def _gone(self, worker: _Worker) -> EngineError:
        self._unexplained = EngineError(f"{self._named(worker)} is gone")
        return self._unexplained

    def _named(self, worker: _Worker) -> str:
        return f"the worker on {worker.device} of {self._door.name}"

    def _missing(self, workers: Sequence[_Worker]) -> str:
        return " and ".join(self._named(worker) for worker in workers[:3])


class _Request(threading.Thread):
    """The engine's part. A daemon, as the interpreter must be able to end while an engine is stopped."""

    def __init__(self, door: Door, names: Mapping[str, str]) -> None:
        super().__init__(name="bcp-push-update", daemon=True)
        self._door, self._names = door, names
        self.error = ""
        self.start()

    @property
    def text(self) -> str:
        return "the engine says nothing of it" if self.is_alive() else self.error or "the engine says that it has ended"

    def run(self) -> None:
        try:
            self._door.have_update(self._names)
        except BytecheckpointError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - told by who waits
            self.error = f"{type(error).__name__}: {error}"
