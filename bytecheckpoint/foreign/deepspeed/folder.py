"""Find the files of a DeepSpeed checkpoint, and read what they contain besides the bytes of tensors.

The names are those of ``deepspeed/runtime/engine.py`` (``_get_ckpt_name`` and its neighbors).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import CheckpointError, CorruptionError, FormatError
from ..source_path import SourcePath

_POINTERS = ("latest", "latest_universal")
_MAX_POINTER_BYTES = 4096
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_\d+_model_states\.pt")
_PIPELINE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_UNIVERSAL = "zero/"


def find_folder(source: SourcePath) -> SourcePath | None:
    """Return the folder of the tag that ``latest`` names, or the path itself; None if it is none.

    Raises ``CorruptionError`` if ``latest`` names a tag that is not there.
    """
    if _has_model(source):
        return source
    for pointer in _POINTERS:
        if pointer not in source.children:
            continue
        raw = source.backend.get(pointer, max_size=_MAX_POINTER_BYTES)
        tag = raw.decode("utf-8", "replace").strip()
        if not tag or {"", ".", ".."} & {*tag.split("/")} or "\\" in tag or "\0" in tag:
            continue
        folder = source.below(tag)
        if _has_model(folder):
            return folder
        if not folder.children and "zero_to_fp32.py" in source.children:
            raise CorruptionError(
                f"{source.url}/{pointer} names the tag {tag!r:.200}, but no such folder is there; fetch it, or "
                f"pass the folder of another tag"
            )
    return None


def _has_model(folder: SourcePath) -> bool:
    return any(_MODEL.fullmatch(name) or _PIPELINE.fullmatch(name) for name in folder.children)


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of a checkpoint by what they hold.

    Attributes:
        folder: The folder.
        model: The names of the model files by data-parallel rank. All stages but ZeRO-3 have one.
        optimizer: The names of the optimizer files by data-parallel rank.
        experts: The names of the files of single experts.
        universal: The names of the folders of a universal checkpoint's parameters.
    """

    folder: SourcePath
    model: Mapping[int, str]
    optimizer: Mapping[int, str]
    experts: Sequence[str]
    universal: Sequence[str] = ()

    @classmethod
    def of(cls, folder: SourcePath) -> DeepSpeedFiles:
        """Classify the names.

        Raises ``CheckpointError`` for pipeline and tensor parallelism, ``FormatError`` if the files of two saves are
        mixed, and ``CorruptionError`` without rank 0's model file.
        """
        model: dict[int, str] = {}
        optimizer: dict[int, str] = {}
        universal: Sequence[str] = ()
        if _UNIVERSAL in folder.children:
            found = folder.backend.list_children(folder.prefix + _UNIVERSAL)
            universal = [name for name in found if name.endswith("/")]
        for pattern, files in ((_MODEL, model), (_OPTIMIZER, optimizer)):
            for name in folder.children:
                match = pattern.fullmatch(name)
                if match is None:
                    continue
                rank, parallel = int(match[1] or 0), int(match[2])
                if parallel:
                    raise CheckpointError(
                        f"{folder.url}/{name} belongs to tensor parallelism, of which DeepSpeed does not store how it "
                        f"split the tensors. Load it with the engine that wrote it and save it with bytecheckpoint"
                    )
                if rank in files:
                    raise FormatError(
                        f"{folder.url}: {files[rank]} and {name} are both of rank {rank}, so they belong to two saves; "
                        f"remove the files of the older one"
                    )
                files[rank] = name
        if any(map(_PIPELINE.fullmatch, folder.children)):
            raise CheckpointError(
                f"{folder.url} holds layer files of DeepSpeed's pipeline parallelism, which are not supported: they "
                f"do not state the names of the whole model. Load them with the engine that wrote them"
            )
        if 0 not in model:
            name = re.sub(r"rank_\d+", "rank_0", model[min(model)], count=1)
            raise CorruptionError(f"{folder.url}/{name}: file is missing; fetch it again")
        experts = [name for name in folder.children if _EXPERT.fullmatch(name)]
        return cls(folder, model, optimizer, experts, universal)

    @cached_property
    def first(self) -> Mapping[str, Any]:
        """What rank 0's model file contains. Raises ``FormatError`` if no engine wrote it."""
        (found,) = self.folder.objects([self.model[0]])
        if type(found) is not dict or not isinstance(found.get("module"), dict) or "dp_world_size" not in found:
            raise FormatError(f"{self.where(self.model[0])}: it is no model file of a DeepSpeed engine")
        if found.get("ds_autoep_layers") or found.get("autoep_layers"):
            raise CheckpointError(
                f"{self.where(self.model[0])}: DeepSpeed's AutoEP is not supported; save with bytecheckpoint instead"
            )
        return found

    @property
    def is_partitioned(self) -> bool:
        """Whether ZeRO-3 wrote the model files, one for each rank."""
        return self.model[0].startswith("zero_pp_rank_")

    @property
    def world_size(self) -> int:
        """The number of data-parallel ranks that saved."""
        size = self.first["dp_world_size"]
        if type(size) is not int or not 1 <= size < 1 << 31:
            raise FormatError(f"{self.where(self.model[0])}: its dp_world_size is {size!r:.80}")
        return size

    def optimizers(self) -> list[Mapping[str, Any]]:
        """What the optimizer files of all ranks contain.

        Raises ``CorruptionError`` for a missing file, and ``FormatError`` for one too many, or one of another kind.
        """
        keys = self.of_all_ranks(self.optimizer)
        found = self.folder.objects(keys)
        for key, document in zip(keys, found, strict=True):
            if type(document) is not dict or type(document.get("optimizer_state_dict")) is not dict:
                raise FormatError(f"{self.where(key)}: it is no optimizer file of a DeepSpeed engine")
        return [document["optimizer_state_dict"] for document in found]

    def of_all_ranks(self, files: Mapping[int, str]) -> list[str]:
        """The names in the order of the ranks. Raises ``CorruptionError`` and ``FormatError``."""
        like = files[min(files)]
        missing = self.world_size - sum(rank < self.world_size for rank in files)
        if missing:
            first = next(rank for rank in range(self.world_size) if rank not in files)
            name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{first}", like)
            raise CorruptionError(
                f"{self.where(name)}: file is missing, although {self.world_size} ranks saved"
                + (f" ({missing} files are missing)" if missing > 1 else "")
                + "; fetch it again"
            )
        extra = next((name for rank, name in files.items() if rank >= self.world_size), None)
        if extra is not None:
            raise FormatError(
                f"{self.where(extra)}: only {self.world_size} ranks saved, so it belongs to another save; remove it"
            )
        return [files[rank] for rank in range(self.world_size)]

    def where(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.folder.url}/{name}"


def items_of(found: Any, what: str, where: str) -> Sequence[Any]:
    """Return a list or tuple in a file. Raises ``FormatError`` for anything else."""
    if not isinstance(found, (list, tuple)):
        raise FormatError(f"{where}: {what} is {type(found).__name__} {found!r:.80}, not a list")
    return found
