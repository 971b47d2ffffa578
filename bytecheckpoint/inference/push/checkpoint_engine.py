"""Engines that are set up for checkpoint-engine, without bytecheckpoint in their workers.

Each worker reads entire tensors from memory that rank 0 shares with it (see ``relay.py``), in two buckets: the sender
fills one while the workers load the other. The buckets on GPUs have run on one GPU.
"""

from __future__ import annotations

import functools
import logging
import os
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...errors import EngineError, StateError, UsageError
from .checkpoint_engine_update import Handle, Update, zeromq
from .engines.rpc import PauseMode
from .engines.vllm import MissingEndpoint
from .relay import RelayEngine, RelayModel
from .transports.cuda_ipc import GPU_PREFIX, visible_gpus
from .transports.shared_memory import SharedArena

_BUCKET_BYTES = 512 << 20
_Named = tuple[str, torch.Tensor, torch.dtype]

_UNBOUNDED_S = 7 * 86400.0
_LATE_S = 5.0

_log = logging.getLogger(__name__)


class IpcEngine(RelayEngine):
    """An engine on this host whose workers have checkpoint-engine's ``update_weights_from_ipc``.

    This is vLLM with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
    checkpoint_engine.worker.VllmColocateWorkerExtension``. It needs pyzmq, and must be made on
    rank 0. Every worker gets every tensor completely. Weights change in place, tensor by tensor. The workers do not
    know their version; this object reports what it has pushed itself. Workers on GPUs have never been tested.

    Args:
        url: The address of the server.
        devices: The names of the workers' devices, "GPU-<uuid>" each; by default all GPUs that this process sees.
        bucket_bytes: The size of each of two buckets, on every GPU and in pinned host memory. A larger tensor needs
            larger buckets.
        dtype: Cast wider floating tensors to this dtype; by default none is cast.
        pause: What happens to running requests; see ``HttpEngine``.
        headers: Sent with every request, for a proxy that authenticates.
        token: Sent as ``Authorization: Bearer``.
        ssl_context: Verifies a server with https. The guard process gets its certificates of authorities, but not a
            client's.

    Raises:
        UsageError: No device is named, or one is named twice.
        StateError: pyzmq is missing, or this process does not see the devices.
    """

    _extension = "checkpoint_engine.worker.VllmColocateWorkerExtension"

    def __init__(
        self,
        url: str,
        *,
        devices: Sequence[str] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        pause: PauseMode = "wait",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        zeromq()
        named = list(visible_gpus() if devices is None else devices)
        model = _WholeModel(self, named, bucket_bytes, dtype)
        super().__init__(url, model, pause=pause, headers=headers, token=token, ssl_context=ssl_context)
        if not named or len(set(named)) < len(named):
            raise UsageError(
                f"{self.name} needs the names of its workers' devices, each once, as this process "
                + ("sees no GPU" if devices is None else f"was given {named}")
            )
        gpus_of(named)
        self._can_pause = True
        self._collective = True

    def pause(self, timeout_s: float) -> None:
        self._can_pause = True
        self.resume_on_exit()
        try:
            super().pause(timeout_s)
        except MissingEndpoint:
            self._can_pause = False
            self.on_exit()

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if not self._can_pause:
            return
        super().resume(version, timeout_s, changed=changed)
        self.on_exit()

    def resume_on_exit(self) -> None:
        """Make the guard end the pause if this process is killed. Call it while the engine serves one version."""
        if self._can_pause:
            self.on_exit(("/resume", None))

    @property
    def may_raise(self) -> bool:
        """Whether workers may end an update by an exception.

        vLLM reads only the answer of the first worker that raises, and uses the others as answers to its next
        requests. Other engines expect an exception when an update fails.
        """
        return not self._collective

    def run_update(self, names: Mapping[str, str]) -> None:
        """Make the workers connect to sockets. Returns when they have ended the update.

        The engine gets no timeout, because a timeout would not end the workers' part.

        Args:
            names: The name of each worker's socket, by device.

        Raises:
            EngineError: The engine failed, or has no endpoint for updates.
        """
        if self._collective:
            try:
                self._post("/collective_rpc", {"method": "update_weights_from_ipc", "args": [names]}, _UNBOUNDED_S)
                return
            except MissingEndpoint:
                self._collective = False
        try:
            self._post("/update_weights_from_ipc", {"zmq_handles": names}, _UNBOUNDED_S)
        except MissingEndpoint:
            self._collective = True
            raise EngineError(
                f"{self.name} has neither /collective_rpc nor /update_weights_from_ipc; start vLLM with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from None


class _WholeModel(RelayModel):
    """Passes tensors on in buckets."""

    def __init__(self, engine: IpcEngine, devices: list[str], bucket_bytes: int, dtype: torch.dtype | None) -> None:
        super().__init__(dtype)
        self._engine, self.devices, self._bucket_bytes = engine, devices, bucket_bytes
        self._last: Update | None = None

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._last is not None and not self._last.join(min(_LATE_S, self.end - time.monotonic())):
            raise EngineError(
                f"{self._engine.name} has not ended an earlier update that failed; is one of its workers stopped?"
            )
        named = [(name, tensor, self.sent_as(tensor.dtype)) for name, tensor in weights]
        sizes = [align_tensor(tensor.numel() * dtype.itemsize) for _, tensor, dtype in named]
        longest = max(sizes)
        buckets = make_buckets(self.devices, max(min(align_tensor(self._bucket_bytes), sum(sizes)), longest), longest)
        try:
            update = self._begin()
            try:
                update.begin(buckets.handles)
                self._engine.on_exit(is_partial=True)  # from here on
                self._send(named, sizes, buckets, update)
                update.send(None)  # the workers release the memory
                update.wait()
                buckets.close()
                update.send(None)  # the workers post-process their weights
                update.wait()
                error_text = update.finish()
                self._engine.resume_on_exit()
                if error_text:
                    # After an earlier exception of a worker, vLLM uses late answers as those of this request.
                    _log.warning("push: all workers have loaded the weights, but %s", error_text)
            except BaseException as error:
                update.give_up(error)
                raise
        finally:
            buckets.close()

    def _send(self, named: Sequence[_Named], sizes: Sequence[int], buckets: Buckets, update: Update) -> None:
        """Send tensors in runs that fit into a bucket; one bucket is filled while the workers read the other."""
        for number, (begin, stop) in enumerate(_runs(sizes, buckets.nbytes)):
            half, rows, offset = number % 2, [], 0
            bucket = buckets.bucket(half)
            for (name, tensor, dtype), size in zip(named[begin:stop], sizes[begin:stop], strict=True):
                nbytes = tensor.numel() * dtype.itemsize
                bucket[offset : offset + nbytes].view(dtype).view(tensor.shape).copy_(tensor)
                place = half * buckets.nbytes + offset
                rows.append({"name": name, "dtype": dtype, "shape": tensor.shape, "offset": place})
                offset += size
            buckets.publish(half, offset)
            update.wait()
            update.send(rows)
        update.wait()

    def _begin(self) -> Update:
        self._last = Update(self._engine, self.devices, self._engine.guard, self.patience_s, self.end)
        return self._last

    @property
    def is_busy(self) -> bool:
        return self._last is not None and not self._last.join(0)


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive tensors that fit into ``limit`` bytes together."""
    begin = used = 0
    for number, size in enumerate(sizes):
        if used + size > limit:
            yield begin, number
            begin, used = number, 0
        used += size
    yield begin, len(sizes)


_ALIGNMENT_BYTES = 256  # what checkpoint-engine uses
_MIG_PREFIX = "MIG-"


def align_tensor(nbytes: int) -> int:
    """Round up to the alignment of tensors in a bucket."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Buckets(ABC):
    """Two buckets of ``nbytes`` each. The ``handles``, one for each worker, are valid until ``close``."""

    def __init__(self, memory: torch.Tensor, handles: list[Handle]) -> None:
        self._memory, self.handles = memory, handles
        self.nbytes = len(memory) // 2

    def bucket(self, number: int) -> torch.Tensor:
        """Return the host memory of bucket 0 or 1, to fill when no worker reads it."""
        return self._memory[number * self.nbytes : (number + 1) * self.nbytes]

    def publish(self, number: int, nbytes: int) -> None:  # noqa: B027 - workers on CPUs map the same memory
        """Make the first ``nbytes`` of a bucket visible to the workers. Returns when they are."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. May be called again."""


class HostBuckets(Buckets):
    """For workers on CPUs: one shared memory for all of them."""

    def __init__(self, workers: int, nbytes: int) -> None:
        self._arena = SharedArena(2 * nbytes)
        address = self._arena.address
        rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        super().__init__(self._arena.memory, [(rebuild, (path, True, address.nbytes))] * workers)

    def close(self) -> None:
        self._arena.close()
        self._memory = torch.empty(0, dtype=torch.uint8)


class CudaBuckets(Buckets):
    """For workers on GPUs: buckets on each GPU, filled from pinned host memory."""

    def __init__(self, gpus: Sequence[int], nbytes: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        refuse_expandable_segments()
        host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers = [torch.empty(2 * nbytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
        super().__init__(host, [reduce_tensor(buffer) for buffer in self._buffers])  # type: ignore[no-untyped-call]

    def publish(self, number: int, nbytes: int) -> None:
        span = slice(number * self.nbytes, number * self.nbytes + nbytes)
        for buffer in self._buffers:
            buffer[span].copy_(self._memory[span], non_blocking=True)
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)

    def close(self) -> None:
        if self._buffers:
            self._buffers.clear()
            self.handles.clear()
            self._memory = torch.empty(0, dtype=torch.uint8)
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # engines leave little memory free


def refuse_expandable_segments() -> None:
    """Raise ``StateError`` if torch's allocator is to use memory that has no CUDA IPC handles."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = os.environ.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            raise StateError(
                f"{name} has expandable_segments:True, and workers cannot open such memory; remove it from the "
                f"environment of this process, or push with HttpEngine, which shares host memory"
            )


def gpus_of(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs with these names; none if the names are of CPUs. Raises ``StateError`` for a GPU
    that this process does not see."""
    if not any(device.startswith((GPU_PREFIX, _MIG_PREFIX)) for device in devices):
        return []
    visible = visible_gpus()
    # A part of a GPU (MIG) is "MIG-<uuid>" for nvidia-smi and NVML. That CUDA has the same UUID for it is unverified;
    # tests/gpu/test_names_of_devices.py compares them. If it has not, such a part is refused as not visible.
    found = [device.replace(_MIG_PREFIX, GPU_PREFIX, 1) for device in devices]
    missing = [device for device, name in zip(devices, found, strict=True) if name not in visible]
    if missing:
        raise StateError(
            f"this process does not see {', '.join(missing)}, only {', '.join(visible) or 'no GPU'}; it must run on "
            "the engine's host, with a CUDA build of torch, and CUDA_VISIBLE_DEVICES must have the engine's GPUs"
        )
    return [visible[name] for name in found]


def make_buckets(devices: Sequence[str], most: int, least: int) -> Buckets:
    """Make buckets for a worker on each device, of ``most`` bytes, or of less where memory is short.

    Raises ``EngineError`` when memory does not suffice for ``least``, and ``StateError`` like ``gpus_of``.
    """
    gpus, nbytes = gpus_of(devices), most
    while True:
        try:
            return CudaBuckets(gpus, nbytes) if gpus else HostBuckets(len(devices), nbytes)
        except (EngineError, RuntimeError) as error:  # torch raises the latter when memory is short
            if nbytes <= least:
                raise EngineError(
                    f"no memory for two buckets of {nbytes:,} bytes, the size of the largest tensor, on "
                    f"{', '.join(devices)} and on the host; the engine must leave that much ({error})"
                ) from error
            nbytes = max(align_tensor(nbytes // 2), least)
        if gpus:
            torch.cuda.empty_cache()
