"""Inference engines, as the coordinator of a push reaches them."""

from __future__ import annotations
