"""The order of the checkpoints of a root, from the oldest to the newest, and which of them a rollback has abandoned.

Everything that asks for the newest checkpoints, or for the oldest ones, sorts by ``order_key``. A rollback adds the
attempts of later steps to one small object of the root, which only roots with a rollback have. It names attempts, and
not steps: a step that is saved again is a new attempt, and so is a copy of an abandoned checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import TypeAlias

import msgpack

from ..errors import FormatError, KeyNotFoundError
from ..format.manifest.document import Summary
from ..storage_backends.base import StorageBackend
from .attempts import ATTEMPT_PREFIX

ROLLBACK_KEY = "rollback.msgpack"
"""The object of a root that lists the attempts that rollbacks have abandoned."""

MAX_ROLLBACK_BYTES = 64 << 20
OrderKey: TypeAlias = tuple[bool, int, str, str]

_TRAILING_NUMBER = re.compile(r"(\d+)$")


def trailing_number(name: str) -> int:
    """Return the number at the end of ``name``, or -1 if it ends in none."""
    number = _TRAILING_NUMBER.search(name)
    return int(number[1]) if number else -1


def series_of(name: str) -> str:
    """Return what the names of one series of checkpoints have in common: all but the number at their end."""
    return _TRAILING_NUMBER.sub("", name)


def step_of(name: str, manifest: Summary) -> int:
    """Return the step that a checkpoint was stored with; else the number at the end of its name, or -1."""
    return trailing_number(name) if manifest.step is None else manifest.step


def order_key(name: str, manifest: Summary, abandoned: Container[str] = ()) -> OrderKey:
    """Return the key by which checkpoints of a root are sorted from the oldest to the newest.

    First come those that a rollback has ``abandoned``. Steps decide, and for equal steps the time of the save.
    """
    return manifest.attempt not in abandoned, step_of(name, manifest), manifest.created, name


@dataclass(frozen=True)
class Abandoned:
    """What rollbacks have abandoned below a root: ``attempts``. ``count`` is the number of rollbacks."""

    attempts: frozenset[str] = frozenset()
    count: int = 0

    def followed_by(self, attempts: frozenset[str]) -> Abandoned:
        """Return the record after one more rollback."""
        return Abandoned(attempts, self.count + 1)

    def encode(self) -> bytes:
        """Return the content of the root's object."""
        return bytes(msgpack.packb({"rollbacks": self.count, "abandoned": sorted(self.attempts)}))

    @classmethod
    def decode(cls, data: bytes, url: str) -> Abandoned:
        """Raises ``FormatError``, which names the root at ``url``."""
        try:
            fields = msgpack.unpackb(data)
            names, count = fields["abandoned"], fields["rollbacks"]
            if not all(name.startswith(ATTEMPT_PREFIX) for name in names) or type(count) is not int:
                raise ValueError("it does not list attempts")
            return cls(frozenset(names), count)
        except Exception as error:
            raise FormatError(
                f"{url}/{ROLLBACK_KEY} is damaged, so it is unknown which checkpoints a rollback has abandoned "
                f"({error}). Remove this file, and repeat the rollback: bcp rollback {url} STEP"
            ) from error


def abandoned_in(root: StorageBackend, children: Collection[str]) -> Abandoned:
    """Return what rollbacks have abandoned. ``children`` are those of the root, so that most roots need no request.

    Raises ``FormatError`` if the record is damaged, and ``StorageError``.
    """
    if ROLLBACK_KEY not in children:
        return Abandoned()
    try:
        return Abandoned.decode(root.get(ROLLBACK_KEY, max_size=MAX_ROLLBACK_BYTES), root.display_url)
    except KeyNotFoundError:
        return Abandoned()
