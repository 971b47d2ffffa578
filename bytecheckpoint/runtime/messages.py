"""Parts of messages for people."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Join the first ``most`` names for a message, and state how many others there are."""
    others = len(names) - most
    return separator.join(names[:most]) + (f" and {others} more" if others > 0 else "")
