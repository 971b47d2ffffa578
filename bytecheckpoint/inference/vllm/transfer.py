"""The weight push as a backend of vLLM's own weight transfer: ``--weight-transfer-config '{"backend": "bcp"}'``. Needs
vLLM.

A request comes with ``update_weights``; what it makes the worker do, and when, is the receiver's matter, the same as by
the worker extension. So weights are put in when the sender says so and every byte has been proved, and not in between.
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

from ..errors import EngineError
from .push.native import post_answer
from .vllm_worker import answer, receiver_of

__all__ = ["BcpInitInfo", "BcpTransferEngine", "BcpUpdateInfo", "register"]

_BACKEND = "bcp"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to vLLM. May be called again."""
    if _BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_BACKEND, __name__, BcpTransferEngine.__name__)


@dataclass
class BcpInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: each request says who asks, as several may."""


@dataclass
class BcpUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A request, where the sender takes answers, and the key that seals them."""

    request: str
    hosts: list[str]
    port: int
    key: str


class BcpTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's."""

    init_info_cls = BcpInitInfo
    update_info_cls = BcpUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: BcpInitInfo) -> None:
        """Senders need not ask for it."""

    def start_weight_update(self) -> None:
        """Nothing changes before a version has been proved."""

    def finish_weight_update(self) -> None:
        """Everything has been done when ``update_weights`` returned."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own ends by waiting for an accelerator, which there need not be.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BcpUpdateInfo) -> None:
        """Answer the sender. Where it has gone, there is nobody to tell: an exception here would leave the answers of
        other workers unread, and vLLM would take them for those of its next request."""
        said = answer(self.vllm_config, self.model, update_info.request)
        asker, parallel = update_info, self.parallel_config
        try:
            post_answer(asker.hosts, asker.port, asker.key, parallel.rank, parallel.world_size, said)
        except EngineError as error:
            _log.warning("push: %s", error)

    def shutdown(self) -> None:
        receiver_of(self.vllm_config, self.model).close()
