"""Names and shapes as engines know them, of models as transformers holds them in memory.

Engines' loaders know the tensors that lie on the hub. From its version 5 on transformers holds some of them otherwise
in memory (the experts of a layer as one tensor), and what trains saves what it holds. Transformers' own way back is run
on recorded tensors, for which it is a matter of views. Nothing here imports transformers before it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["hub_tensors"]

_log = logging.getLogger(__name__)


def hub_tensors(config: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """``tensors`` as the hub has those of the model that ``config``, of transformers, describes.

    They are returned as they are where they are no state of that model in memory, and where this transformers does not
    know the model, or holds it as the hub does. No values are computed.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        _log.debug("names are taken as they are: %s", error)
        return tensors
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - of remote code, or of a model that transformers does not know
        _log.debug("names are taken as they are, transformers cannot make the model: %s", error)
        return tensors
    if not set(tensors) <= set(model.state_dict()):
        return tensors
    reverted: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return reverted
