"""The order of the checkpoints of a root, from the oldest to the newest, and which of them a rollback has abandoned.

Everything that asks for the newest checkpoints, or for the oldest ones, sorts by ``order_key``. A rollback adds the
attempts of later steps to one small object of the root, which only roots with a rollback have. It names attempts, and
not steps: a step that is saved again is a new attempt, and so is a copy of an abandoned checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgpack

from ..errors import FormatError, KeyNotFoundError
from ..format.manifest import Manifest
from ..storage_backends.base import StorageBackend
from .attempts import ATTEMPT_PREFIX

ROLLBACK_KEY = "rollback.msgpack"
"""The object of a root that lists the attempts that rollbacks have abandoned."""

_MAX_BYTES = 64 << 20
_TRAILING_NUMBER = re.compile(r"(\d+)$")


def trailing_number(name: str) -> int:
    """Return the number at the end of ``name``, or -1 if it ends in none."""
    number = _TRAILING_NUMBER.search(name)
    return int(number[1]) if number else -1


def series_of(name: str) -> str:
    """Return what the names of one series of checkpoints have in common: all but the number at their end."""
    return _TRAILING_NUMBER.sub("", name)


def step_of(name: str, manifest: Manifest) -> int:
    """Return the step that a checkpoint was stored with; else the number at the end of its name, or -1."""
    return trailing_number(name) if manifest.step is None else manifest.step


def order_key(name: str, manifest: Manifest, abandoned: Collection[str] = ()) -> tuple[bool, int, str, str]:
    """Return the key by which checkpoints of a root are sorted from the oldest to the newest.

    First come those that a rollback has ``abandoned``. Steps decide, and for equal steps the time of the save.
    """
    return manifest.attempt not in abandoned, step_of(name, manifest), manifest.created, name


def abandoned_in(root: StorageBackend, children: Collection[str]) -> frozenset[str]:
    """Return the attempts that rollbacks have abandoned. ``children`` are those of the root, so that most ask nothing.

    Raises ``FormatError`` if the record is damaged, and ``StorageError``.
    """
    if ROLLBACK_KEY not in children:
        return frozenset()
    try:
        return decode_rollback(root.get(ROLLBACK_KEY, max_size=_MAX_BYTES), root.url)
    except KeyNotFoundError:
        return frozenset()


def encode_rollback(abandoned: Collection[str]) -> bytes:
    """Return the content of the record."""
    return bytes(msgpack.packb({"abandoned": sorted(abandoned)}))


def decode_rollback(data: bytes, url: str) -> frozenset[str]:
    """Return the attempts in a record. Raises ``FormatError``, which names the root at ``url``."""
    try:
        names = msgpack.unpackb(data)["abandoned"]
        if not all(name.startswith(ATTEMPT_PREFIX) for name in names):
            raise ValueError("a name in it is not that of an attempt")
        return frozenset(names)
    except Exception as error:
        raise FormatError(
            f"{url}/{ROLLBACK_KEY} is damaged, so it is unknown which checkpoints a rollback has abandoned: {error}. "
            f"Remove this file, and repeat the rollback with: bcp rollback {url} STEP"
        ) from error
