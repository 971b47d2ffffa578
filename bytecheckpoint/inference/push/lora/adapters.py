"""LoRA adapters as what is pushed: only their tensors go to the engines, whose base models are not touched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from ...errors import FormatError, KeyNotFoundError, StateError
from ...frameworks.module_tree import has_fsdp1
from ...storage_backends import open_backend
from .engines import Engine
from .targets import TargetEngine

__all__ = ["CONFIG_NAME", "AdapterEngine", "adapter_config", "adapter_state"]

CONFIG_NAME = "adapter_config.json"

_MAX_CONFIG = 1 << 20  # bytes
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)(?:\.(?P<rest>.+))?")


class AdapterEngine(TargetEngine):
    """The LoRA adapter ``name`` of ``engine``: what is pushed to it are PEFT's tensors of that adapter.

    ``config`` is PEFT's, a ``LoraConfig`` or what its ``adapter_config.json`` says. After a push, requests that name
    the adapter are answered with it, whatever number or path vLLM has for it; no file is read for that name any more.
    ``engine`` must have been started with LoRA enabled.
    """

    def __init__(self, engine: Engine, name: str, config: Any) -> None:
        super().__init__(engine, f"adapter {name!r}", {"adapter": name, "config": _config_text(config)})


def adapter_state(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """The tensors of a PEFT model's LoRA adapter, under the names that PEFT stores them by; nothing is gathered.

    For ``Pusher.push({"model": adapter_state(model)})`` and ``bytecheckpoint.save``. Raises ``StateError`` for FSDP-1,
    whose parameters have not their own shapes, and for an adapter with whole modules (``modules_to_save``), which is
    more than LoRA.
    """
    if has_fsdp1(model):
        raise StateError("the tensors of an adapter under FSDP-1 are not found by name; shard it with FSDP-2")
    found: dict[str, torch.Tensor] = {}
    others: set[str] = set()
    for wrapped, parameter in model.named_parameters():
        name = _WRAPPERS.sub("", wrapped)
        if f".modules_to_save.{adapter}." in name:
            raise StateError(f"{name}: adapter {adapter!r} has whole modules, which are not pushed with it")
        match = _TENSOR.fullmatch(name)
        if match is None:
            continue
        owner, _, rest = (match["rest"] or "").partition(".")
        if owner in ("", "weight", "bias"):  # of a model that can have one adapter only
            found[name] = parameter.detach()
        elif owner == adapter:
            found[".".join(part for part in (match["module"], match["kind"], rest) if part)] = parameter.detach()
        else:
            others.add(owner)
    if not found:
        there = f"; it has {', '.join(map(repr, sorted(others)))}" if others else ""
        raise StateError(f"the model has no LoRA adapter {adapter!r}{there}")
    return found


def adapter_config(url: str, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the ``adapter_config.json`` of a folder that PEFT stored says."""
    backend = open_backend(url, **dict(storage_options or {}))
    where = f"{url.rstrip('/')}/{CONFIG_NAME}"
    try:
        document = json.loads(backend.get(CONFIG_NAME, max_size=_MAX_CONFIG))
    except KeyNotFoundError as error:
        raise StateError(f"{where} is not there; is this the folder of an adapter that PEFT stored?") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{where} is no map")
    return document


def _config_text(config: Any) -> str:
    document = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(document, Mapping):
        raise StateError(f"an adapter's config is PEFT's LoraConfig or a map, not {type(config).__name__}")
    try:
        # Sorted, as equal configurations must be equal texts: a worker takes another text for another adapter.
        return json.dumps(document, default=_plain, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise StateError(f"the adapter's config cannot be told to an engine: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} in it is no plain value")
