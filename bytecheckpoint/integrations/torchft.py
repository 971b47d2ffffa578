"""Heal a replica group of torchft from another one: ``BcpTransport``."""

from __future__ import annotations

import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Condition
from typing import Any

import msgpack
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path
from torchft.checkpointing.transport import CheckpointTransport

from ..checkpointer import Checkpointer
from ..control.acceptor import Acceptor
from ..control.base import SingleProcess
from ..control.connections import Endpoint, Wait, at_most, connect, receive, receive_into, send
from ..errors import ControlError, DeadlineError, MismatchError, UsageError
from ..frameworks.dtensor import dtensor_around, dtensor_boxes, is_dtensor, local_tensor
from ..storage_backends.memory import MemoryBackend

_REQUEST = struct.Struct("!q")  # the step
_REPLY = struct.Struct("!?Q")  # whether the files follow, and the length of their list, or of an error's text
_MOST_REPLY_BYTES = 1 << 24
_PIECE_BYTES = 8 << 20
_STATE, _SHARDED = "state", "sharded"


class BcpTransport(CheckpointTransport[Any]):
    """Sends the state of a rank to the same rank of a replica group that is behind, as a checkpoint in memory.

    Nothing is pickled: a value that is not plain is refused by name, on the sender. Every chunk of the bytes has a
    checksum, which the receiver verifies before it returns. The connection is authenticated with a key, which is in
    ``metadata``; it is not encrypted. The environment variables ``BYTECHECKPOINT_ADDRESS`` (an address or a network
    interface) and ``BYTECHECKPOINT_PORTS`` say where a sender listens.

    The sender copies its state to host memory, and then may change it. It keeps the copy until the end of the step.
    The receiver gets new tensors in host memory. A DTensor arrives as the part that the sender holds, and gets the mesh
    of a DTensor of the receiver with the same sharding.

    Args:
        timeout: How long a sender waits for a receiver, and for the step that it asks for.
        like: A tree with this rank's DTensors, such as the model's state. Needed only where there are some.

    Raises:
        UsageError: Two meshes of ``like`` differ only in their ranks.

    Example:
        >>> transport = BcpTransport(timedelta(seconds=60), like=model.state_dict())
        >>> manager = torchft.Manager(checkpoint_transport=transport, ...)
    """

    def __init__(self, timeout: timedelta, like: object = None) -> None:
        self._like: dict[str, Any] = {}
        for path, one in tree_flatten_with_path(like)[0]:
            if is_dtensor(one):
                empty = dtensor_around(one, torch.empty_like(local_tensor(one), device="meta"))
                if self._like.setdefault(_sharding(path, one), empty).device_mesh != one.device_mesh:
                    raise UsageError(
                        f"{keystr(path)} is on one of two meshes of equal shape; give them dimension names"
                    )
        self._checkpointer = Checkpointer(communicator=SingleProcess())
        self._server = _Server(timeout.total_seconds())

    def metadata(self) -> str:
        """Return where this rank listens, with the key."""
        return self._server.endpoint.text()

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copy the state, and serve it to receivers that ask for this step, until ``disallow_checkpoint``.

        Raises:
            StateError: The state cannot be saved.
        """
        sharded: dict[str, str] = {}

        def local(path: Any, leaf: Any) -> Any:
            if not is_dtensor(leaf):
                return leaf
            sharded[keystr(path)] = _sharding(path, leaf)
            return local_tensor(leaf)

        state = {_STATE: tree_map_with_path(local, state_dict), _SHARDED: sharded}
        with _memory() as store:
            self._checkpointer.save(store.url, state, step=step, options={"deadline_s": timeout.total_seconds()})
        self._server.serve(step, store)

    def disallow_checkpoint(self) -> None:
        """Serve nothing from now on; what is being sent is sent to its end, from the copy."""
        self._server.serve(-1, None)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a step that another rank sends.

        Raises:
            DeadlineError: It did not arrive in time.
            ControlError: The sender is gone, or serves another step.
            CorruptionError: Bytes were changed on the way.
            MismatchError: A DTensor is sharded as none of this rank's own state.
        """
        with _memory() as store:
            self._fetch(src_rank, metadata, step, timeout.total_seconds(), store)
            found = self._checkpointer.open(store.url)
            state, sharded = found.tree(_STATE), found.tree(_SHARDED)
        odd = [f"{path}: {sharding}" for path, sharding in sharded.items() if sharding not in self._like]
        if odd:
            raise MismatchError(
                f"{len(odd)} DTensors arrived that are sharded as none of this rank, such as {odd[0]}; pass the state "
                "of the model as like= to BcpTransport, and shard all replica groups equally"
            )

        def whole(path: Any, leaf: Any) -> Any:
            sharding = sharded.get(keystr(path))
            return leaf if sharding is None else dtensor_around(self._like[sharding], leaf)

        return tree_map_with_path(whole, state) if sharded else state

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002
        """End all connections."""
        self._server.close()
        self._checkpointer.close()

    def _fetch(self, rank: int, metadata: str, step: int, limit_s: float, into: MemoryBackend) -> None:
        end, endpoint = time.monotonic() + limit_s, Endpoint.of_text(metadata)
        try:
            with connect(endpoint, limit_s=limit_s) as connection:
                wait = _until(end)
                send(connection, _REQUEST.pack(step), wait)
                is_there, length = _REPLY.unpack(receive(connection, _REPLY.size, wait))
                if length > _MOST_REPLY_BYTES:
                    raise ConnectionError(f"a list of {length} bytes is no list of files")
                reply = receive(connection, length, wait)
                if not is_there:
                    raise ConnectionError(reply.decode())
                piece = memoryview(bytearray(_PIECE_BYTES))
                for file, size in msgpack.unpackb(reply):
                    with into.create(file, size) as writer:
                        for offset in range(0, size, _PIECE_BYTES):
                            part = piece[: min(_PIECE_BYTES, size - offset)]
                            receive_into(connection, part, wait)
                            writer.write(offset, part)
                        writer.complete()
        except OSError as error:
            if time.monotonic() < end:
                where = f"rank {rank}, port {endpoint.port}"
                raise ControlError(f"receiving step {step} from {where}, failed: {error}") from error
            raise DeadlineError(f"timed out after {limit_s:g} s: step {step} from rank {rank}: {error}") from error


