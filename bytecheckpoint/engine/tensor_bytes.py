"""Views and copies of tensors as bytes, for every dtype, including those that torch cannot compute with."""

from __future__ import annotations

import ctypes

import torch

from ..tensors.geometry import Box

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By size, the dtype as which elements are moved: torch cannot copy elements of every dtype."""

# Shorter copies hold the GIL: releasing and reacquiring it costs more than the copy.
_MIN_GIL_RELEASE_BYTES = 64 << 10

_move = ctypes.memmove
_move_short = ctypes.PyDLL(None).memmove
_move_short.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_short.restype = None

# All of the process's memory: a slice of it costs a tenth of a view of a tensor.
_memory = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return bytes of memory to read, write or hash. The caller keeps them alive."""
    return _memory[address : address + nbytes]


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between two addresses. The caller keeps both alive. Long copies release the GIL."""
    if nbytes < _MIN_GIL_RELEASE_BYTES:
        _move_short(target, source, nbytes)
    else:
        _move(target, source, nbytes)


def copy_elements(out: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Do ``out[...] = source``; bit by bit between equal dtypes, so that opaque dtypes work too."""
    # A tensor that was made in inference mode can be written only there.
    with torch.inference_mode() if out.is_inference() else torch.no_grad():
        if out.dtype == source.dtype and not any(t.is_conj() or t.is_neg() for t in (out, source)):
            carrier = CARRIERS[out.dtype.itemsize]
            out, source = out.view(carrier), source.view(carrier)
        out.copy_(source, non_blocking=non_blocking)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory holds exactly its elements in row-major order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor that shares its storage."""
    flat = tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach().view(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # one element is contiguous with any stride, but only this one can be viewed
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def box_view(tensor: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    """Return the view of ``tensor``, which holds the box ``outer``, that holds ``box``."""
    return tensor if box == outer else tensor[box.relative_to(outer).slices()]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a buffer to read, write or hash."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]
