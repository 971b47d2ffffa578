"""Servers that do not answer, or not with HTTP: an error of the engine says what has probably happened."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator

import pytest
from toy_engine import toy_engine

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import HttpEngine
from bytecheckpoint.testing import time_limit


class _Server(socketserver.StreamRequestHandler):
    """Fails to pause, and is unreadable otherwise."""

    def handle(self) -> None:
        path = self.rfile.readline().split()[1]
        while self.rfile.readline().strip():
            pass
        is_pause = path.startswith(b"/pause")
        self.wfile.write(b"HTTP/1.1 500 Failed\r\nContent-Length: 0\r\n\r\n" if is_pause else b"unreadable\r\n\r\n")


@pytest.fixture
def url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_engine(url: str) -> None:
    with pytest.raises(EngineError, match="/resume cannot be reached"):
        HttpEngine(url).resume(None, time_limit(10), changed=False)


def test_an_engine_whose_health_is_asked_after_a_failure(url: str) -> None:
    with pytest.raises(EngineError, match="has ended"):
        HttpEngine(url).pause(time_limit(10))


def test_an_engine_that_has_answered_before() -> None:
    with toy_engine(1) as started:
        engine = HttpEngine(started.url)
        engine.pause(time_limit(10))
    killed = rf"^{started.url} has ended: its server or one of its workers was killed or failed, and its log has the"
    with pytest.raises(EngineError, match=killed):
        engine.resume(None, time_limit(10), changed=False)
