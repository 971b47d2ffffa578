"""What this library uses of vLLM in addition to its documented interfaces, which any release may change.

This module itself imports nothing of vLLM.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import StateError

TESTED = "0.30 to 0.32"
"""The releases with which the tests run: everything with the newest, load format and pushes with each."""

_log = logging.getLogger(__name__)


@contextmanager
def imports_of(part: str) -> Iterator[None]:
    """Import inside of this what one part needs. Raises ``StateError`` when this vLLM lacks a name, and an import's
    error without vLLM."""
    try:
        yield
    except ImportError as error:
        if error.name == "vllm" and isinstance(error, ModuleNotFoundError):
            raise
        version = getattr(sys.modules.get("vllm"), "__version__", "of this environment")
        raise StateError(
            f"vLLM {version} lacks what {part!r} of this library needs: {error}; it was tested with {TESTED}. Other "
            "parts are not affected"
        ) from error


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
