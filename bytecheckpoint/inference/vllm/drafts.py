"""The draft model of a vLLM worker. Needs vLLM, and its private names of the part "drafts" (``private.py``)."""

from __future__ import annotations

from typing import Any

from vllm.v1.spec_decode.draft_model import DraftModelProposer

from ...errors import StateError
from ..push.receiver import Receiver
from .model import receiver_of

__all__ = ["receiver_of_draft"]


def receiver_of_draft(vllm_config: Any, runner: Any) -> Receiver:
    """The receiver of the draft model. Raises ``StateError`` for a worker without one that accepts pushes."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise StateError(
            "an engine with pipeline stages is not supported, because only its last stage has the draft model"
        )
    if getattr(runner, "speculator", None) is not None:
        raise StateError(
            "this engine uses vLLM's model runner V2, whose draft models share layers with the serving model or cannot "
            "be reloaded by themselves; start it with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    drafter = getattr(runner, "drafter", None)
    # Other draft models share layers with the serving model, which a reload would change.
    if not isinstance(drafter, DraftModelProposer):
        raise StateError(
            "this engine has no separate draft model that accepts pushes: start it with "
            "--speculative-config of the method draft_model, and with the worker extension"
        )
    return receiver_of(drafter._create_draft_vllm_config(), runner.get_draft_model())
