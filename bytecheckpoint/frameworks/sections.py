"""Split the caller's state into sections, and check the names in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import BytecheckpointError, NameCollisionError, StateError
from ..tensors.shards import SectionSource
from .base import Adapter, Context
from .layout import ParamLayout
from .registry import find_adapter

_log = logging.getLogger(__name__)

_SECTION_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_RANK_SUFFIX = re.compile(r"(.+)@(\d{1,18})")
_SHARD_SUFFIX = re.compile(r"\[(\d+:\d+)?(,\d+:\d+)*\]$")
_MAX_NAME = 4096  # characters of a tensor's name; longer ones only come from mistakes
_MAX_SECTION_NAME = 200  # characters; with a rank and a suffix, every file system accepts it


@dataclass(frozen=True)
class Section:
    """One top-level entry of the state, and the adapter that serves it."""

    name: str
    obj: Any
    adapter: Adapter
    context: Context

    def capture(self) -> SectionSource:
        """Describe what the object holds. Raises ``NameCollisionError`` for an ambiguous or reserved name."""
        with self.naming("its state_dict() or its structure"):
            source = self.adapter.capture(self.obj, self.context)
        names = [*source.metas, *source.aliases]
        if not _are_plain(names):
            for fqn in names:
                check_name(f"{self.name}.{fqn}", fqn)
        clash = source.metas.keys() & source.aliases.keys()
        if clash:
            raise NameCollisionError(
                f"{self.name}: {', '.join(sorted(clash))} are names of tensors and also of tied tensors; rename one"
            )
        return source

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Name the section in errors of the block, which calls the object's own code (``what``).

        Raises:
            StateError: The object's code raised something that is not an error of this library.
        """
        try:
            yield
        except StateError as error:
            if re.search(rf"(?<![\w.-]){re.escape(self.name)}(?![\w-])", str(error)):
                raise
            raise type(error)(f"section {self.name}: {error}") from error
        except BytecheckpointError:
            raise
        except Exception as error:
            raise StateError(
                f"section {self.name}: {what} ({type(self.obj).__name__}) raised {type(error).__name__}: {error}"
            ) from error


def _are_plain(names: list[str]) -> bool:
    """Whether ``check_name`` certainly accepts every name; checks all of them at once."""
    text = "\n".join(names)
    return (
        text.isascii()
        and not any(mark in text for mark in ("@", "]", "\0", "__metadata__"))
        and max(map(len, names), default=0) <= _MAX_NAME
    )


def check_name(full: str, fqn: str) -> None:
    """Raise unless a tensor may be stored under ``fqn``."""
    if _RANK_SUFFIX.fullmatch(fqn):
        raise NameCollisionError(f"{full}: names that end in @<number> are reserved; rename it")
    if _SHARD_SUFFIX.search(fqn):
        raise NameCollisionError(f"{full}: names that end in [0:2,...] are reserved for parts of tensors; rename it")
    if fqn == "__metadata__":
        raise NameCollisionError(f"{full}: safetensors reserves the name __metadata__; rename it")
    if len(fqn) > _MAX_NAME or "\0" in fqn or any("\ud800" <= c <= "\udfff" for c in fqn):
        raise StateError(
            f"{full[:80]!r}: a tensor's name is Unicode text of at most {_MAX_NAME} characters and no zero byte; "
            "rename it"
        )


def is_section_name(name: object) -> bool:
    """Whether an entry of the state may have this name."""
    return isinstance(name, str) and len(name) <= _MAX_SECTION_NAME and _SECTION_NAME.fullmatch(name) is not None


def check_state(state: Any) -> None:
    """Raise ``StateError`` unless ``state`` is a mapping of section names to objects."""
    if not isinstance(state, Mapping) or not state:
        raise StateError(
            "state must be a non-empty mapping such as {'model': model, 'optimizer': optimizer}, "
            f"not {type(state).__name__}"
        )
    for name in state:
        if not is_section_name(name):
            raise StateError(
                f"section name {name!r} is not allowed, because it becomes part of file names; "
                f"use at most {_MAX_SECTION_NAME} letters, digits, '_', '-'"
            )


def resolve_sections(
    state: Mapping[str, Any],
    *,
    framework: str | None,
    rank: int,
    world_size: int,
    allow_pickle: bool,
    trainable_only: bool = False,
    device: torch.device | None = None,
) -> list[Section]:
    """Find an adapter for every section. Sections are in the order of their names. Raises ``UnknownObjectError``."""
    objects = {name: state[name] for name in sorted(state)}
    adapters = {name: find_adapter(obj, framework, section=name) for name, obj in objects.items()}

    def layouts_of(obj: Any) -> Mapping[int, ParamLayout]:
        # A state may make its objects for each access.
        adapter = next((adapters[name] for name, one in objects.items() if one is obj), None) or find_adapter(obj)
        return adapter.parameter_layouts(obj)

    shared = Context(
        "",
        state,
        rank=rank,
        world_size=world_size,
        allow_pickle=allow_pickle,
        trainable_only=trainable_only,
        device=device,
        layouts_of=layouts_of,
    )
    return [
        Section(name, objects[name], adapter, replace(shared, section=name, undo=[]))
        for name, adapter in adapters.items()
    ]


@contextmanager
def undone_on_failure(sections: Sequence[Section]) -> Iterator[None]:
    """Undo what ``Adapter.target`` did to make room if the block fails, and raise the block's error."""
    try:
        yield
    except BaseException:
        # Sections may share tensors, so what the last section did is undone first.
        for section in reversed(sections):
            for undo in reversed(section.context.undo):
                try:
                    undo()
                except Exception:  # noqa: BLE001 - the block's error is the one to raise
                    _log.warning("section %s: could not restore its tensors", section.name, exc_info=True)
        raise


def rank_name(fqn: str, rank: int) -> str:
    """The stored name of a tensor that belongs to a single rank."""
    return f"{fqn}@{rank}"


def split_rank_name(fqn: str) -> tuple[str, int | None]:
    """``("rng.torch", 3)`` for ``"rng.torch@3"``; ``(fqn, None)`` for a shared tensor's name."""
    match = _RANK_SUFFIX.fullmatch(fqn)
    return (match[1], int(match[2])) if match else (fqn, None)
