"""Record which part of which stored tensor goes where in an inference engine."""

from __future__ import annotations
