"""LoRA adapters that vLLM has loaded stay loaded when weights change. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


def keep_adapters(model: Any) -> None:
    """Let vLLM's next removal of all LoRA adapters, because weights change, leave them in its cache.

    Their next requests put them into slots again. vLLM would read each one from its file, which may be gone. If they
    cannot be kept, vLLM removes them.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return

    def empty_slots() -> None:
        del manager.remove_all_adapters  # of this object; the class's method is back
        try:
            active = manager._active_adapters
            pinned = list(active.pinned_items)
            for number in list(active):
                manager.deactivate_adapter(number)
            for number in pinned:
                manager.pin_adapter(number)
        except Exception:  # noqa: BLE001 - vLLM calls this at the end of its own requests, see `worker.answer`
            _log.exception("push: LoRA adapters were not kept; vLLM reads them from their files again")
            manager.remove_all_adapters()

    manager.remove_all_adapters = empty_slots
