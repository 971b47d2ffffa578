"""Comparing what the ranks say, and naming groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["describe_disagreement", "format_ranks"]

_SHOWN = 200


def format_ranks(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def describe_disagreement(phase: str, facts: Sequence[Mapping[str, str]]) -> str:
    """What the ranks say differently, one fact a line, most frequent value first; empty when they agree.

    ``facts`` is by rank. A fact that only some ranks bring counts as a difference.
    """
    names = sorted({name for of_rank in facts for name in of_rank})
    lines = []
    for name in names:
        said: dict[str | None, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            said.setdefault(of_rank.get(name), []).append(rank)
        if len(said) > 1:
            values = sorted(said.items(), key=lambda item: (-len(item[1]), item[1][0]))
            lines.append(f"  {name}: " + "; ".join(_said(value, ranks) for value, ranks in values))
    if not lines:
        return ""
    return "\n".join([f"the ranks do not agree in {phase}; every rank must bring the same arguments:", *lines])


def _said(value: str | None, ranks: Sequence[int]) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
    if value is None:
        return f"nothing on {who}"
    return f"{value if len(value) <= _SHOWN else value[:_SHOWN] + '...'!r} on {who}"
