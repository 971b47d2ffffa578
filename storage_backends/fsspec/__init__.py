"""Every store that fsspec can reach."""

from __future__ import annotations
