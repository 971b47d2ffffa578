"""Engines that are set up for checkpoint-engine, with nothing of this library in them.

Their workers do not say what they want of a tensor, offer no memory, and prove nothing: each takes whole tensors, out
of memory that it is handed. So who leads a push has, in its own process, the receiver that such an engine has not. To
the senders that is an engine with one worker, which wants everything; what arrives there is passed on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...errors import DeadlineError, EngineError, StateError
from .device_memory import gpus_here
from .engines import HttpEngine, PauseMode
from .ipc_buckets import Buckets, aligned, gpus_of, make_buckets
from .ipc_guard import Guard
from .ipc_update import Update, zeromq
from .messages import decode
from .quantizing import Blocks
from .receiver import Receiver
from .targets import aim_of

__all__ = ["IpcEngine"]

_BUCKET_BYTES = 512 << 20
_Named = tuple[str, torch.Tensor, torch.dtype]

_EVER_S = 7 * 86400.0
_PATIENCE = 0.8  # of a sender's: who knows which worker is silent speaks first
_LATE_S = 5.0

_log = logging.getLogger(__name__)


class IpcEngine(HttpEngine):
    """An engine on this host whose workers have checkpoint-engine's ``update_weights_from_ipc``: vLLM with
    ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension``,
    SGLang, lmdeploy. Needs pyzmq.

    ``devices`` are the names by which the workers know where they are, "GPU-<uuid>" each; by default those of all GPUs
    that this process sees. Every worker gets every tensor whole, out of two buckets of ``bucket_bytes`` (more, where a
    tensor is larger): on each GPU, and once in pinned memory of the host. Floating tensors that are wider than
    ``dtype`` are sent in it; by default all as they are.

    Made where the push is led: on rank 0. Weights are changed in place, tensor by tensor, and no worker says which
    version it has: what this object says of it is what it has pushed.
    """

    def __init__(
        self,
        url: str,
        *,
        devices: Sequence[str] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        pause: PauseMode = "wait",
    ) -> None:
        super().__init__(url, pause=pause)
        zeromq()
        named = list(gpus_here() if devices is None else devices)
        if not named or len(set(named)) < len(named):
            raise StateError(
                f"{self.name} needs the names of its workers' devices, each once, as this process "
                + ("sees no GPU" if devices is None else f"was given {named}")
            )
        gpus_of(named)
        self._model = _WholeModel(self, named, bucket_bytes, dtype)
        self._receiver = Receiver(self._model, logging.DEBUG)  # it is raised in this process too
        self._asked = threading.Lock()
        self._can_pause = True
        self._collective = True

    def call(self, request: str, timeout_s: float) -> list[str]:
        end = time.monotonic() + timeout_s
        target, _ = aim_of(request)
        if target is not None:
            raise StateError(f"{self.name} takes its model only, as it is reached by checkpoint-engine's protocol")
        if not self._asked.acquire(timeout=timeout_s):
            raise DeadlineError(f"{self.name} is still at an earlier request")
        try:
            deadline_s = decode(request).get("deadline_s")
            if deadline_s is not None:
                self._model.patience_s = _PATIENCE * deadline_s
            self._model.end = end
            return [self._receiver.answer(request)]
        finally:
            self._asked.release()

    def pause(self, timeout_s: float) -> None:
        """Where the engine knows of no pause, it is not paused."""
        self._can_pause = True
        try:
            super().pause(timeout_s)
        except _NotThere:
            self._can_pause = False

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if not self._can_pause:
            return
        try:
            super().resume(version, timeout_s, changed=changed)
        except _NotThere:  # an older one has no version
            super().resume(None, timeout_s, changed=changed)

    def close(self) -> None:
        self._receiver.close()
        self._model.close()

    @property
    def may_raise(self) -> bool:
        """vLLM reads the answer of the first worker that raised, and takes those of the others for answers to its next
        requests. Others want to be told that an update failed."""
        return not self._collective

    def have_update(self, names: Mapping[str, str]) -> None:
        """Have workers answer at the sockets of these ``names``, by device, and return when they do not any more. The
        engine is given no timeout: it would not end what workers are at."""
        if self._collective:
            try:
                self._post("/collective_rpc", {"method": "update_weights_from_ipc", "args": [names]}, _EVER_S)
                return
            except _NotThere:
                self._collective = False
        try:
            self._post("/update_weights_from_ipc", {"zmq_handles": names}, _EVER_S)
        except _NotThere:
            self._collective = True
            raise EngineError(
                f"{self.name} has neither /collective_rpc nor /update_weights_from_ipc; start vLLM with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from None

    def _refused(self, path: str, code: int, text: str) -> EngineError:
        if code in (404, 405):
            return _NotThere(f"{self.name} has no {path}: {text}")
        hint = ""
        if path == "/collective_rpc":
            hint = (
                "; its log says why. Was it started with --worker-extension-cls "
                "checkpoint_engine.worker.VllmColocateWorkerExtension, and are all workers alive?"
            )
        return EngineError(f"{self.name}{path} answered {code}: {text}{hint}")


class _NotThere(EngineError):
    pass


class _WholeModel:
    """An ``EngineModel`` that wants every tensor whole, and passes on what it is to load."""

    quantized = False
    blocks: Blocks | None = None

    def __init__(self, engine: IpcEngine, devices: list[str], bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self._engine, self.devices = engine, devices
        self._bucket_bytes, self._dtype = bucket_bytes, dtype
        self._guard: Guard | None = None
        self._last: Update | None = None
        self.patience_s = self.end = 0.0

    def make(self) -> nn.Module:
        return nn.Module()

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            torch.empty(tensor.shape, dtype=self._sent_as(tensor.dtype), device="meta").copy_(tensor)

    def _sent_as(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self._dtype
        if wanted is None or not dtype.is_floating_point or dtype.itemsize <= wanted.itemsize:
            return dtype
        return wanted

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._last is not None and not self._last.join(min(_LATE_S, self.end - time.monotonic())):
            raise EngineError(
                f"{self._engine.name} has not ended an earlier update, which failed; is one of its workers stopped?"
            )
        named = [(name, tensor, self._sent_as(tensor.dtype)) for name, tensor in weights]
        sizes = [aligned(tensor.numel() * dtype.itemsize) for _, tensor, dtype in named]
        longest = max(sizes)
        buckets = make_buckets(self.devices, max(min(aligned(self._bucket_bytes), sum(sizes)), longest), longest)
        try:
            update = self._begin()
            try:
                update.begin(buckets.handles)
                self._pass_on(named, sizes, buckets, update)
                update.tell(None)  # they let go of the memory
                update.hear()
                buckets.close()
                update.tell(None)  # and make of the weights what they compute with
                update.hear()
                said = update.finish()
                if said:
                    # Where a worker raised before, vLLM takes late answers of others for those of this request.
                    _log.warning("push: all workers have put the weights in, and yet %s", said)
            except BaseException as error:
                update.give_up(error)
                raise
        finally:
            buckets.close()

    def _pass_on(self, named: Sequence[_Named], sizes: Sequence[int], buckets: Buckets, update: Update) -> None:
        """Tensors, in runs that fit into a bucket: while one is filled, workers are at the other."""
        for number, (begin, stop) in enumerate(_runs(sizes, buckets.nbytes)):
            half, rows, offset = number % 2, [], 0
            bucket = buckets.bucket(half)
            for (name, tensor, dtype), size in zip(named[begin:stop], sizes[begin:stop], strict=True):
                nbytes = tensor.numel() * dtype.itemsize
                bucket[offset : offset + nbytes].view(dtype).view(tensor.shape).copy_(tensor)
                place = half * buckets.nbytes + offset
                rows.append({"name": name, "dtype": dtype, "shape": tensor.shape, "offset": place})
                offset += size
            buckets.show(half, offset)
            update.hear()
            update.tell(rows)
        update.hear()

    def _begin(self) -> Update:
        if self._guard is None:
            self._guard = Guard()
        self._last = Update(self._engine, self.devices, self._guard, self.patience_s, self.end)
        return self._last

    def restore(self) -> bool:
        return False

    def close(self) -> None:
        """Where an update is not over, the guard stays, as workers may still come to it."""
        if self._guard is not None and (self._last is None or self._last.join(0)):
            self._guard.close()
            self._guard = None


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """What follows each other and fits into ``limit`` bytes together."""
    begin = used = 0
    for number, size in enumerate(sizes):
        if used + size > limit:
            yield begin, number
            begin, used = number, 0
        used += size
    yield begin, len(sizes)
