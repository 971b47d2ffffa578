"""vLLM servers, over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from ....errors import DeadlineError, EngineError, UsageError
from .base import Engine, TargetEngine
from .rpc import METHOD, CollectiveRpc, PauseMode

_HEALTH_S = 5.0
_NOT_AUTHENTICATED = (401, 403, 407)
_KILLED = (
    "its server or one of its workers was killed or failed, and its log has the cause; restart it, then push again"
)

TOKEN_VARIABLE = "BYTECHECKPOINT_PUSH_TOKEN"
"""Of the environment: the ``token`` of engines that are named by their address alone."""


class HttpEngine(CollectiveRpc):
    """A vLLM server.

    Start it with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
    bytecheckpoint.inference.vllm.worker.WorkerExtension``. Proxy settings of the environment are ignored.

    Args:
        url: The address of the server.
        pause: What happens to running requests when weights change. "wait" finishes them with the old weights, "abort"
            aborts them, and "keep" continues them with the new weights, for which vLLM computes their KV cache again.
            An engine that its owner has paused stays paused, and keeps its requests.
        headers: Sent with every request, for a proxy that authenticates. The engine's first worker gets them, to end a
            pause whose sender was killed.
        token: Sent as ``Authorization: Bearer``, for ``--api-key`` of a server or proxy.
        ssl_context: Verifies a server with https, by default with the certificates of this host, and may have a
            client's certificate. The engine's first worker gets its certificates of authorities, but not the client's.

    Raises:
        UsageError: ``url`` is not an address of HTTP.
    """

    _extension = "bytecheckpoint.inference.vllm.worker.WorkerExtension"

    def __init__(
        self,
        url: str,
        *,
        pause: PauseMode = "wait",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the address of an engine begins with http:// or https://, and this one is {url!r}")
        self.name = url.rstrip("/")
        self.pause_mode: PauseMode | None = pause
        self._has_answered = False
        self._headers = dict(headers or {})
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = tls_of(ssl_context)
        https = urllib.request.HTTPSHandler(context=ssl_context)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)

    def _rpc(self, arguments: Sequence[Any], timeout_s: float) -> list[Any]:
        # vLLM gets no timeout: after one, it would take late answers for those of its next request.
        answer = self._request("/collective_rpc", {"method": METHOD, "args": list(arguments)}, timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise EngineError(f"{self.name} returned no results for {METHOD}: {answer!s:.200}")
        return results

    def _run(self, method: str, timeout_s: float, *arguments: Any, **options: Any) -> Any:
        if method == "update_weight_version":
            return self._request(f"/{method}", {"new_version": arguments[0]}, timeout_s)
        if method == "is_paused":
            answer = self._request(f"/{method}", None, timeout_s, "GET")
            return isinstance(answer, dict) and answer.get(method) is True
        query = f"?{urlencode(options).lower()}" if options else ""  # with `true` for True
        answer = self._request(f"/{method.removesuffix('_generation')}{query}", None, timeout_s)
        return answer.get("success") if isinstance(answer, dict) else None

    @property
    def identity(self) -> str:
        """The address; one of this host alone is another engine on each host."""
        host = urlsplit(self.name).hostname or ""
        is_local = host == "localhost" or host == "::1" or host.startswith("127.")
        return f"{self.name} (on {socket.gethostname()})" if is_local else self.name

    @property
    def address(self) -> dict[str, Any] | None:
        plain = {"url": self.name, "pause": self.pause_mode, "headers": self._headers, "tls": self._tls}
        return {**plain, "stays_paused": self.stays_paused}

    def _request(self, path: str, document: Mapping[str, Any] | None, timeout_s: float, method: str = "POST") -> Any:
        data = None if method == "GET" else b"" if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.name + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                body = response.read()
            self._has_answered = True
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(path, error.code, error.read()[:2000].decode(errors="replace")) from None
        except (OSError, http.client.HTTPException) as error:
            if _is_timeout(error):
                raise DeadlineError(
                    f"{self.name}{path} did not answer within {timeout_s:.3g} s; is one of its workers stopped?"
                ) from None
            cause = getattr(error, "reason", error)
            if isinstance(cause, (ConnectionResetError, http.client.RemoteDisconnected)):
                raise EngineError(f"{self.name} ended while it handled {path}: {_KILLED}") from error
            if self._has_answered:
                raise EngineError(f"{self.name} has ended: {_KILLED} ({path} cannot be reached: {error})") from error
            raise EngineError(f"{self.name}{path} cannot be reached: {error}; is the engine up?") from error
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{self.name}{path} did not answer with JSON: {body[:200]!r}") from error

    def unreachable(self, timeout_s: float) -> str:
        """Find out whether requests of this process reach the server.

        Args:
            timeout_s: The limit of the wait, in seconds.

        Returns:
            Why they do not; empty if they do.
        """
        error = self._health(timeout_s)
        if isinstance(error, urllib.error.HTTPError):
            return f"{error.code} {error.reason}" if error.code in _NOT_AUTHENTICATED else ""
        return "" if error is None else str(getattr(error, "reason", error))

    def _is_alive(self) -> bool:
        error = self._health(_HEALTH_S)
        if isinstance(error, urllib.error.HTTPError):
            return error.code in (404, 405)  # another server
        return error is None or _is_timeout(error)

    def _health(self, timeout_s: float) -> Exception | None:
        """Return what a question after the server's health raises."""
        request = urllib.request.Request(f"{self.name}/health", headers=self._headers)
        try:
            self._opener.open(request, timeout=timeout_s).close()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            return error
        return None

    def _refused(self, path: str, code: int, text: str) -> EngineError:
        hint = ""
        if code in (404, 405):
            return EngineError(f"{self.name} has no {path}; start vLLM with VLLM_SERVER_DEV_MODE=1: {text}")
        if "EngineCore" in text or "EngineDead" in text or not self._is_alive():
            return EngineError(f"{self.name} has ended: {_KILLED} ({path} answered {code}: {text})")
        if path == "/collective_rpc" and self._has_answered:
            hint = "; one of its workers was killed or failed, and its log has the cause"
        elif path == "/collective_rpc":
            hint = (
                "; its log has the reason. One of its workers may have been killed, or it was started without "
                f"--worker-extension-cls {self._extension}"
            )
        return EngineError(f"{self.name}{path} answered {code}: {text}{hint}")


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)


def engine_at(address: Mapping[str, Any]) -> Engine:
    """Return the engine with this address (``Engine.address``), by which a worker reaches its own engine."""
    tls = tls_context(address["tls"])
    engine = HttpEngine(address["url"], pause=address["pause"], headers=address["headers"], ssl_context=tls)
    engine.stays_paused = address["stays_paused"]
    target = address.get("target")
    return engine if target is None else TargetEngine(engine, *target)


def tls_of(context: ssl.SSLContext | None) -> dict[str, Any] | None:
    """Return what another process needs to verify the same servers, as plain data. A client's certificate is not part
    of it."""
    if context is None:
        return None
    certificates = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))
    checks = {"verify": context.verify_mode != ssl.CERT_NONE, "check_hostname": context.check_hostname}
    return {"certificates": certificates, **checks}


def tls_context(tls: Mapping[str, Any] | None) -> ssl.SSLContext | None:
    """Return a context made of a result of ``tls_of``."""
    if tls is None:
        return None
    context = ssl.create_default_context(cadata=tls["certificates"] or None)
    context.check_hostname = tls["check_hostname"]
    context.verify_mode = ssl.CERT_REQUIRED if tls["verify"] else ssl.CERT_NONE
    return context
