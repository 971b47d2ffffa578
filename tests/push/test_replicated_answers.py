"""An engine with data-parallel replicas: answers belong to the request that they answer."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from bytecheckpoint.control.connections import Endpoint
from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push.engines.rpc import post_answer
from bytecheckpoint.inference.push.engines.vllm import HttpEngine
from bytecheckpoint.testing import time_limit


class _Engine(HttpEngine):
    """Its first request fails, and its worker answers both during the second."""

    _is_replicated = True

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.requests: list[str] = []
        self.late: Exception | None = None
        self.idle: list[socket.socket] = []

    def _rpc(self, arguments: Any, timeout_s: float) -> list[Any]:
        _, info = arguments
        self.requests.append(info)
        if len(self.requests) == 1:
            raise EngineError("the engine did not respond")
        for _ in range(3):  # of strangers, who say nothing
            self.idle.append(socket.create_connection(("127.0.0.1", Endpoint.of_text(info).port)))
        for request, answer in zip(self.requests, ("late", "present")):
            try:
                post_answer(request, 0, 1, answer)
            except EngineError as error:
                self.late = error
        return []


def test_neither_late_answers_nor_idle_connections_disturb_the_present_one() -> None:
    engine = _Engine()
    with pytest.raises(EngineError, match="did not respond"):
        engine.call("first", time_limit(10))
    assert engine.call("second", time_limit(10)) == ["present"]
    assert engine.late is not None
    engine.close()
    for connection in engine.idle:
        connection.close()
