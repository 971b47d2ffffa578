"""Parts of messages for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_STRETCHES = 8


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Join the first ``most`` names for a message, and state how many others there are."""
    others = len(names) - most
    return separator.join(names[:most]) + (f" and {others} more" if others > 0 else "")


def format_ranks(ranks: Iterable[int], *, most: int | None = None) -> str:
    """Format ``[0, 1, 2, 5]`` as ``0-2,5``; if there are more than ``most`` such stretches, only the first ones."""
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches[:most])
    return text if len(stretches) == len(stretches[:most]) else f"{text},..."


def ranks_text(ranks: Iterable[int]) -> str:
    """Return a text such as ``rank 3`` or ``ranks 0-3,8``, shortened if there are many stretches."""
    text = format_ranks(ranks, most=_MOST_STRETCHES)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
