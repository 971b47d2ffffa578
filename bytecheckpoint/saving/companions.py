"""The files that Hugging Face's libraries and vLLM, or ``bcp export``, need in addition to the tensors.

A model that is stored whole gets an index, which maps each tensor to its file, and the model's configuration if it has
one; in any layout, a model with an adapter of PEFT gets the configuration of the adapter, which has its scaling. They
have the file kind ``companion``: they belong to the checkpoint, and no load reads them.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..engine.files import FileImage, data_key
from ..errors import UsageError
from ..format.hf_index import ADAPTER_CONFIG_KEY, ADAPTER_SECTION, CONFIG_KEY, INDEX_KEY, index_document
from ..format.manifest.files import COMPANION
from ..frameworks.module_tree import modules_of
from ..planners.save_plan import SavePlan
from .options import SaveRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredModel:
    """A section that is a model; ``config`` and ``adapter`` are its configuration and its adapter's, if it has them."""

    section: str
    config: bytes | None
    adapter: bytes | None
    is_whole: bool


def find_models(state: Mapping[str, Any], options: SaveRequest) -> list[StoredModel]:
    """Return the sections that are modules or lists of modules, and the section ``model``."""
    found = []
    for name, obj in sorted(state.items()):
        modules = modules_of(obj)
        if name == "model" or modules:
            is_whole = options.layout == "whole" and options.stores_all_of(name)
            config = next((c for m in modules if is_whole and (c := _config(m)) is not None), None)
            adapter = next((c for m in modules if (c := _adapter_config(m)) is not None), None)
            found.append(StoredModel(name, config, adapter, is_whole))
    return found


def refuse_adapters(state: Mapping[str, Any], options: SaveRequest) -> None:
    """Raise ``UsageError`` for a model of PEFT that no library could load from the checkpoint.

    With ``layout="whole"``, its names are those of PEFT's wrappers, in which ``from_pretrained`` finds none of the
    model's weights: it would initialize them at random. The folder that PEFT reads has one adapter of LoRA.
    """
    for name, obj in sorted(state.items()) if options.layout == "whole" else ():
        if name != ADAPTER_SECTION and options.stores_all_of(name) and has_adapter(obj):
            raise UsageError(
                f"section {name!r} is a model with PEFT adapters, whose names from_pretrained does not know: with "
                f"layout='whole' the directory would load with random weights. Call the section {ADAPTER_SECTION!r} "
                "and pass trainable_only=True to write the folder that PEFT loads. Or use layout='merged' or 'shards', "
                "and export the checkpoint: bcp export --lora peft writes that folder, --lora merge the merged model"
            )
    obj = state.get(ADAPTER_SECTION)
    if has_adapter(obj) and not (
        options.layout == "whole" and options.trainable_only and _is_plain_lora(modules_of(obj))
    ):
        raise UsageError(
            f"section {ADAPTER_SECTION!r} is for the folder that PEFT loads: it needs layout='whole', "
            "trainable_only=True and a single adapter of LoRA or DoRA. Save others with layout='merged' or 'shards', "
            "and call their section 'model'"
        )


def has_adapter(obj: Any) -> bool:
    """Whether this is a model, or a list of modules, with adapters of PEFT."""
    return any(_has_adapters(part) for module in modules_of(obj) for part in module.modules())


def _is_plain_lora(modules: Sequence[nn.Module]) -> bool:
    """Whether there is one adapter, for which ``under_names_of_peft`` makes all names of PEFT's files."""
    configs = {
        id(config): config
        for module in modules
        for part in module.modules()
        for config in (vars(part).get("peft_config") or {}).values()
    }
    odd = ("use_qalora", "trainable_token_indices", "target_parameters")
    return len(configs) == 1 and all(
        getattr(config.peft_type, "value", config.peft_type) == "LORA"
        and config.bias == "none"
        and not any(getattr(config, option, None) for option in odd)
        for config in configs.values()
    )


def _has_adapters(module: nn.Module) -> bool:
    """Whether this is PEFT's model, or one of its layers around a layer of the model. Imports nothing."""
    return "_peft_config" in vars(module) or (
        "base_layer" in module._modules and hasattr(type(module), "adapter_layer_names")
    )


def companion_images(plan: SavePlan, models: Sequence[StoredModel], attempt: str) -> list[FileImage]:
    """Return the companions of a plan.

    The usual file names belong to the section ``model``, or to the only model of the state. The index of any other
    model is ``<section>.safetensors.index.json``.
    """
    images = []
    for model in models:
        is_main = model.section == "model" or len(models) == 1
        files = {ADAPTER_CONFIG_KEY: model.adapter if is_main else None}
        if model.is_whole:
            index = INDEX_KEY if is_main else f"{model.section}.safetensors.index.json"
            files |= {index: _index(plan, model.section), CONFIG_KEY: model.config if is_main else None}
        images += [FileImage(f"{attempt}/{key}", model.section, COMPANION, data) for key, data in files.items() if data]
    return images


def _index(plan: SavePlan, section: str) -> bytes:
    """The index omits the aliases of tied weights: the files hold one copy, and the model ties them when it loads."""
    tensors, shards = plan.tensors, plan.shards
    number = tensors.sections.index(section) if section in tensors.sections else -1
    in_section = (tensors.section == number) & (plan.scope < 0)
    rows = np.flatnonzero(in_section[shards.tensor])
    file_of = {}
    for tensor, owner in zip(shards.tensor[rows].tolist(), plan.owner[rows].tolist(), strict=True):
        file_of[tensors.fqn_of(tensor)] = posixpath.basename(data_key("", section, owner, "tensors"))
    return index_document(file_of, int(shards.nbytes(tensors)[rows].sum()))


def _config(module: nn.Module) -> bytes | None:
    """Return the configuration as the model's own library writes it, with the name of the architecture."""
    for part in _unwrapped(module):
        to_json = getattr(getattr(part, "config", None), "to_json_string", None)
        if callable(to_json):
            try:
                document = dict(json.loads(to_json()))
            except Exception:  # noqa: BLE001 - foreign code; the checkpoint is complete without it
                _log.warning(
                    "the configuration of %s is not a JSON object; it is not stored", type(part).__name__, exc_info=True
                )
                return None
            if not document.get("architectures"):
                # FSDP-2 replaces the class of a module with one named "FSDP" and the original name.
                document["architectures"] = [type(part).__name__.removeprefix("FSDP")]
            return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    return None


def _adapter_config(module: nn.Module) -> bytes | None:
    """Return what PEFT writes as the configuration of the model's adapter, if it has a single one."""
    for part in _unwrapped(module):
        configs = getattr(part, "peft_config", None)
        if isinstance(configs, Mapping) and len(configs) == 1:
            (config,) = configs.values()
            try:
                document = {**config.to_dict(), "inference_mode": True}
                return (json.dumps(document, indent=2, sort_keys=True, default=_plain) + "\n").encode()
            except Exception:  # noqa: BLE001 - foreign code; the checkpoint is complete without it
                _log.warning("the adapter of %s is not described as PEFT does; it is not stored", type(part).__name__)
    return None


def _plain(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def _unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost module first, because a wrapper may have a ``config`` that is not the model's."""
    # A module may raise when its truth value is asked for.
    names = ("module", "_orig_mod", "_fsdp_wrapped_module")
    inner = next((m for name in names if isinstance(m := module._modules.get(name), nn.Module)), None)
    if inner is not None:
        yield from _unwrapped(inner)
    yield module
