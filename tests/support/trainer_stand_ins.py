"""Stand-ins for what the examples use of verl and prime-rl, neither of which installs where the tests run.

They have the names and signatures of verl 0.9.1 and of prime-rl's sources, and nothing else.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist


class BaseCheckpointManager:
    """verl.utils.checkpoint.checkpoint_manager"""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
    ) -> None:
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.processing_class, self.checkpoint_config = processing_class, checkpoint_config
        self.checkpoint_save_contents = checkpoint_config["save_contents"]
        self.checkpoint_load_contents = checkpoint_config["load_contents"]
        self.rank = dist.get_rank()
        self.registered: list[tuple[Any, ...]] = []

    def ensure_checkpoint_capacity(self, max_ckpt_to_keep: int | None) -> None:
        self.registered.append((max_ckpt_to_keep,))

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        self.registered.append((new_path, max_ckpt_to_keep))


class EngineRegistry:
    """verl.workers.engine.base"""

    engines: dict[tuple[str, str, str, str], type] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: list[str], device: list[str], vendor: str
    ) -> Callable[[type[Any]], type[Any]]:
        def decorator(engine: type[Any]) -> type[Any]:
            cls.engines |= {(model_type, one, two, vendor): engine for one in backend for two in device}
            return engine

        return decorator


class FSDPEngineWithLMHead:
    """verl.workers.engine.fsdp.transformer_impl"""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def initialize(self) -> None:
        self.checkpoint_manager = BaseCheckpointManager(*self.parts)


class FSDPEngineWithValueHead(FSDPEngineWithLMHead):
    pass


class CheckpointEngine(ABC):
    """verl.checkpoint_engine"""

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineRegistry:
    """verl.checkpoint_engine"""

    backends: dict[str, type] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type[Any]], type[Any]]:
        def decorator(engine: type[Any]) -> type[Any]:
            cls.backends[backend] = engine
            return engine

        return decorator

    @classmethod
    def new(cls, backend: str, **kwargs: Any) -> Any:
        return cls.backends[backend](**kwargs)


class FileSystemWeightBroadcast:
    """prime_rl.trainer.rl.broadcast.filesystem"""

    def __init__(self, output_dir: Path, config: Any, lora_config: Any = None) -> None:
        self.world = SimpleNamespace(is_master=dist.get_rank() == 0)
        self.multi_run_manager = SimpleNamespace(
            ready_to_update=[True],
            progress=[SimpleNamespace(step=0)],
            get_run_dir=lambda idx: output_dir / f"run_{idx}",
        )

    def _notify_orchestrator(self, save_dir: Path) -> None:
        (save_dir / "STABLE").touch()


def install_verl() -> None:
    _install(
        "verl.checkpoint_engine",
        CheckpointEngine=CheckpointEngine,
        CheckpointEngineRegistry=CheckpointEngineRegistry,
    )
    _install("verl.utils.checkpoint.checkpoint_manager", BaseCheckpointManager=BaseCheckpointManager)
    _install("verl.workers.engine.base", EngineRegistry=EngineRegistry)
    _install(
        "verl.workers.engine.fsdp.transformer_impl",
        FSDPEngineWithLMHead=FSDPEngineWithLMHead,
        FSDPEngineWithValueHead=FSDPEngineWithValueHead,
    )


def install_prime_rl(train: Callable[[Callable[..., Any]], None]) -> None:
    """``train`` is what prime-rl's trainer does; it gets ``setup_weight_broadcast``."""
    module = _install("prime_rl.trainer.rl.train")
    module.main = lambda: train(module.setup_weight_broadcast)  # type: ignore[attr-defined]
    _install("prime_rl.trainer.rl.broadcast.filesystem", FileSystemWeightBroadcast=FileSystemWeightBroadcast)
    _install(
        "prime_rl.utils.utils",
        get_broadcast_dir=lambda run: run / "broadcasts",
        get_step_path=lambda folder, step: folder / f"step_{step}",
    )


def _install(name: str, **content: Any) -> ModuleType:
    """Make the module importable, and the packages around it."""
    module = sys.modules.setdefault(name, ModuleType(name))
    module.__dict__.update(content)
    package, _, last = name.rpartition(".")
    if package:
        setattr(_install(package), last, module)
    return module
