"""Move bytes: staging memory, threads, writing, reading and merging, whatever the framework and the layout."""

from __future__ import annotations
