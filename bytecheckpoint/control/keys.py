"""Under which names the ranks leave word for each other in a store, within the prefix of an operation."""

from __future__ import annotations

__all__ = ["address_key", "failure_key", "left_counter", "left_mark", "note_key", "report_key"]


def failure_key(prefix: str) -> str:
    """Names the record of the failure that stands."""
    return f"{prefix}/failure"


def report_key(prefix: str) -> str:
    """In a leader's store: names the record of the first failure in its group that has not been told to rank 0 yet."""
    return f"{prefix}/report"


def note_key(prefix: str, rank: int) -> str:
    """For whom ``rank`` waits. In its own store for its children, in its parent's for the parent."""
    return f"{prefix}/waiting/{rank}"


def left_mark(prefix: str, rank: int) -> str:
    """Says that ``rank`` has left the operation, and which keys it made in this store. A leader's, in the store of rank
    0, says so of its whole group."""
    return f"{prefix}/left/{rank}"


def left_counter(prefix: str) -> str:
    """Counts the marks. It goes last, when everything else of the operation is gone."""
    return f"{prefix}/left/count"


def address_key(prefix: str, rank: int) -> str:
    """Where the others' streams to ``rank`` go; in its parent's store."""
    return f"{prefix}/streams/{rank}"
