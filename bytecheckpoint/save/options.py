"""What the caller of a save chose, and what it has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .engine.checksums import chunk_size_for
from .errors import StateError
from .manifest import pack_metadata
from .planners import LAYOUTS, Layout
from .version import VERSION

__all__ = ["SaveOptions", "WhenBusy"]

_MAX_CHUNK_SIZE = 1 << 30

WhenBusy = Literal["wait", "skip"]
"""What an asynchronous save does that would have to wait for the staging memory of earlier ones."""


@dataclass(frozen=True)
class SaveOptions:
    """What the caller chose. ``deadline_s`` bounds every single wait: for another rank, and for staging memory.
    ``chunk_size`` None leaves it to the size of the checkpoint.

    ``job`` marks the attempt as that of a job with a lease, whose ``guard`` is called on rank 0 when everything is
    written, right before the manifest is put: what it raises ends the save."""

    framework: str | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False
    deadline_s: float = 600.0
    chunk_size: int | None = None
    when_busy: WhenBusy = "wait"
    layout: Layout = "shards"
    gate: bool = False
    job: bytes = b""
    guard: Callable[[], None] = field(default=lambda: None, compare=False)

    def check(self) -> None:
        """Raise ``StateError`` where a choice means nothing."""
        step, chunk_size = self.step, self.chunk_size
        if step is not None and (type(step) is not int or not 0 <= step < 1 << 63):
            raise StateError(f"step must be a whole number from 0 to 2^63-1, not {step!r}")
        if chunk_size is not None and (type(chunk_size) is not int or not 1 <= chunk_size <= _MAX_CHUNK_SIZE):
            raise StateError(f"chunk_size must be a number of bytes from 1 to {_MAX_CHUNK_SIZE}, not {chunk_size!r}")
        if self.layout not in LAYOUTS:
            raise StateError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if self.when_busy not in get_args(WhenBusy):
            raise StateError(f"when_busy must be one of {', '.join(get_args(WhenBusy))}, not {self.when_busy!r}")
        pack_metadata(dict(self.metadata))

    def chunk_size_for(self, nbytes: int) -> int:
        """The number of bytes under one checksum in a checkpoint of ``nbytes``."""
        return self.chunk_size or chunk_size_for(nbytes)

    def facts(self, url: str, sections: Sequence[str]) -> dict[str, str]:
        """What every rank must have been called with alike."""
        return {
            "path": url,
            "step": str(self.step),
            "sections": ", ".join(sections),
            "chunk size": str(self.chunk_size),
            "layout": self.layout,
            "library version": VERSION,
        }
