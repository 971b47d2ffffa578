"""The dtypes in which exports write tensors."""

from __future__ import annotations

import torch

from ..errors import UsageError
from ..tensors.dtypes import DTYPES, DType, is_meaningful_cast

__all__ = ["output_dtype", "parse_cast"]


def parse_cast(cast: str | torch.dtype | None) -> DType | None:
    """Return the dtype to which an export casts. Raises ``UsageError`` unless it is a float of 16 bits or more."""
    if cast is None:
        return None
    dtype = DTYPES.get(str(cast).removeprefix("torch."))
    if dtype is None or dtype.kind != "float" or dtype.itemsize < 2:
        raise UsageError(f"cast must be float16, bfloat16, float32 or float64, not {cast}")
    return dtype


def output_dtype(stored: DType, cast: DType | None) -> DType:
    """Return the dtype in which a tensor is written."""
    # The values of 8-bit floats are meaningless without the scales of the quantized tensor, so they are not cast.
    if cast is None or stored.kind != "float" or stored.itemsize < 2 or not is_meaningful_cast(stored, cast):
        return stored
    return cast
