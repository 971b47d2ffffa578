"""From CUDA devices into staging memory: on streams of their own, with events, so that the host never waits.

Blocks are registered with CUDA once, when the first device tensor comes, because only then a copy runs by itself. The
copying stream waits for what the caller's stream had been given by the time of the call; ``hold_caller`` makes the
caller's stream wait for the copies, so that no later kernel overwrites what is not copied yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...errors import StateError
from ..files import FileImage
from ..tensor_bytes import as_bytes
from .arena import Block
from .piece_copy import copy_flat_range, copy_head, is_plain, parts

__all__ = ["DeviceCopyOut", "cuda_devices", "pin"]

_PACK = 1 << 20  # bytes of a tensor below which it is cheaper to gather several on the device than to copy each

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def cuda_devices(images: Sequence[FileImage]) -> list[torch.device]:
    """The CUDA devices on which tensors of these images lie, in order of their numbers."""
    found = {shard.tensor.device for image in images for shard in image.shards if shard.tensor.is_cuda}
    return sorted(found, key=lambda device: device.index)


class DeviceCopyOut:
    """The device copies of one save. Made on the caller's thread; ``copy_piece`` may then run on any."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def copy_piece(
        self,
        image: FileImage,
        start: int,
        stop: int,
        block: Block,
        place: int,
        only: Callable[[torch.Tensor], bool] | None = None,
    ) -> list[torch.cuda.Event]:
        """``piece_copy.copy_piece``, but what comes from devices is there only when the events are done."""
        pin(block)
        copy_head(image, start, stop, block, place)
        small: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        touched: set[torch.device] = set()
        for tensor, first, last, at in parts(image, start, stop):
            if only is not None and not only(tensor):
                continue
            begin = place + at
            stream = self._streams.get(tensor.device)
            if stream is None:
                copy_flat_range(block.tensor[begin : begin + last - first], tensor, first)
                continue
            touched.add(tensor.device)
            # The caller may let go of the tensor at once; its memory must not be given out before it was copied.
            tensor.record_stream(stream)
            if last - first < _PACK and is_plain(tensor):
                small.setdefault(tensor.device, []).append((begin, as_bytes(tensor)[first:last]))
            else:
                with torch.cuda.stream(stream):
                    copy_flat_range(block.tensor[begin : begin + last - first], tensor, first, non_blocking=True)
        for device, sources in small.items():
            self._copy_packed(device, sources, block)
        return [self._streams[device].record_event() for device in touched]

    def hold_caller(self) -> None:
        """What the calling thread gives its current streams from here on runs after the copies given so far."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _copy_packed(self, device: torch.device, sources: list[tuple[int, torch.Tensor]], block: Block) -> None:
        """One copy for each run of small tensors that lie side by side in the file."""
        runs: dict[int, list[torch.Tensor]] = {}
        start = end = -1
        for begin, source in sources:
            if begin != end:
                start = begin
            runs.setdefault(start, []).append(source)
            end = begin + len(source)
        with torch.cuda.stream(self._streams[device]):
            for start, run in runs.items():
                packed = run[0] if len(run) == 1 else torch.cat(run)
                block.tensor[start : start + len(packed)].copy_(packed, non_blocking=True)


def pin(block: Block) -> None:
    """Register a block's memory with CUDA, so that copies from devices run by themselves; once for each block.

    Raises ``StateError`` where the system does not let so much memory be pinned.
    """
    if block.unpin is not None:
        return
    block.fault_in(block.nbytes)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = runtime.cudaHostRegister(block.address, block.nbytes, _REGISTER_PORTABLE)
    if int(failed):
        raise StateError(
            f"CUDA cannot pin {block.nbytes} bytes of staging memory (error {int(failed)}); raise the limit of locked "
            f"memory (ulimit -l) or give a smaller memory budget"
        )
    # CUDA must not go on taking the addresses for pinned when they are somebody else's.
    block.unpin = weakref.finalize(block, runtime.cudaHostUnregister, block.address)
