"""Convert a transformers model's in-memory state to the hub's names and shapes.

Engines' loaders expect tensors as published on the hub. From version 5 on, transformers fuses some of them in memory
(the experts of a layer become one tensor), and a training job saves what is in memory. ``hub_tensors`` runs
transformers' own reverse conversion on recorded tensors, for which it only creates views. Transformers is imported on
the first call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

_log = logging.getLogger(__name__)


def scale_name(name: str) -> str:
    """Return the name of the tensor of block scales: ``X.weight_scale_inv`` for ``X.weight``."""
    return f"{name}_scale_inv"


def hub_tensors(config: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """``tensors`` under the hub's names and shapes for the model that the transformers configuration describes.

    Returns ``tensors`` itself if they are not this model's in-memory state, or if the installed transformers does not
    support the model. Block scales (``X_scale_inv``) are converted like their weights, although the in-memory state
    does not contain them. No values are computed.
    """
    kind: Any = type(config)
    found = _in_memory(kind, config.to_json_string()) if hasattr(config, "to_json_string") else None
    if found is None:
        return tensors
    revert_weight_conversion, model, names = found
    scales = {name: scale for name in tensors if (scale := scale_name(name)) in tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales.values()}
    if not names.issuperset(weights):
        return tensors
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    if scales:
        # Scales are sliced and transposed like their weights.
        converted = revert_weight_conversion(model, {name: tensors[scale] for name, scale in scales.items()})
        reverted |= {scale_name(name): tensor for name, tensor in converted.items()}
    return reverted


@lru_cache(maxsize=2)  # building a large model takes seconds
def _in_memory(kind: Any, config: str) -> tuple[Any, Any, frozenset[str]] | None:
    """The reverse conversion, the model on the meta device, and the names of its state; None if transformers cannot
    build it."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(configuration_of(kind, config))
    except Exception as error:  # noqa: BLE001 - old or missing transformers, remote code, unknown model
        _log.debug("tensor names are used as they are, because transformers cannot build the model: %s", error)
        return None
    return revert_weight_conversion, model, frozenset(model.state_dict())


def configuration_of(kind: Any, text: str) -> Any:
    """Return the configuration of this class in a ``config.json``. transformers writes infinite floats as objects."""
    return kind.from_dict(json.loads(text, object_hook=_number_of))


def _number_of(found: dict[str, Any]) -> Any:
    is_number = found.keys() == {"__float__"} and found["__float__"] in ("Infinity", "-Infinity", "NaN")
    return float(found["__float__"]) if is_number else found
