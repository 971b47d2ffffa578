"""Receive weight pushes through vLLM's own weight transfer. Needs vLLM.

Start vLLM with ``--weight-transfer-config '{"backend": "bcp"}'``. Each ``update_weights`` has one request, which the
receiver handles as in the worker extension: weights change only when the sender requests it and every byte is verified.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ...errors import EngineError
from ..push.engines.vllm import post_answer
from .worker import answer, receiver_of

__all__ = ["BcpInitInfo", "BcpTransferEngine", "BcpUpdateInfo", "register"]

_BACKEND = "bcp"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with vLLM. Repeated calls have no effect."""
    if _BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_BACKEND, __name__, BcpTransferEngine.__name__)


@dataclass
class BcpInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: each request identifies its sender, as there may be several."""


@dataclass
class BcpUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A request, the addresses to which to send the response, and the key that authenticates it."""

    request: str
    hosts: list[str]
    port: int
    key: str


class BcpTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The transfer engine of one worker."""

    init_info_cls = BcpInitInfo
    update_info_cls = BcpUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: BcpInitInfo) -> None:
        """Does nothing; senders need not call it."""

    def start_weight_update(self) -> None:
        """Does nothing; weights change only after a version is verified."""

    def finish_weight_update(self) -> None:
        """Does nothing; ``update_weights`` returns when everything is done."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method synchronizes an accelerator, which may not exist.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BcpUpdateInfo) -> None:
        """Answer the sender. An unreachable sender is only logged.

        After an exception, vLLM would leave the responses of other workers unread and confuse them with those of its
        next request.
        """
        response = answer(self.vllm_config, self.model, update_info.request)
        asker, parallel = update_info, self.parallel_config
        try:
            post_answer(asker.hosts, asker.port, asker.key, parallel.rank, parallel.world_size, response)
        except EngineError as error:
            _log.warning("push: %s", error)

    def shutdown(self) -> None:
        receiver_of(self.vllm_config, self.model).close()
