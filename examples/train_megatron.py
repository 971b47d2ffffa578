"""Train a small GPT with Megatron-core, and resume it with other parallel sizes.

Start it with torchrun. ``--tp`` and ``--pp`` are the tensor and pipeline parallel sizes; the remaining factor of the
number of processes is data parallel, with Megatron's distributed optimizer. Any of them may change between runs.

Without CUDA, the script uses the CPU shim of this repository's tests. This shows what is stored and where it goes, and
nothing about CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint as bcp

__all__ = ["main"]

SEQUENCE, BATCH, VOCABULARY = 16, 8, 64


def build(tp: int, pp: int) -> tuple[Any, Any]:
    """The model of this rank and its optimizer, as Megatron's own examples build them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    torch.manual_seed(0)
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, Float16Module(config, gpt))
    config.finalize_model_grads_func = finalize_model_grads
    options = OptimizerConfig(
        optimizer="adam", lr=3e-3, min_lr=0.0, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    return model, get_megatron_optimizer(options, [model])


def train_step(model: Any, optimizer: Any, step: int) -> float:
    """One step on the global batch of this step, which is the same for every parallel size. Returns the mean loss."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SEQUENCE + 1) * 3) % VOCABULARY
    micro_batches = tokens.chunk(replicas)[replica].split(2)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
    total = torch.tensor([sum(entry["loss"] for entry in found), float(len(found))])
    dist.all_reduce(total)  # only the last pipeline stage has losses; tensor parallel ranks have the same ones
    return float(total[0] / total[1])


def _forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device), 1)[None, None]
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, partial(_mean)


def _mean(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.item()}


def train(args: argparse.Namespace) -> None:
    """Train up to ``--steps``, from the newest checkpoint if there is one."""
    model, optimizer = build(args.tp, args.pp)
    progress = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    with bcp.CheckpointManager(args.root, cadence=args.save_every) as manager:
        manager.resume(state)
        for step in range(progress["step"] + 1, args.steps + 1):
            loss = train_step(model, optimizer, step)
            progress["step"] = step
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": loss}), flush=True)
            manager.save(step, state)
            if step == args.die_at:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--root", required=True, help="folder or URL of the checkpoints")
    parser.add_argument("--die-at", type=int, help="kill every process after this step, to try a resume")
    args = parser.parse_args()
    with on_any_device():
        train(args)


@contextlib.contextmanager
def on_any_device() -> Iterator[None]:
    """Initialize the process group, on the CPU if there is no CUDA."""
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
        else:
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
            from mcore_cpu import megatron_on_cpu

            dist.init_process_group("gloo")
            stack.enter_context(megatron_on_cpu())
        stack.callback(dist.destroy_process_group)
        yield


if __name__ == "__main__":
    main()
