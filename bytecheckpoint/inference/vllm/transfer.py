"""Receive weight pushes through vLLM's own weight transfer. Needs vLLM.

Start vLLM with ``--weight-transfer-config '{"backend": "bcp"}'``. A request comes with ``init_weight_transfer_engine``,
and the receiver handles it as in the worker extension: weights change only when the sender requests it and every byte
is verified. A request is not a session of ``start_weight_update``, ``update_weights`` and ``finish_weight_update``: a
killed sender would leave it open. vLLM then refuses the next one by an exception, after which its executor takes the
responses of other workers for those of later requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .adapter_slots import empty_kept_slots, keep_adapters
from .private import check_part
from .worker import answer, post, receiver

check_part("transfer")

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

_log = logging.getLogger(__name__)


@dataclass
class BcpInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """A request, the addresses to which to send the response, and the key that authenticates it. Empty from code that
    is written for any backend."""

    request: str = ""
    hosts: Sequence[str] = ()
    port: int = 0
    key: str = ""


@dataclass
class BcpUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty: weights come by ``init_transfer_engine``."""


class BcpTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The transfer engine of one worker. Its methods never raise, see above."""

    init_info_cls = BcpInitInfo
    update_info_cls = BcpUpdateInfo
    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> BcpInitInfo:
        try:
            return BcpInitInfo(**init_dict)
        except TypeError as error:
            _log.error("push: this is not a request of a push: %s", error)
            return BcpInitInfo()

    def init_transfer_engine(self, init_info: BcpInitInfo) -> None:
        """Answer the sender. An unreachable sender, and a wrong address, are only logged."""
        if not init_info.request:
            return
        response = answer(self.vllm_config, self.model, init_info.request)
        try:
            empty_kept_slots(self.model)
            post(self.vllm_config, init_info.hosts, init_info.port, init_info.key, response)
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("push: %s", error)

    def start_weight_update(self) -> None:
        """Does nothing. A trainer's client needs a session to set vLLM's version of the weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        _log.error("push: weights for the backend bcp come by a push, with bytecheckpoint's NativeEngine")

    def receive_weights(self, update_info: BcpUpdateInfo) -> None:
        """Does nothing, see ``update_weights``."""

    def finish_weight_update(self) -> None:
        """Keep the LoRA adapters, which vLLM removes next."""
        keep_adapters(self.model)

    def shutdown(self) -> None:
        try:
            receiver(self.vllm_config, self.model).close()
        except Exception as error:  # noqa: BLE001 - the rest of the worker's shutdown must follow
            _log.warning("push: the memory of pushes was not released: %s", error)
