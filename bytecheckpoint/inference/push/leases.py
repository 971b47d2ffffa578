"""Pauses of engines end, even if the sender that paused is killed.

Before a sender pauses an engine, the engine's first worker gets a lease: the engine's address, and a connection from
the sender. If the connection ends before the lease does, or the lease expires, the sender is gone, and a thread of that
worker resolves the push over the engine's own RPC, as any sender could (``resolve``).
"""

from __future__ import annotations

import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from ...control.acceptor import Acceptor, connect, notice_lost_host
from ...control.connections import Endpoint, at_most, close_when_connected, receive
from ...errors import BytecheckpointError, EngineError, StateError
from ...runtime.threads import run_daemon
from .engines.base import Budget, Engine, ask, ask_all, check_awake
from .engines.vllm import HttpEngine, engine_at, tls_context
from .transports.base import hosts_of_engine

_CONNECT_S = 1.0  # a firewall that drops packets must not delay each push for longer
_RESOLVE_S = 600.0  # requests of the lost push come first, in which the engine may load weights
_RETRY_S = 1.0
_PROBE_S = 2.0
_REVERT = b"r"  # sent before the connection of a lease ends

_log = logging.getLogger(__name__)


class Inconsistent(EngineError):
    """All workers have answered, and they serve no complete version, or different ones."""


def resume_command(engine: Engine) -> str:
    """Return what resumes an engine that serves one complete version, as a part of a sentence."""
    address = engine.address
    if address is None:
        return "the next push resumes it"
    return f"`bcp push --resume {address['url']}` or the next push resumes it"


def push_command(engine: Engine) -> str:
    """Return what repairs an engine that serves no complete version, as a part of a sentence."""
    address = engine.address
    command = "" if address is None or "target" in address else f": `bcp push CHECKPOINT --to {address['url']}`"
    return f"push again, or restart it{command}"


def resolve(engine: Engine, wait_s: float, transaction: str | None = None, *, revert: bool = False) -> int | str | None:
    """End a push whose sender is gone: check that the engine serves one complete version, and resume it.

    Workers that serve different versions, because the sender was lost while one of them rolled back, return to the
    version before. A push that has not begun to change the engine continues.

    Args:
        engine: The engine.
        wait_s: The limit of the wait, in seconds.
        transaction: The push to end, by default whichever has begun and has no connected sender.
        revert: Return to the version before, if that is possible.

    Returns:
        The version; None for what the engine started with.

    Raises:
        Inconsistent: The engine serves no complete version. It is left paused.
        StateError: Another push has begun to change the engine, or a sender is connected. Nothing was changed. Or the
            engine sleeps.
        DeadlineError: The engine did not answer in time.
        EngineError: The engine failed.
    """
    budget = Budget(wait_s)
    if transaction is None:
        answers = ask(engine, "status", {}, budget.left)
        transaction = next((answer["transaction"] for answer in answers if answer["has_begun"]), "")
        _check_free(engine, answers, transaction)
    answers = _resolve(engine, transaction, budget)
    if revert or len({answer["applied_by"] for answer in answers}) > 1:
        ask_all(engine, "revert", {"transaction": transaction}, budget.left)
        answers = _resolve(engine, transaction, budget)
    version = check_consistent(engine, answers)
    check_awake(engine, answers)
    # Rolling back takes time, in which another push may have paused the engine.
    _check_free(engine, ask(engine, "status", {}, budget.left), transaction)
    engine.resume(version, budget.left, changed=True)
    with suppress(BytecheckpointError):
        ask_all(engine, "end_lease", {"transaction": transaction, "has_resumed": True}, budget.left)
    return version


def _resolve(engine: Engine, transaction: str, budget: Budget) -> list[dict[str, Any]]:
    answers = ask(engine, "resolve", {"transaction": transaction}, budget.left)
    _check_free(engine, answers, transaction)
    return answers


def _check_free(engine: Engine, answers: Sequence[Mapping[str, Any]], transaction: str) -> None:
    check_own(engine, answers, transaction)
    if any(answer["has_sender"] for answer in answers):
        raise StateError(f"a push into {engine.name} is in progress, and its sender is alive; nothing was changed")


def check_own(engine: Engine, answers: Sequence[Mapping[str, Any]], transaction: str) -> None:
    """Raise ``StateError`` when another push than ``transaction`` has begun to change the engine."""
    if any(answer["has_begun"] and answer["transaction"] != transaction for answer in answers):
        raise StateError(f"another push into {engine.name} has begun, so this one leaves it alone")


def check_consistent(engine: Engine, answers: list[dict[str, Any]]) -> int | str | None:
    """Return the version that all workers serve. Raises ``Inconsistent`` if there is none."""
    reasons = [answer["inconsistent_reason"] for answer in answers if answer["inconsistent_reason"]]
    left = f"\n  {engine.name} is left paused; {push_command(engine)}"
    if reasons:
        raise Inconsistent(f"{engine.name} serves no consistent version: {reasons[0]}{left}")
    if len({answer["applied_by"] for answer in answers}) > 1:
        versions = ", ".join(f"{answer['version']!r}" for answer in answers)
        raise Inconsistent(f"workers of {engine.name} serve different versions: {versions}{left}")
    version: int | str | None = answers[0]["version"]
    return version


