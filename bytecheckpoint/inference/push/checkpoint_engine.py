"""Engines that are set up for checkpoint-engine, without bytecheckpoint in their workers.

Such workers request no parts of tensors, offer no memory and verify nothing. Rank 0 therefore runs the receiver of the
engine in its own process. To the senders, the engine has one worker, which requests every tensor completely. It passes
them on in memory that rank 0 shares with the workers, in two buckets: the sender fills one while the workers load the
other. There is no lease on the engine: one whose sender is killed stays paused until the next push, and must be
restarted where an update was under way, because its workers then wait for the next message. The buckets on GPUs have
run on one GPU.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import nn

from ...errors import DeadlineError, EngineError, StateError, UsageError
from ...planners.extents import runs_of
from ...runtime.threads import run_daemon
from .checkpoint_engine_update import Handle, Update, zeromq
from .engine_model import EngineModel
from .engines.base import split_target
from .engines.rpc import PauseMode
from .engines.vllm import HttpEngine
from .layout import align
from .messages import decode
from .receiver import Receiver
from .transports.cuda_ipc import GPU_PREFIX, visible_gpus

_BUCKET_BYTES = 512 << 20
_ALIGNMENT_BYTES = 256  # of tensors in a bucket, as checkpoint-engine aligns them
_PATIENCE = 0.8  # of a sender's deadline: the error of this end names the silent worker, so it must come first
_UNBOUNDED_S = 7 * 86400.0
_LATE_S = 5.0

_log = logging.getLogger(__name__)


class IpcEngine(HttpEngine):
    """A vLLM server on this host whose workers have checkpoint-engine's ``update_weights_from_ipc``.

    Start it with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
    checkpoint_engine.worker.VllmColocateWorkerExtension``. It needs pyzmq, and must be made on rank 0. Every worker
    gets every tensor completely. Weights change in place, tensor by tensor. The workers do not know their version; this
    object reports what it has pushed itself. Workers on one GPU have been tested.

    Args:
        url: The address of the server.
        devices: The names of the workers' devices, "GPU-<uuid>" each; by default all GPUs that this process sees.
        bucket_bytes: The size of each of two buckets, on every GPU and in pinned host memory. A larger tensor needs
            larger buckets.
        pause: What happens to running requests; see ``HttpEngine``.
        headers: Sent with every request, for a proxy that authenticates.
        token: Sent as ``Authorization: Bearer``.
        ssl_context: Verifies a server with https.

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
        pause: PauseMode = "wait",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(url, pause=pause, headers=headers, token=token, ssl_context=ssl_context)
        zeromq()
        named = list(visible_gpus() if devices is None else devices)
        if not named or len(set(named)) < len(named):
            raise UsageError(
                f"{self.name} needs the names of its workers' devices, each once, as this process "
                + ("sees no GPU" if devices is None else f"was given {named}")
            )
        gpus_of(named)
        self._model = _WholeModel(self, named, bucket_bytes)
        self._receiver = Receiver(self._model)
        self._pending: Future[str] | None = None

    def call(self, request: str, timeout_s: float) -> list[str]:
        end = time.monotonic() + timeout_s
        target, _ = split_target(request)
        if target is not None:
            raise StateError(f"{self.name} accepts only its model, because its protocol has no other targets")
        if self._pending is not None and not wait([self._pending], timeout_s).done:
            raise DeadlineError(f"{self.name} still handles an earlier request")
        message = decode(request)
        if "deadline_s" in message:
            self._model.patience_s = _PATIENCE * message["deadline_s"]
        self._model.end = end
        # In a thread: an interrupt of this one must not leave the engine with a part of the weights.
        self._pending = run_daemon(lambda: self._receiver.answer(request), "bcp-push-relay")
        return [self._pending.result()]  # the model observes the deadline, and reports what is late

    @property
    def address(self) -> dict[str, Any] | None:
        return None  # its workers have no receiver, so they do not know what they serve

    def note_pause(self, timeout_s: float, *, left_paused: bool) -> None:
        return  # only workers with a receiver know whether a push has left an engine paused

    def run_update(self, names: Mapping[str, str]) -> None:
        """Make the workers connect to sockets. Returns when they have ended the update.

        The engine gets no timeout, because a timeout would not end the workers' part.

        Args:
            names: The name of each worker's socket, by device.

        Raises:
            EngineError: The engine failed, or has no endpoint for updates.
        """
        self._request("/collective_rpc", {"method": "update_weights_from_ipc", "args": [names]}, _UNBOUNDED_S)

    def close(self) -> None:
        self._receiver.close()


