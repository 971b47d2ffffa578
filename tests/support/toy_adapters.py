"""LoRA adapters of the toy engine: the real receivers, and hosts that fail on request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from bytecheckpoint.inference.push.adapters import LoraAdapter, LoraFactor, LoraLayer

MAX_RANK = 8
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))"
)


class ToyAdapters:
    """An ``AdapterHost``, of which so many puts as there are ``failures`` break off, having lost what was served."""

    max_rank = MAX_RANK

    def __init__(self, modules: Mapping[str, int], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.layers = {name: LoraLayer(size, size) for name, size in modules.items()}
        self._served: dict[str, LoraAdapter | None] = {}
        self.failures = 0

    def check(self, config: Mapping[str, Any]) -> None:
        if config.get("use_dora"):
            raise ValueError("DoRA is not supported.")

    def factor_of(self, name: str) -> LoraFactor | None:
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is not a tensor of a LoRA adapter")
        return LoraFactor(found["module"], (found["linear"] or found["embedding"]) == "A")

    def is_elsewhere(self, module: str) -> bool:
        return False

    def pushed(self, name: str) -> LoraAdapter | None:
        return self._served.get(name)

    def put(self, name: str, adapter: LoraAdapter | None) -> None:
        if self.failures:
            self.failures -= 1
            self._served[name] = None
            raise RuntimeError("the adapter does not fit")
        self._served[name] = adapter

    def digests(self) -> dict[str, str]:
        return {name: digest_of(one.tensors, one.config) for name, one in self._served.items() if one is not None}


def digest_of(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    found = hashlib.sha256(repr(config["lora_alpha"]).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
