"""vLLM: the loader plug-in, and the worker side of the weight push."""

from __future__ import annotations
