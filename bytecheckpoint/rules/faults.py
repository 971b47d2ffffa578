"""Collect everything that is wrong, and raise it as one error."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import RuleError
from .patterns import numbered

_MAX_LINES = 64


class Misfit(Exception):
    """Stored tensors do not fit their rule. The caller adds their name and the rule."""

    def __init__(self, detail: str, kind: str = "shape") -> None:
        super().__init__(detail)
        self.kind = kind


class Faults:
    """Faults so far, as ``(kind, name, detail)``. Faults that differ only in the numbers of a name share a line."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str]] = []

    def add(self, kind: str, name: str, detail: str) -> None:
        self.found.append((kind, name, detail))

    def check(self, what: str) -> None:
        """Raise ``RuleError`` if there is a fault. ``what`` begins the message."""
        if not self.found:
            return
        lines = [
            f"{name}{_more(others)}: {detail}" if name else detail
            for (_, detail), names in self._by_detail().items()
            for name, *others in numbered(names).values()
        ]
        rest = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        count = len(self.found)
        title = f"{what} ({count} fault{'s' if count > 1 else ''}):"
        raise RuleError("\n  ".join([title, *lines[:_MAX_LINES], *rest]), self.found)

    def _by_detail(self) -> dict[tuple[str, str], list[str]]:
        groups: dict[tuple[str, str], list[str]] = {}
        for kind, name, detail in self.found:
            groups.setdefault((kind, detail), []).append(name)
        return groups


def _more(names: Sequence[str]) -> str:
    return f" and {len(names)} like it" if names else ""
