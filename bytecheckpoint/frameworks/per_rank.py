"""Values that belong to single ranks, and what becomes of them when the number of ranks changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar, get_args

from ..errors import StateError

__all__ = ["OnResize", "PerRank", "PerRankState", "choose_rank"]

OnResize = Literal["error", "lowest", "modulo", "skip"]
"""``error``: refuse to load at another world size. ``lowest``: every rank takes rank 0's. ``modulo``: rank ``r`` takes
that of ``r % saved world size``. ``skip``: leave what is there."""

_POLICIES = (*get_args(OnResize), "reseed")

T = TypeVar("T")


class PerRank(Generic[T]):
    """A part of a tree that every rank stores and gets back for itself, even where ranks happen to hold the same.

    ``value`` may be a plain value, a tensor, a tree or a stateful object; ``load`` fills or replaces it in place. At
    another world size ``on_resize`` of the target decides, whatever was in force when saving.
    """

    def __init__(self, value: T, on_resize: OnResize = "error") -> None:
        if on_resize not in get_args(OnResize):
            raise StateError(f"on_resize={on_resize!r} is none of 'error', 'lowest', 'modulo', 'skip'")
        self.value = value
        self.on_resize: OnResize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, on_resize={self.on_resize!r})"


class PerRankState(ABC):
    """A stateful object whose state is each rank's own by nature, such as random number generators."""

    @property
    @abstractmethod
    def on_resize(self) -> str:
        """The policy of ``choose_rank`` at another world size."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


def choose_rank(saved_world: int, rank: int, world: int, policy: str) -> int | None:
    """The saved rank whose value ``rank`` takes; None where it takes none (``skip``, and ``error``, which the caller
    reports). At the saved world size every rank takes its own, whatever the policy.

    ``reseed`` takes rank 0's, from which the object derives its own. Raises ``StateError`` for an unknown policy.
    """
    if policy not in _POLICIES:
        raise StateError(f"unknown per-rank policy {policy!r}; known are {', '.join(_POLICIES)}")
    if saved_world == world:
        return rank
    if policy in ("lowest", "reseed"):
        return 0
    return rank % saved_world if policy == "modulo" else None