@contextmanager
def _memory() -> Iterator[MemoryBackend]:
    """A store that only its backend refers to after the block."""
    name = f"torchft-{uuid.uuid4().hex}"
    try:
        yield MemoryBackend(name)
    finally:
        MemoryBackend.delete_store(name)


def _sharding(path: Any, dtensor: Any) -> str:
    """What this rank holds of a DTensor, and how its mesh shards it."""
    boxes = ", ".join(str(one.box) for one in dtensor_boxes(keystr(path), dtensor))
    mesh = dtensor.device_mesh
    return f"{boxes} of {list(dtensor.shape)}, {dtensor.placements} on {list(mesh.shape)} {mesh.mesh_dim_names}"


def _until(end: float) -> Wait:
    return lambda connection, event: at_most(max(end - time.monotonic(), 0.0))(connection, event)


class _Server(Acceptor):
    """Sends the files of one step to each receiver that asks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = Condition()
        self._step, self._is_closed = -1, False
        self._store: MemoryBackend | None = None
        super().__init__()

    def serve(self, step: int, store: MemoryBackend | None) -> None:
        with self._changed:
            self._step, self._store = step, store
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed, self._store = True, None
            self._changed.notify_all()
        super().close()

    def _serve(self, connection: socket.socket) -> None:
        wait = at_most(self._limit_s)
        (step,) = _REQUEST.unpack(receive(connection, _REQUEST.size, wait))
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._step >= step, self._limit_s)
            served, store = self._step, self._store
        if served != step or store is None:
            text = b"it serves step %d" % served if served >= 0 else b"it serves none"
            send(connection, _REPLY.pack(False, len(text)) + text, wait)
            return
        files = [(one.key, one.size) for one in store.list()]
        reply = msgpack.packb(files)
        send(connection, _REPLY.pack(True, len(reply)) + reply, wait)
        piece = memoryview(bytearray(_PIECE_BYTES))
        for file, size in files:
            for offset in range(0, size, _PIECE_BYTES):
                part = piece[: min(_PIECE_BYTES, size - offset)]
                store.read_into(file, offset, part)
                send(connection, part, wait)
