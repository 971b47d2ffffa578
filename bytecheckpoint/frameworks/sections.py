"""From the caller's state to sections, and the names everything in them goes by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import NameCollisionError, StateError
from .frameworks.base import Adapter, Context
from .frameworks.registry import find_adapter
from .shards import SectionSource

__all__ = ["Section", "check_state", "rank_name", "resolve_sections", "split_rank_name"]

_SECTION_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_RANK_SUFFIX = re.compile(r"(.+)@(\d+)")
_SHARD_SUFFIX = re.compile(r"\[(\d+:\d+)?(,\d+:\d+)*\]$")
_MAX_NAME = 4096  # characters of a tensor's name
_MAX_SECTION_NAME = 200  # characters; with rank and suffix it is still a file name everywhere


@dataclass(frozen=True)
class Section:
    """One top-level entry of the state, with the adapter that understands it."""

    name: str
    obj: Any
    adapter: Adapter
    context: Context

    def capture(self) -> SectionSource:
        """What the object holds, checked for names that mean two things."""
        source = self.adapter.capture(self.obj, self.context)
        names = [*source.metas, *source.aliases]
        if not _are_plain(names):
            for fqn in names:
                _check_name(f"{self.name}.{fqn}", fqn)
        clash = source.metas.keys() & source.aliases.keys()
        if clash:
            raise NameCollisionError(
                f"{self.name}: {', '.join(sorted(clash))} are both tensors and names of tied tensors"
            )
        return source


def _are_plain(names: list[str]) -> bool:
    """Whether it is plain to see, of all names at once, that ``_check_name`` has nothing against any of them."""
    text = "\n".join(names)
    return (
        text.isascii()
        and not any(mark in text for mark in ("@", "]", "\0", "__metadata__"))
        and max(map(len, names), default=0) <= _MAX_NAME
    )


def _check_name(full: str, fqn: str) -> None:
    """Raise unless a tensor may be stored under ``fqn`` as it is."""
    if _RANK_SUFFIX.fullmatch(fqn):
        raise NameCollisionError(f"{full}: names that end in @<number> are kept for values of single ranks; rename it")
    if _SHARD_SUFFIX.search(fqn):
        raise NameCollisionError(f"{full}: names that end in [0:2,...] are kept for parts of tensors; rename it")
    if fqn == "__metadata__":
        raise NameCollisionError(f"{full}: safetensors keeps the name __metadata__ for itself; rename it")
    if len(fqn) > _MAX_NAME or "\0" in fqn or any("\ud800" <= c <= "\udfff" for c in fqn):
        raise StateError(
            f"{full[:80]!r}: a tensor's name is Unicode text of at most {_MAX_NAME} characters and no zero byte; "
            "rename it"
        )


def check_state(state: Any) -> None:
    """Raise ``StateError`` unless ``state`` is a mapping of section names to objects."""
    if not isinstance(state, Mapping) or not state:
        raise StateError(
            "state must be a non-empty mapping such as {'model': model, 'optimizer': optimizer}, "
            f"not {type(state).__name__}"
        )
    for name in state:
        if not isinstance(name, str) or not _SECTION_NAME.fullmatch(name) or len(name) > _MAX_SECTION_NAME:
            raise StateError(
                f"section name {name!r} cannot be used: it becomes part of file names; "
                f"use at most {_MAX_SECTION_NAME} letters, digits, '_', '-'"
            )


def resolve_sections(
    state: Mapping[str, Any],
    *,
    framework: str | None,
    rank: int,
    world_size: int,
    allow_pickle: bool,
    device: torch.device | None = None,
) -> list[Section]:
    """An adapter for every section, in the order of their names. Raises ``UnknownObjectError``."""
    notes: list[str] = []
    sections = []
    for name in sorted(state):
        context = Context(name, state, rank, world_size, allow_pickle, device, notes)
        sections.append(Section(name, state[name], find_adapter(state[name], framework, section=name), context))
    return sections


def rank_name(fqn: str, rank: int) -> str:
    """The stored name of a tensor that belongs to one rank alone."""
    return f"{fqn}@{rank}"


def split_rank_name(fqn: str) -> tuple[str, int | None]:
    """``("rng.torch", 3)`` for ``"rng.torch@3"``; ``(fqn, None)`` for a shared tensor's name."""
    match = _RANK_SUFFIX.fullmatch(fqn)
    return (match[1], int(match[2])) if match else (fqn, None)
