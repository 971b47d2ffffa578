"""vLLM workers that can be told to fail in the middle of putting weights in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import xxhash

from bytecheckpoint.engine.tensor_bytes import byte_view
from bytecheckpoint.inference import vllm_transfer
from bytecheckpoint.inference.vllm_adapters import VllmAdapters
from bytecheckpoint.inference.vllm_worker import VllmModel, WorkerExtension

vllm_transfer.register()


class FaultyWorkers(WorkerExtension):
    """``bcp_test_fail(rank)``: the next load of that worker ends after a few tensors. ``bcp_test_fail_adapter()``: the
    next adapter that is put in ends as nothing."""

    def bcp_test_fail(self, rank: int) -> int:
        if self.rank == rank:  # type: ignore[attr-defined]
            load = VllmModel.load

            def broken(model: VllmModel, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
                VllmModel.load = load  # type: ignore[method-assign]
                load(model, _ending(weights))

            VllmModel.load = broken  # type: ignore[method-assign]
        return rank

    def bcp_test_fail_adapter(self) -> None:
        put_in = VllmAdapters._put_in

        def broken(adapters: VllmAdapters, model: Any) -> None:
            VllmAdapters._put_in = put_in  # type: ignore[method-assign]
            adapters._manager.remove_adapter(model.id)
            raise RuntimeError("the adapter does not fit")

        VllmAdapters._put_in = broken  # type: ignore[method-assign]

    def bcp_test_digest(self) -> str:
        """Of all that the model computes with, as its layers have packed it."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found = xxhash.xxh3_128()
        for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(byte_view(tensor.detach().contiguous()))
        return found.hexdigest()


def _ending(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from islice(weights, 9)
    raise RuntimeError("the layer does not fit")
