"""Where this process listens for the other side of a push, and at which addresses the other side finds it.

Two environment variables restrict it: ``BYTECHECKPOINT_PUSH_ADDRESS``, an address, host name or network interface, and
``BYTECHECKPOINT_PUSH_PORTS``, a range such as ``41000-41100``.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import struct
from pathlib import Path

from ....errors import EngineError, UsageError

__all__ = ["ADDRESS_VARIABLE", "PORTS_VARIABLE", "listen", "local_addresses", "own_address"]

ADDRESS_VARIABLE = "BYTECHECKPOINT_PUSH_ADDRESS"
PORTS_VARIABLE = "BYTECHECKPOINT_PUSH_PORTS"

# Addresses for documentation; only the route to them is asked for.
_OTHER_HOSTS = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_ALL, _ALL_IPV4 = ("::",), ("0.0.0.0",)  # only for listening
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


def listen(backlog: int) -> socket.socket:
    """Return a listening socket: on all addresses, of IPv6 too, unless the environment restricts it.

    Raises ``UsageError`` for an invalid variable, and ``EngineError`` when no port of the range is free.
    """
    addresses = _configured()
    for port in _ports():
        try:
            if addresses:
                family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
                return socket.create_server((addresses[0], port), family=family, backlog=backlog)
            return _listen_everywhere(port, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EngineError(f"cannot listen at {addresses or 'any address'}, port {port}: {error}") from error
    raise EngineError(f"no port of {PORTS_VARIABLE}={os.environ.get(PORTS_VARIABLE)} is free; choose a larger range")


def local_addresses() -> tuple[str, ...]:
    """Return the addresses at which other hosts may reach this one, the likeliest first."""
    configured = _configured()
    if configured and configured != _ALL_IPV4:
        return configured
    hosts = [os.environ.get("VLLM_HOST_IP", "")]
    for family, other in _OTHER_HOSTS:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends no packet; only selects the outgoing interface
            hosts.append(probe.getsockname()[0])
    hosts += [socket.gethostname(), "127.0.0.1"]
    if configured == _ALL_IPV4:
        hosts = [host for host in hosts if ":" not in host]
    return tuple(dict.fromkeys(host for host in hosts if host))


def own_address(listener: socket.socket) -> tuple[str, int]:
    """Return the address and port at which this process reaches its own listening socket."""
    host, port = listener.getsockname()[:2]
    return "127.0.0.1" if host in (*_ALL, *_ALL_IPV4) else host, port


def _listen_everywhere(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        # IPv6 may be compiled in and yet switched off on this host.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


def _configured() -> tuple[str, ...]:
    name = os.environ.get(ADDRESS_VARIABLE, "")
    if not name:
        return ()
    if name in (interface for _, interface in socket.if_nameindex()):
        return (_address_of_interface(name),)
    if name in _ALL:
        return ()
    try:
        return (str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]),)
    except OSError as error:
        raise UsageError(f"{ADDRESS_VARIABLE}={name} is no address, host name or interface of this host") from error


def _address_of_interface(name: str) -> str:
    with contextlib.suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        found = fcntl.ioctl(probe, _GET_INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, interface = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if interface == name and not address.is_link_local:
                return str(address)
    raise UsageError(f"{ADDRESS_VARIABLE}={name}: this interface has no address")


def _ports() -> list[int]:
    text = os.environ.get(PORTS_VARIABLE, "")
    if not text:
        return [0]  # the kernel chooses a free one
    first, _, last = text.partition("-")
    try:
        ports = list(range(int(first), int(last or first) + 1))
    except ValueError:
        ports = []
    if not ports or not 0 < ports[0] <= ports[-1] < 1 << 16:
        raise UsageError(f"{PORTS_VARIABLE}={text} is no range of ports such as 41000-41100")
    random.shuffle(ports)  # workers of one host start at the same moment
    return ports
