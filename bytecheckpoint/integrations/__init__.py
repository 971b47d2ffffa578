"""Integrations of trainers: each module needs the package that it is named after, and is imported by its user only."""

from __future__ import annotations
