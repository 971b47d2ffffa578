"""Show optimizer state that is kept scaled, in a low precision or as remainders, as tensors in fp32.

Transformer Engine's fused Adam has such state, and returns and takes copies in fp32. All of them together would need
several times the memory of the state, so each is a ``DerivedTensor`` that is computed when it is copied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..tensors.derived import DerivedTensor

OWN_MASTER = "master_param"
"""The key of the master weight in the state of an optimizer that holds it itself."""


def converts_state(optimizer: Any) -> bool:
    """Whether an optimizer keeps state in a private format, and converts it to fp32 and back."""
    return all(
        callable(getattr(optimizer, name, None))
        for name in ("get_unscaled_state", "set_scaled_state", "initialize_state")
    )


def fp32_state(optimizer: Any, param: torch.Tensor, key: str) -> torch.Tensor:
    """An entry of a parameter's state in fp32: its own memory, or a ``DerivedTensor`` if it is kept in another format.

    An entry that does not exist yet is created when it is written. Until then it is zero, and a master weight is equal
    to the parameter.
    """
    kept = optimizer.state.get(param, {}).get(key)
    if type(kept) is torch.Tensor and kept.dtype == torch.float32:
        values = optimizer.get_unscaled_state(param, key)
        if values.dtype == kept.dtype and values.data_ptr() == kept.data_ptr():
            return kept
    return DerivedTensor.of(
        param.shape,
        torch.float32,
        read=partial(_read, optimizer, param, key),
        write=partial(_write, optimizer, param, key),
        device=param.device,
    )


@torch.no_grad()
def _read(optimizer: Any, param: torch.Tensor, key: str) -> torch.Tensor:
    if key not in optimizer.state.get(param, {}):
        return param.float() if key == OWN_MASTER else torch.zeros_like(param, dtype=torch.float32)
    values: torch.Tensor = optimizer.get_unscaled_state(param, key)
    if values.dtype != torch.int16:
        return values.float()
    # The bits of the master weight, less those of the parameter, which is rounded from it (store_param_remainders).
    bits = param.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(values).view(torch.float32)


@torch.no_grad()
def _write(optimizer: Any, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
    has_remainders = bool(getattr(optimizer, "store_param_remainders", False)) and param.dtype == torch.bfloat16
    if not optimizer.state.get(param):
        optimizer.initialize_state(param, has_remainders)
    if has_remainders and key == OWN_MASTER:
        bits = values.view(torch.int32)
        values = bits.to(torch.int16)  # the lower half
        # Without the parameter that belongs to it, a remainder has no meaning.
        param.view(torch.int16).copy_(bits.sub_(values).bitwise_right_shift_(16))
    optimizer.set_scaled_state(param, key, values)
