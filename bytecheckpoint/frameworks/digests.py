"""Digests of tensors' contents, by which ranks compare replicas, and verify what they receive."""

from __future__ import annotations

from functools import lru_cache

import torch
import xxhash

from ..tensors.derived import is_derived
from ..tensors.metadata import BasicMeta

_PIECE = 1 << 26  # bytes: bounds the temporary memory on a device
# Odd constants with well-mixed bits (from splitmix64 and xxh64), written as signed words for torch.
_STRIDE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def tensor_digest(meta: BasicMeta, tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor's dtype, shape and bytes.

    A tensor on a device is reduced there to 8 bytes for each 64 MiB, and not copied to the host. So digests are
    comparable only between ranks that hold the tensor on devices, or only between ranks that hold it in host memory.

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
    """The digests of all pieces of bytes on a device."""
    pieces = [digest_on_device(flat[start : start + _PIECE]) for start in range(0, flat.numel(), _PIECE)]
    return bytes(torch.stack(pieces).cpu().numpy().tobytes())


def digest_on_device(data: torch.Tensor) -> torch.Tensor:
    """Digest bytes on the device that holds them, with torch operations only. Returns one digest for each row.

    Each 8-byte word is mixed with its position, so that damaged, moved and missing words change the sum. The digest
    detects accidents; it does not resist an attacker.
    """
    length = data.shape[-1]
    full = length // 8 * 8
    is_aligned = data.data_ptr() % 8 == data.storage_offset() % 8 == 0
    words = data[..., :full].view(torch.int64) if is_aligned else data[..., :full].clone().view(torch.int64)
    found = _mix(words, 0)
    if full < length:
        rest = torch.zeros((*data.shape[:-1], 8), dtype=torch.uint8, device=data.device)
        rest[..., : length - full] = data[..., full:]
        found = found + _mix(rest.view(torch.int64), full // 8)
    return found ^ length


def _mix(words: torch.Tensor, begin: int) -> torch.Tensor:
    # Integer overflow wraps around on every device, and the order of the sum does not matter.
    places = torch.arange(begin + 1, begin + 1 + words.shape[-1], dtype=torch.int64, device=words.device)
    mixed = places.mul_(_STRIDE).bitwise_xor(words).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 29).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 32).sum(-1)
