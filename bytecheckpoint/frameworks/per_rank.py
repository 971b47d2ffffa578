"""Values that belong to single ranks, and how they load when the number of ranks changes."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from ..runtime.arguments import check_choice

OnResize = Literal["error", "lowest", "modulo", "skip"]
"""What a load does at another world size. ``error``: refuse. ``lowest``: every rank loads rank 0's value. ``modulo``:
rank ``r`` loads the value of ``r % saved world size``. ``skip``: leave the value in memory unchanged."""

_Policy = Literal["error", "lowest", "modulo", "skip", "reseed"]

T = TypeVar("T")


class PerRank(Generic[T]):
    """A part of a tree that each rank saves and loads separately, even if all ranks hold equal values.

    A load fills tensors of ``value`` in place and replaces plain values. At the saved world size, each rank loads the
    value that it saved. At another world size, the ``on_resize`` of the object that is loaded applies; the one at the
    time of the save does not matter.

    Args:
        value: A plain value, a tensor, a tree or a stateful object.
        on_resize: What a load does at another world size. ``error`` fails. ``lowest`` loads rank 0's value on every
            rank. ``modulo`` loads the value of rank ``r % saved world size`` on rank ``r``. ``skip`` leaves ``value``
            unchanged.

    Attributes:
        value: The current value; after a load, the loaded one.
        on_resize: The policy, as passed to the constructor.

    Raises:
        UsageError: ``on_resize`` is not a known policy.

    Example:
        >>> state = {"extra_state": {"sampler": bcp.PerRank(sampler_position, on_resize="modulo")}}
    """

    def __init__(self, value: T, on_resize: OnResize = "error") -> None:
        check_choice("on_resize", on_resize, OnResize)
        self.value = value
        self.on_resize: OnResize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, on_resize={self.on_resize!r})"


def choose_rank(saved_world: int, rank: int, world: int, policy: str) -> int | None:
    """Return the saved rank whose value a rank loads.

    At the saved world size, every rank loads the value that it saved, whatever the policy.

    Args:
        saved_world: The number of ranks that saved.
        rank: The rank that loads.
        world: The number of ranks that load.
        policy: One of ``OnResize``, or ``reseed``, which selects rank 0's value; the object derives its state from it.

    Returns:
        The rank, or None if the policy selects none: for ``skip``, and for ``error``, which the caller reports.

    Raises:
        UsageError: ``policy`` is not a known policy.
    """
    check_choice("the per-rank policy", policy, _Policy)
    if saved_world == world:
        return rank
    if policy in ("lowest", "reseed"):
        return 0
    return rank % saved_world if policy == "modulo" else None
