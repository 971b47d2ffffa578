"""The engine with vLLM's own weight transfer: answers belong to the request that they answer."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push.engines.vllm import HttpEngine, NativeEngine, post_answer
from bytecheckpoint.testing import time_limit


class _Engine(HttpEngine):
    """Its first request fails, and its worker answers both during the second."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.requests: list[dict[str, Any]] = []
        self.late: Exception | None = None

    def transfer_step(self, step: str, document: Any, timeout_s: float) -> None:
        if step != "update_weights":
            return
        info = document["update_info"]
        self.requests.append(info)
        if len(self.requests) == 1:
            raise EngineError("the engine did not respond")
        for request, answer in zip(self.requests, ("late", "present")):
            try:
                post_answer(request["hosts"], request["port"], request["key"], 0, 1, answer)
            except EngineError as error:
                self.late = error


def test_a_late_answer_is_not_taken_for_the_present_one() -> None:
    engine = _Engine()
    native = NativeEngine(engine)
    with pytest.raises(EngineError, match="did not respond"):
        native.call("first", time_limit(10))
    assert native.call("second", time_limit(10)) == ["present"]
    assert engine.late is not None
    native.close()
