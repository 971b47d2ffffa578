"""A failure report between ranks: text and plain data only, so that any exception can be reported."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from .. import errors
from ..errors import BytecheckpointError, DeadlineError, MismatchError, RankFailedError, RuleError, without_userinfo
from .peers import PeerIdentity

_MESSAGE_LIMIT_CHARACTERS = 1 << 22  # a mismatch error may list every name of a large model
_TRACEBACK_LIMIT_CHARACTERS = 1 << 18
_WITH_FAULTS = {one.__name__: one for one in (MismatchError, RuleError)}


@dataclass(frozen=True)
class FailureRecord:
    """Which rank failed, where and how. Every rank raises the first record of an operation.

    ``raised_as`` names the class of ``bytecheckpoint.errors`` that the other ranks raise: the error's own class or its
    nearest base there, so that ``except MismatchError`` works on every rank; ``RankFailedError`` for any other
    exception. ``about`` describes the operation: its kind and its path.
    """

    rank: int
    host: str
    pid: int
    phase: str
    error_type: str
    message: str
    traceback_text: str = ""
    raised_as: str = "RankFailedError"
    faults: list[list[str]] = field(default_factory=list)
    text: str = ""
    about: str = ""
    engine: str = ""

    @classmethod
    def from_exception(cls, error: BaseException, phase: str, here: PeerIdentity) -> FailureRecord:
        """Describe an exception of this process. Works for any exception, even if its ``str`` raises."""
        if isinstance(error, RankFailedError) and error.rank >= 0:
            # A nested operation has already reported this failure, with the same text on every rank.
            where = (error.rank, error.host, here.pid, error.phase, error.error_type)
            return cls(*where, message="", traceback_text=error.traceback_text, text=str(error))
        known = [getattr(errors, name) for name in errors.__all__]
        raised_as = next((base.__name__ for base in type(error).__mro__ if base in known), "RankFailedError")
        return cls(
            rank=here.rank,
            host=here.host,
            pid=here.pid,
            phase=phase,
            error_type=type(error).__name__,
            message=shorten(message_of(error), _MESSAGE_LIMIT_CHARACTERS),
            traceback_text=shorten(traceback_text_of(error), _TRACEBACK_LIMIT_CHARACTERS),
            raised_as=raised_as,
            faults=faults_of(error),
            engine=getattr(error, "engine", ""),
        )

    @classmethod
    def from_death(cls, peer: PeerIdentity, phase: str, message: str) -> FailureRecord:
        """Describe a rank whose process has ended."""
        return cls(peer.rank, peer.host, peer.pid, phase, "ProcessDied", message)

    @classmethod
    def from_disconnection(cls, peer: PeerIdentity, phase: str, here: PeerIdentity, reason: str) -> FailureRecord:
        """Describe a rank that this process cannot reach any more."""
        message = (
            f"its connection to rank {here.rank} on {here.host} was lost ({reason}): its process has ended, or the "
            "network between these hosts fails"
        )
        return cls(peer.rank, peer.host, peer.pid, phase, "ConnectionLost", message)

    @classmethod
    def from_deadline(cls, message: str, phase: str, here: PeerIdentity) -> FailureRecord:
        """Describe a wait of this rank that passed its deadline."""
        return cls(here.rank, here.host, here.pid, phase, "DeadlineError", message, raised_as="DeadlineError")

    def pack(self) -> bytes:
        """Encode for another rank."""
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> FailureRecord:
        """Decode what ``pack`` returned."""
        return cls(**msgpack.unpackb(data))

    def rank_failed(self) -> RankFailedError:
        """Make the error that names rank, host, phase and cause, with the original traceback as text."""
        message = self.text
        if not message:
            message = f"rank {self.rank} on {self.host} failed in {self.phase}: {self.error_type}: {self.message}"
            message += self._where()
        if self.traceback_text and not self.text:
            message += "\n\n" + textwrap.indent(self.traceback_text.rstrip(), "    ")
        return RankFailedError(
            message,
            rank=self.rank,
            host=self.host,
            phase=self.phase,
            error_type=self.error_type,
            traceback_text=self.traceback_text,
        )

    def _where(self) -> str:
        return f"\n  in: {self.about}" if self.about else ""

    def error(self) -> BytecheckpointError:
        """Make the error that the ranks raise that did not fail themselves."""
        if self.raised_as == DeadlineError.__name__ and not self.traceback_text:
            return DeadlineError(self.message + self._where())
        cause = self.rank_failed()
        if self.raised_as == RankFailedError.__name__:
            return cause
        raised = library_error(self.raised_as, self.message, self.faults)
        raised.__cause__, raised.engine = cause, self.engine
        return raised


def library_error(name: str, message: str, faults: Sequence[Sequence[str]]) -> BytecheckpointError:
    """Make an error of the class of this name, or of the base class if the library has no such class."""
    if name in _WITH_FAULTS:
        return _WITH_FAULTS[name](message, [(kind, what, detail) for kind, what, detail in faults])
    found: Any = getattr(errors, name) if name in errors.__all__ else BytecheckpointError
    made: BytecheckpointError = (found if issubclass(found, BytecheckpointError) else BytecheckpointError)(message)
    return made


def faults_of(error: BaseException) -> list[list[str]]:
    """Return the faults that an error lists, as text."""
    found = getattr(error, "faults", []) if isinstance(error, tuple(_WITH_FAULTS.values())) else []
    return [[str(part) for part in fault] for fault in found]


def message_of(error: BaseException) -> str:
    """Return an error's text, even if its ``str`` raises."""
    try:
        return without_userinfo(str(error))
    except Exception:  # noqa: BLE001 - __str__ of a foreign exception may raise anything; the report must still be sent
        return "(its message cannot be shown)"


def traceback_text_of(error: BaseException) -> str:
    """Return an error's traceback, even if its ``str`` raises."""
    try:
        return without_userinfo("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    except Exception:  # noqa: BLE001 - formatting calls into the foreign exception, as above
        return "".join(traceback.format_tb(error.__traceback__))


def shorten(text: str, limit: int) -> str:
    """Return the beginning and the end of a text that has more than ``limit`` characters, as text that UTF-8 has."""
    # Lone surrogates (from file names) have no UTF-8 form.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[: limit // 2] + "\n[...]\n" + text[-limit // 2 :]
