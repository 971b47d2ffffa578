"""Move a run from the Trainer of transformers to FSDP-2 and this library, in place and in the middle of the run.

    python examples/move_from_huggingface.py write --old runs/old                              # steps 1 to 4
    torchrun --nproc-per-node 2 examples/move_from_huggingface.py continue --old runs/old --new runs/new
    bcp export runs/new/step-8 exported --config-from runs/old/checkpoint-4
    python examples/move_from_huggingface.py use --model exported

``write`` is the run so far. ``continue`` loads its ``checkpoint-4``, trains on with FSDP-2 and saves with this library.
``bcp export`` writes the model for ``from_pretrained``, and ``use`` loads it. The batch depends only on the step, so
the losses are those of a Trainer that goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import bytecheckpoint as bcp

STEPS, SWITCH, BATCH, LENGTH = 8, 4, 8, 16
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    tie_word_embeddings=True,
)


def sample(number: int) -> torch.Tensor:
    start, width = (int(one) for one in torch.randint(1, 9, (2,), generator=torch.Generator().manual_seed(number)))
    return (start + width * torch.arange(LENGTH)) % 64


class Samples(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(STEPS * BATCH):
            yield {"input_ids": sample(number), "labels": sample(number)}


class StopAt(TrainerCallback):
    """The Trainer's schedule is that of all steps, but it stops earlier."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
        return control


def write(old: str, stop_at: int) -> None:
    torch.manual_seed(0)
    settings = TrainingArguments(
        output_dir=old,
        max_steps=STEPS,
        save_steps=SWITCH,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
    )
    Trainer(LlamaForCausalLM(CONFIG), settings, train_dataset=Samples(), callbacks=[StopAt(stop_at)]).train()


def continue_with_fsdp(old: str, new: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    decayed = [param for name, param in model.named_parameters() if "norm" not in name]
    rest = [param for name, param in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    extra = {"global_step": 0}
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "extra_state": extra}
    # trainer_state.json has more than the step; the other values stay where they are.
    bcp.load(f"{old}/checkpoint-{SWITCH}", {**state, "rng": bcp.RNGState()}, strict={"extra_state": False})
    for step in range(extra["global_step"], STEPS):
        tokens = torch.stack([sample(step * BATCH + one) for one in range(BATCH)]).chunk(ranks)[rank]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        extra["global_step"] += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {extra['global_step']}  loss {mean.item() / ranks:.5f}", flush=True)
    bcp.save(f"{new}/step-{STEPS}", {**state, "rng": bcp.RNGState()}, step=STEPS)
    dist.destroy_process_group()


def use(model: str) -> None:
    found = AutoModelForCausalLM.from_pretrained(model).eval()
    tokens = torch.stack([sample(number) for number in range(BATCH)])
    with torch.no_grad():
        print(f"loaded  loss {found(input_ids=tokens, labels=tokens).loss.item():.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "continue", "use"])
    parser.add_argument("--old", default="runs/old", help="the Trainer's output_dir")
    parser.add_argument("--new", default="runs/new", help="where this library saves, a folder or a URL")
    parser.add_argument("--model", default="exported", help="the folder of bcp export")
    parser.add_argument("--stop-at", type=int, default=SWITCH, help="the last step of write")
    args = parser.parse_args()
    if args.what == "write":
        write(args.old, args.stop_at)
    elif args.what == "continue":
        continue_with_fsdp(args.old, args.new)
    else:
        use(args.model)


if __name__ == "__main__":
    main()
