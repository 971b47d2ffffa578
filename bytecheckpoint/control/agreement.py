"""Compare facts across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..runtime.messages import ranks_text

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
