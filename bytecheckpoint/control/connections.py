"""Authenticated connections: how processes of this library meet on the network, and move bytes.

Both ends prove that they have a key, which reached them in another way (the store of a process group, the RPC of an
engine) and never travels on the connection:

    listener -> connector   challenge (32 bytes)
    connector -> listener   magic (8) | length of the introduction (2) | introduction | nonce (32) | MAC (32)
    listener -> connector   MAC (32)

Both MACs are keyed BLAKE2b over the two random values and the introduction, each for its own end. A process that reuses
an address thus learns nothing, and a recorded handshake cannot be replayed or reflected. Before the key is proven, a
stranger makes this process read 4 KiB at most, for a limited time, on one thread for all of them. 64 strangers at most
hold a connection; more of them wait, and the oldest is disconnected. Nothing is encrypted.

Sockets are non-blocking. A thread that moves bytes says by a ``Wait`` how long it is willing to wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
import select
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ..errors import ThreadError
from ..runtime.threads import Threads, run_daemon
from .timings import ACCEPT_RETRY_S, CONNECT_S, CROWD_S, HANDSHAKE_S

Buffer: TypeAlias = bytes | bytearray | memoryview
"""One-dimensional and contiguous."""

Wait = Callable[[socket.socket, int], None]
"""Returns when a connection is ready for an event of ``select.poll``, or raises to end the wait."""

_MAGIC = b"bcpnet-1"
_HEAD = struct.Struct("!8sH")
_SECRET_BYTES = 32  # of keys, random values and MACs
_LONGEST_INTRODUCTION_BYTES = 4096
_MOST_STRANGERS = 64  # connections that have not authenticated yet; many processes have only 1,024 descriptors
_SEND_BYTES = 8 << 20

_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60, "TCP_KEEPCNT": 30}.items()  # seconds, seconds, probes
    if hasattr(socket, name)
}

_log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """Where a process listens: its addresses, likeliest first, its port, and the key."""

    addresses: Sequence[str]
    port: int
    key: bytes

    def text(self) -> str:
        """Return it as text, with the key, for ``of_text`` in another process."""
        return json.dumps([list(self.addresses), self.port, self.key.hex()])

    @classmethod
    def of_text(cls, text: str) -> Endpoint:
        addresses, port, key = json.loads(text)
        return cls(addresses, port, bytes.fromhex(key))


def new_key() -> bytes:
    """Return a random key."""
    return secrets.token_bytes(_SECRET_BYTES)


async def introduce(connection: socket.socket, key: bytes, introduction: bytes) -> None:
    """Authenticate to a listener, and check that it has the key.

    Raises ``ConnectionError`` if it does not have it, and ``ValueError`` for an introduction that is too long.
    """
    if len(introduction) > _LONGEST_INTRODUCTION_BYTES:
        raise ValueError(f"an introduction of {len(introduction)} bytes is too long")
    challenge, nonce = await _read(connection, _SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
    signed = challenge + nonce + introduction
    head = _HEAD.pack(_MAGIC, len(introduction))
    await _loop().sock_sendall(connection, head + introduction + nonce + _mac(key, b"connector", signed))
    if not hmac.compare_digest(await _read(connection, _SECRET_BYTES), _mac(key, b"listener", signed)):
        raise ConnectionError("the process at this address does not have the key")


async def welcome(connection: socket.socket, key: bytes) -> bytes:
    """Authenticate a process that has connected, and return its introduction. Reads no byte after the handshake.

    Raises ``OSError`` or ``ValueError`` for anything but a process that has the key.
    """
    challenge = secrets.token_bytes(_SECRET_BYTES)
    await _loop().sock_sendall(connection, challenge)
    magic, length = _HEAD.unpack(await _read(connection, _HEAD.size))
    if magic != _MAGIC or length > _LONGEST_INTRODUCTION_BYTES:
        raise ValueError("it is not a connection of this library")
    introduction, nonce = await _read(connection, length), await _read(connection, _SECRET_BYTES)
    signed = challenge + nonce + introduction
    if not hmac.compare_digest(await _read(connection, _SECRET_BYTES), _mac(key, b"connector", signed)):
        raise ValueError("it does not have the key")
    await _loop().sock_sendall(connection, _mac(key, b"listener", signed))
    return introduction


async def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = await _loop().sock_recv(connection, count - len(data))
        if not received:
            raise ConnectionError("it closed the connection during the handshake")
        data += received
    return data


def _mac(key: bytes, end: bytes, signed: bytes) -> bytes:
    return hashlib.blake2b(signed, key=key, person=end, digest_size=_SECRET_BYTES).digest()


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def accept(listener: socket.socket, key: bytes, take: Callable[[bytes, socket.socket], None]) -> NoReturn:
    """Accept connections until cancelled, and close the listener then.

    Args:
        listener: A listening socket.
        key: What a connector must have.
        take: Called with the introduction and the connection of each authenticated connector. It must not block.
    """
    strangers: dict[asyncio.Task[None], tuple[socket.socket, float]] = {}  # and when each has connected

    async def admit(connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                introduction = await welcome(connection, key)
            take(introduction, connection)
        except (OSError, ValueError) as error:
            _log.debug("refused a connection: %s", error)
            connection.close()
        except Exception:  # noqa: BLE001 - the next connections must be accepted
            _log.exception("a connection could not be taken")
            connection.close()

    def forget(task: asyncio.Task[None]) -> None:
        connection, _begun = strangers.pop(task)
        if task.cancelled():
            connection.close()

    listener.setblocking(False)
    try:
        while True:
            try:
                connection, _address = await _loop().sock_accept(listener)
            except OSError:
                _log.debug("accepting a connection failed", exc_info=True)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            _configure(connection)
            task = _loop().create_task(admit(connection))
            strangers[task] = connection, _loop().time()
            task.add_done_callback(forget)
            await asyncio.sleep(0)  # accepting itself does not yield while others wait in the backlog
            if len(strangers) >= _MOST_STRANGERS:
                oldest, (_, begun) = next(iter(strangers.items()))
                wait_s = max(0.0, begun + CROWD_S - _loop().time())
                done, _ = await asyncio.wait(strangers, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    oldest.cancel()
                    await asyncio.wait([oldest])
    finally:
        listener.close()
        for task in strangers:
            task.cancel()
        # Not a group of tasks: its reference cycle would keep what `take` refers to.
        await asyncio.gather(*strangers, return_exceptions=True)


async def dial(endpoint: Endpoint, introduction: bytes = b"", limit_s: float | None = None) -> socket.socket:
    """Connect to the first address that answers; ``limit_s`` is the limit of the last one.

    Raises ``ConnectionError``, and ``ValueError`` for an introduction that is too long.
    """
    refused = []
    for number, address in enumerate(endpoint.addresses, 1):
        try:
            async with asyncio.timeout(CONNECT_S if number < len(endpoint.addresses) else limit_s):
                return await _dial_address(address, endpoint, introduction)
        except TimeoutError:
            refused.append(f"{address}: no answer in time; a firewall may discard the packets")
        except OSError as error:
            refused.append(f"{address}: {error}")
    raise ConnectionError(f"cannot connect to port {endpoint.port} of " + "; ".join(refused))


async def _dial_address(address: str, endpoint: Endpoint, introduction: bytes) -> socket.socket:
    connection = socket.socket(await _family(address, endpoint.port), socket.SOCK_STREAM)
    try:
        _configure(connection)
        await _loop().sock_connect(connection, (address, endpoint.port))
        await introduce(connection, endpoint.key, introduction)
    except BaseException:
        connection.close()
        raise
    return connection


async def _family(address: str, port: int) -> int:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        found = await _loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)
        return found[0][0]


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    # asyncio does this only for sockets with an explicit protocol number.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Between two saves, firewalls and load balancers would forget it. A link that is cut for minutes does not end it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(endpoint: Endpoint, introduction: bytes = b"", limit_s: float | None = None) -> socket.socket:
    """``dial`` for any thread, also for one that runs its own event loop."""
    dialed = run_daemon(lambda: asyncio.run(dial(endpoint, introduction, limit_s)), "bytecheckpoint-connect")
    try:
        return dialed.result()
    except BaseException:
        close_when_connected(dialed)
        raise


def close_when_connected(dialed: Future[socket.socket]) -> None:
    """Close a connection that no one waits for any more."""
    dialed.add_done_callback(_close)


def _close(dialed: Future[socket.socket]) -> None:
    if not dialed.cancelled() and dialed.exception() is None:
        dialed.result().close()


def at_most(limit_s: float | None) -> Wait:
    """Return a ``Wait`` that raises ``TimeoutError`` after ``limit_s`` without progress."""

    def wait(connection: socket.socket, event: int) -> None:
        poll = select.poll()
        poll.register(connection, event)
        if not poll.poll(None if limit_s is None else 1000 * limit_s):
            raise TimeoutError(f"the other end did not move for {limit_s:g} s")

    return wait


def send(connection: socket.socket, data: Buffer, wait: Wait) -> None:
    """Return when the operating system has accepted all bytes. Raises ``OSError``, and what ``wait`` raises."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        try:
            done += connection.send(view[done : done + _SEND_BYTES])
        except BlockingIOError:
            wait(connection, select.POLLOUT)


