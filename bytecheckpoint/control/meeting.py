"""What a rank knows once all have met, and where hosts reach each other."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .lines import Lines
from .peers import PeerIdentity
from .tree import Tree

__all__ = ["ADDRESS_VARIABLE", "GROUP_VARIABLE", "LOOPBACK", "Meeting", "addresses_facing", "root_addresses"]

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE = "BYTECHECKPOINT_CONTROL_ADDRESS"
"""Environment variable of rank 0: its address, where the others do not find it by themselves."""

GROUP_VARIABLE = "BYTECHECKPOINT_CONTROL_GROUP_SIZE"
"""Environment variable, alike on every rank: how many ranks talk through one leader, where that is not told."""

_ELSEWHERE = "192.0.2.1"  # some address that is not ours


@dataclass
class Meeting:
    """Who, where, and lines to the stores. ``server`` is the store itself, on a rank that serves one.

    ``local``: all ranks reach each other over the loopback interface. ``neighbours``: the processes of this host.
    """

    here: PeerIdentity
    tree: Tree
    neighbours: list[PeerIdentity]
    lines: Lines
    local: bool
    server: Any = field(default=None, repr=False)


def root_addresses() -> list[str]:
    """Where other hosts may reach rank 0, when asked there; most likely first."""
    told = os.environ.get(ADDRESS_VARIABLE)
    return [told] if told else addresses_facing([os.environ.get("MASTER_ADDR", _ELSEWHERE)])


def addresses_facing(hosts: Sequence[str]) -> list[str]:
    """Where ``hosts``, and others like them, may reach this one; most likely first."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError):
            # Nothing is sent: this asks the routing table which of our addresses faces that host.
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    found.append(socket.getfqdn())
    local = ("127.", "::1", "fe80:")
    return [address for address in dict.fromkeys(found) if not address.startswith(local)] or [LOOPBACK]
