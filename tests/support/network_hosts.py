"""Several "hosts" on this machine: network namespaces with their own addresses, host names and boot ids.

Each host has one interface, ``eth0``, whose packets a thread of this process passes on: it can delay them, cut links in
one direction or both, forget connections as a firewall does, and let only one port through. Tests are skipped where
namespaces are not permitted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_INFO = 0x1001
_TCP = 6
_SETUP = """
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
hostname node{number}
ip link set lo up
echo ready
exec sleep 100000
"""
_ADDRESSES = """
ip addr add {address}/24 dev eth0
ip -6 addr add {address6}/64 dev eth0 nodad
ip link set eth0 up
ip tuntap add dev docker0 mode tun
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
"""


class Hosts:
    """Hosts 0 to ``count - 1``, whose names are ``node0`` and so on. Use it as a context manager."""

    def __init__(self, count: int, folder: Path) -> None:
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.addresses6 = [f"fd77::{number + 1}" for number in range(count)]
        self.delay_s = 0.0
        self._cut: set[tuple[int, int]] = set()
        self._flows: set[bytes] = set()
        self._forgotten: frozenset[bytes] = frozenset()
        self._only_port: int | None = None
        self._processes = [self._start(number, folder) for number in range(count)]
        self.pids = [process.pid for process in self._processes]
        self._interfaces = [self._connect(number) for number in range(count)]
        self._wake, self._stop = os.pipe()
        self._relay = threading.Thread(target=self._pass_on)
        self._relay.start()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._stop)
        self._relay.join()
        os.close(self._wake)
        for interface in self._interfaces:
            os.close(interface)
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def cut(self, source: int, target: int) -> None:
        """Lose every packet from one host to another."""
        self._cut.add((source, target))

    def isolate(self, host: int) -> None:
        """Lose every packet from and to a host."""
        for other in set(range(len(self.pids))) - {host}:
            self._cut |= {(host, other), (other, host)}

    def forget(self) -> None:
        """Lose every packet of the TCP connections that exist, as a firewall does that has forgotten them."""
        self._forgotten = frozenset(self._flows)

    def allow_only(self, port: int | None) -> None:
        """Lose every packet that neither goes to this port nor comes from it."""
        self._only_port = port

    def heal(self) -> None:
        """Lose nothing any more."""
        self._cut.clear()
        self._forgotten, self._only_port, self.delay_s = frozenset(), None, 0.0

    def _start(self, number: int, folder: Path) -> subprocess.Popen[bytes]:
        boot_id = folder / f"boot-{number}"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        script = _SETUP.format(boot_id=boot_id, number=number)
        process = subprocess.Popen(["unshare", "-n", "-u", "-m", "sh", "-e", "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.kill()
            process.wait()
            pytest.skip("namespaces are not permitted here")
        return process

    def _connect(self, number: int) -> int:
        """Give a host its interface, and return the end that this process has of it."""
        made: list[int] = []
        # A namespace of networks belongs to a thread.
        thread = threading.Thread(target=lambda: made.append(_interface(self.pids[number])))
        thread.start()
        thread.join()
        if not made:
            pytest.skip("network interfaces are not permitted here")
        script = _ADDRESSES.format(address=self.addresses[number], address6=self.addresses6[number])
        subprocess.run(["nsenter", "-t", str(self.pids[number]), "-n", "sh", "-e", "-c", script], check=True)
        return made[0]

    def _pass_on(self) -> None:
        places = {interface: number for number, interface in enumerate(self._interfaces)}
        waiting: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        poll = select.poll()
        for one in (*places, self._wake):
            poll.register(one, select.POLLIN)
        while True:
            wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 60.0
            ready = [number for number, _ in poll.poll(1000 * wait_s)]
            if self._wake in ready:
                return
            for interface in ready:
                packet = os.read(interface, 65536)
                target = self._target(places[interface], packet)
                if target is not None:
                    heapq.heappush(waiting, (time.monotonic() + self.delay_s, next(order), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the host has ended
                    os.write(self._interfaces[target], packet)

    def _target(self, source: int, packet: bytes) -> int | None:
        """Return the host to which a packet goes, or None if it is lost."""
        is_4 = packet[0] >> 4 == 4
        address, protocol, ports = (
            (packet[16:20], packet[9], packet[20:24]) if is_4 else (packet[24:40], packet[6], packet[40:44])
        )
        target = address[-1] - 1
        if target not in range(len(self.pids)) or (not is_4 and address[0] != 0xFD) or (source, target) in self._cut:
            return None
        if protocol == _TCP:
            ends = (bytes([source]) + ports[:2], bytes([target]) + ports[2:])
            flow = b"".join(sorted(ends))
            self._flows.add(flow)
            is_open = self._only_port is None or self._only_port in struct.unpack("!HH", ports)
            if flow in self._forgotten or not is_open:
                return None
        return target


def _set_namespace(pid: int, kind: str) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {kind} of {pid}")
    finally:
        os.close(descriptor)


def _interface(pid: int) -> int:
    _set_namespace(pid, "net")
    interface = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(interface, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN_WITHOUT_INFO))
    return interface


def enter_host(pid: int) -> None:
    """Move this process, which has one thread, to a host."""
    folder = os.getcwd()
    for kind in ("net", "uts", "mnt"):
        _set_namespace(pid, kind)
    os.chdir(folder)


@contextlib.contextmanager
def network_hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Yield hosts; skip the test where they are not permitted."""
    if (
        os.geteuid() != 0
        or not all(map(shutil.which, ("unshare", "nsenter", "ip")))
        or not Path("/dev/net/tun").exists()
    ):
        pytest.skip("namespaces and network interfaces need root, util-linux, iproute2 and /dev/net/tun")
    with Hosts(count, folder) as hosts:
        yield hosts
