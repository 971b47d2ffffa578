"""A typed language that describes what each stored tensor is: a shard of which tensor, under which name.

See ``docs/rules.md``. The package does no I/O except for reading the rules that it contains.
"""

from __future__ import annotations

from .kinds import Averaged, Flat, Ignored, Replicated, Rule, Sharded, Split, Unique
from .resolution import GlobalTensor, RankFile, Region, Resolution, Source
from .rules import Rules

__all__ = [
    "Averaged",
    "Flat",
    "GlobalTensor",
    "Ignored",
    "RankFile",
    "Region",
    "Replicated",
    "Resolution",
    "Rule",
    "Rules",
    "Sharded",
    "Source",
    "Split",
    "Unique",
]
