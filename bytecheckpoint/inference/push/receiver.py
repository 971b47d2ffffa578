"""A worker's side of a push: it says what it wants, offers memory, proves what arrived, and puts it in.

Where memory allows, every request is answered at once and nothing is waited for, so a sender that dies or stalls
leaves a worker that serves what it served. Between requests there are two arenas: the bytes of the version that is
served, which is the way back, and the bytes of the next. A version is put in only when every byte of it has been
proved. With less memory there is one arena and no way back, or a ring out of which chunks are put in as they come
(``staging.py``).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import BytecheckpointError, CorruptionError, EngineError, StateError
from .giving import Gives
from .group import GroupAddress
from .group_receiving import Membership
from .learning import EngineModel, Learned, learn_parts
from .messages import Failure, Table, decode, encode, pack_parts
from .ring import Ring
from .ring_making import make_ring
from .serving import Chunks, ServedWeights, Staged
from .staging import STREAMED, choose_mode
from .tcp_server import TcpServer
from .versions import Versions, Weights

__all__ = ["PROTOCOL", "Receiver"]

PROTOCOL = 4
_TABLES = 4  # what was learned is kept for: senders of two kinds, each as they are and quantised

_log = logging.getLogger(__name__)


class Receiver:
    """One worker's. For the thread that runs the model; only the TCP road, and what gives to other engines, have
    threads of their own. What fails is logged at ``log_level``, as who raises it is elsewhere."""

    def __init__(self, model: EngineModel, log_level: int = logging.WARNING) -> None:
        self.id = secrets.token_hex(8)
        self._log_level = log_level
        self._model = model
        self._learned: dict[bytes, tuple[Table, Learned, bool]] = {}
        self._versions = Versions()
        self._set_aside = 0
        self._ring: Ring | None = None
        self._transaction = ""
        self._proved = False
        self._torn = ""
        self._server: TcpServer | None = None
        self._gives = Gives()
        self._membership = Membership()

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
            _log.log(self._log_level, "push: %s", error, exc_info=True)
            answer["failure"] = vars(Failure.of(error, self._serving()))
        served = self._versions.served
        answer |= {"version": None if served is None else served.version, "torn": self._torn}
        answer["put_in_by"] = "" if served is None else served.put_in_by
        answer["seconds"] = time.monotonic() - begin
        return encode(answer)

    def close(self) -> None:
        """Give the memory back. What is served goes on being served, without a way back to it."""
        self._stop_listening()
        self._membership.leave()
        self._gives.close("the worker gave its memory back")
        self._versions.give_up()
        self._transaction = ""

    def _serving(self) -> str:
        if self._torn:
            return f"serves no whole version ({self._torn}); push again or restart it before it is used"
        served = self._versions.served
        return "serves what it started with" if served is None else f"serves version {served.version!r}"

    def _describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What of the senders' table this worker wants."""
        table = Table.unpack(message["table"])
        strict = message["strict"]
        known = self._learned.get(table.digest)
        if known is None or known[2] < strict:
            learned = learn_parts(self._model, table, strict=strict)
            while len(self._learned) >= _TABLES:
                del self._learned[next(iter(self._learned))]
            known = self._learned[table.digest] = table, learned, strict
        return {"parts": pack_parts(known[1].parts), "blocks": self._model.blocks}

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a transaction: memory for this layout, and what is in it already."""
        self._stop_listening()
        self._proved, self._transaction = False, message["transaction"]
        found = message["layouts"].get(self.id)
        learned = None if found is None else self._learned.get(found[2])
        if learned is None:
            return {"unknown": True}
        digest, packed, _ = found
        layout = self._versions.layout(digest, packed)
        if layout is None:
            return {"unknown": True}
        limit, sharers = message["memory"], message["sharers"][self.id]
        mode = message["mode"] or choose_mode(layout.nbytes, self._versions.held, limit, sharers)
        weights = self._versions.begin(learned[0], layout, mode, self._gives.reads)
        if mode == STREAMED:
            self._ring, place = make_ring(message, layout, learned[1].takes)
            place |= {"group": self._membership.name, "takes": self._membership.plan}
            return {"mode": mode, "known": [], "served": [], **place}
        known, weights.digests = weights.digests, []
        served = self._versions.served
        same = served is not None and served.layout.digest == digest and served.arena is not None
        return {
            "mode": mode,
            "arena": weights.address,
            "tokens": self._versions.tokens,
            "known": known,
            "served": served.digests if served is not None and same else [],
        }

    def _listen(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let senders that do not reach the arena write by TCP, until ``verify``."""
        weights = self._opened(message)
        self._stop_listening()
        self._server = TcpServer(weights.memory, message["deadline_s"])
        return {"tcp": self._server.address.plain()}

    def _join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Be a party of a group from now on, and receive by it into the ring."""
        self._opened(message)
        if self._ring is None:
            raise StateError("a group without a ring: nothing was sent")
        party, takes = message["parties"][self.id]
        self._membership.begin(GroupAddress.from_plain(message["address"]), party, takes, self._ring)
        return {}

    def _verify(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Prove that the arena holds the version: the first of two phases."""
        weights = self._opened(message)
        self._stop_listening()
        digests, unchanged = message["chunks"][self.id]
        if unchanged and self._versions.served is not None:
            weights.copy_from(self._versions.served, unchanged)
        faults = weights.faults(digests)
        if faults:
            named = ", ".join(weights.layout.name_of(chunk) for chunk in faults[:5])
            raise CorruptionError(
                f"{len(faults)} of {len(digests)} chunks of version {message['version']!r} did not arrive as they were "
                f"sent: {named}; the version was not put in, push it again"
            )
        weights.version, weights.digests, self._proved = message["version"], digests, True
        return {}

    def _apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Put the version in that was proved: the second phase. If that fails, what was served is put in again."""
        weights = self._opened(message)
        if not self._proved:
            raise StateError("apply before verify: nothing was put in")
        self._proved = False
        try:
            self._put_in(weights, Staged(weights.layout, weights.memory))
        except Exception as error:
            self._go_back(f"putting in version {weights.version!r} failed: {type(error).__name__}: {error}")
            raise
        self._versions.serve_next(self._transaction)
        return {}

    def _stream(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Put in what comes into the ring, chunk by chunk, each of them proved."""
        weights, ring = self._opened(message), self._ring
        if ring is None:
            raise StateError("stream without a ring: nothing was put in")
        weights.version = message["version"]
        try:
            self._put_in(weights, ring)
            ring.drain()
        except Exception as error:
            ring.fail(
                error if isinstance(error, BytecheckpointError) else EngineError(f"{type(error).__name__}: {error}")
            )
            self._membership.leave()  # the others notice
            self._go_back(f"version {weights.version!r} was not put in whole: {type(error).__name__}: {error}")
            self._stop_listening()  # nobody says that it is over
            raise
        weights.digests, self._set_aside = ring.digests, ring.set_aside
        self._versions.serve_next(self._transaction)
        return {}

    def _put_in(self, weights: Weights, source: Chunks) -> None:
        self._torn = f"version {weights.version!r} was being put in"
        self._model.load(ServedWeights(weights.table, weights.layout, source).tensors())
        self._torn = ""

    def _go_back(self, why: str) -> None:
        """Serve again what was served. Leaves ``_torn`` set where that is impossible."""
        self._torn = why
        served = self._versions.served
        try:
            if served is None or served.arena is None:
                if self._model.restore():
                    self._torn = ""
                elif served is not None:
                    self._torn += f"; the bytes of version {served.version!r} were not kept"
                return
            faults = served.faults(served.digests)
            if faults:
                self._torn += f"; of version {served.version!r}, {len(faults)} chunks are damaged"
                return
            self._put_in(served, Staged(served.layout, served.memory))
        except Exception as error:  # noqa: BLE001 - it is kept, and told with every answer
            _log.exception("push: the way back to what was served failed")
            self._torn = f"{why}; so did the way back: {type(error).__name__}: {error}"

    def _revert(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take back the version that this transaction put in, where it did, and where there is a way."""
        versions, transaction = self._versions, message["transaction"]
        if not versions.was_put_in_by(transaction):
            return {"reverted": False}
        assert versions.served is not None
        why = f"version {versions.served.version!r} was taken back"
        if versions.holds_before:
            versions.take_back()
            self._go_back(why)
            if self._torn:
                raise EngineError(f"no way back: {self._torn}")
            return {"reverted": True}
        self._torn = why  # if that fails
        reverted = self._model.restore()
        self._torn = ""
        if reverted:
            versions.take_back()
        return {"reverted": reverted}

    def _state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What is served, and what it costs."""
        served = self._versions.served
        intact = served is None or (served.arena is not None and not served.faults(served.digests))
        return {
            "digest": b"" if served is None else served.digest,
            "bytes": self._versions.held,
            "intact": intact,
            "set_aside": self._set_aside,
        }

    def _release(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.close()
        return {}

    def _opened(self, message: Mapping[str, Any]) -> Weights:
        found = self._versions.next
        if found is None or message["transaction"] != self._transaction:
            raise EngineError(
                "this push is over: another one began, or the worker was restarted; nothing of it was put in, push "
                "again"
            )
        return found

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._ring is not None:
            self._ring.close()
            self._membership.end()
            self._ring = None

    def _finish(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """All senders have come to their end."""
        self._stop_listening()
        return {}

    _handlers: Mapping[str, Callable[[Receiver, Mapping[str, Any]], dict[str, Any]]] = {
        "describe": _describe,
        "prepare": _prepare,
        "listen": _listen,
        "join": _join,
        "verify": _verify,
        "apply": _apply,
        "stream": _stream,
        "finish": _finish,
        "revert": _revert,
        "state": _state,
        "release": _release,
        "held": lambda self, message: self._gives.held(message, self._versions.served, self._torn),
        "give": lambda self, message: self._gives.give(message, self.id),
        "given": lambda self, message: self._gives.given(message),
        "let_go": lambda self, message: self._gives.let_go(message),
    }
