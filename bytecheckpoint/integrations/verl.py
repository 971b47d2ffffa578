"""Push the weights of verl's actors to its rollouts: the backend ``bcp`` of its checkpoint engines."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future

import msgpack
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..control.acceptor import all_addresses, connect
from ..control.addresses import listen
from ..control.connections import Buffer, Endpoint, LoopThread, accept, at_most, new_key, receive, receive_into, send
from ..engine.tensor_bytes import as_bytes, byte_view
from ..errors import BytecheckpointError, ControlError, CorruptionError, DeadlineError
from ..format.checksums import checksum_of
from ..tensors.dtypes import find_dtype

_FRAME = struct.Struct("!I16s")  # the length of what follows, and its checksum
_REPORT = struct.Struct("!I")  # the length of a failure's text, or 0 when all workers have everything
_PIECE_BYTES = 4 << 20

_Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("bcp")
class BcpCheckpointEngine(CheckpointEngine):
    """Sends each tensor from the first actor through a chain of all workers of the rollouts.

    A tensor travels as a message with its name, dtype and shape, and as pieces, each with a checksum. A worker verifies
    a piece before it sends it on, and a tensor before it gives it to its rollout. Nothing is pickled. Connections are
    authenticated with a new key in each update; they are not encrypted. Workers listen where the environment variables
    ``BYTECHECKPOINT_ADDRESS`` (an address or a network interface) and ``BYTECHECKPOINT_PORTS`` say.

    Args:
        bucket_size: How many bytes of host memory a process uses, in addition to two tensors.
        is_master: Whether this is the first actor.
        timeout_s: How long a process waits for another one that does not move.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:  # noqa: FBT001, FBT002
        self._batch_bytes = bucket_size // 2  # while one batch travels, the next one is made, or the last one used
        self._is_master, self._timeout_s = is_master, timeout_s
        self._accepting: LoopThread | None = None
        self._accepted: Future[socket.socket] = Future()
        self._incoming: socket.socket | None = None
        self._outgoing: socket.socket | None = None
        self._name = self._source = self._target = self._sent = ""

    def prepare(self) -> str:
        """Listen, and return where, with the key. The first actor only sends."""
        self.finalize()
        if self._is_master:
            return ""
        listener, self._accepted = listen(), Future()
        endpoint = Endpoint(all_addresses(), listener.getsockname()[1], new_key())
        self._accepting, accepted = LoopThread("bcp-verl-accept"), self._accepted
        self._accepting.submit(accept(listener, endpoint.key, lambda _, connection: accepted.set_result(connection)))
        return endpoint.text()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return the arguments of ``init_process_group`` of all actors, and of all workers of rollouts."""
        names = ["actor rank 0", *(f"rollout rank {rank}" for rank in range(rollout_world_size))]
        ends = [*metadata[actor_wg_world_size:], ""]
        columns = {"name": names, "source": ["", *names[:-1]], "target": [*names[1:], ""], "address": ends}
        others = [""] * (actor_wg_world_size - 1)
        actors = {key: [column[0], *others] for key, column in columns.items()}
        return actors, {key: column[1:] for key, column in columns.items()}

    def init_process_group(self, name: str, source: str, target: str, address: str) -> None:
        """Connect to the next process of the chain. Actors without a name are not in it. Raises ``EngineError``."""
        self._name, self._source, self._target = name, source, target
        if target:
            self._outgoing = connect(Endpoint.of_text(address))
        elif not name:
            self.finalize()

    def finalize(self) -> None:
        """End all connections."""
        if self._accepting is not None:
            self._accepting.close()
        if self._accepted.done():
            self._accepted.result().close()
        if self._outgoing is not None:
            self._outgoing.close()
        self._accepting = self._incoming = self._outgoing = None

    async def send_weights(self, weights: Iterable[_Named], global_steps: int | None = None) -> None:
        """Send the tensors, and return when all workers have them.

        Raises:
            DeadlineError: A worker did not move for ``timeout_s``.
            ControlError: A worker is gone, or reports an error.
        """
        weights = iter(weights)
        try:
            if self._outgoing is not None:
                await self._send_all(weights, global_steps)
        except BaseException:
            self._stop("")  # the workers need not wait for the rest of the walk
            raise
        finally:
            for _ in weights:  # all actors make each tensor together: without this one, the others would hang
                pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[_Named]:
        """Yield the tensors, on the current accelerator if there is one.

        Raises:
            DeadlineError: Nothing arrived for ``timeout_s``, or the next worker did not move.
            ControlError: Another process is gone or reports an error, or the actors send another step.
            CorruptionError: Bytes were changed on the way.
        """
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        loop, batches = asyncio.get_running_loop(), self._batches(global_steps)
        ahead = loop.run_in_executor(None, next, batches, None)
        try:
            while (batch := await ahead) is not None:
                ahead = loop.run_in_executor(None, next, batches, None)
                for name, tensor in batch:
                    yield name, tensor if device is None else tensor.to(device)
        except BaseException as error:
            ahead.cancel()
            is_own = isinstance(error, BytecheckpointError)
            self._stop(str(error) if is_own else f"{self._name}: its rollout takes no more tensors: {error!r}")
            raise

    async def _send_all(self, weights: Iterator[_Named], global_steps: int | None) -> None:
        loop = asyncio.get_running_loop()
        batch, nbytes = [("the step", msgpack.packb(global_steps))], 0
        sending = loop.run_in_executor(None, self._put, [])
        for name, tensor in weights:
            for data in _frames(name, tensor):
                batch.append((name, data))
                nbytes += len(data)
                if nbytes >= self._batch_bytes:
                    await sending
                    sending = loop.run_in_executor(None, self._put, batch)
                    batch, nbytes = [], 0
        await sending
        await loop.run_in_executor(None, self._put, [*batch, ("the end", msgpack.packb(None))])
        await loop.run_in_executor(None, self._confirm)

    def _batches(self, global_steps: int | None) -> Iterator[list[_Named]]:
        batch: list[_Named] = []
        nbytes = 0
        for name, tensor in self._tensors(global_steps):
            batch.append((name, tensor))
            nbytes += tensor.nbytes
            if nbytes >= self._batch_bytes:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _tensors(self, global_steps: int | None) -> Iterator[_Named]:
        with self._naming(f"waiting {self._timeout_s:g} s for {self._source}"):
            self._incoming = self._accepted.result(self._timeout_s)
        step = msgpack.unpackb(self._relay("the step"))
        if None not in (step, global_steps) and step != global_steps:
            raise ControlError(f"{self._name} expects the weights of step {global_steps}, but those of {step} arrive")
        last = "the step"
        while (entry := msgpack.unpackb(self._relay(f"what follows {last}"))) is not None:
            last, dtype, shape = entry
            tensor = torch.empty(shape, dtype=getattr(torch, find_dtype(dtype).name), device="cpu")
            data = byte_view(tensor)
            for offset in range(0, len(data), _PIECE_BYTES):
                self._relay(last, data[offset : offset + _PIECE_BYTES])
            yield last, tensor
        if self._outgoing is not None:
            self._confirm()
        self._report("")

    def _relay(self, what: str, into: memoryview | None = None) -> Buffer:
        """Receive a frame, verify it, and send it on."""
        assert self._incoming is not None
        wait = at_most(self._timeout_s)
        with self._naming(f"receiving {what} from {self._source}"):
            length, checksum = _FRAME.unpack(receive(self._incoming, _FRAME.size, wait))
            data = memoryview(bytearray(min(length, _PIECE_BYTES))) if into is None else into
            if length == len(data):
                receive_into(self._incoming, data, wait)
        if length != len(data) or checksum_of(data) != checksum:
            raise CorruptionError(f"{self._name}: bytes of {what} were changed on the way from {self._source}")
        if self._outgoing is not None:
            self._put([(what, data)])
        return data

    def _put(self, batch: list[tuple[str, Buffer]]) -> None:
        """Send frames to the next process of the chain."""
        assert self._outgoing is not None
        for self._sent, data in batch:
            with self._naming(f"sending {self._sent} to {self._target}"):
                self._wait_to_send(self._outgoing, select.POLLOUT)
                send(self._outgoing, _FRAME.pack(len(data), checksum_of(data)), self._wait_to_send)
                send(self._outgoing, data, self._wait_to_send)

    def _wait_to_send(self, connection: socket.socket, event: int) -> None:
        """A ``Wait`` that a report ends: before the end of an update, it is that of a failure."""
        poll = select.poll()
        poll.register(connection, event | select.POLLIN)
        found = poll.poll(1000 * self._timeout_s)
        if not found:
            raise TimeoutError(f"it did not move for {self._timeout_s:g} s")
        if found[0][1] & select.POLLIN:
            self._confirm()

    def _confirm(self) -> None:
        """Wait for the report of the next process, and raise what it reports."""
        assert self._outgoing is not None
        wait = at_most(self._timeout_s)
        with self._naming(f"sending {self._sent} to {self._target}"):
            (length,) = _REPORT.unpack(receive(self._outgoing, _REPORT.size, wait))
            failure = receive(self._outgoing, length, wait).decode()
        if failure:
            raise ControlError(failure)

    def _report(self, failure: str) -> None:
        if self._incoming is not None:
            text = failure.encode()
            with contextlib.suppress(OSError):  # the other end notices that the connection ends
                send(self._incoming, _REPORT.pack(len(text)) + text, at_most(self._timeout_s))

    def _stop(self, failure: str) -> None:
        """Report to both neighbours. The connection on which tensors arrive stays open, to send the report."""
        self._report(failure)
        for connection, how in ((self._incoming, socket.SHUT_RD), (self._outgoing, socket.SHUT_RDWR)):
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(how)

    @contextlib.contextmanager
    def _naming(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = DeadlineError if isinstance(error, TimeoutError) else ControlError
            raise kind(f"{self._name}: {action} failed: {str(error) or 'timed out'}") from error


def _frames(name: str, tensor: torch.Tensor) -> Iterator[Buffer]:
    """A tensor as frames, copied to host memory: the next tensor may be made in the same memory."""
    yield msgpack.packb([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    data = as_bytes(tensor.detach().contiguous())
    for offset in range(0, len(data), _PIECE_BYTES):
        yield byte_view(data[offset : offset + _PIECE_BYTES].to("cpu", copy=True))
