"""A worker's side of a push: it says what it wants, offers memory, proves what arrived, and puts it in.

Every request is answered at once and nothing is waited for, so a sender that dies or stalls leaves a worker that
serves what it served. Between requests there are two arenas: the bytes of the version that is served, which is the way
back, and the bytes of the next. A version is put in only when every byte of it has been proved.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ...engine.tensor_bytes import byte_view
from ...errors import CorruptionError, EngineError, StateError
from ..parts import Part
from .arena import Arena
from .layout import Layout
from .learning import EngineModel, learn_parts
from .messages import Failure, Table, decode, encode, pack_parts
from .serving import ServedWeights
from .tcp_server import TcpServer

__all__ = ["PROTOCOL", "Receiver"]

PROTOCOL = 2
_TABLES = 4  # what was learned is kept for: senders of two kinds, each as they are and quantised

_log = logging.getLogger(__name__)

Version = int | str | None


@dataclass
class _Weights:
    """An arena and what it holds. ``digests`` are those of the chunks, xxh3-64, and empty while they are not known:
    then somebody may be writing."""

    table: Table
    layout: Layout
    arena: Arena
    digests: list[int]
    version: Version = None

    def faults(self, digests: list[int]) -> list[int]:
        """Chunks of which the memory is not what the digests say."""
        data = byte_view(self.arena.memory)
        offsets, sizes = self.layout.offsets, self.layout.sizes
        return [
            chunk
            for chunk, digest in enumerate(digests)
            if xxhash.xxh3_64_intdigest(data[offsets[chunk] : offsets[chunk] + sizes[chunk]]) != digest
        ]


class Receiver:
    """One worker's. For the thread that runs the model; only the TCP road has threads of its own."""

    def __init__(self, model: EngineModel) -> None:
        self.id = secrets.token_hex(8)
        self._model = model
        self._learned: dict[bytes, tuple[Table, list[Part], bool]] = {}
        self._served: _Weights | None = None
        self._next: _Weights | None = None
        self._transaction = ""
        self._proved = False
        self._torn = ""
        self._server: TcpServer | None = None

    def answer(self, request: str) -> str:
        """The answer to any request, as text. Never raises."""
        begin = time.monotonic()
        answer: dict[str, Any] = {"receiver": self.id, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            message = decode(request)
            answer["nonce"] = message.get("nonce")
            if message.get("protocol") != PROTOCOL:
                raise StateError(
                    f"the sender speaks protocol {message.get('protocol')!r} of the push, this worker {PROTOCOL}; "
                    "install the same version of bytecheckpoint on both sides"
                )
            answer |= self._handlers[message["kind"]](self, message)
        except Exception as error:  # noqa: BLE001 - see messages.py; the sender raises it
            _log.warning("push: %s", error, exc_info=True)
            answer["failure"] = vars(Failure.of(error, self._serving()))
        answer |= {"version": None if self._served is None else self._served.version, "torn": self._torn}
        answer["seconds"] = time.monotonic() - begin
        return encode(answer)

    def close(self) -> None:
        """Give the memory back. What is served goes on being served, without a way back to it."""
        self._stop_listening()
        for weights in (self._next, self._served):
            if weights is not None:
                weights.arena.close()
        self._next = self._served = None
        self._transaction = ""

    def _serving(self) -> str:
        if self._torn:
            return f"serves no whole version ({self._torn}); push again or restart it before it is used"
        return "serves what it started with" if self._served is None else f"serves version {self._served.version!r}"

    def _describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What of the senders' table this worker wants."""
        table = Table.unpack(message["table"])
        strict = message["strict"]
        if self._learned.get(table.digest, (table, [], False))[2] < strict or table.digest not in self._learned:
            parts = learn_parts(self._model, table, strict=strict)
            while len(self._learned) >= _TABLES:
                del self._learned[next(iter(self._learned))]
            self._learned[table.digest] = (table, parts, strict)
        return {"parts": pack_parts(self._learned[table.digest][1]), "blocks": self._model.blocks}

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a transaction: an arena of this layout, and what is in it already."""
        self._stop_listening()
        self._proved, self._transaction = False, message["transaction"]
        found = message["layouts"].get(self.id)
        learned = None if found is None else self._learned.get(found[2])
        if learned is None:
            return {"unknown": True}
        digest, packed, _ = found
        layout = self._layout(digest, packed)
        if layout is None:
            return {"unknown": True}
        if self._next is not None and (self._next.layout.digest != digest or not self._next.digests):
            # A sender of a push that failed may still be writing there.
            self._next.arena.close()
            self._next = None
        if self._next is None:
            self._next = _Weights(learned[0], layout, Arena(layout.nbytes), [])
        known, self._next.digests = self._next.digests, []
        same = self._served is not None and self._served.layout.digest == digest and bool(self._served.digests)
        return {
            "arena": self._next.arena.address.plain(),
            "known": known,
            "served": self._served.digests if same and self._served is not None else [],
        }

    def _layout(self, digest: bytes, packed: bytes | None) -> Layout | None:
        for weights in (self._next, self._served):
            if weights is not None and weights.layout.digest == digest:
                return weights.layout
        return None if packed is None else Layout.unpack(packed)

    def _listen(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let senders that do not reach the arena write by TCP, until ``verify``."""
        weights = self._opened(message)
        self._stop_listening()
        self._server = TcpServer(weights.arena.memory, message["deadline_s"])
        return {"tcp": self._server.address.plain()}

    def _verify(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Prove that the arena holds the version: the first of two phases."""
        weights = self._opened(message)
        self._stop_listening()
        digests, unchanged = message["chunks"][self.id]
        self._copy_unchanged(weights, unchanged)
        faults = weights.faults(digests)
        if faults:
            named = ", ".join(weights.layout.name_of(chunk) for chunk in faults[:5])
            raise CorruptionError(
                f"{len(faults)} of {len(digests)} chunks of version {message['version']!r} did not arrive as they were "
                f"sent: {named}; the version was not put in, push it again"
            )
        weights.version, weights.digests, self._proved = message["version"], digests, True
        return {}

    def _copy_unchanged(self, weights: _Weights, chunks: list[int]) -> None:
        """Chunks that are as in the version that is served."""
        offsets, sizes = weights.layout.offsets, weights.layout.sizes
        for chunk in chunks:
            assert self._served is not None
            span = slice(offsets[chunk], offsets[chunk] + sizes[chunk])
            weights.arena.memory[span].copy_(self._served.arena.memory[span])

    def _apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Put the version in that was proved: the second phase. If that fails, what was served is put in again."""
        weights = self._opened(message)
        if not self._proved:
            raise StateError("apply before verify: nothing was put in")
        self._proved = False
        try:
            self._put_in(weights)
        except Exception as error:
            self._go_back(f"putting in version {weights.version!r} failed: {type(error).__name__}: {error}")
            raise
        self._served, self._next = weights, self._served
        return {}

    def _put_in(self, weights: _Weights) -> None:
        self._torn = f"version {weights.version!r} was being put in"
        self._model.load(ServedWeights(weights.table, weights.layout, weights.arena.memory).tensors())
        self._torn = ""

    def _go_back(self, why: str) -> None:
        """Serve again what was served. Leaves ``_torn`` set where that is impossible."""
        self._torn = why
        try:
            if self._served is None:
                if self._model.restore():
                    self._torn = ""
                return
            faults = self._served.faults(self._served.digests)
            if faults:
                self._torn += f"; of version {self._served.version!r}, {len(faults)} chunks are damaged"
                return
            self._put_in(self._served)
        except Exception as error:  # noqa: BLE001 - it is kept, and told with every answer
            _log.exception("push: the way back to what was served failed")
            self._torn = f"{why}; so did the way back: {type(error).__name__}: {error}"

    def _revert(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take back the version that this transaction put in, where it did."""
        if self._transaction != message["transaction"] or self._served is None:
            return {"reverted": False}
        if self._served.version != message["version"] or self._next is self._served:
            return {"reverted": False}
        new, self._served, self._next = self._served, self._next, self._served
        self._go_back(f"version {new.version!r} was taken back")
        if self._torn:
            raise EngineError(f"no way back from version {new.version!r}: {self._torn}")
        return {"reverted": True}

    def _state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What is served, and what it costs."""
        held = [weights for weights in (self._served, self._next) if weights is not None]
        digest = b"" if self._served is None else xxhash.xxh3_128_digest(repr(self._served.digests).encode())
        intact = self._served is None or not self._served.faults(self._served.digests)
        return {"digest": digest, "bytes": sum(one.layout.nbytes for one in held), "intact": intact}

    def _release(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.close()
        return {}

    def _opened(self, message: Mapping[str, Any]) -> _Weights:
        if self._next is None or message["transaction"] != self._transaction:
            raise EngineError(
                "this push is over: another one began, or the worker was restarted; nothing of it was put in, push "
                "again"
            )
        return self._next

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    _handlers: Mapping[str, Callable[[Receiver, Mapping[str, Any]], dict[str, Any]]] = {
        "describe": _describe,
        "prepare": _prepare,
        "listen": _listen,
        "verify": _verify,
        "apply": _apply,
        "revert": _revert,
        "state": _state,
        "release": _release,
    }
