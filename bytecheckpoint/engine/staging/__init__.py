"""From tensors to staging memory: one copy, in the layout of the files to be."""

from __future__ import annotations
