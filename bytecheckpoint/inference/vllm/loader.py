"""``--load-format bcp``: vLLM starts from a checkpoint of any training layout, each rank reading only what it holds.

``register`` is an entry point of ``vllm.general_plugins``, which vLLM calls in each of its processes. Nothing here is
imported without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import nn
from vllm.config import LoadConfig, ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ..checkpoint import Checkpoint
from ..checkpointer import DEADLINE_S, default_checkpointer
from ..engine.writing.commit import ATTEMPT_MARK
from ..errors import MismatchError, StateError
from . import vllm_transfer
from .coverage import OwnWrites, uncovered
from .delivery import Delivered, StoredWeights
from .hub_names import hub_tensors
from .recording import Copy

__all__ = ["BcpModelLoader", "register"]

_LOAD_FORMAT = "bcp"
_OPTIONS = frozenset({"path", "section", "verify", "share_reads", "deadline_s", "storage_options"})

# vLLM shows what its own loggers say.
_log = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Make the load format, and the backend of weight transfers, known to vLLM. May be called again."""
    register_model_loader(_LOAD_FORMAT)(BcpModelLoader)
    vllm_transfer.register()


class BcpModelLoader(BaseModelLoader):
    """Of ``--model-loader-extra-config``: ``path``, of the checkpoint or a folder of safetensors files, where
    ``--model`` names only a configuration; ``section`` (default "model"), and as of ``bytecheckpoint.load`` ``verify``,
    ``share_reads``, ``deadline_s``, ``storage_options``."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise StateError(
                f"load format {_LOAD_FORMAT} takes {', '.join(sorted(_OPTIONS))} as extra configuration, not "
                f"{', '.join(map(str, unknown))}"
            )
        self._options = options

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to fetch beforehand."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill ``model``. Raises ``MismatchError`` naming parameters of which elements would get nothing."""
        op = default_checkpointer().operation("load", float(self._options.get("deadline_s", DEADLINE_S)))
        try:
            with op.phase("open"):
                checkpoint = self._open(model_config)
                op.is_about(f"load of {checkpoint.url}")
                weights = StoredWeights(checkpoint, self._options.get("section", "model"))
            op.agree("agree", _facts(checkpoint))
            with op.phase("describe"):
                tensors = hub_tensors(model_config.hf_config, dict(weights.tensors()))
                with OwnWrites() as own:
                    model.load_weights(tensors.items())  # type: ignore[operator]
                if model_config.quantization is None:  # else, some are only computed later
                    _check_complete(model, weights.recorder.copies, own.targets)
            delivered = weights.deliver(op, self._options.get("share_reads", "auto"))
            # No rank serves while another could not load.
            op.barrier("loaded")
        finally:
            op.close()
        _log.info("%s: %s", checkpoint.url, _summary(delivered))

    def _open(self, model_config: ModelConfig) -> Checkpoint:
        path = str(self._options.get("path") or model_config.model)
        head, _, name = path.rstrip("/").rpartition("/")
        if name.startswith(ATTEMPT_MARK):
            path = head  # Checkpoint.model_directory, which holds the configuration of a model that was stored whole
        return default_checkpointer().open(
            path, verify=self._options.get("verify", True), storage_options=self._options.get("storage_options")
        )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """What tells whether all ranks see the same. Folders of others have no name for one state of theirs."""
    table = xxhash.xxh3_128()
    for name, stored in checkpoint.items():
        table.update(f"{name} {stored.meta}\n".encode())
    return {"path": checkpoint.url, "checkpoint": checkpoint.manifest.attempt, "tensors": table.hexdigest()}


def _check_complete(model: nn.Module, copies: Sequence[Copy], own: Sequence[torch.Tensor]) -> None:
    holes = uncovered(model.named_parameters(), copies, own)
    if holes:
        listed = "".join(f"\n  {name}: {elements}" for name, elements in holes[:10])
        more = f"\n  and {len(holes) - 10} more" if len(holes) > 10 else ""
        faults = [("missing", name, elements) for name, elements in holes]
        raise MismatchError(
            f"the checkpoint has nothing for all or a part of {len(holes)} parameter(s):{listed}{more}", faults
        )


def _summary(delivered: Delivered) -> str:
    share = 100 * delivered.straight / max(delivered.wanted, 1)
    text = f"{delivered.wanted:,} bytes into place, {share:.1f} % of them straight; {delivered.read:,} bytes read"
    text += f", {delivered.received:,} from other ranks" if delivered.received else ""
    return text + (f"; values of {', '.join(delivered.seen)} were computed with" if delivered.seen else "")
