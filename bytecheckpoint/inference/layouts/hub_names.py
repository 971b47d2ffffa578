"""Names and shapes as engines know them, of models as transformers holds them in memory.

Engines' loaders know the tensors that lie on the hub. From its version 5 on transformers holds some of them otherwise
in memory (the experts of a layer as one tensor), and what trains saves what it holds. Transformers' own way back is run
on recorded tensors, for which it is a matter of views. Nothing here imports transformers before it is called.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from .push.quantizing import scale_name

__all__ = ["hub_tensors"]

_log = logging.getLogger(__name__)


def hub_tensors(config: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """``tensors`` as the hub has those of the model that ``config``, of transformers, describes.

    They are returned as they are where they are no state of that model in memory, and where this transformers does not
    know the model, or holds it as the hub does. Scales of blocks (``X_scale_inv``) go with their weights, though they
    are no part of such a state. No values are computed.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion

        kind: Any = type(config)
        model, names = _in_memory(kind, config.to_json_string())
    except Exception as error:  # noqa: BLE001 - no such transformers, remote code, a model that it does not know
        _log.debug("names are taken as they are, transformers cannot make the model: %s", error)
        return tensors
    scales = {name: scale for name in tensors if (scale := scale_name(name)) in tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in scales.values()}
    if not names.issuperset(weights):
        return tensors
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    if scales:
        # Blocks are cut and turned as their weights are.
        turned = revert_weight_conversion(model, {name: tensors[scale] for name, scale in scales.items()})
        reverted |= {scale_name(name): tensor for name, tensor in turned.items()}
    return reverted


@lru_cache(maxsize=2)  # for a large model it takes seconds
def _in_memory(kind: Any, config: str) -> tuple[Any, frozenset[str]]:
    """The model without memory, and its state's names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind.from_dict(json.loads(config)))
    return model, frozenset(model.state_dict())
