"""The on-disk format: manifest, values, and the safetensors container. ``docs/format.md`` is normative."""

from __future__ import annotations
