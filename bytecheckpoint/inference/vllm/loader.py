"""Load a checkpoint of any training layout when vLLM starts (``--load-format bcp``).

``register`` is an entry point of ``vllm.general_plugins``, which vLLM calls in each of its processes. Nothing here is
imported without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import torch
import xxhash
from torch import nn

from ...checkpoint.attempts import ATTEMPT_PREFIX
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.location import Location
from ...checkpointer import default_checkpointer, session_of
from ...control.base import Operation
from ...errors import MismatchError, StateError, UsageError
from ...loading.options import LoadOptions
from ...runtime import DEFAULT_DEADLINE_S
from ..delivery import DeliveryReport, StoredWeights
from ..layouts.hub_names import hub_tensors
from ..push.engine_model import record_copies
from ..push.messages import pack_parts, unpack_parts
from ..push.plan import check_taken_whole
from ..push.writing import check_finite
from .private import imports_of

with imports_of("loader"):
    from vllm.config import LoadConfig, ModelConfig, get_current_vllm_config
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

_LOAD_FORMAT = "bcp"
_OPTIONS = frozenset(
    {
        *("path", "root", "peers", "token", "section", "rules", "rename", "verify", "share_reads", "deadline_s"),
        *("storage_options", "strict", "check_finite"),
    }
)

# vLLM shows only the messages of its own loggers.
_log = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Register the load format with vLLM. Repeated calls have no effect."""
    register_model_loader(_LOAD_FORMAT)(BcpModelLoader)


