"""The states of a push on one worker, and the transitions between them.

    IDLE --> RECEIVING --> VERIFIED --> APPLYING --> APPLIED
                 |                         |            |
                 |                         +--> ENDED <-+
                 |                         |            |
                 +---------------------> STREAMING -----+

A push begins in any state, with ``IDLE``, and replaces the one before: senders of that may be gone. Which requests a
worker accepts depends on the state alone; the model changes only in ``APPLYING`` and ``STREAMING``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from ...errors import EngineError, StateError


class PushState(Enum):
    """A state of a push."""

    IDLE = auto()  # there is no memory for it: none yet, or it was released
    RECEIVING = auto()  # senders may write
    VERIFIED = auto()  # every byte of the version is there
    APPLYING = auto()  # the engine is about to pause, and the worker to load the verified version
    STREAMING = auto()  # the engine is about to pause, and the worker to load chunks while they arrive
    APPLIED = auto()  # the worker serves the version
    ENDED = auto()  # nothing of it is applied any more: it failed, was taken back, or its sender is gone


_TRANSITIONS: Mapping[PushState, set[PushState]] = {
    PushState.IDLE: {PushState.IDLE, PushState.RECEIVING},
    PushState.RECEIVING: {PushState.IDLE, PushState.VERIFIED, PushState.STREAMING},
    PushState.VERIFIED: {PushState.IDLE, PushState.APPLYING},
    PushState.APPLYING: {PushState.IDLE, PushState.APPLIED, PushState.ENDED},
    PushState.STREAMING: {PushState.IDLE, PushState.APPLIED, PushState.ENDED},
    PushState.APPLIED: {PushState.IDLE, PushState.ENDED},
    PushState.ENDED: {PushState.IDLE},
}

_ACCEPTED: Mapping[str, set[PushState]] = {
    "join_group": {PushState.RECEIVING},
    "verify": {PushState.RECEIVING},
    "apply": {PushState.VERIFIED, PushState.APPLYING},
    "stream": {PushState.RECEIVING, PushState.STREAMING},
}
"""The requests of a push after the first one, and the states in which each of them is accepted."""

_CHANGING = {PushState.RECEIVING: PushState.STREAMING, PushState.VERIFIED: PushState.APPLYING}


class PushLifecycle:
    """The state of the latest push on one worker. For the thread that runs the model."""

    def __init__(self) -> None:
        self.transaction = ""
        self.state = PushState.IDLE

    @property
    def has_begun(self) -> bool:
        """Whether the push may have changed the model, or is about to."""
        return self.state not in (PushState.IDLE, PushState.RECEIVING, PushState.VERIFIED)

    @property
    def is_changing(self) -> bool:
        """Whether the engine is about to pause, or to load."""
        return self.state in _CHANGING.values()

    def check(self, request: str, transaction: str) -> None:
        """Raise ``EngineError`` if a request comes from an older push, or one that has ended, and ``StateError`` if it
        is not its turn."""
        if transaction != self.transaction or self.state in (PushState.IDLE, PushState.ENDED):
            raise EngineError(
                "this push is over: another one began, or the worker was restarted; nothing was applied, push again"
            )
        if self.state not in _ACCEPTED[request]:
            raise StateError(f"the request {request!r} is not its turn: the push is {self.state.name.lower()}")

    def begin(self, transaction: str = "") -> None:
        """A push replaces the one before; without a name, there is none."""
        self.move(PushState.IDLE)
        self.transaction = transaction

    def change(self) -> None:
        """The engine is about to pause, or to load. Without effect when the push has begun to change the model."""
        if self.state in _CHANGING:
            self.move(_CHANGING[self.state])

    def end(self) -> None:
        """Nothing of the push is applied any more. Without effect when it has changed nothing, or has ended."""
        if PushState.ENDED in _TRANSITIONS[self.state]:
            self.move(PushState.ENDED)

    def move(self, to: PushState) -> None:
        """Go to another state."""
        if to not in _TRANSITIONS[self.state]:
            raise AssertionError(f"a push cannot go from {self.state.name} to {to.name}")
        self.state = to
