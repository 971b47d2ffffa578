"""A worker's side of pushed LoRA adapters: their tensors are held against the layers that they are for, and kept.

Every worker takes the tensors of an adapter whole, as an engine cuts them itself when it puts them beside its weights.
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

from ...errors import MismatchError, StateError
from .quantizing import Blocks
from .receiver import Receiver

__all__ = ["Adapter", "AdapterHost", "AdapterModel", "AdapterReceivers", "Piece", "Site", "piece_of"]

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))"
)
# With one of these, which modules have an adapter is no longer plain from their names.
_NARROWING = ("layers_to_transform", "layers_pattern", "exclude_modules", "layer_replication", "target_parameters")


class Site(NamedTuple):
    """Sizes of a layer as the whole model has it, not this worker's part; None where they are not known. Whether it is
    ``named`` plainly: a trainer may know by another name what an engine calls so (experts, as one tensor)."""

    inputs: int | None
    outputs: int | None
    named: bool = True


class Piece(NamedTuple):
    """Of which module a tensor is the factor A, of shape (rank, inputs), or else B, (outputs, rank)."""

    module: str
    is_a: bool


@dataclass(frozen=True)
class Adapter:
    """``config`` is PEFT's; ``tensors`` are in the type in which the engine keeps adapters, under PEFT's names."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class AdapterHost(Protocol):
    """What is needed of an engine's worker. Called from the thread that runs the model, and none else."""

    dtype: torch.dtype
    max_rank: int

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise for an adapter of a kind that the engine cannot serve."""

    def sites(self) -> Mapping[str, Site]:
        """The modules of the worker's model that can have an adapter, by the names that trainers have for them."""

    def piece_of(self, name: str) -> Piece | None:
        """What the tensor ``name`` is, None for what the engine leaves out. Raises ``ValueError`` for what is no
        tensor of an adapter."""

    def is_elsewhere(self, module: str) -> bool:
        """Whether another worker may have that module, which is no site of this one."""

    def pushed(self, name: str) -> Adapter | None:
        """What ``put`` made it serve."""

    def put(self, name: str, adapter: Adapter | None) -> None:
        """Serve the adapter under this name from now on; None: what the engine itself has under it. Where it raises,
        it can be called again."""