class BcpModelLoader(BaseModelLoader):
    """The loader of the format ``bcp``.

    ``--model-loader-extra-config`` may contain ``path``, a checkpoint or a directory of safetensors files, if
    ``--model`` contains only a configuration; ``root``, a folder whose newest checkpoint is loaded instead if there is
    one; ``peers``, addresses of engines, whose first that was pushed to sends what it serves, in place of a checkpoint,
    so that an engine that restarts serves what the others do; ``token``, sent to peers as ``Authorization: Bearer`` (by
    default the environment's ``BYTECHECKPOINT_PUSH_TOKEN``, which vLLM does not log); ``section`` (default "model");
    ``rules``, a file or a set of rules that makes the names of the hub; ``rename``, a map of names as for
    ``bytecheckpoint.open`` (``{"ema.module.": "model."}`` serves averaged weights); ``strict`` and ``check_finite``
    as for ``Pusher.push``; and ``verify``, ``share_reads``, ``deadline_s`` and ``storage_options`` as for
    ``bytecheckpoint.load``.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise UsageError(
                f"load format {_LOAD_FORMAT} accepts {', '.join(sorted(_OPTIONS))} as extra configuration, not "
                f"{', '.join(map(str, unknown))}"
            )
        if not isinstance(options.get("peers", []), list):
            raise UsageError(f"peers is a list of addresses of engines, not {options['peers']!r}")
        self._options = options

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing; weights are read when they are loaded."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill ``model``. Raises ``MismatchError`` that names the parameters with missing elements."""
        op = session_of().operation("load", self._deadline_s)
        try:
            self._choose(op)
            if self._is_joined(op, model, model_config):
                return
            with op.phase("open"):
                checkpoint = self._open(model_config)
                op.set_description(f"load of {checkpoint.url}")
                weights = StoredWeights(checkpoint, self._options.get("section", "model"))
            op.agree("agree", _facts(checkpoint))
            if self._must_quantize(op, model, model_config, weights):
                self._quantize(op, model, model_config, checkpoint)
                return
            delivered = weights.deliver(op, self._options.get("share_reads", "auto"))
            if self._options.get("check_finite", True):
                with op.phase("check"):
                    check_finite(weights.loaded())
            # A rank must not serve if another one could not load.
            op.barrier("loaded")
        finally:
            op.close()
        model.bytecheckpoint_version = checkpoint.step  # type: ignore[assignment]
        _log.info("%s: %s", checkpoint.backend.display_url, _summary(delivered))

    def _must_quantize(
        self, op: Operation, model: nn.Module, model_config: ModelConfig, weights: StoredWeights
    ) -> bool:
        """Record what the model's own loader copies, and return whether any rank must quantize it first. A parameter
        accepts here what it accepts in a push."""
        strict, blocks = self._is_strict, None
        with op.phase("describe"):
            if model_config.quantization is not None:
                with imports_of("push"):
                    from .model import blocks_of
                blocks = blocks_of(get_current_vllm_config().quant_config)
            tensors = hub_tensors(model_config.hf_config, dict(weights.tensors()))
            record = record_copies(
                lambda: model.load_weights(tensors.items()),  # type: ignore[operator]
                weights.recorder,
                dict(weights.table.rows),
                model,
                blocks,
                strict=strict and model_config.quantization is None,  # vLLM computes some of their parameters later
            )
        found = op.gather("requests", msgpack.packb([bool(record.wide), pack_parts(record.parts)]))
        with op.phase("requests"):
            requests = [msgpack.unpackb(one) for one in found or ()]
            if strict and requests:
                requested = [unpack_parts(parts) for _, parts in requests]
                check_taken_whole("the engine", weights.table, requested)
        is_wide = any(wide for wide, _ in requests)
        return op.broadcast("requests", bytes([is_wide]) if op.rank == 0 else None) == bytes([True])

    def _quantize(self, op: Operation, model: nn.Module, model_config: ModelConfig, checkpoint: Checkpoint) -> None:
        if model_config is not get_current_vllm_config().model_config:
            raise MismatchError(
                f"{checkpoint.url} must be quantized for the engine's draft model, which only a push does; use a "
                "checkpoint that is quantized already"
            )
        with imports_of("push"):
            from .peers import load_quantized
        checks = {"strict": self._is_strict, "check_finite": self._options.get("check_finite", True)}
        load_quantized(op, model, checkpoint, self._options.get("section", "model"), self._deadline_s, **checks)
        model.bytecheckpoint_is_quantized = True  # type: ignore[assignment]
        _log.info("%s: quantized by rank 0", checkpoint.backend.display_url)

    @property
    def _is_strict(self) -> bool:
        return bool(self._options.get("strict", True))

    @property
    def _deadline_s(self) -> float:
        return float(self._options.get("deadline_s", DEFAULT_DEADLINE_S))

    def _choose(self, op: Operation) -> None:
        """Let the path be the newest checkpoint below the root, on all ranks and for later loads too."""
        if "root" not in self._options:
            return
        with op.phase("root"):
            root = Location(self._options["root"], storage_options=self._options.get("storage_options"))
            newest = default_checkpointer().latest(root, allow_fresh=True, deadline_s=self._deadline_s)
        url = op.broadcast("root", (b"" if newest is None else newest.url.encode()) if op.rank == 0 else None).decode()
        if url:
            self._options["path"] = self.load_config.model_loader_extra_config["path"] = url

    def _is_joined(self, op: Operation, model: nn.Module, model_config: ModelConfig) -> bool:
        """Load what a peer serves. Returns whether all ranks have loaded it."""
        peers = self._options.get("peers", ())
        if not peers or model_config is not get_current_vllm_config().model_config:
            return False  # a draft model
        with imports_of("push"):
            from .peers import join

        token = self._options.get("token")
        return any(join(op, model, url, self._deadline_s, token) for url in peers)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights for a load in place: of vLLM's ``reload_weights``, and of the rollback of a first push.

        Each rank reads only what its loader copies.
        """
        checkpoint = self._open(model_config)
        if vars(model).get("bytecheckpoint_is_quantized"):
            raise StateError(f"{checkpoint.url} must be quantized, and a reload does not; push it instead")
        weights = StoredWeights(checkpoint, self._options.get("section", "model"))
        tensors = hub_tensors(model_config.hf_config, dict(weights.tensors_read_by_copies()))
        return iter(tensors.items())

    def _open(self, model_config: ModelConfig) -> Checkpoint:
        path = str(self._options.get("path") or model_config.model)
        head, _, name = path.rstrip("/").rpartition("/")
        if name.startswith(ATTEMPT_PREFIX):
            path = head  # Checkpoint.model_directory, which also contains the model's configuration
        return default_checkpointer().open(
            Location(path, storage_options=self._options.get("storage_options")),
            rename=self._options.get("rename"),
            options=LoadOptions(
                verify=self._options.get("verify", True), rules=self._options.get("rules"), deadline_s=self._deadline_s
            ),
        )


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    """Facts that all ranks must agree on. Other systems' folders have no attempt name, so compare their tensors too."""
    table = xxhash.xxh3_128()
    for name, stored in checkpoint.items():
        table.update(f"{name} {stored.meta}\n".encode())
    return {"path": checkpoint.url, "checkpoint": checkpoint.manifest.attempt, "tensors": table.hexdigest()}


def _summary(delivered: DeliveryReport) -> str:
    share = 100 * delivered.direct / max(delivered.requested, 1)
    text = f"{delivered.requested:,} bytes into place, {share:.1f} % of them straight; {delivered.read:,} bytes read"
    text += f", {delivered.received:,} from other ranks" if delivered.received else ""
    return text + (f"; values of {', '.join(delivered.seen)} were computed with" if delivered.seen else "")
