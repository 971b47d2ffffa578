"""Read stored bytes into tensors: in ranges, checked against the manifest as they arrive."""

from __future__ import annotations
