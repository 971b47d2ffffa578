"""Tensors as the bytes they are: every dtype, also those that torch cannot compute with."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["as_bytes", "byte_view", "copy_elements", "copy_memory"]

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# Shorter copies keep the interpreter lock: giving it up and getting it back costs more than they do.
_SHORT = 64 << 10

_move = ctypes.memmove
_move_short = ctypes.PyDLL(None).memmove
_move_short.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_short.restype = None


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes from address to address, both of which the caller keeps alive. Long copies let other threads run."""
    if nbytes < _SHORT:
        _move_short(target, source, nbytes)
    else:
        _move(target, source, nbytes)


def copy_elements(out: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """``out[...] = source``; between equal types bit by bit, so that also those torch cannot compute with survive."""
    with torch.no_grad():
        if out.dtype == source.dtype and not any(t.is_conj() or t.is_neg() for t in (out, source)):
            carrier = _CARRIERS[out.dtype.itemsize]
            out, source = out.view(carrier), source.view(carrier)
        out.copy_(source, non_blocking=non_blocking)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor, sharing storage."""
    flat = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """``as_bytes`` of a tensor on the CPU, for who reads, writes or hashes it."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]
