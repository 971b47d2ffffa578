"""Copy a committed checkpoint from one store to another: checked, in parallel parts, and resumable."""

from __future__ import annotations
