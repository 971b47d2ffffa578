"""The debug models of torchtitan, trained on CPUs with its own trainer.

torchtitan expects an accelerator. What it lacks here is replaced, before it is imported: the kernels of one way of
expert parallelism, which need triton, statistics of a device's memory, and timeouts of NCCL.
torch 2.13 has no ``step`` of pipeline schedules that takes microbatches.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import tyro
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

import bytecheckpoint as bcp

__all__ = ["VOCAB", "Trained", "debug_model", "parsed", "train"]

VOCAB = 2048

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
_NOTHING = "set_device reset_peak_memory_stats empty_cache synchronize"


def _kernels() -> ModuleType:
    """A module with the names that torchtitan imports from the kernels."""
    made = ModuleType(_KERNELS)
    [folder] = find_spec("torchtitan").submodule_search_locations  # type: ignore[union-attr, misc]
    importing = ast.parse(Path(folder, "distributed", "minimal_async_ep", "api.py").read_text())
    for node in ast.walk(importing):
        if isinstance(node, ast.ImportFrom) and node.module == _KERNELS:
            vars(made).update(dict.fromkeys(name.name for name in node.names))
    return made


def _import_trainer() -> None:
    sys.modules[_KERNELS] = _kernels()
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        tools = importlib.import_module("torchtitan.tools.utils")
    properties = SimpleNamespace(total_memory=1 << 34, name="CPU")
    device_module = SimpleNamespace(
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: properties,
        current_device=lambda: 0,
        memory_stats=lambda device=None: {},
        **dict.fromkeys(_NOTHING.split(), lambda device=None: None),
    )
    vars(tools).update(device_module=device_module, get_local_device=lambda: torch.device("cpu"))
    trainer = importlib.import_module("torchtitan.trainer")
    trainer.dist_utils.set_pg_timeouts = lambda **_: None
    trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})  # type: ignore[attr-defined]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _import_trainer()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.manager import custom_registry  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager  # noqa: E402


class _Tokens(IterableDataset[Any]):
    """An endless stream of random tokens, another one on each data-parallel rank."""

    def __init__(self, rank: int, world_size: int, length: int) -> None:
        self._rank, self._world_size, self._length = rank, world_size, length
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        positions = torch.arange(self._length)
        while True:
            generator = torch.Generator().manual_seed(self._count * self._world_size + self._rank)
            tokens = torch.randint(0, VOCAB, (self._length + 1,), generator=generator)
            self._count += 1
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._count = state["count"]


class _Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """As that of torchtitan."""

    def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, seq_len: int, **kwargs: Any) -> None:
        del kwargs["tokenizer"]
        batch_size = kwargs.pop("local_batch_size")
        data = _Tokens(dp_rank, dp_world_size, seq_len)
        super().__init__(data, dp_rank, dp_world_size, batch_size=batch_size, **kwargs)


class _Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """As that of torchtitan."""

    def __init__(self, config: Any, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB


@dataclass
class Trained:
    """What can be compared after a training."""

    losses: dict[int, float]
    sums: dict[str, float]
    rng: int


def _config(folder: Path | str, kind: str, steps: int, parallelism: Mapping[str, Any], checkpoint: Any) -> Any:
    registry = importlib.import_module(f"torchtitan.models.{kind}.config_registry")
    config = getattr(registry, f"{kind}_debugmodel")()
    config.model_spec.model.layers[2:] = []
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # others are compiled
    config.dump_folder, config.checkpoint = str(folder), checkpoint
    config.tokenizer, config.dataloader = _Tokenizer.Config(), _Loader.Config()
    config.lr_scheduler.total_steps = 10
    config.debug.seed = 7
    config.validator.enable = False
    settings = {"seq_len": 16, "local_batch_size": 2, "steps": steps, "disable_cuda_graphs": True}
    for name, value in settings.items():
        setattr(config.training, name, value)
    for name, value in {"spmd_backend": "partial_dtensor", **parallelism}.items():
        setattr(config.parallelism, name, value)
    return config


def debug_model() -> Any:
    """What ``llama3_debugmodel`` returns, for CPUs."""
    warnings.simplefilter("ignore")
    return _config("", "llama3", 1, {}, CheckpointManager.Config())


def parsed(*arguments: str, checkpoint: Any) -> Any:
    """The configuration of a training that was started with these arguments."""
    warnings.simplefilter("ignore")
    config = _config("", "llama3", 1, {}, checkpoint)
    return tyro.cli(type(config), args=arguments, default=config, registry=custom_registry)


def train(
    rank: int,
    world_size: int,
    folder: Path | str,
    *,
    kind: str = "llama3",
    steps: int = 6,
    parallelism: Mapping[str, Any] | None = None,
    native: bool = False,
    killed_in_save: int | None = None,
    sigterm_at: int | None = None,
    dropout: float = 0.1,
    **options: Any,
) -> Trained:
    """Train, and save every second step; ``options`` are those of the checkpoint manager.

    With ``killed_in_save``, the last rank is killed when the save of this step is staged and not committed.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    options = {"enable": True, "interval": 2, "last_save_model_only": False, **options}
    if native:
        checkpoint = CheckpointManager.Config(**options)
    else:
        checkpoint = BcpCheckpointManager.Config(**options)

        def kill(handle: bcp.SaveHandle) -> None:
            if rank == world_size - 1 and handle.url.endswith(f"step-{killed_in_save}"):
                os.kill(os.getpid(), signal.SIGKILL)

        if killed_in_save:
            checkpoint.checkpoints["callbacks"] = bcp.manager.Callbacks(on_staged=kill)
    warnings.simplefilter("ignore")  # the pool resets the filters
    trainer = _config(folder, kind, steps, parallelism or {}, checkpoint).build()
    for module in (one for part in trainer.model_parts for one in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reductions
    if trainer.parallel_dims.pp_enabled:
        trainer.pp_schedule.step = _step_of_microbatches(trainer.pp_schedule)
    for part in trainer.model_parts:
        if "0" in part.layers:  # random states matter
            part.layers["0"].register_forward_hook(lambda module, args, out: nn.functional.dropout(out, dropout))
    losses: dict[int, float] = {}

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        losses[step] = loss
        if step == sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.metrics_processor.log = log
    with suppress(SystemExit):
        if checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    trainer.close()
    parameters = {name: one for part in trainer.model_parts for name, one in part.named_parameters()}
    sums = {
        name.replace("_checkpoint_wrapped_module.", ""): _whole(one).double().sum().item()
        for name, one in parameters.items()
    }
    state = torch.get_rng_state()
    return Trained(losses, sums, hash(state.numpy().tobytes()))


def _step_of_microbatches(schedule: Any) -> Any:
    """The ``step`` of a pipeline schedule of later releases of torch, which takes microbatches."""

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, return_outputs: bool, loss_kwargs: Any
    ) -> None:
        for stage in schedule._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    return step


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    whole = getattr(parameter, "full_tensor", None)
    return parameter.detach() if whole is None else whole().detach()
