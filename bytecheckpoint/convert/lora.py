"""Export LoRA adapters under PEFT's names: merged into the model, or as the files that PEFT stores.

A live model of PEFT has ``<path>.base_layer.weight``, ``<path>.lora_A.<adapter>.weight`` and ``lora_B`` for each
adapted layer, and whole copies of some modules as ``<path>.modules_to_save.<adapter>``. Its files leave out the
adapter's name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..errors import FormatError, MismatchError, NameNotFoundError, UnsupportedTensorError, UsageError
from ..runtime.arguments import check_choice
from ..runtime.messages import listed
from ..tensors.geometry import Box

LoraForm = Literal["merge", "peft"]

ADAPTER_KEY = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<path>.+)\.(?P<kind>lora_\w+)(?:\.(?P<rest>.+))?")
_KINDS = {"lora_A": "down", "lora_B": "up", "lora_embedding_A": "down", "lora_embedding_B": "up"}
_SAVED = re.compile(r"(?P<path>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class Lora:
    """How an export treats an adapter.

    Attributes:
        how: ``merge`` adds the products of the factors to the tensors of the model. ``peft`` writes the adapter alone.
        config: The content of PEFT's ``adapter_config.json``, if there is one.
        alpha: The numerator of the scaling ``alpha / rank``, in place of the configuration's ``lora_alpha``.
        adapter: The adapter's name, if the model has several.
    """

    how: LoraForm
    config: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    adapter: str | None = None


ReadBox = Callable[[int, Box], torch.Tensor]
"""Returns a box of the tensor in a row of the manifest."""


@dataclass(frozen=True)
class LowRank:
    """What is added to a matrix: ``scale * up @ down``, or its transpose.

    ``down`` and ``up`` are rows of the manifest, with the shapes (rank, columns) and (rows, rank).
    """

    down: int
    up: int
    rank: int
    scale: float
    transposed: bool = False

    def added_to(self, block: torch.Tensor, box: Box, read: ReadBox) -> torch.Tensor:
        """Return the sum for ``block``, the box of the matrix, in float32 (float64 if the block is)."""
        (row, column), (rows, columns) = box.offsets, box.lengths
        if self.transposed:
            row, column, rows, columns = column, row, columns, rows
        dtype = torch.promote_types(block.dtype, torch.float32)
        down = read(self.down, Box((0, column), (self.rank, columns))).to(dtype)
        up = read(self.up, Box((row, 0), (rows, self.rank))).to(dtype)
        product = up @ down
        return torch.add(block.to(dtype), product.T if self.transposed else product, alpha=self.scale)


@dataclass(frozen=True)
class _Factor:
    path: str
    adapter: str
    kind: str


class LoraPlan:
    """What becomes of each tensor of a section.

    Attributes:
        added: What is added to the tensors in these rows of the manifest.
        config: The content of ``adapter_config.json``.
    """

    def __init__(self, checkpoint: Checkpoint, section: str, lora: Lora) -> None:
        """Find the adapter.

        Raises ``UsageError`` if the scaling or the adapter is unknown, ``NameNotFoundError`` without an adapter,
        ``MismatchError`` if a layer lacks a tensor or the shapes do not fit, and ``UnsupportedTensorError`` for other
        methods than LoRA of matrices and embeddings.
        """
        check_choice("lora", lora.how, LoraForm)
        manifest = checkpoint.manifest
        self._lora, self._url = lora, checkpoint.url
        self._meta_of = manifest.tensors.meta_of
        self._rows: dict[str, int] = {
            manifest.tensors.fqn_of(row): row for row in manifest.section_tensors(section).tolist()
        }
        self._refuse_methods()
        self._factors = self._find(self._rows)
        self._adapter = self._chosen_adapter()
        self._layers = self._by_layer()
        self.added: dict[int, LowRank] = {}
        if lora.how == "merge":
            self.added = {self._base(path): self._low_rank(path, layer) for path, layer in self._layers.items()}
        self.config = dict(lora.config) or self._new_config()

    def relabel(self, name: str) -> str | None:
        """The exported name of a stored one; None if it is not exported."""
        factor, saved = self._factors.get(name), _SAVED.fullmatch(name)
        if self._lora.how == "merge":
            if factor is not None or ".original_module." in name:
                return None
            if saved is not None:
                name = f"{saved['path']}.{saved['rest']}" if saved["adapter"] == self._adapter else ""
            return name.removeprefix(_PREFIX).replace(".base_layer.", ".") or None
        if saved is not None and saved["adapter"] == self._adapter:
            name = f"{saved['path']}.{saved['rest']}"
        elif factor is None or factor.adapter != self._adapter:
            return None
        elif factor.adapter:
            name = ".".join(f"{name}.".rsplit(f".{factor.adapter}.", 1)).removesuffix(".")
        return name if name.startswith(_PREFIX) else _PREFIX + name

    def config_file(self) -> bytes:
        """The text of ``adapter_config.json``."""
        return (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode()

    # ---------------------------------------------------------------------------------------------------------- finding

    def _refuse_methods(self) -> None:
        config = self._lora.config
        odd = [key for key in ("use_dora", "lora_bias", "use_qalora") if config.get(key)]
        if config.get("bias", "none") != "none":
            odd.append("bias")
        if config.get("peft_type", "LORA") != "LORA":
            odd.append(f"peft_type {config['peft_type']}")
        if odd:
            raise UnsupportedTensorError(
                f"{self._url}: the adapter uses {', '.join(odd)}, which is not supported; call PEFT's "
                f"merge_and_unload() or save_pretrained() and save the result"
            )

    def _find(self, names: Mapping[str, int]) -> dict[str, _Factor]:
        factors: dict[str, _Factor] = {}
        odd: list[str] = []
        for name in names:
            match = _FACTOR.fullmatch(name)
            if match is None:
                odd += [name] if ".token_adapter." in name else []
                continue
            *owner, last = (match["rest"] or "weight").split(".")
            if match["kind"].startswith("lora_embedding") and last != "weight":
                owner, last = [last], "weight"
            if match["kind"] not in _KINDS or last != "weight" or len(owner) > 1 or len(self._shape(name)) != 2:
                odd.append(name)
            factors[name] = _Factor(match["path"], ".".join(owner), match["kind"])
        if odd:
            raise UnsupportedTensorError(
                f"{self._url}: {len(odd)} tensor(s) of the adapter are no factors of a matrix or an embedding, such "
                f"as {odd[0]}; call PEFT's merge_and_unload() or save_pretrained() and save the result"
            )
        if not factors:
            raise NameNotFoundError(f"{self._url} has no LoRA factors (lora_A, lora_B); leave lora out")
        return factors

    def _chosen_adapter(self) -> str:
        there = sorted({factor.adapter for factor in self._factors.values()})
        asked = self._lora.adapter
        if asked is None and len(there) == 1:
            return there[0]
        if asked is None or (asked not in there and there != [""]):
            raise UsageError(f"{self._url} has the adapters {', '.join(there)}; choose one of them, not {asked}")
        return asked if asked in there else ""

    def _by_layer(self) -> dict[str, dict[str, str]]:
        """By the path of the layer, the names of both factors."""
        layers: dict[str, dict[str, str]] = {}
        for name, factor in self._factors.items():
            if factor.adapter == self._adapter:
                layers.setdefault(factor.path, {})[_KINDS[factor.kind]] = name
        faults = [
            ("missing", f"{path}.{kind}", "")
            for path, layer in layers.items()
            for kind, role in (("lora_A", "down"), ("lora_B", "up"))
            if role not in layer
        ]
        if faults:
            raise MismatchError(
                f"{self._url}: {len(faults)} LoRA factor(s) are missing: {listed([name for _, name, _ in faults])}",
                faults,
            )
        return layers

    # ---------------------------------------------------------------------------------------------------------- merging

    def _base(self, path: str) -> int:
        for name in (f"{path}.base_layer.weight", f"{path}.weight"):
            if name in self._rows:
                return self._rows[name]
        fault = ("missing", f"{path}.base_layer.weight", "")
        raise MismatchError(
            f"{self._url}: {fault[1]} is missing, so the adapter cannot be merged; the save may have stored the "
            f"adapter only, which lora='peft' exports",
            [fault],
        )

    def _low_rank(self, path: str, layer: Mapping[str, str]) -> LowRank:
        base, down, up = self._base(path), layer["down"], layer["up"]
        meta, (rank, columns), (rows, other) = self._meta_of(base), self._shape(down), self._shape(up)
        is_turned = bool(self._lora.config.get("fan_in_fan_out")) or "embedding" in self._factors[down].kind
        fits = [turned for turned, shape in ((False, (rows, columns)), (True, (columns, rows))) if meta.shape == shape]
        if not fits or rank != other or meta.dtype.kind != "float" or meta.dtype.itemsize < 2:
            detail = f"{meta} with factors {[rank, columns]} and {[rows, other]}"
            raise MismatchError(
                f"{self._url}: the factors of {path} do not fit its weight: {detail}", [("shape", path, detail)]
            )
        # A matrix that is not square shows its orientation.
        transposed = is_turned if len(fits) == 2 else fits[0]
        return LowRank(self._rows[down], self._rows[up], rank, self._scale(path, rank), transposed)

    def _scale(self, path: str, rank: int) -> float:
        config = self._lora.config
        patterns = config.get("alpha_pattern") or {}
        inner = path.removeprefix(_PREFIX)
        key = next((one for one in patterns if re.fullmatch(rf"(.*\.)?({one})", inner)), None)
        alpha = self._lora.alpha if self._lora.alpha is not None else patterns.get(key, config.get("lora_alpha"))
        if alpha is None:
            raise self._unknown_scale()
        if type(alpha) not in (int, float):
            raise FormatError(f"adapter_config.json: lora_alpha is {alpha!r:.80}")
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _unknown_scale(self) -> UsageError:
        return UsageError(
            f"{self._url}: the scaling of the adapter is not stored with its tensors; pass adapter_config.json, or "
            f"alpha (lora_alpha)"
        )

    def _new_config(self) -> dict[str, Any]:
        """A configuration with what the tensors show."""
        if self._lora.how != "peft":
            return {}
        if self._lora.alpha is None:
            raise self._unknown_scale()
        ranks = {path.removeprefix(_PREFIX): self._shape(layer["down"])[0] for path, layer in self._layers.items()}
        saved = {match["path"].removeprefix(_PREFIX) for name in self._rows if (match := _SAVED.fullmatch(name))}
        rank = max(ranks.values())
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": None,
            "task_type": None,
            "inference_mode": True,
            "r": rank,
            "rank_pattern": {path: own for path, own in ranks.items() if own != rank},
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(ranks),
            "modules_to_save": sorted(saved) or None,
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._meta_of(self._rows[name]).shape
        return shape
