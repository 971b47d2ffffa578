"""Receive weight pushes through vLLM's own weight transfer. Needs vLLM.

Start vLLM with ``--weight-transfer-config '{"backend": "bcp"}'``. Each ``update_weights`` has one request, which the
receiver handles as in the worker extension: weights change only when the sender requests it and every byte is verified.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from .adapter_slots import keep_adapters
from .private import check_part
from .worker import answer, post, receiver

check_part("transfer")

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

__all__ = ["BcpInitInfo", "BcpTransferEngine", "BcpUpdateInfo"]

_log = logging.getLogger(__name__)


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
        """Keep the LoRA adapters, which vLLM removes next; ``update_weights`` returns when everything is done."""
        keep_adapters(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method synchronizes an accelerator, which may not exist.
        try:
            info = self.parse_update_info(update_info)
        except Exception as error:  # noqa: BLE001 - see `receive_weights`
            _log.error("push: this is not a request of a push: %s", error)
            return
        self.receive_weights(info)

    def receive_weights(self, update_info: BcpUpdateInfo) -> None:
        """Answer the sender. An unreachable sender, and a wrong address, are only logged.

        After an exception, vLLM would leave the responses of other workers unread and confuse them with those of its
        next request.
        """
        response = answer(self.vllm_config, self.model, update_info.request)
        try:
            post(self.vllm_config, update_info.hosts, update_info.port, update_info.key, response)
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("push: %s", error)

    def shutdown(self) -> None:
        try:
            receiver(self.vllm_config, self.model).close()
        except Exception as error:  # noqa: BLE001 - the rest of the worker's shutdown must follow
            _log.warning("push: the memory of pushes was not released: %s", error)
