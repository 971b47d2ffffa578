"""One update of an engine's weights by checkpoint-engine's protocol.

A request to the engine makes each worker connect to its own socket, answer the messages that arrive there, and
return after the last one. Workers wait for messages without a bound. Whatever goes wrong, this end therefore releases
every worker, including one that connects only later, by going to the end of the update at once: a worker that raised
an exception would end the engine.

The protocol pickles the messages to the workers. The workers' answers are text; nothing is unpickled here.
"""

from __future__ import annotations

import functools
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import BytecheckpointError, DeadlineError, EngineError, StateError
from ...runtime.threads import run_daemon
from ...version import install_command

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A worker gets the memory of both buckets, as one tensor of bytes, by calling the function with the arguments."""

# Has as many arguments as a handle of GPU memory, of which workers replace the last one by their own device number.
_NO_MEMORY = (functools.partial(torch.empty, dtype=torch.uint8), (0,) * 7)

_POLL_S = 0.05
_LINGER_MS = 1000  # for messages that the kernel has not accepted yet
_LATE_S = 4.0  # for an engine to notice that its workers have ended
_MAX_TEXT = 8000


def zeromq() -> Any:
    """Return the zmq module. Raises ``StateError`` if it is not installed."""
    try:
        import zmq
    except ImportError as error:
        command = install_command("checkpoint-engine")
        raise StateError(f"checkpoint-engine's protocol needs pyzmq: {command}") from error
    return zmq


@dataclass
class _Worker:
    """``has_begun`` when the worker got its handle; ``owes_answer`` while a message is unanswered."""

    device: str
    socket: Any
    has_begun: bool = False
    owes_answer: bool = False

    @property
    def last_messages(self) -> list[Any]:
        return [None, None] if self.has_begun else [_NO_MEMORY, None, None]


class Update:
    """One update of ``engine``, for one thread. It ends by ``finish`` or ``give_up``.

    ``request`` makes the workers connect to sockets, by device, and returns when the engine reports the end. Each
    answer may take ``patience_s``, and no wait lasts beyond ``end`` (of ``time.monotonic()``). Another update of the
    same engine must not begin before ``join`` returns True.
    """

    def __init__(
        self,
        engine: str,
        request: Callable[[Mapping[str, str]], None],
        devices: Sequence[str],
        patience_s: float,
        end: float,
    ) -> None:
        self._zmq = zeromq()
        self._engine, self._patience_s, self._end = engine, patience_s, end
        self._context = self._zmq.Context()
        # The names are secret: a process that has one can connect to it, and a worker executes what it receives.
        names = {device: f"ipc://@bcp-{secrets.token_hex(16)}" for device in devices}
        # DEALER behaves like REQ, but can also send to a worker that owes an answer.
        self._workers = [_Worker(device, self._context.socket(self._zmq.DEALER)) for device in names]
        for worker in self._workers:
            worker.socket.bind(names[worker.device])
        self._request = run_daemon(lambda: request(names), "bcp-push-update")
        self._releasing: Future[None] | None = None

    def join(self, timeout_s: float) -> bool:
        """Wait until the engine has answered and all threads have ended. Return False after ``timeout_s``."""
        running = [self._request] if self._releasing is None else [self._request, self._releasing]
        return not wait(running, max(timeout_s, 0.0)).not_done

    def begin(self, handles: Sequence[Handle]) -> None:
        """Send each worker its handle, when all have connected."""
        for worker in self._workers:
            late = "did not begin an update", "is the engine busy, or stopped, or on another host?"
            self._await([worker], self._zmq.POLLOUT, *late)
        for worker, handle in zip(self._workers, handles, strict=True):
            self._send(worker, handle)

    def send(self, message: Any) -> None:
        """Send a message to all workers, after the answers that they owe."""
        self.wait()
        for worker in self._workers:
            self._send(worker, message)

    def wait(self) -> None:
        """Wait for all owed answers. Raises the first failure that a worker reports."""
        while owing := [worker for worker in self._workers if worker.owes_answer]:
            worker = self._await(owing, self._zmq.POLLIN, "did not answer", "is its process stopped?")
            text = worker.socket.recv_multipart()[-1].decode(errors="replace")
            worker.owes_answer = False
            if text:
                raise EngineError(f"{self._named(worker)} failed:\n{text[-_MAX_TEXT:].rstrip()}")

    def finish(self) -> str:
        """End an update after the workers' last answers. Returns the error in the engine's own answer, if any."""
        if not self.join(self._end - time.monotonic()):
            raise DeadlineError(f"{self._engine} has all weights, but did not end the update in time")
        self._close(0)
        return self._error()

    def give_up(self, error: BaseException) -> None:
        """Release all workers in a thread, including those that connect later or were stopped, for as long as the
        engine handles the request. Adds what the engine reports to ``error``."""
        self._releasing = run_daemon(self._release_workers, "bcp-push-release")
        if not isinstance(error, DeadlineError):  # a late worker will not answer now
            self.join(min(_LATE_S, max(self._end - time.monotonic(), _POLL_S)))
            if self._request.done() and (text := self._error()):
                error.args = (f"{error}: {text}",)

    def _release_workers(self) -> None:
        left = list(self._workers)
        while True:
            has_ended = self._request.done()
            for worker in [worker for worker in left if worker.socket.poll(0, self._zmq.POLLOUT)]:
                for message in worker.last_messages:
                    self._send(worker, message)
                left.remove(worker)
            if has_ended:
                break
            wait([self._request], _POLL_S)
        self._close(_LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        for worker in self._workers:
            worker.socket.close(linger_ms)
        self._context.term()

    def _error(self) -> str:
        """Return the error of the engine's request, which has ended; empty if there is none."""
        error = self._request.exception()
        if error is None or isinstance(error, BytecheckpointError):
            return str(error or "")
        return f"{type(error).__name__}: {error}"

    def _await(self, workers: Sequence[_Worker], event: int, late: str, hint: str) -> _Worker:
        """Return the first worker with an event on its socket: the failure of one may keep others from answering.

        Raises ``EngineError`` for a worker that is gone, and ``DeadlineError``.
        """
        end = min(time.monotonic() + self._patience_s, self._end)
        while True:
            for worker in workers:
                is_connected = worker.socket.poll(0, self._zmq.POLLOUT)
                may_come = is_connected or not (worker.has_begun or self._request.done())
                if worker.socket.poll(0, event):
                    return worker
                if not may_come:
                    raise EngineError(f"{self._named(worker)} takes no part in the update")
            if time.monotonic() >= end:
                raise DeadlineError(f"{self._named(workers[0])} {late} within {self._patience_s:.3g} s; {hint}")
            workers[0].socket.poll(1000 * _POLL_S, event)

    def _send(self, worker: _Worker, message: Any) -> None:
        with suppress(self._zmq.Again):  # it is gone, and the wait for its answer ends
            # REP expects an empty frame first, which REQ would add.
            worker.socket.send_multipart([b"", pickle.dumps(message)], flags=self._zmq.DONTWAIT)
        worker.has_begun = worker.owes_answer = True

    def _named(self, worker: _Worker) -> str:
        return f"the worker on {worker.device} of {self._engine}"
