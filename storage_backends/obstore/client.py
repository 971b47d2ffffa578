"""The connection to one container, shared by all backends of this process that use it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from typing import Any, TypeVar

import obstore.store
from fsspec.asyn import get_loop
from fsspec.utils import tokenize

from ...errors import StorageError
from ..window import Window
from .errors import map_error
from .places import Place

__all__ = ["Client", "client_for", "is_inherited"]

_T = TypeVar("_T")

_CONNECT_S = 10
_LEAST_TRY_S = 30.0
_TRIES = 5  # of a request that takes longest, within the deadline
_TRIES_OF_UNKNOWN_ENDPOINT = 3  # a wrong address fails in a second, not after the whole deadline
_MAX_PAUSE_S = 5
_MAX_CLIENTS = 8  # jobs that rotate tokens would otherwise keep one client for each
_VARIABLES = ("AZURE_", "GOOGLE_")


class Client:
    """Sends requests through obstore, which repeats them. Thread-safe; unusable in a forked child.

    Attributes:
        window: Slots and memory for the parts of all writers, which all clients of a process share.
        version_field: Which field of an object's metadata is its version.
    """

    def __init__(self, place: Place, deadline_s: float, window: Window) -> None:
        self.window = window
        self.version_field = "version" if place.store == "GCSStore" else "e_tag"
        self._place, self._deadline_s = place, deadline_s
        self._has_answered = False
        self._first = self._open(_TRIES_OF_UNKNOWN_ENDPOINT - 1)
        self._store: Any = None

    def _open(self, retries: int) -> Any:
        try_s = min(self._deadline_s, max(_LEAST_TRY_S, self._deadline_s / _TRIES))
        options = {"connect_timeout": timedelta(seconds=_CONNECT_S), "timeout": timedelta(seconds=try_s)}
        return getattr(obstore.store, self._place.store)(
            self._place.container,
            config=dict(self._place.config),
            client_options=options | dict(self._place.client_options),
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=self._deadline_s),
                "backoff": {"max_backoff": timedelta(seconds=_MAX_PAUSE_S)},
            },
        )

    @property
    def store(self) -> Any:
        """The store of obstore."""
        if not self._has_answered:
            return self._first
        if self._store is None:
            self._store = self._open(2**31)
        return self._store

    def start(self, send: Callable[[], Coroutine[Any, Any, _T]], deadline_s: float) -> Future[_T]:
        """Start a coroutine on the event loop. It raises what obstore does, and ``TimeoutError`` after the deadline."""

        async def bounded() -> _T:
            try:
                result = await asyncio.wait_for(send(), deadline_s)
            except TimeoutError:
                raise TimeoutError(f"the store did not answer within {deadline_s:g} s") from None
            self._has_answered = True
            return result

        return asyncio.run_coroutine_threadsafe(bounded(), get_loop())

    def run(
        self,
        action: str,
        send: Callable[[], Coroutine[Any, Any, _T]],
        deadline_s: float,
        *,
        reading: bool = False,
        putting: bool = False,
    ) -> _T:
        """Return the result of a coroutine. Raises ``StorageError``."""
        return self.wait(action, self.start(send, deadline_s), reading=reading, putting=putting)

    def wait(self, action: str, future: Future[_T], *, reading: bool = False, putting: bool = False) -> _T:
        """Return the result of what ``start`` has started. Raises ``StorageError``."""
        try:
            return future.result()
        except CancelledError:
            raise StorageError(f"{action}: it was aborted") from None
        except StorageError:
            raise
        except Exception as error:
            mapped = map_error(error, action, reading=reading, putting=putting)
            self._has_answered |= not mapped.is_late
            raise mapped from error
        except BaseException:
            future.cancel()
            raise


class _Clients:
    """The clients of this process by container, credentials and deadline."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._window = Window()
        self._pid = 0
        self._clients: OrderedDict[str, Client] = OrderedDict()

    @property
    def is_inherited(self) -> bool:
        return self._pid not in (0, os.getpid())

    def after_fork(self) -> None:
        """Drop a lock that a thread of the parent may have held."""
        self.lock = threading.Lock()

    def find(self, place: Place, deadline_s: float) -> Client:
        environment = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
        token = tokenize(place.store, place.container, place.config, place.client_options, deadline_s, environment)
        with self.lock:
            if self.is_inherited:
                raise StorageError(
                    "obstore cannot be used in a process that was forked from one that has used it; open the store "
                    "again, which then uses fsspec, or start the process with 'spawn'"
                )
            self._pid = os.getpid()
            found = self._clients.pop(token, None) or Client(place, deadline_s, self._window)
            self._clients[token] = found
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            return found


_clients = _Clients()
os.register_at_fork(after_in_child=_clients.after_fork)


def is_inherited() -> bool:
    """Whether this process was forked from one that has used obstore. Its threads are missing here, so calls hang."""
    return _clients.is_inherited


def client_for(place: Place, deadline_s: float, action: str) -> Client:
    """Return the client for a container.

    Raises:
        StorageError: An option is not valid, or the process was forked (see ``is_inherited``).
    """
    try:
        return _clients.find(place, deadline_s)
    except Exception as error:
        raise map_error(error, action) from error
