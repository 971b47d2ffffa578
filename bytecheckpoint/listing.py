"""Which checkpoints are below a root, and why what looks like one is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .engine.writing.commit import ATTEMPT_MARK, read_manifest
from .errors import CheckpointError, CheckpointNotFoundError
from .manifest import MANIFEST_KEY, Manifest
from .storage_backends import join, open_backend

__all__ = ["Listing", "list_checkpoints"]

Status = Literal["checkpoint", "partial", "broken", "other"]


@dataclass(frozen=True)
class Listing:
    """One folder below the root. ``name`` is its path there ("." is the root itself).

    ``status``: "checkpoint"; "partial", where saves began and none was committed; "broken", where a manifest cannot be
    read; "other" for anything else. ``problem`` says why it is no checkpoint. ``attempts`` are tries that are no part
    of a committed checkpoint: left by a save that died, or written right now.
    """

    name: str
    url: str
    status: Status
    problem: str = ""
    attempts: tuple[str, ...] = ()
    step: int | None = None
    created: str = ""
    world_size: int = 0
    sections: tuple[str, ...] = ()
    tensors: int = 0
    files: int = 0
    size: int = 0


def list_checkpoints(root: str, *, depth: int = 1, storage_options: Mapping[str, Any] | None = None) -> list[Listing]:
    """What is at ``root`` and up to ``depth`` folders below it, in the order of names and numbers.

    Nothing below a checkpoint is looked at. Reads manifests only. Raises ``CheckpointNotFoundError`` where nothing is
    stored at all, ``StorageError`` where the store does not answer.
    """
    found = list(_visit(root, ".", depth, dict(storage_options or {})))
    if not found:
        raise CheckpointNotFoundError(f"nothing is stored at {root}; check the path")
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.name))


def _visit(url: str, name: str, depth: int, options: dict[str, Any]) -> Iterator[Listing]:
    backend = open_backend(url, **options)
    children = backend.list_children("")
    attempts = [child.rstrip("/") for child in children if child.startswith(ATTEMPT_MARK) and child.endswith("/")]
    folders = [child[:-1] for child in children if child.endswith("/") and child[:-1] not in attempts]
    if MANIFEST_KEY in children:
        try:
            yield _committed(name, backend.url, read_manifest(backend), attempts)
        except CheckpointError as error:
            yield Listing(name, backend.url, "broken", str(error), tuple(attempts))
    elif attempts:
        problem = f"{len(attempts)} save(s) began and none was committed"
        yield Listing(name, backend.url, "partial", problem, tuple(attempts))
    elif children and (name != "." or not folders) and (depth == 0 or not folders):
        yield Listing(name, backend.url, "other", f"it has no {MANIFEST_KEY}")
    if MANIFEST_KEY in children or depth == 0:
        return
    for folder in folders:
        below = folder if name == "." else f"{name}/{folder}"
        yield from _visit(join(url, folder), below, depth - 1, options)


def _committed(name: str, url: str, manifest: Manifest, attempts: Sequence[str]) -> Listing:
    return Listing(
        name,
        url,
        "checkpoint",
        attempts=tuple(attempt for attempt in attempts if attempt != manifest.attempt),
        step=manifest.step,
        created=manifest.created,
        world_size=manifest.world_size,
        sections=tuple(section.name for section in manifest.sections),
        tensors=len(manifest.tensors),
        files=len(manifest.files),
        size=manifest.file_bytes,
    )
