"""The plain values of a checkpoint, for ``bcp inspect`` and ``bcp show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..runtime.messages import format_ranks
from .output import Output, plain


def values_of(found: Checkpoint) -> list[dict[str, Any]]:
    """Return all plain values. Pickled ones are listed, but never loaded."""
    return [
        {"name": value.name, "section": value.section, "rank": value.rank, "value": plain(value.decode())}
        for value in found.index.values()
        if not value.only_orders_keys
    ]


def print_values(out: Output, values: Sequence[Mapping[str, Any]], most_characters: int | None = None) -> None:
    """Print each value; one that several ranks have, once. A text over ``most_characters`` is cut."""
    owners: dict[tuple[str, str], list[int]] = {}
    for value in values:
        rank = value["rank"]
        name = value["name"] if rank is None else value["name"].removesuffix(f"@{rank}")
        ranks = owners.setdefault((name, str(value["value"])), [])
        ranks += [] if rank is None else [rank]
    for (name, text), ranks in owners.items():
        if most_characters is not None:
            text = " ".join(text.split())
            if len(text) > most_characters:
                text = f"{text[:most_characters]} ... (bcp show and --json print all)"
        out.line(f"{name}{'@' if ranks else ''}{format_ranks(ranks)} = {text}")
