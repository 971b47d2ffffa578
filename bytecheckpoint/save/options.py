"""The options of a save, and their validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..engine.checksums import chunk_size_for
from ..errors import UsageError
from ..format.manifest import pack_metadata
from ..planners import LAYOUTS, Layout
from ..runtime.limits import DEFAULT_DEADLINE_S
from ..version import VERSION

__all__ = ["SaveOptions", "WhenBusy"]

_MAX_CHUNK_SIZE = 1 << 30  # bytes

WhenBusy = Literal["wait", "skip"]
"""What an asynchronous save does when earlier saves still hold the staging memory it needs."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The options of one save.

    Attributes:
        framework: Name of the adapter to use; None infers it from the objects.
        step: Training step that is stored in the manifest.
        metadata: Plain values that are stored in the manifest.
        allow_pickle: Store values that are not plain as pickles.
        deadline_s: Limit of every single wait: for another rank, and for staging memory.
        chunk_size: Bytes under one checksum; None chooses by the size of the checkpoint.
        when_busy: What an asynchronous save does when staging memory is short.
        layout: How tensors that are sharded across ranks are stored.
        gate: Copy parameters and optimizer state after the call has returned.
        job: Mark of the job that holds the lease of the root; part of the attempt's name.
        guard: Called on rank 0 right before the manifest is written. If it raises, the save fails.
    """

    framework: str | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    chunk_size: int | None = None
    when_busy: WhenBusy = "wait"
    layout: Layout = "shards"
    gate: bool = False
    job: bytes = b""
    guard: Callable[[], None] = field(default=lambda: None, compare=False)

    def check(self) -> None:
        """Raise ``UsageError`` if an option is invalid."""
        step, chunk_size = self.step, self.chunk_size
        if step is not None and (type(step) is not int or not 0 <= step < 1 << 63):
            raise UsageError(f"step must be an integer from 0 to 2^63-1, not {step!r}")
        if chunk_size is not None and (type(chunk_size) is not int or not 1 <= chunk_size <= _MAX_CHUNK_SIZE):
            raise UsageError(f"chunk_size must be a number of bytes from 1 to {_MAX_CHUNK_SIZE}, not {chunk_size!r}")
        if self.layout not in LAYOUTS:
            raise UsageError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if self.when_busy not in get_args(WhenBusy):
            raise UsageError(f"when_busy must be one of {', '.join(get_args(WhenBusy))}, not {self.when_busy!r}")
        pack_metadata(dict(self.metadata))

    def chunk_size_for(self, nbytes: int) -> int:
        """Return the number of bytes under one checksum in a checkpoint of ``nbytes`` bytes."""
        return self.chunk_size or chunk_size_for(nbytes)

    def shared_arguments(self, url: str, sections: Sequence[str]) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks, for comparison and for messages."""
        return {
            "path": url,
            "step": str(self.step),
            "sections": ", ".join(sections),
            "chunk size": str(self.chunk_size),
            "layout": self.layout,
            "library version": VERSION,
        }
