"""What moves bytes: staging memory, threads, the writer and the reader. It knows no framework and takes no decision
about layout."""

from __future__ import annotations

__all__: list[str] = []
