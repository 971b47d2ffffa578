"""Groups: processes of a job and of engines that send each other tensors, by gloo, or by NCCL from device to device.

A group lives from push to push, as forming one takes long. It is made of torch's process groups, which are entered in
no list of torch's, so that neither the job's nor the engine's own are touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...errors import EngineError, StateError
from .tcp_wire import own_hosts

__all__ = ["Gathering", "Group", "GroupAddress", "GroupBackend", "GroupBroken", "check_backend", "join_group"]

GroupBackend = Literal["gloo", "nccl"]

_FOR_EVER = timedelta(days=365)  # NCCL's own watchdog would end the process, which may be an engine's
_POLL_S = 0.0005

Transfer = tuple[int, torch.Tensor]
"""A party, and contiguous bytes."""


class GroupBroken(EngineError):
    """A party has left, or was not there in time: then it is ``late``. The group is of no use any more."""

    late = False


@dataclass(frozen=True)
class GroupAddress:
    """Where parties of a group of ``size`` meet. ``name`` is that of no other group. Each wait takes ``wait_s``."""

    name: str
    hosts: tuple[str, ...]
    port: int
    backend: GroupBackend
    size: int
    wait_s: float

    @classmethod
    def from_plain(cls, values: Any) -> GroupAddress:
        name, hosts, *others = values
        return cls(name, tuple(hosts), *others)

    def plain(self) -> list[Any]:
        return [self.name, list(self.hosts), self.port, self.backend, self.size, self.wait_s]


class _Store:
    """Where a group meets, on rank 0. It lives for as long as the group does."""

    def __init__(self, backend: GroupBackend, size: int, wait_s: float) -> None:
        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=wait_s), wait_for_workers=False)
        self.address = GroupAddress(secrets.token_hex(8), own_hosts(), self._store.port, backend, size, wait_s)


def check_backend(backend: str) -> None:
    """Raise ``StateError`` where this process can be in no group of it."""
    if backend not in get_args(GroupBackend):
        raise StateError(f"a group is by {' or '.join(get_args(GroupBackend))}, not {backend!r}")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise StateError(
            "a group by nccl needs a CUDA device in each process, and this one has none; use gloo, or no group"
        )


class Gathering:
    """A job's group as rank 0 knows it, from push to push: where it meets, and with which workers."""

    def __init__(self, backend: GroupBackend, wait_s: float) -> None:
        self._backend, self._wait_s = backend, wait_s
        self._store: _Store | None = None
        self._workers: list[str] = []

    def address(self, senders: Sequence[str], workers: Sequence[str], groups: Sequence[str]) -> GroupAddress:
        """Of a group of all ``senders`` and ``workers``. It is the one of last time where the workers are the same, and
        all parties say that they are in it still: the senders, and workers in ``groups``."""
        names = {*senders, *groups}
        if self._store is None or names != {self._store.address.name} or self._workers != list(workers):
            self._store = _Store(self._backend, len(senders) + len(workers), self._wait_s)
            self._workers = list(workers)
        return self._store.address

    def close(self) -> None:
        """The next group is another."""
        self._store = None


class Group(ABC):
    """One party's end. For one thread at a time."""

    def __init__(self, address: GroupAddress) -> None:
        self.name, self._wait_s = address.name, address.wait_s
        self.device = torch.device("cpu")

    @abstractmethod
    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int, check: Callable[[], None]
    ) -> None:
        """All of it at once; between two parties in the order given, and with the same ``tag`` on both sides. Returns
        when memory may be used again. ``check`` is called now and then where that is possible, and raises to give up.
        Raises ``GroupBroken``."""

    @abstractmethod
    def leave(self) -> None:
        """The others notice when they next wait for this party. Never raises."""


def _broken(text: str, *, late: bool = False) -> GroupBroken:
    broken = GroupBroken(text)
    broken.late = late
    return broken


def join_group(address: GroupAddress, rank: int) -> Group:
    """Returns when all parties are there. Raises ``EngineError`` where that is not so in time."""
    try:
        store = _connected(address)
        _meet(store, rank, address)
        return _Gloo(address, store, rank) if address.backend == "gloo" else _Nccl(address, store, rank)
    except (RuntimeError, ValueError) as error:  # torch's errors are among them
        raise EngineError(
            f"{socket.gethostname()} cannot join the group of {address.size} parties that meets at "
            f"{address.hosts[0]}:{address.port} by {address.backend}: {error}"
        ) from error


