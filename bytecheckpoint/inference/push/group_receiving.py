"""A worker's part in a group: it does its steps in a thread of its own, into a ring that the model's empties."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
import xxhash

from ...errors import BytecheckpointError, CorruptionError, EngineError
from .device_memory import compute_device
from .digesting import digests_of
from .group import Group, GroupAddress, GroupBackend, GroupBroken, Transfer, check_backend, join_group
from .messages import SenderGone
from .ring import Ring
from .steps import Take, unpack_takes

__all__ = ["GroupMemory", "Membership"]

_SOON_S = 0.5  # in which a thread ends that has nothing to wait for

_log = logging.getLogger(__name__)


class GroupMemory:
    """A ring's: where the backend can receive. Raises as ``check_backend``."""

    address = None

    def __init__(self, backend: GroupBackend, nbytes: int) -> None:
        check_backend(backend)
        device = torch.device("cpu") if backend == "gloo" else compute_device()
        with torch.inference_mode(False):  # another thread writes to it
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


class Membership:
    """In one group at a time, which stays from push to push. For the thread that runs the model."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._takes: list[Take] = []
        self._thread: threading.Thread | None = None
        self.plan = b""
        """Which takes it has."""

    @property
    def name(self) -> str:
        """Of the group; empty where it is in none, or in one that is of no use any more."""
        return "" if self._group is None else self._group.name

    def begin(self, address: GroupAddress, rank: int, takes: bytes | None, ring: Ring) -> None:
        """Join where it is another group, and begin to receive into ``ring``. ``takes`` are those of last time where
        they are None. Raises ``EngineError``."""
        if self.name != address.name:
            self.leave()
            self._group = join_group(address, rank)
        if takes is not None:
            self._takes, self.plan = unpack_takes(takes), xxhash.xxh3_128_digest(takes)
        assert self._group is not None
        # A daemon, as it may be waiting for a sender that is stopped when the interpreter ends.
        self._thread = threading.Thread(target=self._run, args=(self._group, ring), name="bcp-push-group", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """This push is over. A group that is still at it has been left by some, and is left."""
        if self._thread is not None:
            self._thread.join(_SOON_S)
            if self._thread.is_alive():
                self.leave()
            self._thread = None

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _run(self, group: Group, ring: Ring) -> None:
        try:
            steps = _Steps(group, ring, self._takes)
            for step in steps.numbers:
                steps.do(step)
        except Exception as error:  # noqa: BLE001 - the model's thread raises it
            known = SenderGone(str(error)) if isinstance(error, GroupBroken) else error
            if not isinstance(known, BytecheckpointError):
                _log.warning("push: receiving by a group failed", exc_info=True)
                known = EngineError(f"receiving by a group failed: {type(error).__name__}: {error}")
            ring.fail(known)  # before others hear of it, who then end what this ring hears of
            group.leave()
            if self._group is group:
                self._group = None


class _Steps:
    """Of one push."""

    def __init__(self, group: Group, ring: Ring, takes: Sequence[Take]) -> None:
        self._group, self._ring = group, ring
        self._begun: dict[int, list[Take]] = {}
        self._relayed: dict[int, list[Take]] = {}
        for take in takes:
            self._begun.setdefault(take.turn.step, []).append(take)
            if take.last_step > take.turn.step:
                self._relayed.setdefault(take.last_step, []).append(take)
        self.numbers = sorted({*self._begun, *self._relayed})
        self._places: dict[int, torch.Tensor] = {}
        self._told: dict[int, torch.Tensor] = {}

    def do(self, step: int) -> None:
        """What this worker has to do in it. Raises what is wrong."""
        begun, relayed = self._begun.get(step, []), self._relayed.get(step, [])
        if begun:
            self._ring.make_room([take.chunk for take in begun])
        for take in begun:
            self._places[take.chunk] = self._ring.claim(take.chunk, take.nbytes)
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        for take in relayed + begun:
            place = self._places[take.chunk]
            receives += [(party, place[begin:end]) for party, begin, end in take.receives(step)]
            sends += [(party, place[begin:end]) for party, begin, end in take.relays(step)]
        told = self._room_for_digests(begun)
        receives += [(sender, digests.view(torch.uint8)) for sender, digests in told.items()]
        self._group.exchange(sends, receives, step, self._ring.check)
        for sender, digests in told.items():
            of_sender = [take.chunk for take in begun if take.sender == sender]
            self._told.update(zip(of_sender, digests, strict=True))
        self._prove(relayed + [take for take in begun if take.last_step == step])

    def _room_for_digests(self, begun: Sequence[Take]) -> dict[int, torch.Tensor]:
        counts: dict[int, int] = {}
        for take in begun:
            counts[take.sender] = counts.get(take.sender, 0) + 1
        return {
            sender: torch.empty(count, dtype=torch.int64, device=self._group.device)
            for sender, count in sorted(counts.items())
        }

    def _prove(self, takes: Sequence[Take]) -> None:
        if not takes:
            return
        found = digests_of([self._places.pop(take.chunk) for take in takes])
        told = torch.stack([self._told.pop(take.chunk) for take in takes])
        for take, here, there in zip(takes, found.tolist(), told.tolist(), strict=True):
            if here != there:
                raise CorruptionError(self._ring.damaged(take.chunk))
            self._ring.here(take.chunk, here % (1 << 64))
