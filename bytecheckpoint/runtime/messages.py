"""Parts of messages for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


_SHOWN_CHARACTERS = 200


def describe_disagreement(phase: str, facts: Sequence[Mapping[str, str]]) -> str:
    """List the facts that differ between ranks, one per line, most frequent value first; empty if all are equal.

    ``facts`` is indexed by rank. A fact that only some ranks have counts as a difference.
    """
    names = sorted({name for of_rank in facts for name in of_rank})
    lines = []
    for name in names:
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            ranks_by_value.setdefault(of_rank.get(name), []).append(rank)
        if len(ranks_by_value) > 1:
            values = sorted(ranks_by_value.items(), key=lambda item: (-len(item[1]), item[1][0]))
            lines.append(f"  {name}: " + "; ".join(_format_value(value, ranks) for value, ranks in values))
    if not lines:
        return ""
    return "\n".join([f"the ranks do not agree in {phase}; every rank must pass the same arguments:", *lines])


def _format_value(value: str | None, ranks: Sequence[int]) -> str:
    where = ranks_text(ranks)
    if value is None:
        return f"nothing on {where}"
    return f"{value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + '...'!r} on {where}"
