"""A worker that gives what it serves to workers of engines that join. One thread for each, beside that of the model.

``held`` says what there is, and keeps it as it is; ``give`` begins; ``given`` tells how it went, and shows that whoever
asks is still there; ``let_go`` ends it. Where nobody asks any more, or the deadline has passed, it ends by itself.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgpack

from ...errors import DeadlineError, EngineError, StateError
from .arena import Address, Arena
from .arena_source import ArenaSource
from .layout import Layout
from .messages import SenderGone, Table, without_frames
from .quantizer import Quantizer
from .ring_road import RingRoad, StreamBroken
from .roads import Road, SharedMemory, Tcp
from .tcp_wire import TcpAddress
from .writing import Job, unpack_writes, write_all

__all__ = ["Gives"]

_JOIN_S = 2.0  # waited for a thread that was told to end; it ends later where it is connecting

_Ways = dict[int, Callable[[float], Road]]

_log = logging.getLogger(__name__)


class Served(Protocol):
    """A version that a worker serves, and its bytes."""

    table: Table
    layout: Layout
    arena: Arena | None
    digests: list[int]
    version: int | str | None


class Gives:
    """What one worker gives at a time. For the thread that runs the model; none of it waits."""

    def __init__(self) -> None:
        self._gives: dict[str, _Give] = {}

    def held(self, message: Mapping[str, Any], served: Served | None, torn: str) -> dict[str, Any]:
        """What there is to give, as ``Source.describe`` has it, and the types of its boxes. It stays as it is for
        ``hold_s`` seconds, and while it is given."""
        self._forget_old()
        if torn:
            raise StateError(f"it serves no whole version ({torn}), so there is nothing to give; push to it anew")
        if served is None:
            raise StateError(
                "it serves what it started with, which nobody pushed, so there is nothing to give; push into it first, "
                "or take another engine"
            )
        if served.arena is None:
            raise StateError(
                f"it serves version {served.version!r} and has its bytes no more, as its memory was given back or is "
                "short; push into it anew, or take another engine"
            )
        source = ArenaSource(served.table, served.layout, served.arena.memory, served.digests, served.version)
        self._gives[message["transaction"]] = _Give(served.arena, source, message["hold_s"])
        return {"description": source.describe(), "types": [dtype.name for dtype in source.types]}

    def reads(self, weights: Served) -> bool:
        """Whether the bytes of ``weights`` must stay as they are."""
        self._forget_old()
        return any(give.arena is not None and give.arena is weights.arena for give in self._gives.values())

    def give(self, message: Mapping[str, Any], receiver: str) -> dict[str, Any]:
        """Begin; or say which targets are not reached from here, and have no address yet. A worker that has an arena
        for each transaction has the older one's no more, so what is still given to it ends."""
        give = self._of(message["transaction"])
        if give.begun:
            return {"unreached": []}
        assignment = msgpack.unpackb(message["assignments"][receiver])
        jobs = unpack_writes(assignment["writes"])
        targets = sorted({place.target for job in jobs for place in job.places})
        ways = _ways(targets, assignment, message["addresses"], message["tcp_only"])
        if len(ways) < len(targets):
            return {"unreached": [target for target in targets if target not in ways]}
        joining = frozenset(message["receivers"])
        for other in self._gives.values():
            if other is not give and other.joining & joining:
                other.end("another join of the same engine began")
        give.begin(
            jobs, assignment["task"], assignment["known"], ways, joining, message["deadline_s"], message["lease_s"]
        )
        return {"unreached": []}

    def given(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What came of it, None while it goes on, and the bytes written. Raises what it failed with."""
        give = self._of(message["transaction"])
        return {"outcome": give.outcome(), "written": give.written}

    def let_go(self, message: Mapping[str, Any]) -> dict[str, Any]:
        give = self._gives.pop(message["transaction"], None)
        if give is not None:
            give.end("whoever asked for it gave it up")
        return {}

    def close(self, why: str) -> None:
        for give in self._gives.values():
            give.end(why)
        for give in self._gives.values():
            give.join()
        self._gives.clear()

    def _of(self, transaction: str) -> _Give:
        self._forget_old()
        if transaction not in self._gives:
            raise StateError(
                "this join is over: it took too long, or the worker was restarted or gave its memory back; join again"
            )
        return self._gives[transaction]

    def _forget_old(self) -> None:
        for transaction in [transaction for transaction, give in self._gives.items() if give.late]:
            self._gives.pop(transaction).end("nobody asked for it any more")


def _ways(targets: list[int], assignment: Mapping[str, Any], addresses: Mapping[int, Any], tcp_only: bool) -> _Ways:
    """To those targets that are reached, and how a road there is opened, in so many seconds."""
    arenas, rings = assignment["arenas"], assignment["rings"]
    ways: _Ways = {}
    for target in targets:
        if rings:
            slots, _, port = rings[target]
            memory = None if tcp_only else Address.from_plain(arenas[target])
            ways[target] = partial(RingRoad, TcpAddress.from_plain(port), memory, slots)
        elif target in addresses:
            ways[target] = partial(Tcp, TcpAddress.from_plain(addresses[target]))
        elif not tcp_only and (road := SharedMemory.open(Address.from_plain(arenas[target]))) is not None:
            ways[target] = partial(_opened, road)
    return ways


def _opened(road: Road, deadline_s: float) -> Road:
    return road


class _Give:
    """Of one transaction. ``arena`` is None when it is read no more."""

    def __init__(self, arena: Arena, source: ArenaSource, hold_s: float) -> None:
        self.arena: Arena | None = arena
        self.joining: frozenset[str] = frozenset()
        self._source: ArenaSource | None = source
        self._deadline = self._until = time.monotonic() + hold_s
        self._lease_s = hold_s
        self._ended = ""
        self._roads: dict[int, Road] = {}
        self._thread: threading.Thread | None = None
        self._outcome: bytes | None = None
        self._error: BaseException | None = None
        self.written = 0

    @property
    def begun(self) -> bool:
        return self._thread is not None

    @property
    def late(self) -> bool:
        return time.monotonic() > self._until

    def begin(
        self,
        jobs: list[Job],
        task: bytes,
        known: list[Any],
        ways: _Ways,
        joining: frozenset[str],
        deadline_s: float,
        lease_s: float,
    ) -> None:
        self.joining, self._lease_s = joining, lease_s
        self._deadline = time.monotonic() + deadline_s
        self._renew()
        # A daemon, as it may be waiting for a worker that is stopped when the interpreter ends.
        self._thread = threading.Thread(
            target=self._run, args=(jobs, task, known, ways), name="bcp-push-give", daemon=True
        )
        self._thread.start()

    def outcome(self) -> bytes | None:
        self._renew()
        if self._error is not None:
            raise without_frames(self._error)  # and not itself, which would keep those that it is raised through
        return self._outcome

    def end(self, why: str) -> None:
        """Have the thread end soon. Nothing, where it has."""
        self._ended = self._ended or why
        if self._thread is None:
            self._drop()
        for road in list(self._roads.values()):
            road.interrupt()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _renew(self) -> None:
        self._until = min(self._deadline, time.monotonic() + self._lease_s)

    def _check(self) -> None:
        if self._ended:
            raise self._broken_off()
        if self.late:
            raise DeadlineError("what was to be given to another engine was not there in time, or nobody asked for it")

    def _broken_off(self) -> EngineError:
        return EngineError(f"what was being given to another engine was broken off: {self._ended}")

    def _run(self, jobs: list[Job], task: bytes, known: list[Any], ways: _Ways) -> None:
        try:
            self._outcome = self._write(jobs, task, known, ways)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the outcome raises it
            # Roads that are interrupted say something else; and a stream breaks where another that gives has failed,
            # which then says why.
            told = SenderGone(str(error)) if isinstance(error, StreamBroken) else without_frames(error)
            self._error = self._broken_off() if self._ended else told
            _take_apart(error)
            _log.warning("push: giving ended: %s", self._error)
        finally:
            ways.clear()
            self._drop()

    def _write(self, jobs: list[Job], task: bytes, known: list[Any], ways: _Ways) -> bytes:
        assert self._source is not None
        for target, open_road in ways.items():
            self._check()
            self._roads[target] = open_road(max(self._deadline - time.monotonic(), 0.05))
        quantizer = Quantizer(self._source, task)
        digests, became = write_all(
            self._source, jobs, quantizer, self._roads, known, self._check, wrote=self._count_written
        )
        if self._ended:
            raise self._broken_off()
        packed: bytes = msgpack.packb([digests, became])
        return packed

    def _count_written(self, nbytes: int) -> None:
        self.written += nbytes

    def _drop(self) -> None:
        """Nothing is read or written any more."""
        self.arena = self._source = None
        roads, self._roads = self._roads, {}
        for road in roads.values():
            road.close()


def _take_apart(error: BaseException) -> None:
    """It and those behind it, of all threads, and what the functions that they went through knew: until the interpreter
    next looks for circles, these might keep all memory that was mapped."""
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None:
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None
