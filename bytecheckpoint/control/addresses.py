"""Where this process listens, and the addresses at which others reach it.

Two environment variables restrict it: ``BYTECHECKPOINT_ADDRESS``, an address, host name or network interface, and
``BYTECHECKPOINT_PORTS``, a range such as ``41000-41100``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from ..errors import ControlError, UsageError

ADDRESS_VARIABLE = "BYTECHECKPOINT_ADDRESS"
PORTS_VARIABLE = "BYTECHECKPOINT_PORTS"

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("::", "0.0.0.0")
"""Addresses that are only for listening."""

_BACKLOG = 4096
_OTHER_HOSTS = ("192.0.2.1", "2001:db8::1")  # addresses for documentation; only the route to them is asked for
_NOT_FOR_OTHERS = ("127.", "::1", "fe80:", "localhost")
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


def listen(address: str = "") -> socket.socket:
    """Return a listening socket: at ``address``, or where the environment says, or else on all addresses of this host.

    A configured address that is not one of this host's, such as that of a gateway, is only for the other side.
    Raises ``UsageError`` for an invalid variable, and ``ControlError`` when no port of the range is free.
    """
    where, ports = (address, [0]) if address else (_configured(), _ports())
    for port in ports:
        try:
            return _bound(where, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ControlError(f"cannot listen at {where or 'any address'}, port {port}: {error}") from error
    raise ControlError(f"no port of {PORTS_VARIABLE}={os.environ.get(PORTS_VARIABLE)} is free; choose a larger range")


def own_addresses(facing: Iterable[str] = ()) -> list[str]:
    """Return the addresses at which other hosts may reach this one, the likeliest first.

    Those from which packets to the hosts ``facing`` this one leave come first. This host's name is looked up only if no
    interface has an address, because a name server may be slow. Without a network, only ``LOOPBACK`` is left. Raises
    ``UsageError`` for an invalid variable.
    """
    configured = _configured()
    if configured and configured not in EVERYWHERE:
        return [configured]
    found = []
    for host in (*facing, *_OTHER_HOSTS):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends no packet; only selects the outgoing interface
            found.append(probe.getsockname()[0])
    found += filter(None, (_address_of_interface(name) for _, name in socket.if_nameindex()))

    def for_others(addresses: Iterable[str]) -> list[str]:
        others = [one for one in dict.fromkeys(addresses) if not one.startswith(_NOT_FOR_OTHERS)]
        return [one for one in others if not configured or ":" not in one]

    return for_others(found) or for_others(_addresses_by_name()) or [LOOPBACK]


@functools.cache  # a name server may be slow
def _addresses_by_name() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return [*found, socket.getfqdn()]


def _bound(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        # IPv6 may be compiled in and yet switched off on this host.
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _configured() -> str:
    """Return the configured address; empty for all of them."""
    name = os.environ.get(ADDRESS_VARIABLE, "")
    if name in ("", "::"):
        return ""
    if name in (interface for _, interface in socket.if_nameindex()):
        if address := _address_of_interface(name):
            return address
        raise UsageError(f"{ADDRESS_VARIABLE}={name}: this interface has no address")
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"{ADDRESS_VARIABLE}={name} is no address, host name or interface of this host") from error


def _address_of_interface(name: str) -> str:
    """Return the IPv4 address of an interface, or else an IPv6 one; empty if it has none."""
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
    return ""


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
    random.shuffle(ports)  # processes of one host start at the same moment
    return ports