class PauseLease(Acceptor):
    """A worker's side of a lease, until ``end``."""

    def __init__(self, address: Mapping[str, Any], transaction: str, seconds: float) -> None:
        self.is_connected = False
        self.transaction, self._address = transaction, address
        self._state, self._is_over = threading.Lock(), False
        super().__init__(hosts_of_engine())
        self._timer = threading.Timer(seconds, self._expire, ["did not end its push in time"])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """End the lease: the sender resumes the engine itself, or has done so."""
        with self._state:
            self._is_over = True
        self._timer.cancel()
        self.close()

    def _serve(self, connection: socket.socket) -> None:
        self.is_connected = True
        notice_lost_host(connection)
        revert = False
        with suppress(OSError):
            revert = receive(connection, 1, at_most(None)) == _REVERT
        self.is_connected = False
        self._expire("has given up" if revert else "is gone", revert=revert)

    def _expire(self, why: str, *, revert: bool = False) -> None:
        with self._state:
            if self._is_over:
                return
            self._is_over = True
        # Not in this thread: resolving ends this lease, which waits for this thread.
        run_daemon(lambda: self._resolve(why, revert=revert), "bcp-push-resolve")

    def _resolve(self, why: str, *, revert: bool) -> None:
        engine, budget = engine_at(self._address), Budget(_RESOLVE_S)
        try:
            version = self._resolve_until(engine, budget, revert=revert)
            _log.warning("push: the sender %s; %s resumed with version %r", why, engine.name, version)
        except StateError as error:
            _log.warning("push: the sender %s: %s", why, error)
        except BytecheckpointError as error:
            _log.error("push: the sender %s; %s is left paused: %s", why, engine.name, error)
        finally:
            engine.close()

    def _resolve_until(self, engine: Engine, budget: Budget, *, revert: bool) -> int | str | None:
        """Resolve, and try again after errors that may pass, such as those of a proxy."""
        while True:
            try:
                return resolve(engine, budget.left, self.transaction, revert=revert)
            except (Inconsistent, StateError):
                raise
            except BytecheckpointError as error:
                if budget.is_over:
                    raise
                _log.warning("push: %s cannot be resumed now: %s; trying again", engine.name, error)
            time.sleep(_RETRY_S)


@functools.cache  # a warning is enough once, and a firewall that drops packets delays the worker
def unreachable(address: str) -> str:
    """Return why this worker cannot reach the engine at its address, in JSON; empty if it can."""
    found = json.loads(address)
    engine = HttpEngine(found["url"], headers=found["headers"], ssl_context=tls_context(found["tls"]))
    return engine.unreachable(_PROBE_S)


class HeldLease:
    """A sender's side of a lease of ``seconds`` on one engine. ``holder`` is the receiver of its first worker.

    Where the worker cannot reach the engine, it only notes the pause.

    Raises ``EngineError`` or ``DeadlineError`` when the workers do not accept the lease; nothing is paused then.
    """

    def __init__(self, engine: Engine, transaction: str, holder: str, seconds: float, wait_s: float) -> None:
        self._engine, self._transaction = engine, transaction
        self._connecting: Future[socket.socket] | None = None
        address = engine.address
        message = {"transaction": transaction, "holder": holder, "address": address, "seconds": seconds}
        answers = ask(engine, "lease", {**message, "stays_paused": engine.stays_paused}, wait_s)
        if address is None:
            return
        endpoint, fault = next(answer["lease"] for answer in answers if "lease" in answer)
        if fault:
            _log.warning(
                "push: a worker of %s cannot reach it at this address (%s), so its pause does not end if this process "
                "is killed while weights change; then %s",
                engine.name, fault, resume_command(engine),
            )  # fmt: skip
        self._connecting = run_daemon(lambda: connect(Endpoint(*endpoint)), "bcp-push-lease")
        wait([self._connecting], _CONNECT_S)

    def end(self, wait_s: float, *, has_resumed: bool) -> None:
        """End the lease after the engine has resumed, or must stay paused until the next push."""
        try:
            message = {"transaction": self._transaction, "has_resumed": has_resumed}
            ask_all(self._engine, "end_lease", message, wait_s)
        except BytecheckpointError as error:
            _log.warning("push: the lease on %s was not ended: %s", self._engine.name, error)
        self.lose()

    def lose(self, *, revert: bool = False) -> None:
        """Disconnect, so that the engine's worker resolves the push as soon as it can; with ``revert``, by a return to
        the version before."""
        if self._connecting is not None:
            if revert and self._connecting.done() and self._connecting.exception() is None:
                with suppress(OSError):
                    self._connecting.result().send(_REVERT)
            close_when_connected(self._connecting)
            self._connecting = None
