"""The save protocol and its steps."""

from __future__ import annotations
