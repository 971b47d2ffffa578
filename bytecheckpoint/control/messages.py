"""The messages between ranks, and how a rank introduces itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgpack

MessageKind = Literal["payload", "waiting", "report", "failure", "left", "closing", "probe", "alive"]
"""``payload``: an exchange. ``waiting``: a note that names the ranks that the sender waits for. ``report``: a failure,
on its way to rank 0. ``failure``: the failure that every rank raises, on its way down. ``left``: the sender and all
ranks below it have left the operation. ``closing``: the sender closes its communicator. ``probe``: the receiver must
answer with ``alive``."""


class Introduction(NamedTuple):
    """The rank that connects, and for what: control messages, one stream of an operation, or to ask for messages again.

    Only the higher of two ranks connects for messages. The lower one asks it to.
    """

    sender: int
    purpose: Literal["messages", "stream", "again"]
    operation: str = ""
    channel: str = ""


class Message(NamedTuple):
    """A message that belongs to one operation."""

    kind: MessageKind
    operation: str
    phase: str = ""
    body: bytes = b""

    def pack(self) -> bytes:
        """Encode."""
        return bytes(msgpack.packb(self))

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        """Decode what ``pack`` returned."""
        return cls(*msgpack.unpackb(data))


class WaitStep(NamedTuple):
    """A rank waits in a phase for other ranks."""

    rank: int
    phase: str
    missing: list[int]


def pack_branch(payloads: Sequence[bytes]) -> bytes:
    """Combine the payloads of a rank and of all ranks below it."""
    return payloads[0] if len(payloads) == 1 else bytes(msgpack.packb(payloads))


def unpack_branch(data: bytes, count: int) -> list[bytes]:
    """Separate ``count`` payloads."""
    return [data] if count == 1 else list(msgpack.unpackb(data))
