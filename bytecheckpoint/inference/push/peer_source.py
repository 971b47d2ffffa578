"""A worker that sends its served version to workers of engines that join.

The coordinator of the join sends four requests: ``hold`` describes the served version and keeps its bytes, ``send``
begins to send, ``send_status`` returns the outcome, and ``release`` ends the transfer. A transfer whose deadline has
expired ends on its own. Each transfer has one thread, so the worker keeps serving.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
import xxhash

from ...engine.tensor_bytes import byte_view, copy_elements
from ...errors import CorruptionError, DeadlineError, EngineError, PlanError, StateError
from ...runtime.threads import run_daemon
from ...tensors.dtypes import DType
from ...tensors.geometry import Box
from ..layouts.parts import torch_dtype_of
from .memory import HeldVersion
from .messages import SenderLost, without_traceback
from .quantizer import Quantizer
from .sender import PushAssignment, Sender
from .sources import PushSource
from .transports.base import Transport, TransportBroken
from .transports.shared_memory import SharedArena

_JOIN_S = 2.0  # for a thread that must end; one that is connecting ends later

HeldType = tuple[Box, DType]

_log = logging.getLogger(__name__)


def held_type(held: Sequence[HeldType], box: Box) -> DType:
    """Return the dtype in which a worker that holds ``held`` of a tensor sends ``box``. Raises ``PlanError``."""
    for outer, dtype in held:
        if outer.contains(box):
            return dtype
    raise PlanError(f"{box} is not held; the plan belongs to another version")


class ArenaSource(PushSource):
    """One worker's share of its served version.

    ``fetch`` may return other dtypes than ``table`` states: those in which the worker received its parts. Where it
    received a box in several, the table's dtype comes first. Each fetched chunk is verified once.
    """

    def __init__(self, version: HeldVersion) -> None:
        self.table, self.version = version.table, version.version
        self._layout, self._memory, self._digests = version.layout, version.memory, version.digests
        self._verified: set[int] = set()
        stored = {name: meta.dtype for name, meta in self.table.rows}
        parts = enumerate(self._layout.parts)
        self._parts: dict[str, list[int]] = {}
        for number, part in sorted(parts, key=lambda one: one[1].dtype != stored.get(one[1].name)):
            self._parts.setdefault(part.name, []).append(number)
        held = [self._layout.parts[number] for numbers in self._parts.values() for number in numbers]
        self.held, self.types = [(part.name, part.box) for part in held], [part.dtype for part in held]

    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Raises ``CorruptionError`` when memory has changed since the push."""
        return [self._view(name, box) for name, box in boxes]

    def _view(self, name: str, box: Box) -> torch.Tensor:
        for number in self._parts.get(name, ()):
            part = self._layout.parts[number]
            if part.box.contains(box):
                return self._assemble(number, box, torch_dtype_of(part.dtype))
        raise PlanError(f"{name} {box} is not held here; the plan belongs to another version")

    def _assemble(self, part: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of one chunk, or a copy from several."""
        out: torch.Tensor | None = None
        for number, held, common in self._layout.overlaps(part, box):
            source = self._chunk(number, held, dtype)[common.relative_to(held).slices()]
            if common == box:
                return source
            out = torch.empty(box.lengths, dtype=dtype) if out is None else out
            copy_elements(out[common.relative_to(box).slices()], source)
        return torch.empty(box.lengths, dtype=dtype) if out is None else out

    def _chunk(self, number: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        data = self._memory[self._layout.span(number)]
        if number not in self._verified:
            if xxhash.xxh3_64_intdigest(byte_view(data)) != self._digests[number]:
                raise CorruptionError(
                    f"version {self.version!r} is damaged in memory: {self._layout.name_of(number)}; it was not sent, "
                    "push to this engine again"
                )
            self._verified.add(number)
        return data.view(dtype).view(box.lengths)


class PeerSource:
    """The transfers of one worker. For the thread that runs the model; no method waits, except ``close``."""

    def __init__(self) -> None:
        self._transfers: dict[str, _Transfer] = {}

    def hold(self, message: Mapping[str, Any], served: HeldVersion) -> dict[str, Any]:
        """Describe the served version (``PushSource.describe``). Its bytes stay unchanged for ``hold_s`` seconds and
        while they are sent."""
        self._end_expired()
        assert served.arena is not None
        source = ArenaSource(served)
        self._transfers[message["transaction"]] = _Transfer(served.arena, source, message["hold_s"])
        return {"description": source.describe(), "finite": served.finite}

    def reads(self, version: HeldVersion) -> bool:
        """Return whether a transfer still needs the bytes of ``version``."""
        self._end_expired()
        return any(one.arena is not None and one.arena is version.arena for one in self._transfers.values())

    def send(self, message: Mapping[str, Any], receiver: str) -> dict[str, Any]:
        """Begin to send."""
        transfer = self._of(message["transaction"])
        sender = Sender(message["deadline_s"], tcp_only=message["tcp_only"])
        sender.finite = message["finite"]
        assignment = sender.take(message["assignments"][receiver])
        transfer.begin(sender, assignment)
        return {}

    def send_status(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outcome (None while sending) and the bytes written. Raises the failure of the transfer."""
        transfer = self._of(message["transaction"])
        return {"outcome": transfer.outcome(), "written": transfer.written}

    def release(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """End a transfer and its hold on the served version."""
        transfer = self._transfers.pop(message["transaction"], None)
        if transfer is not None:
            transfer.end("the coordinator ended it")
        return {}

    def close(self, reason: str) -> None:
        for transfer in self._transfers.values():
            transfer.end(reason)
        for transfer in self._transfers.values():
            transfer.join()
        self._transfers.clear()

    def _of(self, transaction: str) -> _Transfer:
        self._end_expired()
        if transaction not in self._transfers:
            raise StateError(
                "this join is over: it took too long, or the worker was restarted or released its memory; join again"
            )
        return self._transfers[transaction]

    def _end_expired(self) -> None:
        for transaction in [transaction for transaction, one in self._transfers.items() if one.has_expired]:
            self._transfers.pop(transaction).end("it took too long")


class _Transfer:
    """One transaction. ``arena`` is None when its bytes are no longer read."""

    def __init__(self, arena: SharedArena, source: ArenaSource, hold_s: float) -> None:
        self.arena: SharedArena | None = arena
        self.written = 0
        self._source: ArenaSource | None = source
        self._deadline = time.monotonic() + hold_s
        self._end_reason = ""
        self._transports: dict[int, Transport] = {}
        self._sending: Future[bytes] | None = None

    @property
    def has_expired(self) -> bool:
        return time.monotonic() > self._deadline

    def begin(self, sender: Sender, assignment: PushAssignment) -> None:
        """Send in a thread."""
        self._transports = sender.shared_memory(assignment)
        self._deadline = time.monotonic() + sender.deadline_s
        self._sending = run_daemon(lambda: self._run(sender, assignment), "bcp-push-send")

    def outcome(self) -> bytes | None:
        if self._sending is None or not self._sending.done():
            return None
        error = self._sending.exception()
        if error is not None:
            raise without_traceback(error)  # a copy: raising the original would add frames to it each time
        return self._sending.result()

    def end(self, reason: str) -> None:
        """Make the thread end soon, if it still runs."""
        self._end_reason = self._end_reason or reason
        if self._sending is None:
            self._release()
        for transport in list(self._transports.values()):
            transport.interrupt()

    def join(self) -> None:
        wait([self._sending] if self._sending else [], _JOIN_S)

    def _check(self) -> None:
        if self._end_reason:
            raise self._ended()
        if self.has_expired:
            raise DeadlineError("sending to another engine took too long")

    def _ended(self) -> EngineError:
        return EngineError(f"sending to another engine was ended: {self._end_reason}")

    def _run(self, sender: Sender, assignment: PushAssignment) -> bytes:
        try:
            return self._write(sender, assignment)
        except BaseException as error:  # noqa: BLE001 - the coordinator raises it
            # Interrupted transports raise other errors. A stream breaks when another sender has failed, whose
            # error is the cause.
            cause = self._ended() if self._end_reason else without_traceback(error)
            if isinstance(cause, TransportBroken):
                cause = SenderLost(str(error))
            _break_cycles(error)
            _log.warning("push: sending to another engine ended: %s", cause)
            raise cause from None
        finally:
            self._release()
            sender.close()

    def _write(self, sender: Sender, assignment: PushAssignment) -> bytes:
        assert self._source is not None
        for target in sender.targets:
            self._check()
            if target not in self._transports:
                sender.deadline_s = max(self._deadline - time.monotonic(), 0.05)
                try:
                    self._transports[target] = sender.connect(assignment, target)
                except EngineError as error:
                    # A target of a stream closes its port when another sender fails, whose error is the cause.
                    raise SenderLost(str(error)) from error
        quantizer = Quantizer(self._source, sender.task)
        quantizer.set_maxima(quantizer.partial_maxima())
        outcome = sender.write(assignment, quantizer, self._transports, self._check, self._count_written)
        if self._end_reason:
            raise self._ended()
        return outcome

    def _count_written(self, nbytes: int) -> None:
        self.written += nbytes

    def _release(self) -> None:
        self.arena = self._source = None
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            transport.close()


def _break_cycles(error: BaseException) -> None:
    """Clear the frames of an error and of its causes: in a reference cycle, these would keep mapped memory until the
    next garbage collection."""
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None:
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None
