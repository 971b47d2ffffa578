"""An engine behind https, whose certificate only the caller's context trusts, and which requires a token."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from certificates import server_context

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import HttpEngine
from bytecheckpoint.inference.push.engines.vllm import engine_at
from bytecheckpoint.inference.push.leases import unreachable
from bytecheckpoint.testing import time_limit


class _Front(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(certificate: Path) -> Iterator[str]:
    """The address of a server that requires a token."""
    context = server_context(certificate)
    server = HTTPServer(("127.0.0.1", 0), _Front)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_certificate_of_the_callers_context(server: str, certificate: Path) -> None:
    with pytest.raises(EngineError, match="CERTIFICATE_VERIFY_FAILED"):
        HttpEngine(server, token="right").pause(time_limit(10))
    trusting = ssl.create_default_context(cafile=str(certificate))
    HttpEngine(server, token="right", ssl_context=trusting).pause(time_limit(10))


def _unreachable(engine: HttpEngine) -> str:
    return unreachable(json.dumps(engine.address))


def test_a_worker_that_must_resume_its_engine(server: str, certificate: Path) -> None:
    """It gets the certificates, and finds out by a request whether it will be able to."""
    trusting = ssl.create_default_context(cafile=str(certificate))
    trusting.check_hostname = False
    engine = HttpEngine(server, token="right", ssl_context=trusting)
    assert _unreachable(engine) == ""
    engine_at(json.loads(json.dumps(engine.address))).resume(None, time_limit(10), changed=False)
    assert "CERTIFICATE_VERIFY_FAILED" in _unreachable(HttpEngine(server, token="right"))
    assert "401" in _unreachable(HttpEngine(server, token="wrong", ssl_context=trusting))
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    assert _unreachable(HttpEngine(server, token="right", ssl_context=unverified)) == ""
