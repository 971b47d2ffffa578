"""An engine behind https, whose certificate only the caller's context trusts."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bytecheckpoint.errors import EngineError
from bytecheckpoint.inference.push import HttpEngine
from bytecheckpoint.testing import time_limit
from tests.support.certificates import server_context


class _Front(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_certificate_of_the_callers_context(certificate: Path) -> None:
    context = server_context(certificate)
    server = HTTPServer(("127.0.0.1", 0), _Front)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"https://localhost:{server.server_address[1]}"
        with pytest.raises(EngineError, match="CERTIFICATE_VERIFY_FAILED"):
            HttpEngine(url).pause(time_limit(10))
        trusting = ssl.create_default_context(cafile=str(certificate))
        HttpEngine(url, ssl_context=trusting).pause(time_limit(10))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
