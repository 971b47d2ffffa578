"""A worker's side of a push: request tensors, offer memory, verify what arrived, and load it.

Where memory allows, the receiver answers every request at once and waits for nothing, so the worker keeps serving when
a sender dies or stalls. It then holds two arenas: the served version, for a rollback, and the next one. It loads a
version only after every byte has been verified. ``memory.py`` describes the modes that need less memory, and
``lifecycle.py`` the states of a push.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import repeat
from typing import Any

import torch

from ...errors import BytecheckpointError, CorruptionError, EngineError, StateError
from ...runtime.gc_pause import paused
from ...telemetry.trace import notify
from .engine_model import ChunkedTensors, EngineModel, LoadRecord, record_load
from .joins import Holds
from .layout import ChunkStore, Waves
from .leases import PauseLease, unreachable
from .lifecycle import PushLifecycle, PushState
from .memory import STREAMED, HeldVersion, VersionStore, choose_mode, ring_of
from .messages import PROTOCOL, Table, decode, encode, failure_of, pack_parts
from .replay import Replay
from .transports.base import Digests, word_digests, xxh3_digests
from .transports.cuda_ipc import DeviceArena
from .transports.group import GroupAddress
from .transports.group_transport import GroupMember
from .transports.ring import GroupMemory, RingBuffer, RingMemory
from .transports.shared_memory import SharedArena
from .transports.tcp import ChunkServer
from .writing import UNCHANGED, fate_of

_MAX_RECORDS = 4  # of loads: two kinds of senders, each with and without quantization
_CHANGES = frozenset({"prepare", "apply", "stream", "rollback"})  # requests that begin or apply a change
_PATIENCE = 0.8  # of a sender's deadline: a missing chunk is the cause of missing room, so this worker reports first

_DAMAGED = -1  # equal to no digest, so that the next push sends the chunk

_log = logging.getLogger(__name__)


class Receiver:
    """Answers the requests of a push in one worker of an engine.

    Only the thread that runs the model may call it. The TCP servers use separate threads.

    Args:
        model: The worker's model.
        device: The device of the model's weights. For a CUDA device, host memory for chunks is registered with CUDA, so
            that the device copies directly from there.
    """

    def __init__(self, model: EngineModel, device: torch.device | None = None) -> None:
        self.id = secrets.token_hex(8)
        self._model, self._device = model, device
        self._records: dict[bytes, tuple[Table, LoadRecord, bool]] = {}
        self._versions, self._start_version = VersionStore(device), model.start_version
        self._set_aside = 0
        self._known: list[int] = []  # the digests of the next version's memory when this push began
        self._is_served = False  # whether the verified version has the bytes of the served one
        self._ring: RingBuffer | None = None
        self._push = PushLifecycle()
        self._inconsistent_reason = ""
        self._caches_may_be_spoiled = False  # by values that were not finite
        self._lease: PauseLease | None = None
        self._left_paused = False  # whether a push has paused the engine, and has not resumed it
        self._server: ChunkServer | None = None
        self._holds = Holds()
        self._member = GroupMember()

    def answer(self, request: str, base: Receiver | None = None) -> str:
        """Answer a request.

        Args:
            request: The text that ``Engine.call`` carried to this worker.
            base: The receiver of the engine's model, where this one is of a draft model or an adapter. While the model
                serves no consistent version, neither do they, so that nothing resumes the engine.

        Returns:
            The response, which ``Engine.call`` returns. A failure is a response too; this method never raises.
        """
        answer = _header(self.id)
        try:
            message = decode(request)
            answer["nonce"] = message.get("nonce")
            if message.get("protocol") != PROTOCOL:
                raise StateError(
                    f"the sender uses protocol {message.get('protocol')!r} of the push, this worker {PROTOCOL}; "
                    "install the same version of bytecheckpoint on both sides"
                )
            kind = message["kind"]
            handler: Callable[[Mapping[str, Any]], dict[str, Any] | None] = getattr(self, f"_on_{kind}")
            if base is not None and base._inconsistent_reason and kind in _CHANGES:
                raise StateError(
                    f"the engine's model serves no consistent version ({base._inconsistent_reason}); nothing was "
                    "changed, push the model first"
                )
            self._check_replaced()
            if kind in _CHANGES and "weights" in self._model.asleep():
                raise StateError(
                    "the engine sleeps, and the memory of its weights is not mapped; nothing was changed. Call its "
                    'wake_up first, with tags=["weights"] or without'
                )
            notify(f"push.worker.{kind}", "enter")
            with paused():
                answer |= handler(message) or {}
            notify(f"push.worker.{kind}", "exit")
        except Exception as error:  # noqa: BLE001 - the coordinator raises it, see messages.py
            _log.warning("push: %s", error, exc_info=True)
            answer["failure"] = failure_of(error, self._serving())
        served = self._versions.served
        if served is not None:
            answer |= {"version": served.version, "applied_by": served.applied_by}
        else:
            answer["version"] = self._start_version
        answer |= {
            "inconsistent_reason": self._inconsistent_reason or (base._inconsistent_reason if base else ""),
            "left_paused": self._left_paused or (base is not None and base._left_paused),
            "asleep": sorted(self._model.asleep()),
            "transaction": self._push.transaction,
            "has_begun": self._push.has_begun,
            "is_changing": self._push.is_changing or self._has_own_lease,
            "has_sender": self._lease is not None and self._lease.is_connected,
        }
        return encode(answer)

    def close(self) -> None:
        """Free the memory of pushes. The engine keeps serving, but cannot revert any more."""
        self._end_lease()
        self._stop_listening()
        self._member.leave()
        self._holds.close()
        self._versions.release()
        self._push.begin()

    def _serving(self) -> str:
        if self._inconsistent_reason:
            return f"serves no consistent version ({self._inconsistent_reason}); push again or restart it before use"
        served = self._versions.served
        return "serves what it started with" if served is None else f"serves version {served.version!r}"

    def _on_describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of the senders' table that this worker requests."""
        table = Table.unpack(message["table"])
        strict = message["strict"]
        known = self._records.get(table.digest)
        if known is None or known[2] < strict:
            record = record_load(self._model, table, strict=strict)
            while len(self._records) >= _MAX_RECORDS:
                del self._records[next(iter(self._records))]
            known = self._records[table.digest] = table, record, strict
        record = known[1]
        return {"parts": pack_parts(record.parts), "blocks": dict.fromkeys(record.wide, self._model.blocks)}

    def _on_prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a transaction: provide memory for a layout, and return what it already contains."""
        self._stop_listening()
        self._push.begin(message["transaction"])
        digest, packed, table_digest = message["layouts"].get(self.id, (b"", None, b""))
        known_record = self._records.get(table_digest)
        layout = None if known_record is None else self._versions.layout(digest, packed)
        if known_record is None or layout is None:
            return {"unknown": True}
        table, record, _ = known_record
        limit, held, sharers = message["memory"], self._versions.held, message["sharers"][self.id]
        mode = message["mode"] or choose_mode(layout.nbytes, limit, held, sharers)
        version = self._versions.begin(table, layout, mode, self._holds.reads)
        self._push.move(PushState.RECEIVING)
        answer = {"mode": mode, "tokens": self._versions.tokens, "known": [], "served": []}
        if mode == STREAMED:
            waves = ring_of(layout, limit)
            self._ring = _open_ring(message, waves, record, self._device)
            return answer | {
                "arena": self._ring.address,
                "endpoint": self._ring.endpoint,
                "ring": [waves.slots, waves.slot_bytes],
                "group": self._member.name,
            }
        assert version.arena is not None
        self._server = ChunkServer(version.chunks, message["deadline_s"])
        answer |= {"arena": version.arena.address, "endpoint": self._server.endpoint, "known": version.digests}
        self._known, version.digests = version.digests, []
        served = self._served_in(digest)
        if served is not None:
            answer["served"] = served.digests
        return answer

    def _served_in(self, layout: bytes) -> HeldVersion | None:
        """Return the served version if its bytes are here, in this layout."""
        served = self._versions.served
        is_here = served is not None and served.arena is not None and served.layout.digest == layout
        return served if is_here else None

    def _on_join_group(self, message: Mapping[str, Any]) -> None:
        """Join a group and receive from it into the ring buffer."""
        layout = self._current("join_group", message).layout
        assert self._ring is not None
        number = message["members"][self.id]
        self._member.begin(GroupAddress(*message["address"]), number, layout.receptions, self._ring)

    def _on_verify(self, message: Mapping[str, Any]) -> None:
        """First phase of the commit: check that the arena holds the version."""
        version = self._current("verify", message)
        self._stop_listening()
        digests = message["chunks"][self.id]
        served = self._served_in(version.layout.digest)
        unchanged: list[int] = []
        # What is in another process may be gone since.
        is_same = served is not None and (served.table.digest, served.digests) == (version.table.digest, digests)
        self._is_served = is_same = is_same and not self._inconsistent_reason and not self._model.is_remote
        if served is not None:
            known = zip(digests, self._known or repeat(None), served.digests, strict=False)
            unchanged = [chunk for chunk, digest in enumerate(known) if fate_of(*digest) == UNCHANGED]
            for span in map(version.layout.span, () if is_same else unchanged):
                version.memory[span].copy_(served.memory[span])
        faults = (served if served is not None and is_same else version).faults(digests)
        if faults:
            for chunk in faults if is_same else set(faults).intersection(unchanged):
                assert served is not None
                served.digests[chunk] = _DAMAGED
            names = ", ".join(version.layout.name_of(chunk) for chunk in faults[:5])
            raise CorruptionError(
                f"{len(faults)} of {len(digests)} chunks of version {message['version']!r} did not arrive as they were "
                f"sent: {names}; the version was not applied, push it again"
            )
        version.version, version.digests, version.finite = message["version"], digests, message["finite"]
        if is_same:
            version.digests = self._known  # nothing was written
        self._replay_of(version)  # made now, while the engine is not paused yet
        self._push.move(PushState.VERIFIED)

    def _on_apply(self, message: Mapping[str, Any]) -> None:
        """Second phase of the commit: load the verified version. After a failure, load the served one again."""
        version = self._current("apply", message)
        self._push.change()
        if self._is_served:
            if self._versions.served is None:
                self._push.end()
                raise EngineError("the engine has loaded other weights by itself during this push; push again")
            self._versions.repeat(version, self._push.transaction)
        else:
            try:
                self._load(version, version.chunks)
            except Exception as error:
                self._push.end()
                self._roll_back(f"applying version {version.version!r} failed: {type(error).__name__}: {error}")
                raise
            self._versions.serve_next(self._push.transaction)
        self._push.move(PushState.APPLIED)

    def _on_stream(self, message: Mapping[str, Any]) -> None:
        """Load the chunks that arrive in the ring buffer, each of them verified."""
        version, ring = self._current("stream", message), self._ring
        assert ring is not None
        version.version, version.finite = message["version"], message["finite"]
        self._push.change()
        try:
            self._load(version, ring)
            ring.drain()
        except Exception as error:
            self._push.end()
            ring.fail(error)
            self._member.leave()  # the other members notice
            self._roll_back(f"version {version.version!r} was only partly applied: {type(error).__name__}: {error}")
            self._stop_listening()  # no `finish` will come
            raise
        version.digests, self._set_aside = ring.digests, ring.set_aside
        self._versions.serve_next(self._push.transaction)
        self._push.move(PushState.APPLIED)

    def _load(self, version: HeldVersion, store: ChunkStore) -> None:
        self._inconsistent_reason = f"version {version.version!r} was being applied"
        weights = ChunkedTensors(version.table, version.layout, store).tensors()
        replay = self._replay_of(version)
        if replay is None:
            self._model.load(weights)
        else:
            self._model.replay(replay, version.memory, weights)
        self._clear_caches(may_be_spoiled=not version.finite)
        self._inconsistent_reason = ""

    def _replay_of(self, version: HeldVersion) -> Replay | None:
        known = self._records.get(version.table.digest)
        return None if known is None or version.arena is None else known[1].replay(version.layout)

    def _check_replaced(self) -> None:
        """Forget what was served before the engine itself loaded other weights."""
        served = self._versions.served
        if (served is not None or self._inconsistent_reason) and self._model.was_replaced():
            name = None if served is None else served.version
            _log.warning("push: the engine has loaded other weights by itself; it no longer serves version %r", name)
            self._versions.forget()
            self._inconsistent_reason, self._start_version = "", None

    def _restore(self) -> bool:
        is_restored = self._model.restore()
        if is_restored:
            self._clear_caches(may_be_spoiled=False)
        return is_restored

    def _clear_caches(self, *, may_be_spoiled: bool) -> None:
        if self._caches_may_be_spoiled and "kv_cache" not in self._model.asleep():  # else they are gone
            self._model.clear_caches()
        self._caches_may_be_spoiled = may_be_spoiled

    def _roll_back(self, reason: str) -> None:
        """Load again what was served. Leaves ``_inconsistent_reason`` set where that is impossible."""
        self._inconsistent_reason = reason
        served = self._versions.served
        try:
            if served is None or served.arena is None:
                if self._restore():
                    self._inconsistent_reason = ""
                elif served is not None:
                    self._inconsistent_reason += f"; the bytes of version {served.version!r} were not kept"
                return
            faults = served.faults(served.digests)
            if faults:
                self._inconsistent_reason += f"; {len(faults)} chunks of version {served.version!r} are damaged"
                return
            self._load(served, served.chunks)
        except Exception as error:  # noqa: BLE001 - every later response reports it
            _log.exception("push: the rollback to the served version failed")
            self._inconsistent_reason = f"{reason}; the rollback failed too: {type(error).__name__}: {error}"

    def _on_revert(self, message: Mapping[str, Any]) -> None:
        """Return from the version that this transaction applied, if it did, to the one before, if that is possible."""
        versions, transaction = self._versions, message["transaction"]
        served = versions.served
        # When another transaction has begun, its senders may be writing into the memory of the version before.
        if served is None or not transaction == self._push.transaction == served.applied_by:
            return
        self._push.end()
        reason = f"version {served.version!r} was reverted"
        if versions.before is not None:
            self._return(reason)
            return
        known, self._inconsistent_reason = self._inconsistent_reason, reason  # stays if `restore` raises
        is_restored = self._restore()
        if is_restored:
            versions.revert()
        self._inconsistent_reason = "" if is_restored else known

    def _on_finish(self, message: Mapping[str, Any]) -> None:
        """All senders of a stream have finished."""
        self._stop_listening()

    def _on_status(self, message: Mapping[str, Any]) -> None:
        """Every answer has the status."""

    def _on_release(self, message: Mapping[str, Any]) -> None:
        self.close()

    def _on_lease(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Hold the lease for a pause of the engine, in one worker of it."""
        if message["transaction"] != self._push.transaction:
            raise EngineError("this push is over: another one began; nothing was applied, push again")
        self._end_lease()
        self._push.change()
        if message["holder"] != self.id:
            return {}
        self._left_paused = not message["stays_paused"]
        if message["address"] is None:
            return {}
        self._lease = PauseLease(message["address"], message["transaction"], message["seconds"])
        return {"lease": [self._lease.endpoint, unreachable(json.dumps(message["address"]))]}

    def _on_resolve(self, message: Mapping[str, Any]) -> None:
        """End the transaction of a sender that is gone: nothing of it is applied any more. One that has not begun to
        change weights continues, because its sender may be alive."""
        transaction = message["transaction"]
        if self._lease is not None and self._lease.transaction == transaction:
            self._end_lease()
        if self._push.has_begun and self._push.transaction == transaction:
            self._stop_listening()
            self._push.end()

    @property
    def _has_own_lease(self) -> bool:
        """Whether the latest push has paused the engine, or is about to."""
        return self._lease is not None and self._lease.transaction == self._push.transaction

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def _on_end_lease(self, message: Mapping[str, Any]) -> None:
        if message["transaction"] == self._push.transaction:
            self._end_lease()
            self._left_paused = self._left_paused and not message["has_resumed"]

    def _on_state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        served = self._versions.served
        is_intact = served is None or (served.arena is not None and not served.faults(served.digests))
        return {
            "digest": b"" if served is None else served.digest,
            "bytes": self._versions.held,
            "intact": is_intact,
            "set_aside": self._set_aside,
            "before": None if self._versions.before is None else [self._versions.before.version],
        }

    def _on_rollback(self, message: Mapping[str, Any]) -> None:
        """Serve again the version that was served before the last one."""
        versions = self._versions
        if versions.before is None or versions.served is None:
            raise StateError("it does not hold the version before; nothing was changed")
        self._push.end()
        self._return(f"version {versions.served.version!r} was rolled back")

    def _return(self, reason: str) -> None:
        """Serve the version before. Raises ``EngineError``."""
        self._versions.revert()
        self._roll_back(reason)
        if self._inconsistent_reason:
            raise EngineError(f"the rollback failed: {self._inconsistent_reason}")

    def _current(self, request: str, message: Mapping[str, Any]) -> HeldVersion:
        """Return the version of a push, whose turn the request is."""
        self._push.check(request, message["transaction"])
        version = self._versions.next
        assert version is not None
        return version

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._ring is not None:
            self._ring.close()
            self._member.end()
            self._ring = None

    def _on_hold(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the served version to engines that join, and keep its bytes for them."""
        served = self._versions.served
        if self._inconsistent_reason or served is None or served.arena is None:
            raise StateError(
                f"it has no bytes to send, as it {self._serving()}, or its memory was released or is short; push into "
                "it first, or use another engine"
            )
        return self._holds.hold(message, served)


def refuse(error: Exception, request: Any) -> str:
    """Return the response of a worker that has no receiver for the request, whatever that is. Never raises."""
    answer = _header("")
    with suppress(BytecheckpointError, TypeError, AttributeError):
        answer["nonce"] = decode(request).get("nonce")
    answer["failure"] = failure_of(error, "")
    return encode(answer)


def _header(receiver: str) -> dict[str, Any]:
    """Return what every answer has, as of a worker that serves what it started with."""
    served = {"version": None, "inconsistent_reason": "", "applied_by": "", "transaction": ""}
    return {"receiver": receiver, "host": socket.gethostname(), "pid": os.getpid(), **served}


def _open_ring(message: Mapping[str, Any], waves: Waves, record: LoadRecord, device: torch.device | None) -> RingBuffer:
    """Make a ring buffer in shared memory, in memory of a group's backend, or in memory of the worker's device."""
    memory: RingMemory
    digests: Digests = xxh3_digests
    if message["group"]:
        memory = GroupMemory(message["group"], waves.nbytes)
        digests = word_digests if message["group"] == "nccl" else xxh3_digests
    elif message["cuda_ipc"]:
        memory, digests = DeviceArena(waves.nbytes), word_digests
    else:
        memory = SharedArena(waves.nbytes, device)
    return RingBuffer(waves, record.copies, _PATIENCE * message["deadline_s"], memory, digests)