class _WholeModel(EngineModel):
    """Requests every tensor completely, and passes on what it loads in buckets."""

    is_remote = True

    def __init__(self, engine: IpcEngine, devices: list[str], bucket_bytes: int) -> None:
        self._engine, self._devices, self._bucket_bytes = engine, devices, bucket_bytes
        self._last: Update | None = None
        self.patience_s = self.end = 0.0

    def make(self) -> nn.Module:
        return nn.Module()

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").copy_(tensor)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._last is not None and not self._last.join(min(_LATE_S, self.end - time.monotonic())):
            raise EngineError(
                f"{self._engine.name} has not ended an earlier update that failed; is one of its workers stopped?"
            )
        named = list(weights)
        sizes = list(map(_room_of, named))
        nbytes = max(min(align(self._bucket_bytes, _ALIGNMENT_BYTES), sum(sizes)), max(sizes))
        try:
            buckets = Buckets(self._devices, nbytes)
        except (EngineError, RuntimeError) as error:  # torch raises the latter when memory is short
            raise EngineError(
                f"no memory for two buckets of {nbytes:,} bytes on {', '.join(self._devices)} and on the host; the "
                f"engine must leave that much, or pass IpcEngine smaller bucket_bytes ({error})"
            ) from error
        try:
            self._last = update = Update(
                self._engine.name, self._engine.run_update, self._devices, self.patience_s, self.end
            )
            try:
                update.begin(buckets.handles)
                self._send(named, buckets, update)
                update.send(None)  # the workers release the memory
                update.wait()
                buckets.close()
                update.send(None)  # the workers post-process their weights
                update.wait()
                error_text = update.finish()
                if error_text:
                    # After an earlier exception of a worker, vLLM uses late answers as those of this request.
                    _log.warning("push: all workers have loaded the weights, but %s", error_text)
            except BaseException as error:
                update.give_up(error)
                raise
        finally:
            buckets.close()

    def _send(self, named: Sequence[tuple[str, torch.Tensor]], buckets: Buckets, update: Update) -> None:
        """Send tensors in runs that fit into a bucket; one bucket is filled while the workers read the other."""
        for number, run in enumerate(runs_of(named, _room_of, buckets.nbytes)):
            half, rows, offset = number % 2, [], 0
            bucket = buckets.bucket(half)
            for name, tensor in run:
                bucket[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                place = half * buckets.nbytes + offset
                rows.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": place})
                offset += _room_of((name, tensor))
            buckets.publish(half, offset)
            update.send(rows)


def _room_of(named: tuple[str, torch.Tensor]) -> int:
    return align(named[1].nbytes, _ALIGNMENT_BYTES)


class Buckets:
    """Two buckets of ``nbytes`` each on every GPU, filled from pinned host memory.

    The ``handles``, one for each worker, are valid until ``close``. Raises ``StateError`` for an allocator whose memory
    cannot be shared, and ``RuntimeError`` when memory is short.
    """

    def __init__(self, devices: Sequence[str], nbytes: int) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        refuse_expandable_segments()
        self.nbytes = nbytes
        self._host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers = [torch.empty(2 * nbytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus_of(devices)]
        self.handles: list[Handle] = [reduce_tensor(buffer) for buffer in self._buffers]  # type: ignore[no-untyped-call]

    def bucket(self, number: int) -> torch.Tensor:
        """Return the host memory of bucket 0 or 1, to fill when no worker reads it."""
        return self._host[number * self.nbytes : (number + 1) * self.nbytes]

    def publish(self, number: int, nbytes: int) -> None:
        """Make the first ``nbytes`` of a bucket visible to the workers. Returns when they are."""
        span = slice(number * self.nbytes, number * self.nbytes + nbytes)
        for buffer in self._buffers:
            buffer[span].copy_(self._host[span], non_blocking=True)
        for buffer in self._buffers:
            torch.cuda.synchronize(buffer.device)

    def close(self) -> None:
        """Free the memory. May be called again."""
        if self._buffers:
            self._buffers.clear()
            self.handles.clear()
            self._host = torch.empty(0, dtype=torch.uint8)
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
    """Return the numbers of the GPUs with these names. Raises ``StateError`` for one that this process does not see."""
    visible = visible_gpus()
    # A part of a GPU (MIG) is "MIG-<uuid>" for nvidia-smi and NVML. That CUDA has the same UUID for it is unverified;
    # tests/gpu/test_names_of_devices.py compares them. If it has not, such a part is refused as not visible.
    found = [device.replace("MIG-", GPU_PREFIX, 1) for device in devices]
    missing = [device for device, name in zip(devices, found, strict=True) if name not in visible]
    if missing:
        raise StateError(
            f"this process does not see {', '.join(missing)}, only {', '.join(visible) or 'no GPU'}; it must run on "
            "the engine's host, with a CUDA build of torch, and CUDA_VISIBLE_DEVICES must have the engine's GPUs"
        )
    return [visible[name] for name in found]
