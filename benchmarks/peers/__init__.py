"""The contestants: names, implementations, and requirements. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENTRIES", "Entry", "select"]


@dataclass(frozen=True)
class Entry:
    """One contestant: ``factory`` (``module:class`` below ``benchmarks.peers``), called with ``options``.

    ``install`` lists the requirements of its environment in addition to torch (``requirements/benchmarks.txt`` pins
    them); without any it runs in the benchmark's environment. ``parts`` lists the parts to measure.
    """

    name: str
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    install: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("save", "cold", "warm")
    note: str = ""

    @property
    def environment(self) -> str:
        """Name of its environment; "" is the benchmark's."""
        return self.install[0] if self.install else ""


_LOAD, _SAVE = ("cold", "warm"), ("save",)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("bytecheckpoint", "library:Library"),
        Entry("bytecheckpoint async", "library:Library", {"background": True}, parts=_SAVE),
        Entry(
            "bytecheckpoint async, objects",
            "library:Objects",
            {"gate": False},
            parts=_SAVE,
            note="a module and its optimizer, not a mapping of their tensors",
        ),
        Entry(
            "bytecheckpoint gated",
            "library:Objects",
            {"gate": True},
            parts=_SAVE,
            note="as above; the copy overlaps with the training step",
        ),
        Entry("bytecheckpoint unverified", "library:Library", {"verify": False}, parts=_LOAD, note="no checksums"),
        Entry("DCP", "dcp:Dcp"),
        Entry("DCP 4 threads", "dcp:Dcp", {"threads": 4}),
        Entry("DCP async thread", "dcp:DcpAsync", parts=_SAVE),
        Entry(
            "DCP async thread, kept stager",
            "dcp:DcpAsync",
            {"keep_stager": True},
            parts=_SAVE,
            note="staging buffers reused",
        ),
        Entry("DCP async process", "dcp:DcpAsync", {"keep_stager": True, "process": True}, parts=_SAVE),
        Entry("torch.save", "torch_save:TorchSave", note="does not fsync"),
        Entry("torch.load mmap", "torch_save:TorchSave", {"mapped": True}, parts=_LOAD),
        Entry("safetensors", "safetensors_file:Safetensors", note="does not fsync, no checksums"),
        Entry("torchsnapshot", "torchsnapshot:TorchSnapshot", install=("torchsnapshot",), note="does not fsync"),
        Entry(
            "torchsnapshot async",
            "torchsnapshot:TorchSnapshot",
            {"background": True},
            ("torchsnapshot",),
            _SAVE,
            note="does not fsync",
        ),
        Entry(
            "torch_checkpointing",
            "torch_checkpointing:TorchCheckpointing",
            install=("torch_checkpointing",),
            note="buffered: its O_DIRECT default fails on ext4 with EINVAL; does not fsync",
        ),
        Entry(
            "torch_checkpointing async",
            "torch_checkpointing:TorchCheckpointing",
            {"background": True},
            ("torch_checkpointing",),
            _SAVE,
            note="as above; its lock is waited for before each update",
        ),
        Entry(
            "Orbax",
            "orbax:Orbax",
            install=("orbax-checkpoint",),
            note="NumPy arrays in the memory of the tensors; syncs its data files, not its metadata",
        ),
        Entry(
            "Orbax async",
            "orbax:Orbax",
            {"background": True},
            ("orbax-checkpoint",),
            _SAVE,
            note="as above",
        ),
        Entry("tensorizer", "tensorizer:Tensorizer", install=("tensorizer",), note="does not fsync"),
        Entry("Run:ai streamer", "runai_streamer:RunaiStreamer", install=("runai-model-streamer",), parts=_LOAD),
        Entry("fastsafetensors", "fastsafetensors:Fastsafetensors", install=("fastsafetensors",), parts=_LOAD),
    )
}


def select(requested: Sequence[str]) -> list[Entry]:
    """Return the requested entries: "default" (no requirements), "all", or names. Raises ``ValueError``."""
    chosen: dict[str, Entry] = {}
    for name in requested:
        if name == "all":
            chosen |= ENTRIES
        elif name == "default":
            chosen |= {key: entry for key, entry in ENTRIES.items() if not entry.install}
        elif name in ENTRIES:
            chosen[name] = ENTRIES[name]
        else:
            raise ValueError(f"no contestant {name!r}; there are: {', '.join(ENTRIES)}")
    return [entry for name, entry in ENTRIES.items() if name in chosen]
