"""Chunks over a process group: each chunk leaves its sender once, and its replica set broadcasts it.

The replica set of a chunk is the set of workers that request it. The sender sends the chunk to one of them, the root,
which broadcasts it to the others. Senders and workers handle the chunks in one common order, one at a time, so they
cannot deadlock: the first unfinished chunk waits for no other one. Its room in a ring buffer depends only on chunks
before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgpack
import torch

from ....errors import EngineError
from ....runtime.threads import run_daemon
from ..layout import ArrivedChunk, ChunkTarget, Write
from ..messages import SenderLost
from .base import OutgoingChunk, Transport, TransportBroken
from .cuda_ipc import synchronize
from .group import Check, Group, GroupAddress, Membership
from .ring import RingBuffer

_SOON_S = 0.5  # a thread that waits for no other member ends within this time

_log = logging.getLogger(__name__)


class Reception(NamedTuple):
    """How one worker receives one chunk, which it stores in ``chunks`` (several where it requests the box twice).

    ``members`` is the replica set. Senders come before workers in the numbering of members.
    """

    sender: int
    root: int
    members: tuple[int, ...]
    chunks: tuple[int, ...]
    nbytes: int


def plan_receptions(order: Sequence[tuple[int, Write]], senders: int, targets: int) -> list[list[Reception]]:
    """Return what each target receives, in the common ``order`` of writes; each write comes with its sender."""
    found: list[list[Reception]] = [[] for _ in range(targets)]
    for sender, write in order:
        members = tuple(sorted({senders + place.target for place in write.places}))
        root = senders + _root(write.places)
        for member in members:
            chunks = tuple(place.chunk for place in write.places if senders + place.target == member)
            found[member - senders].append(Reception(sender, root, members, chunks, write.nbytes))
    return found


def _root(places: Sequence[ChunkTarget]) -> int:
    """Return the target that gets a chunk from its sender: a different one from chunk to chunk, to spread the work."""
    targets = sorted({place.target for place in places})
    return targets[places[0].chunk % len(targets)]


class GroupTransport(Transport):
    """Sends chunks to the roots of their replica sets, in the order of this sender's ``writes``. Raises
    ``TransportBroken``, and what ``check`` raises."""

    def __init__(self, group: Group, senders: int, writes: Sequence[Write], check: Check) -> None:
        self._group, self._senders, self._check = group, senders, check
        self._number = {write.places[0]: number for number, write in enumerate(writes)}
        self._next = 0
        self._changed = threading.Condition()
        self._is_interrupted = False

    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        for chunk in chunks:
            self._write(*chunk)

    def _write(self, places: Sequence[ChunkTarget], data: torch.Tensor, digest: int) -> None:
        number = self._number[places[0]]
        with self._changed:
            self._changed.wait_for(lambda: self._next == number or self._is_interrupted)
            if self._is_interrupted:
                raise TransportBroken("this sender ended the transfer")
        label = torch.frombuffer(bytearray(digest.to_bytes(8, "big")), dtype=torch.uint8).to(self._group.device)
        synchronize([data, label])  # the group uses other streams
        self._group.send(self._senders + _root(places), [data, label], self._check)
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Do nothing: the group outlasts the push."""


class GroupMember(Membership):
    """A worker's membership in one group at a time, over many pushes. For the thread of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._receiving: Future[None] | None = None

    def begin(self, address: GroupAddress, rank: int, packed: bytes, ring: RingBuffer) -> None:
        """Join the group if it is another one, and begin to receive into ``ring`` in a thread. ``packed`` are the
        receptions. Raises ``EngineError``."""
        group = self.join(address, rank)
        receptions = [Reception(*one) for one in msgpack.unpackb(packed, use_list=False)]
        sets = {reception.members for reception in receptions if len(reception.members) > 1}
        try:
            group.form_subgroups(sorted(sets))
        except EngineError:
            self.leave()  # members may have formed different subgroups
            raise
        self._receiving = run_daemon(lambda: self._run(group, rank, receptions, ring), "bcp-push-group")

    def end(self) -> None:
        """End this push. A thread that still waits has lost other members, so this worker leaves the group."""
        if self._receiving is not None:
            if not wait([self._receiving], _SOON_S).done:
                self.leave()
            self._receiving = None

    def _run(self, group: Group, rank: int, receptions: Sequence[Reception], ring: RingBuffer) -> None:
        try:
            for reception in receptions:
                _receive(group, rank, ring, reception)
        except Exception as error:  # noqa: BLE001 - the model's thread raises it
            _log.warning("push: receiving from a group ended", exc_info=error)
            is_lost = isinstance(error, TransportBroken)
            ring.fail(SenderLost(str(error)) if is_lost else error)  # before others notice: theirs must not hide this
            group.leave()
            if self._group is group:
                self._group = None


def _receive(group: Group, rank: int, ring: RingBuffer, reception: Reception) -> None:
    ring.wait_for_room(reception.chunks)
    places = [ring.claim(chunk, reception.nbytes) for chunk in reception.chunks]
    label = torch.empty(8, dtype=torch.uint8, device=group.device)
    if reception.root == rank:
        group.receive(reception.sender, [places[0], label], ring.check)
    if len(reception.members) > 1:
        group.broadcast(reception.members, reception.root, [places[0], label], ring.check)
    for place in places[1:]:
        place.copy_(places[0])
    digest = int.from_bytes(bytes(label.tolist()), "big")
    ring.verify([ArrivedChunk(*one, digest) for one in zip(reception.chunks, places, strict=True)])