def _connected(address: GroupAddress) -> Store:
    failed = RuntimeError("it has no host")
    for host in address.hosts:
        try:
            # First as a plain connection: torch tries a port that nobody listens at for a long time.
            socket.create_connection((host, address.port), timeout=5.0).close()
            store = TCPStore(host, address.port, None, False, timedelta(seconds=address.wait_s))
        except (OSError, RuntimeError) as error:
            failed = RuntimeError(f"{host}: {error}")
        else:
            return PrefixStore(address.name, store)
    raise failed


def _meet(store: Store, rank: int, address: GroupAddress) -> None:
    """All are there: NCCL itself waits for ever for who does not come."""
    store.set(f"here/{rank}", "")
    store.wait([f"here/{party}" for party in range(address.size)], timedelta(seconds=address.wait_s))


class _Gloo(Group):
    def __init__(self, address: GroupAddress, store: Store, rank: int) -> None:
        super().__init__(address)
        wait = timedelta(seconds=address.wait_s)
        self._group: Any = dist.ProcessGroupGloo(store, rank, address.size, wait)

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int, check: Callable[[], None]
    ) -> None:
        group = self._group  # another thread may leave
        if group is None:
            raise _broken("this party has left the group")
        begin = time.monotonic()
        works: list[Any] = []
        try:
            for party, tensor in receives:
                works.append(group.recv([tensor], party, tag))
            for party, tensor in sends:
                works.append(group.send([tensor], party, tag))
            for work in works:
                check()
                work.wait()
        except RuntimeError as error:
            works.clear()  # they keep connections open, and the error keeps them
            late = time.monotonic() - begin >= self._wait_s
            raise _broken(f"the group broke: {_in_short(error)}", late=late) from None

    def leave(self) -> None:
        self._group = None  # connections end with the last work that knows them


def _in_short(error: RuntimeError) -> str:
    """Without gloo's own source lines and advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition(". ")[0]


class _Nccl(Group):
    """On the device that is torch's current one where this is made."""

    def __init__(self, address: GroupAddress, store: Store, rank: int) -> None:
        super().__init__(address)
        self.device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOR_EVER
        with _without_watchdog():
            group: Any = dist.ProcessGroupNCCL(store, rank, address.size, options)

        def connect() -> None:
            with torch.cuda.device(self.device):
                group.eager_connect_single_device(self.device)

        # NCCL itself waits for ever for a party that ends meanwhile.
        error = _in_a_thread_of_its_own(connect, address.wait_s)
        try:
            if error is not None:
                raise error
        finally:
            del error  # it has this frame
        self._group = group

    def exchange(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int, check: Callable[[], None]
    ) -> None:
        group = self._group
        if group is None:
            raise _broken("this party has left the group")
        if not sends and not receives:
            return
        # Of what fails between the first of it and the last, NCCL keeps in the thread that there was no last.
        error = _in_a_thread_of_its_own(lambda: self._do(group, sends, receives, check))
        try:
            if isinstance(error, RuntimeError):
                raise _broken(f"the group broke: {error}") from error
            if error is not None:
                raise error
        finally:
            del error  # it has this frame

    def _do(
        self, group: Any, sends: Sequence[Transfer], receives: Sequence[Transfer], check: Callable[[], None]
    ) -> None:
        with torch.cuda.device(self.device):
            group._start_coalescing()
            for party, tensor in receives:
                group.recv([tensor], party, 0)
            for party, tensor in sends:
                group.send([tensor], party, 0)
            work = group._end_coalescing()
            self._wait_for(work, check)

    def _wait_for(self, work: Any, check: Callable[[], None]) -> None:
        end = time.monotonic() + self._wait_s
        while not work.is_completed():
            check()
            if time.monotonic() > end:
                raise _broken(f"the group broke: a party was not there within {self._wait_s:g} s", late=True)
            time.sleep(_POLL_S)
        work.wait()  # has this thread's stream see what has come

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()  # what others of this process's kernels wait for would never end


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """A group that is made meanwhile has none: at the first error of the network, torch's ends the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _in_a_thread_of_its_own(function: Callable[[], None], wait_s: float | None = None) -> BaseException | None:
    """What it raised, or that it takes longer; then it goes on, and nobody hears of it. A daemon, as the interpreter
    must be able to end while NCCL waits."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            raised.append(error)

    thread = threading.Thread(target=run, name="bcp-push-nccl", daemon=True)
    thread.start()
    thread.join(wait_s)
    if thread.is_alive():
        return RuntimeError(
            f"NCCL took longer than {wait_s:g} s; has a party ended, or does NCCL_SOCKET_IFNAME name no interface by "
            "which they reach each other?"
        )
    return raised.pop() if raised else None
