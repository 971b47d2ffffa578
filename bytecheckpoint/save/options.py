"""The options of a save, and their validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import xxhash

from ..checkpoint.selection import Selection
from ..codecs import find_codec, list_codecs
from ..engine.checksums import chunk_size_for
from ..errors import UnsupportedVersionError, UsageError, without_userinfo
from ..format.manifest import MAX_ENCODED_CHUNK, pack_metadata
from ..planners import Layout
from ..runtime.arguments import check_arguments, choice
from ..runtime.limits import DEFAULT_DEADLINE_S
from ..transfer.transfer import Stop
from ..version import VERSION
from .replicas import Replicas

__all__ = ["AUTO", "SaveOptions", "WaitFor", "WhenBusy"]

AUTO = "auto"
"""The value of ``codec`` that lets each rank choose, and of ``base`` that takes the newest checkpoint."""

_MAX_SHOWN = 100  # characters of a metadata value in a message

WaitFor = Literal["staging", "path"]
"""Which commit ``SaveHandle.result`` waits for."""

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
        selection: What to store, by full name.
        trainable_only: Leave out parameters that get no gradient, and their optimizer state.
        replicas: How tensors that several ranks hold are compared before one copy is stored.
        codec: Name of the codec of tensor files, ``AUTO``, or None.
        base: Refer to the unchanged chunks of this checkpoint instead of writing them: a path, ``AUTO``, or None.
        gate: Copy parameters and optimizer state after the call has returned.
        staging: The folder in which the checkpoint is committed first, and from which it is uploaded; None if it is
            written to its path.
        wait_for: Whether ``result`` waits for the commit in the staging folders, or for the one at the path.
        upload_rate: Bytes per second of the upload; None for no limit.
        job: Mark of the job that holds the lease of the root; part of the attempt's name.
        guard: Called on rank 0 right before the manifest is written. If it raises, the save fails.
        upload_stop: Ends the upload before it is complete.
    """

    framework: str | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    allow_pickle: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    chunk_size: int | None = None
    when_busy: WhenBusy = "wait"
    layout: Layout = "shards"
    selection: Selection = field(default_factory=Selection)
    trainable_only: bool = False
    replicas: Replicas = "auto"
    codec: str | None = None
    base: str | os.PathLike[str] | None = None
    gate: bool = False
    staging: str | os.PathLike[str] | None = None
    wait_for: WaitFor = "staging"
    upload_rate: float | None = None
    job: bytes = b""
    guard: Callable[[], None] = field(default=lambda: None, compare=False)
    upload_stop: Stop = field(default_factory=Stop, compare=False)

    def checked(self) -> SaveOptions:
        """Return these options as the types that the code expects. Raises ``UsageError`` if one is invalid."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        options = replace(
            self,
            **check_arguments(
                values,
                layout=choice(Layout),
                when_busy=choice(WhenBusy),
                wait_for=choice(WaitFor),
                replicas=choice(Replicas),
            ),
        )
        options.selection.check()
        options._check_codec()
        options._check_base()
        options._check_staging()
        pack_metadata(dict(options.metadata))
        return options

    def stores_all_of(self, section: str) -> bool:
        """Return whether nothing of the section is left out; False if in doubt."""
        return not self.trainable_only and self.selection.selects_all_of(section)

    def chunk_size_for(self, nbytes: int) -> int:
        """Return the number of bytes under one checksum in a checkpoint of ``nbytes`` bytes."""
        size = self.chunk_size or chunk_size_for(nbytes)
        return size if self.codec is None and self.base is None else min(size, MAX_ENCODED_CHUNK)

    def _check_staging(self) -> None:
        if self.wait_for != "staging" and self.staging is None:
            raise UsageError("wait_for needs staging: without it, there is only one commit")
        if self.upload_rate is not None and self.staging is None:
            raise UsageError("upload_rate needs staging: without it, the save itself writes to the path")

    def _check_codec(self) -> None:
        if self.codec is None:
            return
        try:
            if self.codec != AUTO:
                find_codec(self.codec)
        except UnsupportedVersionError as error:
            raise UsageError(f"codec must be None, {AUTO!r} or one of {', '.join(list_codecs())}: {error}") from None
        if self.codec != AUTO and self.layout != "shards":
            raise UsageError(
                f"codec={self.codec!r} needs layout='shards': other layouts make safetensors files, which have no codec"
            )
        if self.chunk_size is not None and self.chunk_size > MAX_ENCODED_CHUNK:
            raise UsageError(f"with a codec, chunk_size must be at most {MAX_ENCODED_CHUNK}, not {self.chunk_size}")

    def _check_base(self) -> None:
        if self.base is None:
            return
        if self.layout != "shards":
            raise UsageError(
                f"base={self.base!r} needs layout='shards': other layouts make safetensors files, which cannot refer "
                f"to older files"
            )
        if self.chunk_size is not None and self.chunk_size > MAX_ENCODED_CHUNK:
            raise UsageError(f"with a base, chunk_size must be at most {MAX_ENCODED_CHUNK}, not {self.chunk_size}")

    def shared_arguments(self, url: str, sections: Sequence[str]) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks, for comparison and for messages."""
        return {
            "path": url,
            "step": str(self.step),
            "sections": ", ".join(sections),
            "chunk size": str(self.chunk_size),
            "layout": self.layout,
            "include": ", ".join(self.selection.include),
            "exclude": ", ".join(self.selection.exclude),
            "trainable_only": str(self.trainable_only),
            **{f"metadata[{key!r}]": _shortened(_canonical(value)) for key, value in self.metadata.items()},
            "replicas": self.replicas,
            "codec": str(self.codec),
            "base": without_userinfo(str(self.base)),
            "staging": str(self.staging is not None),
            "library version": VERSION,
        }


def _canonical(value: object) -> str:
    """Plain values as text that does not depend on the order of keys."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_canonical(item)}" for key, item in value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_canonical, value)) + "]"
    return repr(value)


def _shortened(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... ({xxhash.xxh3_128_hexdigest(text.encode(errors='surrogatepass'))})"
