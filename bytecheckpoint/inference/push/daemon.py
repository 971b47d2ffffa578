"""Calls in daemon threads: the interpreter must be able to end while a worker of an engine is stopped."""

from __future__ import annotations

from ...runtime.daemon import run_daemon

__all__ = ["run_daemon"]
