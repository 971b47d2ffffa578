"""Checkpoints of verl's FSDP engines by this library: saved by any number of GPUs, resumed on any other.

    export PYTHONPATH=examples VERL_USE_EXTERNAL_MODULES=verl_checkpoints VERL_ENGINE_VENDOR=bcp
    python -m verl.trainer.main_ppo ...

verl imports this module in every process, and its registry of engines then chooses these for actors and critics. The
settings of checkpoints (``save_contents``, ``load_contents``, ``max_actor_ckpt_to_keep``) keep their meaning, except
for ``hf_model``: use ``bcp export CHECKPOINT FOLDER --config-from MODEL`` when you need one. Weights
still go to verl's own rollout workers by verl, or by ``bytecheckpoint.integrations.verl``;
``bcp push ROOT/global_step_10/actor --to URL`` pushes a checkpoint into any other server.
"""

from __future__ import annotations

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import bytecheckpoint as bcp


class BcpCheckpoints(BaseCheckpointManager):
    """What an engine saves and loads. Its paths may be URLs of a store, too."""

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        if local_path is None:
            return
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        # verl records the step as its newest one when this returns, so the checkpoint must be durable then.
        bcp.save(local_path, self._state(self.checkpoint_save_contents), step=global_step)
        if self.rank == 0:
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        if local_path is not None:
            bcp.load(local_path, self._state(self.checkpoint_load_contents))

    def _state(self, contents):
        state = {"model": self.model} if "model" in contents else {}
        if "optimizer" in contents and self.optimizer is not None:
            state["optimizer"] = self.optimizer
        if "extra" in contents:
            state["rng"] = bcp.RNGState()
            if self.lr_scheduler is not None:
                state["lr_scheduler"] = self.lr_scheduler
        return state


class SavesWithBcp:
    """Before an engine of verl: replaces its manager of checkpoints."""

    def initialize(self):
        super().initialize()
        own = self.checkpoint_manager
        self.checkpoint_manager = BcpCheckpoints(
            own.model, own.optimizer, own.lr_scheduler, own.processing_class, own.checkpoint_config
        )


def register(model_type):
    return EngineRegistry.register(model_type, backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor="bcp")


@register("language_model")
class BcpEngineWithLMHead(SavesWithBcp, FSDPEngineWithLMHead):
    pass


@register("value_model")
class BcpEngineWithValueHead(SavesWithBcp, FSDPEngineWithValueHead):
    pass
