"""The options of saves, and one save as the caller requests it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from ..checkpoint.location import Location, Tier
from ..checkpoint.selection import Selection
from ..codecs import find_codec, list_codecs
from ..engine.checksums import chunk_size_for
from ..errors import UnsupportedVersionError, UsageError, without_userinfo
from ..format.manifest.files import MAX_ENCODED_CHUNK
from ..format.manifest.payload import SAVE_TIMES_KEY, pack_metadata
from ..planners.gather_plan import Layout
from ..runtime import DEFAULT_DEADLINE_S
from ..runtime.arguments import check_arguments, choice, options_of
from ..transfer.transfer import Stop
from ..version import VERSION
from .replicas import Replicas

AUTO = "auto"
"""The value of ``codec`` that lets each rank choose, and of ``base`` that takes the newest checkpoint."""

_MAX_SHOWN = 100  # characters of a metadata value in a message


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How checkpoints are saved. A mapping of these names to values stands for it wherever it is accepted.

    Args:
        layout: How to store tensors that are sharded across ranks. "shards" stores each shard as it is. "merged"
            merges irregular shards (flat parameters of FSDP-1 and ZeRO) into whole tensors. "whole" merges all shards,
            and also writes the index and configuration with which Hugging Face libraries and vLLM load the model from
            ``Checkpoint.model_directory``. Merging runs in the background and does not delay the call.
        codec: How to encode tensors: None (not at all), "zstd", "zstd-planes" (which separates the bytes of
            floating-point numbers by significance first: bf16 weights shrink to 0.69, fp32 ones to 0.85), or a codec
            of another package. Chunks are encoded one by one, so a part of a tensor can still be read. The files are
            no safetensors files then. "auto" encodes with "zstd-planes" on ranks whose earlier saves have shown that
            the store is slower than the codec, and never on local disks. Needs ``layout="shards"``.
        base: Do not write what an older checkpoint has: chunks of tensors that are equal to its chunks at the same
            places. "auto" takes the newest checkpoint in the folder that the path is in; or pass the path of a
            checkpoint in that folder. The files are shared by the checkpoints of the folder, in its ``objects``: any of
            them may be removed, but only ``bcp copy`` moves one out of it. A base must have been saved with ``base``
            too; the first one writes everything, and ``SaveResult.remark`` says so. Needs ``layout="shards"``. With a
            tier, the base is what this process has uploaded last.
        gate: With ``async_save``, return before parameters and optimizer state are copied. The copy overlaps with the
            next forward and backward pass; ``torch.optim.Optimizer.step`` of the optimizers in the state,
            ``load_state_dict`` of its optimizers and modules, and ``load`` wait until it is done. Save from the
            training thread. Everything else, such as buffers and parameters that none of these optimizers updates, is
            copied before the call returns. If other code changes one of the tensors in place before
            ``SaveHandle.staged()``, the save fails; changes through ``tensor.data`` and by replayed CUDA graphs are
            not detected. If the state does not fit into the staging memory, the call copies it as it does without a
            gate.
        replicas: How parameters and optimizer state that several ranks hold are compared. "auto" compares completely
            what nothing declares to be replicas (plain modules without ``DistributedDataParallel``), and a sample,
            which changes with the path, of what the state declares (``DistributedDataParallel``, ``Replicate()``,
            HSDP; with ``gate``, only in host memory). The save fails if copies of the former differ, and logs a
            warning if copies of the latter do. "check" compares all of them and fails in both cases, "trust" compares
            none. "own" is like "auto", but stores the copy of each rank where undeclared replicas differ.
        trainable_only: Leave out the parameters of modules that do not require a gradient, and their optimizer state
            and hyper-parameters, as for a LoRA run. A tied parameter is stored if any of its names requires one.
            Buffers and extra state are stored, because a forward pass may change them; ``exclude`` leaves them out
            too. Other sections are not affected. Combines with ``include`` and ``exclude``.
        framework: Name of the adapter to use for all sections; by default it is inferred from each object.
        allow_pickle: Store values that are not plain as pickles. A load refuses them unless its options allow them.
        chunk_size: Bytes under one checksum. By default 256 KiB, and more if the checkpoint exceeds 1 TiB.
        deadline_s: Seconds that each single wait may take: for another rank, for staging memory, or for storage. By
            default 600, or what ``JobOptions`` of a ``CheckpointManager`` say.

    Example:
        >>> bcp.save("runs/7b/step-1000", state, options=bcp.SaveOptions(codec="zstd", base="auto"))
        >>> bcp.save("runs/7b/step-1000", state, options={"codec": "zstd", "base": "auto"})
    """

    layout: Layout = "shards"
    codec: str | None = None
    base: str | os.PathLike[str] | None = None
    gate: bool = False
    replicas: Replicas = "auto"
    trainable_only: bool = False
    framework: str | None = None
    allow_pickle: bool = False
    chunk_size: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest(SaveOptions):
    """One save: its options, and what else the caller states about it.

    Attributes:
        location: Where the checkpoint is saved; None only for a warm-up.
        step: Training step that is stored in the manifest.
        metadata: Plain values that are stored in the manifest.
        selection: What to store, by full name.
        job: Mark of the job that holds the lease of the root; part of the attempt's name.
        guard: Called on rank 0 right before the manifest is written. If it raises, the save fails.
        upload_stop: Ends the upload before it is complete.
        superfluous: Called on rank 0; returns the attempts that need not be uploaded, because retention would remove
            them once those are uploaded that were saved later.
    """

    deadline_s: float = DEFAULT_DEADLINE_S
    location: Location | None = None
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)
    job: bytes = b""
    guard: Callable[[], None] = field(default=lambda: None, compare=False)
    upload_stop: Stop = field(default_factory=Stop, compare=False)
    superfluous: Callable[[], Sequence[str]] = field(default=tuple, compare=False)

    @classmethod
    def of(cls, options: SaveOptions | Mapping[str, Any] | None, **rest: Any) -> SaveRequest:
        """Return a save with these options and other fields, checked. Raises ``UsageError`` if one is invalid."""
        given = options_of(SaveOptions, options)
        values = {one.name: getattr(given, one.name) for one in fields(SaveOptions)}
        if values["deadline_s"] is None:
            values["deadline_s"] = DEFAULT_DEADLINE_S
        return cls(**values, **rest).checked()

    def checked(self) -> SaveRequest:
        """Return these options as the types that the code expects. Raises ``UsageError`` if one is invalid."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        options = replace(self, **check_arguments(values, layout=choice(Layout), replicas=choice(Replicas)))
        options.selection.check()
        options._check_encoding()
        if SAVE_TIMES_KEY in options.metadata:
            raise UsageError(f"the key {SAVE_TIMES_KEY!r} of metadata is reserved; use another one")
        pack_metadata(dict(options.metadata))
        return options

    @property
    def tier(self) -> Tier | None:
        """Where the checkpoint is committed first, and from where it is uploaded; None if it is written to its path."""
        return None if self.location is None else self.location.tier

    def stores_all_of(self, section: str) -> bool:
        """Return whether nothing of the section is left out; False if in doubt."""
        return not self.trainable_only and self.selection.selects_all_of(section)

    def chunk_size_for(self, nbytes: int) -> int:
        """Return the number of bytes under one checksum in a checkpoint of ``nbytes`` bytes."""
        size = self.chunk_size or chunk_size_for(nbytes)
        return size if self.codec is None and self.base is None else min(size, MAX_ENCODED_CHUNK)

    def _check_encoding(self) -> None:
        codec = None if self.codec == AUTO else self.codec
        if codec is not None:
            try:
                find_codec(codec)
            except UnsupportedVersionError as error:
                known = ", ".join(list_codecs())
                raise UsageError(f"codec must be None, {AUTO!r} or one of {known}: {error}") from None
        for name, value in (("codec", codec), ("base", self.base)):
            if value is not None and self.layout != "shards":
                raise UsageError(
                    f"{name}={value!r} needs layout='shards': other layouts make safetensors files, which have no "
                    f"codec and cannot refer to older files"
                )
        is_encoded = self.codec is not None or self.base is not None
        if is_encoded and self.chunk_size is not None and self.chunk_size > MAX_ENCODED_CHUNK:
            raise UsageError(
                f"with a codec or a base, chunk_size must be at most {MAX_ENCODED_CHUNK}, not {self.chunk_size}"
            )

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
            "tier": str(self.tier is not None),
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
