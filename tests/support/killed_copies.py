"""Kill copies to S3 at chosen requests, and read from their journals what the store had confirmed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import msgpack
from s3_faults import Exchange, FaultProxy
from transfer_launcher import Launcher

import bytecheckpoint as bcp
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, decode, encode
from bytecheckpoint.storage_backends import StorageBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.transfer.journal import find_journals

__all__ = [
    "ENDS",
    "PART",
    "PARTS",
    "WINDOW",
    "Gate",
    "acknowledged",
    "contents",
    "kill_often",
    "parts_of",
    "pending_ids",
    "upload_ids",
]

PART = 5 << 20
WINDOW = 2

# For ``kill_often``: while parts are sent, and at the end.
PARTS = [("part", passed, WINDOW) for passed in (0, 1, 2, 1, 0, 3, 1)]
ENDS = [("complete", 0, 1), ("complete", 0, 1), ("put", 0, 1)]


def records(root: Path) -> list[Any]:
    """Return the records of the only journal, from its bytes alone."""
    [path] = [*root.glob("copy-*.journal")] or [Path(path) for path, _ in find_journals(str(root))]
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        length, _ = struct.unpack_from("<IQ", data, at)
        found.append(msgpack.unpackb(data[at + 12 : at + 12 + length]))
        at += 12 + length
    return found


def acknowledged(root: Path) -> set[tuple[str, int]]:
    """Return the file and number of each part that the store has confirmed."""
    return {(record[1], record[2] + 1) for record in records(root) if record[0] == "part"}


def upload_ids(root: Path) -> set[str]:
    return {record[3].split()[-1] for record in records(root) if record[0] == "file"}


def contents(backend: StorageBackend) -> dict[str, bytes]:
    """Return all objects by key. A copy equals its source, although its attempt has another name."""
    found = {stat.key: backend.get(stat.key) for stat in backend.list()}
    if MANIFEST_KEY in found:
        manifest = decode(found[MANIFEST_KEY])
        old = manifest.attempt
        names = [name.replace(old, "attempt-1") for name in manifest.files.name]
        manifest = replace(manifest, attempt="attempt-1", files=replace(manifest.files, name=names))
        found = {key.replace(old, "attempt-1"): data for key, data in found.items()}
        found[MANIFEST_KEY] = encode(manifest)
    return found


def pending_ids(bucket: str, s3: dict[str, Any]) -> set[str]:
    return {one["UploadId"] for one in fsspec.filesystem("s3", **s3).list_multipart_uploads(bucket)}


class Gate:
    """A rule that passes ``passed`` requests of a kind, and holds all later ones of this kind."""

    def __init__(self, kind: str, passed: int, target: str) -> None:
        self.kind, self.left, self._target = kind, passed, target
        self.parts: list[tuple[str, int]] = []

    def __call__(self, exchange: Exchange) -> str | None:
        if exchange.part is not None:
            self.parts.append((exchange.path.removeprefix(self._target), exchange.part))
        if exchange.kind != self.kind:
            return None
        self.left -= 1
        return None if self.left >= 0 else "wait"


def kill_often(
    kills: Sequence[tuple[str, int, int]],
    commands: Sequence[tuple[object, ...]],
    root: Path,
    target: str,
    proxy: FaultProxy,
    processes: Launcher,
    check: Callable[[], None] = lambda: None,
) -> tuple[int, set[str]]:
    """Kill one command after the other; return how many parts they have sent, and the ids of their uploads.

    ``kills`` are the request where it is killed, how many of its kind pass before, and how many are held then. A held
    request arrives, its reply does not. ``root`` has the journal.
    """
    total, known, begun = 0, set[tuple[str, int]](), set[str]()
    for index, (kind, passed, held) in enumerate(kills):
        proxy.rule = gate = Gate(kind, passed, target)
        proxy.go_on.clear()
        pid = processes.start(*commands[index % len(commands)], window=WINDOW)
        for _ in range(held):
            assert proxy.waiting.acquire(timeout=time_limit(60)), f"{kind} {proxy.kinds}"
        processes.kill(pid)
        proxy.go_on.set()
        assert not known & set(gate.parts), f"kill {index}"
        assert len(acknowledged(root)) >= len(known) + (passed if kind == "part" else 0)
        known = acknowledged(root)
        begun |= upload_ids(root)
        total += len(gate.parts)
        check()
    return total, begun


def parts_of(checkpoint: bcp.Checkpoint) -> int:
    """Return how many parts of S3 the files of a checkpoint have."""
    return sum(-(-int(size) // PART) for size in checkpoint.manifest.files.size if size > 8 << 20)
