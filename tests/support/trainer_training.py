"""A tiny training with the Trainer of transformers or TRL, on one rank or several."""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp._init_utils as fsdp1
import transformers
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import bytecheckpoint as bcp
from bytecheckpoint.integrations.transformers import BcpTrainer, BcpTrainerMixin

__all__ = ["free_port", "make_model", "settings", "train", "train_on_ranks"]

STEPS = 10
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class _Counts(transformers.Trainer):
    """Writes a file next to the Trainer's and reads it again, as the ``GRPOTrainer`` of TRL does."""

    counter = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.counter += 1
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            Path(folder, "counter.json").write_text(json.dumps(self.counter))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and Path(checkpoint, "counter.json").exists():
            self.counter = json.loads(Path(checkpoint, "counter.json").read_text())


class CountingTrainer(BcpTrainerMixin, _Counts):
    """A Trainer with a file of its own in each checkpoint."""


class _Signal(TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def make_model(**sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given: dict[str, Any] = {**_SIZES, **sizes}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=61, num_key_value_heads=2, attention_dropout=0.1, tie_word_embeddings=True, **given)
    )


def settings(root: Path | str, **changes: Any) -> TrainingArguments:
    """Arguments of a training of ``STEPS`` steps that saves and evaluates every third one."""
    given: dict[str, Any] = {
        "output_dir": str(root),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "save_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**given | changes)


def train(
    root: Path | str,
    *,
    resume: Any = True,
    signalled: tuple[int, int] | None = None,
    kind: type[transformers.Trainer] = BcpTrainer,
    checkpoints: Mapping[str, Any] | None = None,
    model: Any = None,
    adapted: bool | Mapping[str, Any] = False,
    **changes: Any,
) -> dict[str, Any]:
    """Train; ``signalled`` is a step and the signal that this process gets after it. Return what can be compared.

    With ``adapted``, train an adapter of LoRA, with these further options.
    """
    data = torch.randint(0, 61, (48, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in data]
    model = make_model() if model is None else model
    if adapted:
        odd = adapted if isinstance(adapted, Mapping) else {}
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, **odd))
    transformers.set_seed(3)
    arguments = settings(root, **changes)
    if "fsdp" in changes:
        # Accelerate shards on accelerators only, and ignores the argument elsewhere.
        assert arguments.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        # Of a CPU without a number, which Accelerate names, FSDP-1 makes "cpu:0", and refuses that.
        fsdp1._get_device_from_device_id = lambda device, rank, handle: None
    own = {"checkpoints": checkpoints} if issubclass(kind, BcpTrainerMixin) else {}
    trainer = kind(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[_Signal(*signalled)] if signalled else [],
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    logs = trainer.state.log_history
    parameters = {name: _whole(one) for name, one in trainer.model.named_parameters()}
    return {
        "losses": {log["step"]: (log["loss"], log["learning_rate"]) for log in logs if "loss" in log},
        "evaluations": {log["step"]: log["eval_loss"] for log in logs if "eval_loss" in log},
        "sums": {name: one.double().sum().item() for name, one in parameters.items()},
        "flos": trainer.state.total_flos,
        "best": trainer.state.best_model_checkpoint,
        "counter": getattr(trainer, "counter", None),
    }


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):  # a part of it, at stage 3
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    whole = getattr(parameter, "full_tensor", None)
    return parameter.detach() if whole is None else whole().detach()


def train_on_ranks(
    rank: int, world_size: int, port: int, root: str, killed_in_save: int | None, changes: dict[str, Any]
) -> dict[str, Any]:
    """As ``train``, on each rank; the last one is killed when the save of a step is staged and not committed."""
    warnings.simplefilter("ignore")  # the pool resets the filters
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def kill(handle: bcp.SaveHandle) -> None:
        if rank == world_size - 1 and handle.url.endswith(f"checkpoint-{killed_in_save}"):
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        checkpoints = {"callbacks": bcp.manager.Callbacks(on_staged=kill), **(changes.get("checkpoints") or {})}
        return train(root, **changes | {"checkpoints": checkpoints})
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
