"""Who takes part. Names, where each is implemented, and what must be installed for it; nothing is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENTRIES", "Entry", "select"]


@dataclass(frozen=True)
class Entry:
    """One contestant: ``factory`` (``module:class`` below ``benchmarks.peers``) called with ``options``.

    ``install`` names what its own environment needs beside torch (pinned in ``requirements.txt``); with nothing to
    install it runs in the environment of the benchmark. ``parts`` says what of it is worth measuring.
    """

    name: str
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    install: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("save", "cold", "warm")
    note: str = ""

    @property
    def environment(self) -> str:
        """The environment it runs in: "" for the benchmark's own."""
        return self.install[0] if self.install else ""


_LOAD, _SAVE = ("cold", "warm"), ("save",)

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("bytecheckpoint", "library:Library"),
        Entry("bytecheckpoint async", "library:Library", {"background": True}, parts=_SAVE),
        Entry("bytecheckpoint gated", "library:Gated", parts=_SAVE, note="the copy goes on behind the training step"),
        Entry("bytecheckpoint unverified", "library:Library", {"verify": False}, parts=_LOAD, note="no checksums"),
        Entry("DCP", "dcp:Dcp"),
        Entry("DCP 4 threads", "dcp:Dcp", {"threads": 4}, parts=_SAVE),
        Entry("DCP async thread", "dcp:DcpAsync", parts=_SAVE),
        Entry(
            "DCP async thread, kept stager",
            "dcp:DcpAsync",
            {"keep_stager": True},
            parts=_SAVE,
            note="staging buffers reused",
        ),
        Entry("DCP async process", "dcp:DcpAsync", {"keep_stager": True, "process": True}, parts=_SAVE),
        Entry("torch.save", "torch_save:TorchSave", note="no fsync of its own"),
        Entry("torch.load mmap", "torch_save:TorchSave", {"mapped": True}, parts=_LOAD),
        Entry("safetensors", "safetensors_file:Safetensors", note="no fsync of its own, no checksums"),
        Entry("torchsnapshot", "torchsnapshot:TorchSnapshot", install=("torchsnapshot",), note="no fsync of its own"),
        Entry(
            "torchsnapshot async",
            "torchsnapshot:TorchSnapshot",
            {"background": True},
            ("torchsnapshot",),
            _SAVE,
            note="no fsync of its own",
        ),
        Entry(
            "torch_checkpointing",
            "torch_checkpointing:TorchCheckpointing",
            install=("torch_checkpointing",),
            note="buffered: its O_DIRECT default fails on ext4 with EINVAL; no fsync of its own",
        ),
        Entry(
            "torch_checkpointing async",
            "torch_checkpointing:TorchCheckpointing",
            {"background": True},
            ("torch_checkpointing",),
            _SAVE,
            note="as above; its lock is waited for before each update",
        ),
        Entry("tensorizer", "tensorizer:Tensorizer", install=("tensorizer",), note="no fsync of its own"),
        Entry("Run:ai streamer", "runai_streamer:RunaiStreamer", install=("runai-model-streamer",), parts=_LOAD),
        Entry("fastsafetensors", "fastsafetensors:Fastsafetensors", install=("fastsafetensors",), parts=_LOAD),
    )
}


def select(wanted: Sequence[str]) -> list[Entry]:
    """The entries that ``wanted`` names: "default" (nothing to install), "all", or names. Raises ``ValueError``."""
    chosen: dict[str, Entry] = {}
    for name in wanted:
        if name == "all":
            chosen |= ENTRIES
        elif name == "default":
            chosen |= {key: entry for key, entry in ENTRIES.items() if not entry.install}
        elif name in ENTRIES:
            chosen[name] = ENTRIES[name]
        else:
            raise ValueError(f"no contestant {name!r}; there are: {', '.join(ENTRIES)}")
    return [entry for name, entry in ENTRIES.items() if name in chosen]