def piece_of(name: str) -> Piece:
    """As PEFT names tensors. Raises ``ValueError`` for what is none of an adapter."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no tensor of a LoRA adapter")
    return Piece(found["module"], (found["linear"] or found["embedding"]) == "A")


class AdapterModel:
    """An ``EngineModel`` that is one adapter: its loader holds tensors against the host's layers, and takes them
    whole."""

    quantized = False
    blocks: Blocks | None = None

    def __init__(self, host: AdapterHost, name: str, config: str, loaded: Callable[[], None]) -> None:
        self._host, self._name, self._config_text, self._loaded = host, name, config, loaded
        self._before: Adapter | None = None

    def make(self) -> nn.Module:
        """What the configuration says that there is, where it says that plainly. So what nobody sends is noticed."""
        config = self._config()
        self._host.check(config)
        made = nn.Module()
        targets = config.get("target_modules")
        if isinstance(targets, str) or targets is None or any(config.get(key) for key in _NARROWING):
            return made
        for module, site in self._host.sites().items():
            if site.named and site.inputs is not None and site.outputs is not None and _is_target(module, targets):
                rank = _rank_of(config, module)
                for leaf, shape in (("lora_A", (rank, site.inputs)), ("lora_B", (site.outputs, rank))):
                    _place(made, f"{module}.{leaf}", torch.empty(shape, dtype=self._host.dtype, device="meta"))
        return made

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        places = dict(model.named_parameters())
        tensors = dict(weights)
        pieces = self._pieces({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, piece in pieces.items():
            tensor = tensors[name]
            place = places.get(f"{piece.module}.{'lora_A' if piece.is_a else 'lora_B'}")
            if place is None:
                place = nn.Parameter(torch.empty(tensor.shape, dtype=self._host.dtype, device="meta"))
            place.data.copy_(tensor)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._before = self._host.pushed(self._name)
        tensors = dict(weights)
        taken: dict[str, torch.Tensor] = {}
        for name in self._pieces({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
            taken[name] = torch.empty(tensors[name].shape, dtype=self._host.dtype)
            taken[name].copy_(tensors[name])
        self._host.put(self._name, Adapter(self._config(), taken))
        self._loaded()

    def restore(self) -> bool:
        self._host.put(self._name, self._before)
        return True

    def _config(self) -> dict[str, Any]:
        config = json.loads(self._config_text)
        if not isinstance(config, dict) or not isinstance(config.get("r"), int):
            raise StateError(f"the config of adapter {self._name!r} names no rank r: {self._config_text:.200}")
        return config

    def _pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """Those of the tensors that this worker takes. Raises one ``MismatchError`` for all that do not fit."""
        config, sites = self._config(), self._host.sites()
        found: dict[str, Piece] = {}
        faults: list[tuple[str, str, str]] = []
        for name, shape in shapes.items():
            try:
                piece = self._host.piece_of(name)
            except ValueError as error:
                faults.append(("unknown", name, str(error)))
                continue
            if piece is None or (piece.module not in sites and self._host.is_elsewhere(piece.module)):
                continue
            if piece.module not in sites:
                faults.append(("unknown", name, f"the engine's model has no module {piece.module} that can have LoRA"))
                continue
            if piece in found.values():
                faults.append(("unknown", name, "another of the tensors is the same of its module"))
            found[name] = piece
            fault = self._fault(piece, shape, sites[piece.module], _rank_of(config, piece.module))
            if fault:
                faults.append(("shape", name, fault))
        faults += _unpaired(found)
        if faults:
            listed = "\n  ".join(f"{name}: {text}" for _, name, text in faults[:10])
            more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise MismatchError(f"{len(faults)} tensor(s) of adapter {self._name!r}:\n  {listed}{more}", faults)
        return found

    def _fault(self, piece: Piece, shape: tuple[int, ...], site: Site, rank: int) -> str:
        """What is wrong with a shape, if anything."""
        if rank > self._host.max_rank:
            return f"its rank is {rank}, and the engine was started for {self._host.max_rank} at most"
        if site.inputs is None or site.outputs is None:
            return ""
        wanted = (rank, site.inputs) if piece.is_a else (site.outputs, rank)
        if shape == wanted:
            return ""
        return f"shape {list(shape)}, where rank {rank} and the layer of the engine make {list(wanted)}"


class AdapterReceivers:
    """The receivers of a worker's adapters: one for each name, and one more while another configuration takes over."""

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._receivers: dict[tuple[str, str], Receiver] = {}

    def receiver(self, target: Mapping[str, Any]) -> Receiver:
        """Of the adapter that a sender means. Never raises."""
        key = (str(target.get("adapter")), str(target.get("config")))
        if key not in self._receivers:
            self._receivers[key] = Receiver(AdapterModel(self._host, *key, partial(self._close_others, key)))
        return self._receivers[key]

    def _close_others(self, key: tuple[str, str]) -> None:
        # What they know of what is served is no longer so.
        for other in [other for other in self._receivers if other[0] == key[0] and other != key]:
            self._receivers.pop(other).close()


def _is_target(module: str, targets: Any) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _rank_of(config: Mapping[str, Any], module: str) -> int:
    """As PEFT has it: the first pattern that the end of the name matches."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(config["r"])


def _unpaired(pieces: Mapping[str, Piece]) -> list[tuple[str, str, str]]:
    names = {piece: name for name, piece in pieces.items()}
    return [
        ("missing", name, f"there is no lora_{'B' if is_a else 'A'} of {module} to go with it")
        for (module, is_a), name in names.items()
        if Piece(module, not is_a) not in names
    ]


def _place(tree: nn.Module, path: str, tensor: torch.Tensor) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        children = dict(tree.named_children())
        if parent not in children:
            tree.add_module(parent, children.setdefault(parent, nn.Module()))
        tree = children[parent]
    tree.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
