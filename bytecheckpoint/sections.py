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
        for fqn in source.metas:
            if split_rank_name(fqn)[1] is not None:
                raise NameCollisionError(
                    f"{self.name}.{fqn}: names that end in @<number> are kept for values of single ranks; rename it"
                )
        clash = source.metas.keys() & source.aliases.keys()
        if clash:
            raise NameCollisionError(
                f"{self.name}: {', '.join(sorted(clash))} are both tensors and names of tied tensors"
            )
        return source


def check_state(state: Any) -> None:
    """Raise ``StateError`` unless ``state`` is a mapping of section names to objects."""
    if not isinstance(state, Mapping) or not state:
        raise StateError(
            "state must be a non-empty mapping such as {'model': model, 'optimizer': optimizer}, "
            f"not {type(state).__name__}"
        )
    for name in state:
        if not isinstance(name, str) or not _SECTION_NAME.fullmatch(name):
            raise StateError(
                f"section name {name!r} cannot be used: it becomes part of file names; use letters, digits, '_', '-'"
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
