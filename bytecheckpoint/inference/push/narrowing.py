"""Elements of wide types that would go into parameters of 8 bits: a cast alone would lose what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...dtypes import DType
from ...errors import MismatchError
from ...metadata import BasicMeta
from ...shards import basic_meta
from ..recording import Copy
from .quantizing import QUANTIZED, Blocks

__all__ = ["check_quantizable", "is_narrow", "is_wide"]


def is_narrow(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize == 1


def is_wide(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize > 1


def check_quantizable(
    blocks: Blocks | None, metas: Mapping[str, BasicMeta], copies: Sequence[Copy], seen: frozenset[str]
) -> bool:
    """Whether a loader that makes these ``copies`` wants tensors that have to be quantised. Raises ``MismatchError``
    for what would be cast to 8 bits and cannot be quantised; ``seen`` are tensors whose values the loader wanted."""
    faults: dict[str, str] = {}
    narrowed: set[str] = set()
    for copy in copies:
        meta, held = metas[copy.name], basic_meta(copy.target.dtype, ()).dtype
        if copy.view.numel and is_wide(meta.dtype) and is_narrow(held):
            narrowed.add(copy.name)
            if blocks is None:
                faults[copy.name] = f"{meta} is sent for {held}, and the engine's model has no scales for its blocks"
            elif held != QUANTIZED:
                faults[copy.name] = f"{meta} is sent for {held}, for which there is no rule of quantising"
            elif len(meta.shape) < 2:
                faults[copy.name] = f"{meta} is sent for {held}, and has no blocks"
            elif copy.name in seen:
                faults[copy.name] = f"{meta} is sent for {held}, and the engine's loader computes with its values"
    if faults:
        listed = "\n  ".join(f"{name}: {text}" for name, text in list(faults.items())[:20])
        raise MismatchError(
            f"{len(faults)} tensor(s) would be cast to 8 bits with no scale, which gives nonsense; nothing was sent. "
            f"Push them as the engine's own checkpoints have them, with their scales:\n  {listed}",
            [("dtype", name, text) for name, text in faults.items()],
        )
    return bool(narrowed)
