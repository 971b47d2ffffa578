"""Load a checkpoint of any training layout when vLLM starts (``--load-format bcp``).

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

from ...checkpoint.attempts import ATTEMPT_PREFIX
from ...checkpoint.checkpoint import Checkpoint
from ...checkpointer import default_checkpointer
from ...errors import MismatchError, UsageError
from ...runtime.limits import DEFAULT_DEADLINE_S
from ..delivery import DeliveryReport, StoredWeights
from ..layouts.coverage import UnrecordedWrites, uncovered
from ..layouts.hub_names import hub_tensors
from ..layouts.recording import Copy
from . import transfer

__all__ = ["BcpModelLoader", "register"]

_LOAD_FORMAT = "bcp"
_OPTIONS = frozenset({"path", "section", "rules", "verify", "share_reads", "deadline_s", "storage_options"})

# vLLM shows only the messages of its own loggers.
_log = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Register the load format and the weight transfer backend with vLLM. Repeated calls have no effect."""
    register_model_loader(_LOAD_FORMAT)(BcpModelLoader)
    transfer.register()


class BcpModelLoader(BaseModelLoader):
    """The loader of the format ``bcp``.

    ``--model-loader-extra-config`` may contain ``path``, a checkpoint or a directory of safetensors files, if
    ``--model`` contains only a configuration; ``section`` (default "model"); ``rules``, a file or a set of rules that
    makes the names of the hub; and ``verify``, ``share_reads``, ``deadline_s`` and ``storage_options`` as for
    ``bytecheckpoint.load``.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise UsageError(
                f"load format {_LOAD_FORMAT} takes {', '.join(sorted(_OPTIONS))} as extra configuration, not "
                f"{', '.join(map(str, unknown))}"
            )
        self._options = options

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing; weights are read when they are loaded."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill ``model``. Raises ``MismatchError`` that names the parameters with missing elements."""
        op = default_checkpointer().operation("load", float(self._options.get("deadline_s", DEFAULT_DEADLINE_S)))
        try:
            with op.phase("open"):
                checkpoint = self._open(model_config)
                op.set_description(f"load of {checkpoint.url}")
                weights = StoredWeights(checkpoint, self._options.get("section", "model"))
            op.agree("agree", _facts(checkpoint))
            with op.phase("describe"):
                tensors = hub_tensors(model_config.hf_config, dict(weights.tensors()))
                with UnrecordedWrites() as own:
                    model.load_weights(tensors.items())  # type: ignore[operator]
                if model_config.quantization is None:  # vLLM computes some parameters of quantized models later
                    _check_complete(model, weights.recorder.copies, own.targets)
            delivered = weights.deliver(op, self._options.get("share_reads", "auto"))
            # A rank must not serve if another one could not load.
            op.barrier("loaded")
        finally:
            op.close()
        _log.info("%s: %s", checkpoint.backend.display_url, _summary(delivered))

    def _open(self, model_config: ModelConfig) -> Checkpoint:
        path = str(self._options.get("path") or model_config.model)
        head, _, name = path.rstrip("/").rpartition("/")
        if name.startswith(ATTEMPT_PREFIX):
            path = head  # Checkpoint.model_directory, which also contains the model's configuration
        return default_checkpointer().open(
            path,
            verify=self._options.get("verify", True),
            rules=self._options.get("rules"),
            storage_options=self._options.get("storage_options"),
        )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Facts that all ranks must agree on. Other systems' folders have no attempt name, so compare their tensors too."""
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
        raise MismatchError(f"the checkpoint does not completely fill {len(holes)} parameter(s):{listed}{more}", faults)


def _summary(delivered: DeliveryReport) -> str:
    share = 100 * delivered.direct / max(delivered.requested, 1)
    text = f"{delivered.requested:,} bytes into place, {share:.1f} % of them straight; {delivered.read:,} bytes read"
    text += f", {delivered.received:,} from other ranks" if delivered.received else ""
    return text + (f"; values of {', '.join(delivered.seen)} were computed with" if delivered.seen else "")
