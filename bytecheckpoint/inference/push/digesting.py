"""Digests of chunks where they lie: in host memory xxh3-64, on a device a sum of mixed words, for which torch has all
that it takes. Both ends take the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from ...engine.tensor_bytes import byte_view

__all__ = ["Digest", "digest_on_device", "digests_of", "words_of", "xxh3_of"]

Digest = Callable[[torch.Tensor], int]
"""Of contiguous bytes: a number of 64 bits."""

# Odd numbers with bits everywhere (those of splitmix64 and xxh64), as torch's signed words.
_STRIDE, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_SIGN = 1 << 63


def xxh3_of(data: torch.Tensor) -> int:
    """Of bytes in host memory."""
    return xxhash.xxh3_64_intdigest(byte_view(data))


def words_of(data: torch.Tensor) -> int:
    """``digest_on_device``, of bytes anywhere."""
    return int(digest_on_device(data)) % (2 * _SIGN)


def digests_of(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64, where the chunks are, which are contiguous bytes."""
    if all(chunk.device.type == "cpu" for chunk in chunks):
        return torch.tensor([_signed(xxh3_of(chunk)) for chunk in chunks], dtype=torch.int64)
    return torch.stack([digest_on_device(chunk) for chunk in chunks])


def digest_on_device(data: torch.Tensor) -> torch.Tensor:
    """Of bytes: each word of 8 is mixed with its place, so that words that were damaged, moved or left out are noticed;
    not made to withstand who means harm."""
    whole = data.numel() // 8 * 8
    is_aligned = data.data_ptr() % 8 == data.storage_offset() % 8 == 0
    words = data[:whole].view(torch.int64) if is_aligned else data[:whole].clone().view(torch.int64)
    found = _mixed(words, 0)
    if whole < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        found = found + _mixed(rest.view(torch.int64), whole // 8)
    return found ^ data.numel()


def _mixed(words: torch.Tensor, begin: int) -> torch.Tensor:
    # Numbers wrap around, which is the same everywhere; so is the sum in any order.
    mixed = torch.arange(begin + 1, begin + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_STRIDE).bitwise_xor_(words).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 29).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 32).sum()


def _signed(number: int) -> int:
    return number - 2 * _SIGN if number >= _SIGN else number
