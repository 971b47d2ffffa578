"""Load a checkpoint: the protocol and its steps."""

from __future__ import annotations