def receive_into(connection: socket.socket, out: Buffer, wait: Wait) -> None:
    """Fill ``out``. Raises ``OSError``, also when the other end closes the connection first, and what ``wait``
    raises."""
    view, done = memoryview(out).cast("B"), 0
    while done < len(view):
        try:
            count = connection.recv_into(view[done:])
        except BlockingIOError:
            wait(connection, select.POLLIN)
            continue
        if not count:
            raise ConnectionError(f"the connection ended {len(view) - done} bytes too early")
        done += count


def receive(connection: socket.socket, nbytes: int, wait: Wait) -> bytes:
    """Return exactly ``nbytes``; see ``receive_into``."""
    data = bytearray(nbytes)
    receive_into(connection, data, wait)
    return bytes(data)


class LoopThread:
    """An event loop on its own thread, from construction until ``close``. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._loop, self._stopped = asyncio.new_event_loop(), asyncio.Event()
        self._executor = Threads(1, name)
        if not self._executor.start():
            raise ThreadError(f"{name} needs a thread, and the interpreter, which ends, starts none any more")
        self._running = self._executor.submit(self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopped.wait())

    def call(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call a function on the thread; return False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the thread. Raises ``ConnectionError`` if the loop is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise ConnectionError("this communicator is closed") from error

    def close(self) -> None:
        """Cancel what still runs, and end the thread. May be called again."""
        self.call(self._stopped.set)
        self._executor.shutdown()
        self._running.result()
