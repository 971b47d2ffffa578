"""Digests of tensors' contents, by which ranks find out whether their replicas are equal."""

from __future__ import annotations

from functools import lru_cache

import torch
import xxhash

from ..tensors.derived import is_derived
from ..tensors.metadata import BasicMeta

__all__ = ["device_digest", "tensor_digest"]

_PIECE_WORDS = 1 << 23  # 64 MiB: bounds the temporary memory on a device
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd, with random-looking bits


def tensor_digest(meta: BasicMeta, tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor's dtype, shape and bytes.

    A tensor on a device is reduced there to 16 bytes, and not copied to the host. So digests are comparable only
    between ranks that hold the tensor on devices, or only between ranks that hold it in host memory.

    Args:
        meta: The dtype and shape that become part of the digest.
        tensor: Dense memory. The current streams of its device order the computation.

    Returns:
        16 bytes.
    """
    if not tensor.numel():
        return xxhash.xxh3_128_digest(b"", seed=_seed(meta))
    if is_derived(tensor):
        values = tensor.compute()
        tensor.release(tensor.nbytes)
        return tensor_digest(meta, values)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    data = flat.numpy().data if flat.device.type == "cpu" else device_digest(flat)
    return xxhash.xxh3_128_digest(data, seed=_seed(meta))


@lru_cache(maxsize=1 << 12)  # a model has few shapes
def _seed(meta: BasicMeta) -> int:
    return xxhash.xxh3_64_intdigest(str(meta).encode())


def device_digest(flat: torch.Tensor) -> bytes:
    """Two sums of all 8-byte words modulo 2^64, each word times a weight that depends on its position."""
    tail = flat.numel() % 8
    whole = flat[: flat.numel() - tail]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    words = whole.view(torch.int64)
    sums = words.new_zeros(len(_MULTIPLIERS))
    for start in range(0, words.numel(), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        position = torch.arange(start + 1, start + 1 + piece.numel(), device=words.device)
        for number, multiplier in enumerate(_MULTIPLIERS):
            weight = position * multiplier
            weight ^= weight >> 29
            sums[number] += (weight.mul_(multiplier) * piece).sum()
    return bytes(sums.cpu().numpy().tobytes() + flat[flat.numel() - tail :].cpu().numpy().tobytes())
