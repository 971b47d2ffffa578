"""The sender's side of pushed LoRA adapters. The engine's base model is not touched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....checkpoint.location import AnyLocation, Location
from ....errors import FormatError, KeyNotFoundError, StateError, UsageError
from ....format.hf_index import ADAPTER_CONFIG_KEY
from ....frameworks.module_tree import clean_name, has_fsdp1
from .base import Engine, TargetEngine

_MAX_CONFIG_BYTES = 1 << 20
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)(?:\.(?P<rest>.+))?")


class AdapterEngine(TargetEngine):
    """One LoRA adapter of an engine. Push PEFT's tensors of that adapter to it.

    After a push, the engine answers requests for this adapter's name with the pushed tensors, whatever number or path
    vLLM has for it, and reads no file for that name any more.

    Args:
        engine: A vLLM engine that was started with LoRA enabled.
        name: The name of the adapter in requests.
        config: PEFT's ``LoraConfig``, or the content of its ``adapter_config.json``.

    Raises:
        UsageError: ``config`` is neither.
        StateError: ``config`` has values that JSON cannot express.
    """

    def __init__(self, engine: Engine, name: str, config: Any) -> None:
        super().__init__(engine, f"adapter {name!r}", {"adapter": name, "config": _config_text(config)})


def adapter_state(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT model's LoRA adapter, under PEFT's names for stored adapters. Nothing is gathered.

    Use the result in ``Pusher.push({"model": adapter_state(model)})`` and in ``bytecheckpoint.save``.

    Args:
        model: The PEFT model, also under FSDP-2.
        adapter: The name of the adapter in the model.

    Returns:
        The tensors by name.

    Raises:
        StateError: The model is under FSDP-1, whose flat parameters do not have the tensors' shapes; it has no such
            adapter; or the adapter contains complete modules (``modules_to_save``).
    """
    if has_fsdp1(model):
        raise StateError("FSDP-1 does not keep the tensors of an adapter under their names; use FSDP-2")
    found: dict[str, torch.Tensor] = {}
    others: set[str] = set()
    for wrapped, parameter in model.named_parameters():
        name = clean_name(wrapped)
        if f".modules_to_save.{adapter}." in name:
            raise StateError(
                f"{name}: adapter {adapter!r} has complete modules (modules_to_save), which cannot be pushed"
            )
        match = _TENSOR.fullmatch(name)
        if match is None:
            continue
        owner, _, rest = (match["rest"] or "").partition(".")
        if owner in ("", "weight", "bias"):  # a model that can have only one adapter
            found[name] = parameter.detach()
        elif owner == adapter:
            found[".".join(part for part in (match["module"], match["kind"], rest) if part)] = parameter.detach()
        else:
            others.add(owner)
    if not found:
        there = f"; it has {', '.join(map(repr, sorted(others)))}" if others else ""
        raise StateError(f"the model has no LoRA adapter {adapter!r}{there}")
    return found


def adapter_config(path: AnyLocation) -> dict[str, Any]:
    """Read the ``adapter_config.json`` of a folder that PEFT stored.

    Args:
        path: The folder.

    Returns:
        The configuration.

    Raises:
        StateError: The folder has no such file.
        FormatError: The file is not a JSON object.
    """
    location = Location.of(path)
    backend, where = location.open(), f"{str(location).rstrip('/')}/{ADAPTER_CONFIG_KEY}"
    try:
        document = json.loads(backend.get(ADAPTER_CONFIG_KEY, max_size=_MAX_CONFIG_BYTES))
    except KeyNotFoundError as error:
        raise StateError(f"{where} does not exist; is this the folder of an adapter that PEFT stored?") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{where} is not a JSON object")
    return document


def _config_text(config: Any) -> str:
    document = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(document, Mapping):
        raise UsageError(f"an adapter's config is PEFT's LoraConfig or a mapping, not {type(config).__name__}")
    try:
        # Sorted, because a worker treats a different text as a different configuration.
        return json.dumps(document, default=sorted, sort_keys=True)  # PEFT has sets, and enumerations of text
    except (TypeError, ValueError) as error:
        raise StateError(f"the adapter's config cannot be expressed in JSON: {error}") from error
