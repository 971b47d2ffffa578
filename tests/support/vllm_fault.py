"""vLLM workers that fail on request in the middle of loading weights. On CPUs, they can generate where they are
pipeline stages, or have some of the experts, which vLLM (0.32) leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import xxhash
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from bytecheckpoint.engine.tensor_bytes import byte_view
from bytecheckpoint.inference.push.replay import Replay
from bytecheckpoint.inference.vllm.adapters import VllmAdapters, adapters_of
from bytecheckpoint.inference.vllm.loader import register
from bytecheckpoint.inference.vllm.model import VllmModel
from bytecheckpoint.inference.vllm.worker import WorkerExtension, receiver

register()
_compute = CPUUnquantizedExperts.apply


def _compute_own(self: Any, *, expert_map: torch.Tensor | None, **arguments: Any) -> None:
    """vLLM's kernel for CPUs (0.32) leaves out that a worker has some of the experts only."""
    if expert_map is not None:
        own = expert_map[arguments["topk_ids"].long()]
        arguments["topk_weights"] = arguments["topk_weights"] * (own >= 0)
        arguments["topk_ids"] = own.clamp(min=0).to(arguments["topk_ids"].dtype)
    _compute(self, expert_map=expert_map, **arguments)


CPUUnquantizedExperts.apply = _compute_own


class FaultyWorkers(WorkerExtension):
    """``bcp_test_fail(rank)``: the next load of that worker, counted over data-parallel replicas, ends after a few
    tensors. ``bcp_test_fail_adapter()``: the next adapter that is loaded ends as nothing."""

    def bcp_test_fail(self, rank: int) -> int:
        parallel = self.vllm_config.parallel_config
        if parallel.data_parallel_index * parallel.world_size + parallel.rank == rank:
            load, replay = VllmModel.load, VllmModel.replay

            def broken(model: VllmModel, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
                VllmModel.load, VllmModel.replay = load, replay
                load(model, _ending(weights))

            def broken_replay(model: VllmModel, given: Replay, *arguments: Any) -> None:
                VllmModel.load, VllmModel.replay = load, replay
                replay(model, _EndingReplay(given), *arguments)

            VllmModel.load, VllmModel.replay = broken, broken_replay
        return rank

    def bcp_test_replayed(self) -> list[Any]:
        """The number of layers that the latest push replayed, and the tensors that its loader loaded."""
        given = receiver(self.vllm_config, self.model_runner.get_model())
        *_, (_, record, _) = given._records.values()
        return [len(record.fills), sorted(record.others)]

    def bcp_test_fail_adapter(self) -> None:
        load = VllmAdapters.load

        def broken(adapters: VllmAdapters, *arguments: Any) -> None:
            VllmAdapters.load = load
            raise RuntimeError("the adapter does not fit")

        VllmAdapters.load = broken

    def bcp_test_known_adapters(self) -> int:
        """For how many adapters a request is kept."""
        return len(adapters_of(self.model_runner.lora_manager._adapter_manager)._requests)

    def bcp_test_make_room(self) -> None:
        """For what comes from the pipeline stage before: on CPUs, vLLM (0.32) leaves that to a rehearsal that it makes
        for compiled models alone."""
        runner = self.model_runner
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    def bcp_test_digest(self) -> dict[str, str]:
        """Of all that the model computes with: what is in it, and what layers make of ones that have packed their
        weights and let them go. Of adapters, what is in their slots."""
        model = self.model_runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, layer in model.named_modules():
            if hasattr(layer, "cpu_linear"):
                width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "input_size", None)
                width = width or layer.embedding_dim
                ones = torch.eye(width, dtype=layer.weight.dtype)
                tensors[f"{name} of ones"] = layer.cpu_linear(ones, layer.weight, None)
            for stack in ("lora_a_stacked", "lora_b_stacked"):
                for number, slots in enumerate(getattr(layer, stack, ())):
                    tensors[f"{name}.{stack}.{number}"] = slots
        return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    bits = xxhash.xxh3_64_hexdigest(byte_view(tensor.detach().cpu().contiguous()))
    return f"{bits} {tensor.dtype} {tuple(tensor.shape)}"


class _EndingReplay(Replay):
    """Raises after a few layers."""

    def __init__(self, given: Replay) -> None:
        vars(self).update(vars(given))
        self._left = 3

    def fill(self, *arguments: Any) -> None:
        if not self._left:
            raise RuntimeError("the layer does not fit")
        self._left -= 1
        super().fill(*arguments)


def _ending(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from islice(weights, 9)
    raise RuntimeError("the layer does not fit")
