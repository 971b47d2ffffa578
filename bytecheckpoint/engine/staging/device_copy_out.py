"""Copy CUDA tensors into staging memory on internal streams, so that the host does not wait.

Blocks are pinned once, because only copies into pinned memory are asynchronous. The internal stream waits for the work
that was queued on the caller's stream before the call. ``make_caller_wait`` makes the caller's stream wait for the
copies, so that no later kernel overwrites a tensor that is not copied yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ...errors import StateError
from ...tensors.derived import is_derived
from ..blocks import Block
from ..files import FileImage
from ..tensor_bytes import as_bytes, is_plain
from .pieces import copy_flat_range, copy_head, parts

_PACK = 1 << 20  # bytes; several smaller tensors are concatenated on the device, which is cheaper than single copies


def cuda_devices(images: Sequence[FileImage]) -> list[torch.device]:
    """Return the CUDA devices of the images' tensors, ordered by index."""
    found = {shard.tensor.device for image in images for shard in image.shards if shard.tensor.is_cuda}
    return sorted(found, key=lambda device: device.index)


class DeviceCopyOut:
    """The device copies of one save. Create it on the caller's thread; any thread may call ``copy_piece``."""

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
        offset: int,
        only: Callable[[torch.Tensor], bool] | None = None,
    ) -> list[torch.cuda.Event]:
        """Like ``copy_piece``, but device bytes have arrived only when the returned events are done."""
        if self._streams:
            pin(block, next(iter(self._streams)))
        copy_head(image, start, stop, block, offset)
        small: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        touched: set[torch.device] = set()
        for tensor, first, last, at in parts(image, start, stop, only):
            begin = offset + at
            stream = self._streams.get(tensor.device)
            if is_derived(tensor):
                with torch.cuda.stream(stream):  # the copy must wait for the computation
                    values = tensor.compute()
                tensor.release(last - first)
                tensor = values
            if stream is None:
                copy_flat_range(block.tensor[begin : begin + last - first], tensor, first)
                continue
            touched.add(tensor.device)
            # The caller may free the tensor at once; the allocator must not reuse its memory before the copy.
            tensor.record_stream(stream)
            if last - first < _PACK and is_plain(tensor):
                small.setdefault(tensor.device, []).append((begin, as_bytes(tensor)[first:last]))
            else:
                with torch.cuda.stream(stream):
                    copy_flat_range(block.tensor[begin : begin + last - first], tensor, first, non_blocking=True)
        for device, sources in small.items():
            self._copy_packed(device, sources, block)
        return [self._streams[device].record_event() for device in touched]

    def make_caller_wait(self) -> None:
        """Make the calling thread's current streams wait for the copies queued so far."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _copy_packed(self, device: torch.device, sources: list[tuple[int, torch.Tensor]], block: Block) -> None:
        """Copy each run of small tensors that are adjacent in the file with one transfer."""
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


def pin(block: Block, device: torch.device) -> None:
    """Register a block's memory with CUDA, so that copies from devices run by themselves; once for each block.

    ``device`` is one of those that are copied (see ``Block.pin``).

    Raises ``StateError`` where the system does not let so much memory be pinned.
    """
    failed = block.pin(device)
    if failed:
        raise StateError(
            f"CUDA cannot pin {block.nbytes} bytes of staging memory (error {failed}); raise the limit of locked "
            f"memory (ulimit -l) or give a smaller memory budget"
        )


def block_preparation(images: Sequence[FileImage]) -> Callable[[Block], None] | None:
    """Return what any thread must do with a new block before it stages these images: pin it if they are on a device."""
    devices = cuda_devices(images)
    if not devices:
        return None

    return lambda block: pin(block, devices[0])
