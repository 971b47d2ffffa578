"""A worker's side of pushed LoRA adapters: check their tensors against the model's layers, and keep them.

Every worker requests the complete tensors of an adapter, because an engine divides them itself when it loads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...errors import StateError
from .engine_model import EngineModel
from .messages import check_faults
from .receiver import Receiver

# With one of these options, the names of modules do not determine which ones have an adapter.
_NARROWING = ("layers_to_transform", "layers_pattern", "exclude_modules", "layer_replication", "target_parameters")


class LoraLayer(NamedTuple):
    """The sizes of a layer in the full model, not of this worker's part; None where unknown. ``named`` is False where
    trainers may have another name for the layer (experts stored as one tensor)."""

    inputs: int | None
    outputs: int | None
    named: bool = True


class LoraFactor(NamedTuple):
    """Factor A of a module, of shape (rank, inputs), or factor B, of shape (outputs, rank)."""

    module: str
    is_a: bool


@dataclass(frozen=True)
class LoraAdapter:
    """A pushed adapter: PEFT's ``config``, and its ``tensors`` in the engine's adapter dtype, under PEFT's names."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class AdapterHost(Protocol):
    """What the push needs of an engine's worker. Called only from the thread that runs the model."""

    dtype: torch.dtype
    max_rank: int

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise for a kind of adapter that the engine cannot serve."""

    @property
    def layers(self) -> Mapping[str, LoraLayer]:
        """The modules of the worker's model that can have an adapter, by the trainers' names for them."""

    def factor_of(self, name: str) -> LoraFactor | None:
        """Return the factor that the tensor ``name`` is, or None if the engine ignores it. Raises ``ValueError`` for a
        tensor that does not belong to an adapter."""

    def is_elsewhere(self, module: str) -> bool:
        """Return whether another worker may have a module that is not in ``layers``."""

    def pushed(self, name: str) -> LoraAdapter | None:
        """Return the adapter that ``put`` set."""

    def put(self, name: str, adapter: LoraAdapter | None) -> None:
        """Serve the adapter under this name; None restores what the engine itself has. May be called again after an
        exception."""


class AdapterModel(EngineModel):
    """An ``EngineModel`` for one adapter. Its loader checks tensors against the host's layers and requests them
    completely."""

    def __init__(self, host: AdapterHost, name: str, config: str, loaded: Callable[[], None]) -> None:
        self._host, self._name, self._config_text, self._loaded = host, name, config, loaded
        self._before: LoraAdapter | None = None

    def make(self) -> nn.Module:
        """Make the tensors that an unambiguous configuration implies, so that missing ones are detected."""
        config = self._config()
        self._host.check(config)
        made = nn.Module()
        targets = config.get("target_modules")
        if isinstance(targets, str) or targets is None or any(config.get(key) for key in _NARROWING):
            return made
        for module, layer in self._host.layers.items():
            if layer.named and layer.inputs is not None and layer.outputs is not None and _is_target(module, targets):
                rank = _rank_of(config, module)
                for leaf, shape in (("lora_A", (rank, layer.inputs)), ("lora_B", (layer.outputs, rank))):
                    _place(made, f"{module}.{leaf}", torch.empty(shape, dtype=self._host.dtype, device="meta"))
        return made

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        places = dict(model.named_parameters())
        for _, factor, tensor in self._requested(weights):
            place = places.get(f"{factor.module}.{'lora_A' if factor.is_a else 'lora_B'}")
            if place is None:
                place = nn.Parameter(torch.empty(tensor.shape, dtype=self._host.dtype, device="meta"))
            place.data.copy_(tensor)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._before = self._host.pushed(self._name)
        taken: dict[str, torch.Tensor] = {}
        for name, _, tensor in self._requested(weights):
            taken[name] = torch.empty(tensor.shape, dtype=self._host.dtype).copy_(tensor)
        self._host.put(self._name, LoraAdapter(self._config(), taken))
        self._loaded()

    def restore(self) -> bool:
        self._host.put(self._name, self._before)
        return True

    def _config(self) -> dict[str, Any]:
        config = json.loads(self._config_text)
        if not isinstance(config, dict) or not isinstance(config.get("r"), int):
            raise StateError(f"the config of adapter {self._name!r} has no rank r: {self._config_text:.200}")
        return config

    def _requested(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, LoraFactor, torch.Tensor]]:
        """Yield the tensors that this worker requests. Raises one ``MismatchError`` for all mismatches."""
        config, layers, tensors = self._config(), self._host.layers, dict(weights)
        found: dict[str, LoraFactor] = {}
        faults: list[tuple[str, str, str]] = []
        for name, tensor in tensors.items():
            try:
                factor = self._host.factor_of(name)
            except ValueError as error:
                faults.append(("unknown", name, str(error)))
                continue
            if factor is None or (factor.module not in layers and self._host.is_elsewhere(factor.module)):
                continue
            if factor.module not in layers:
                faults.append(("unknown", name, f"the engine's model has no module {factor.module} that can have LoRA"))
                continue
            if factor in found.values():
                faults.append(("unknown", name, "another tensor is the same factor of its module"))
            found[name] = factor
            fault = self._fault(factor, tuple(tensor.shape), layers[factor.module], _rank_of(config, factor.module))
            if fault:
                faults.append(("shape", name, fault))
        faults += _unpaired(found)
        check_faults(f"{len(faults)} tensor(s) of adapter {self._name!r}", faults, limit=10)
        return ((name, factor, tensors[name]) for name, factor in found.items())

    def _fault(self, factor: LoraFactor, shape: tuple[int, ...], layer: LoraLayer, rank: int) -> str:
        """Return what is wrong with a shape; empty if nothing is."""
        if rank > self._host.max_rank:
            return f"its rank is {rank}, and the engine was started for {self._host.max_rank} at most"
        if layer.inputs is None or layer.outputs is None:
            return ""
        expected = (rank, layer.inputs) if factor.is_a else (layer.outputs, rank)
        if shape == expected:
            return ""
        return f"shape {list(shape)}, but rank {rank} and the engine's layer require {list(expected)}"


class AdapterReceivers:
    """The receivers of a worker's adapters: one per name, and a second one during a change of configuration."""

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._receivers: dict[tuple[str, str], Receiver] = {}

    def receiver(self, target: Mapping[str, Any]) -> Receiver:
        """Return the receiver of a target. Never raises."""
        key = (str(target.get("adapter")), str(target.get("config")))
        if key not in self._receivers:
            self._receivers[key] = Receiver(AdapterModel(self._host, *key, partial(self._close_others, key)))
        return self._receivers[key]

    def _close_others(self, key: tuple[str, str]) -> None:
        # They describe a version that is no longer served.
        for other in [other for other in self._receivers if other[0] == key[0] and other != key]:
            self._receivers.pop(other).close()


def _is_target(module: str, targets: Any) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _rank_of(config: Mapping[str, Any], module: str) -> int:
    """Return the rank by PEFT's rule: the first pattern that matches the end of the name wins."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(config["r"])


def _unpaired(factors: Mapping[str, LoraFactor]) -> list[tuple[str, str, str]]:
    names = {factor: name for name, factor in factors.items()}
    return [
        ("missing", name, f"lora_{'B' if is_a else 'A'} of {module} is missing")
        for (module, is_a), name in names.items()
        if LoraFactor(module, not is_a) not in names
    ]


def _place(tree: nn.Module, path: str, tensor: torch.Tensor) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        children = dict(tree.named_children())
        if parent not in children:
            tree.add_module(parent, children.setdefault(parent, nn.Module()))
        tree = children[parent]
    tree.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
