"""Process groups of senders and workers, with gloo or NCCL. The NCCL backend has never run between devices.

A group lasts over many pushes, because forming one is slow. It consists of torch process groups that are not registered
with ``torch.distributed``, so the groups of the job and of the engine stay untouched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ....control.acceptor import all_addresses
from ....control.addresses import EVERYWHERE, LOOPBACK, listen
from ....errors import EngineError, StateError, UsageError
from ....runtime.threads import run_daemon
from .base import TransportBroken, hosts_of_engine

GroupBackend = Literal["gloo", "nccl"]

_UNBOUNDED = timedelta(days=365)  # when NCCL's own timeout expires, its watchdog ends the process
_POLL_S = 0.0005
_CONNECT_S = 5.0

Tensors = Sequence[torch.Tensor]
Check = Callable[[], None]


class GroupAddress(NamedTuple):
    """Where the members of a group of ``size`` meet. ``name`` is unique. Each wait is bounded by ``wait_s``."""

    name: str
    hosts: Sequence[str]
    port: int
    backend: GroupBackend
    size: int
    wait_s: float


def check_backend(backend: str) -> None:
    """Raise ``UsageError`` for an unknown backend, and ``StateError`` when this process cannot use it."""
    if backend not in get_args(GroupBackend):
        raise UsageError(f"the backend of a group is {' or '.join(get_args(GroupBackend))}, not {backend!r}")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise StateError(
            "an nccl group needs a CUDA device in each process, and this process has none; use gloo, or no group"
        )


class GroupRendezvous:
    """Rank 0's side of forming groups: the store at which the current group met, and its workers."""

    def __init__(self, backend: GroupBackend, wait_s: float) -> None:
        self._backend, self._wait_s = backend, wait_s
        self._store: TCPStore | None = None
        self._address: GroupAddress | None = None
        self._workers: list[str] = []

    def address(self, senders: Sequence[str], workers: Sequence[str], groups: Sequence[str]) -> GroupAddress:
        """Return the address of a group of all ``senders`` and ``workers``.

        The current group is reused when the workers are the same and all members are still in it: ``senders`` and
        ``groups`` are the names of the groups in which the senders and the workers are.
        """
        names = {*senders, *groups}
        if self._address is None or names != {self._address.name} or self._workers != list(workers):
            wait = timedelta(seconds=self._wait_s)
            listener = listen()
            host, port = listener.getsockname()[:2]
            host = LOOPBACK if host in EVERYWHERE else host
            # The store owns the socket from now on.
            self._store = TCPStore(
                host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            size = len(senders) + len(workers)
            addresses = all_addresses(hosts_of_engine())
            self._address = GroupAddress(
                secrets.token_hex(8), addresses, self._store.port, self._backend, size, self._wait_s
            )
            self._workers = list(workers)
        return self._address

    def close(self) -> None:
        """Forget the group; the next push forms a new one."""
        self._store = self._address = None


class Group(ABC):
    """One member's end of a group. For one thread at a time; ``leave`` may be called from another.

    All operations return when the tensors, which are contiguous bytes on ``device``, may be used again. They call
    ``check`` now and then, which raises to end the wait, and raise ``TransportBroken``.
    """

    device = torch.device("cpu")

    def __init__(self, address: GroupAddress, store: Store, rank: int) -> None:
        self.name, self._wait_s = address.name, address.wait_s
        self._store, self._rank, self._size = store, rank, address.size
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._all: Any = self._form("all", rank, address.size)

    def form_subgroups(self, sets: Sequence[tuple[int, ...]]) -> None:
        """Form a subgroup for each set of members. All members of a set must call this with their sets in one common
        order. Raises ``EngineError``."""
        for members in sets:
            if members not in self._subgroups:
                name = "-".join(map(str, members))
                with _as_engine_error(f"the subgroup of members {name}"):
                    _meet(self._store, name, members.index(self._rank), len(members), self._wait_s)
                    self._subgroups[members] = self._form(name, members.index(self._rank), len(members))

    def send(self, member: int, tensors: Tensors, check: Check) -> None:
        """Send to one member, which calls ``receive``."""
        self._start(self._all, lambda group: [group.send([tensor], member, 0) for tensor in tensors], check)

    def receive(self, member: int, tensors: Tensors, check: Check) -> None:
        """Receive from one member, which calls ``send``."""
        self._start(self._all, lambda group: [group.recv([tensor], member, 0) for tensor in tensors], check)

    def broadcast(self, members: tuple[int, ...], root: int, tensors: Tensors, check: Check) -> None:
        """Copy the tensors of ``root`` to all ``members`` of a subgroup."""
        position = members.index(root)
        self._start(
            self._subgroups.get(members), lambda group: [group.broadcast(tensor, position) for tensor in tensors], check
        )

    @abstractmethod
    def _form(self, name: str, rank: int, size: int) -> Any:
        """Form a torch process group. Raises ``RuntimeError``."""

    def _start(self, group: Any, operations: Callable[[Any], list[Any]], check: Check) -> None:
        """Start operations of ``group``, which is None after ``leave``, and wait for them."""
        if group is None:
            raise TransportBroken("this member has left the group")
        try:
            self._run(group, operations, check)
        finally:
            del group  # an error that is kept refers to this frame, and would keep connections open after ``leave``

    @abstractmethod
    def _run(self, group: Any, operations: Callable[[Any], list[Any]], check: Check) -> None:
        """Start operations of ``group`` and wait for them. Raises ``TransportBroken``."""

    def leave(self) -> None:
        """Leave the group. Its members notice when they next wait for this one. Never raises."""
        self._all = None  # connections close with the last work that refers to them
        self._subgroups = {}


def join_group(address: GroupAddress, rank: int) -> Group:
    """Join a group, and return when all members have. Raises ``EngineError`` when that takes too long."""
    where = f"the group of {address.size} members that meets at {address.hosts[0]}:{address.port} by {address.backend}"
    with _as_engine_error(where):
        store = _connect(address)
        _meet(store, "", rank, address.size, address.wait_s)
        return (_Gloo if address.backend == "gloo" else _Nccl)(address, store, rank)


class Membership:
    """A process's membership in one group at a time, over many pushes."""

    def __init__(self) -> None:
        self._group: Group | None = None

    @property
    def name(self) -> str:
        """The name of the group; empty when this process is in no usable group."""
        return "" if self._group is None else self._group.name

    def join(self, address: GroupAddress, rank: int) -> Group:
        """Join the group unless this process is in it already. Raises ``EngineError``."""
        if self._group is None or self._group.name != address.name:
            self.leave()
            self._group = join_group(address, rank)
        return self._group

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()


@contextlib.contextmanager
def _as_engine_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's errors are among them
        raise EngineError(f"{socket.gethostname()} cannot join {what}: {error}") from error


def _connect(address: GroupAddress) -> Store:
    failure = RuntimeError("it has no host")
    for host in address.hosts:
        try:
            # Try a plain connection first: torch retries a closed port for a long time.
            socket.create_connection((host, address.port), timeout=_CONNECT_S).close()
            store = TCPStore(host, address.port, None, False, timedelta(seconds=address.wait_s))
        except (OSError, RuntimeError) as error:
            failure = RuntimeError(f"{host}: {error}")
        else:
            return PrefixStore(address.name, store)
    raise failure


def _meet(store: Store, name: str, rank: int, size: int, wait_s: float, value: str = "") -> list[str]:
    """Wait until all members are there, and return their values. NCCL itself would wait for a missing one without a
    bound."""
    keys = [f"here/{name}/{member}" for member in range(size)]
    store.set(keys[rank], value)
    store.wait(keys, timedelta(seconds=wait_s))
    return [store.get(key).decode() for key in keys] if value else []


def refuse_shared_devices(store: Store, rank: int, size: int, device: str, wait_s: float) -> None:
    """Raise ``RuntimeError``, in all members, if two of them use one device: NCCL would fail late, or not return."""
    members: dict[str, list[int]] = {}
    for member, name in enumerate(_meet(store, "device", rank, size, wait_s, device)):
        members.setdefault(name, []).append(member)
    for name, same in members.items():
        if len(same) > 1:
            raise RuntimeError(
                f"members {' and '.join(map(str, same))} share GPU {name}, which NCCL does not support; start the "
                f'trainer and each worker on different GPUs, or push with group="gloo", cuda_ipc=True or no group'
            )


class _Gloo(Group):
    def _form(self, name: str, rank: int, size: int) -> Any:
        wait = timedelta(seconds=self._wait_s)
        return dist.ProcessGroupGloo(PrefixStore(name, self._store), rank, size, wait)

    def _run(self, group: Any, operations: Callable[[Any], list[Any]], check: Check) -> None:
        begin = time.monotonic()
        works: list[Any] = []
        try:
            works += operations(group)
            while works:
                check()
                works.pop(0).wait()
        except RuntimeError as error:
            is_late = time.monotonic() - begin >= self._wait_s
            # Without the position in gloo's source and without its advice.
            text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition(". ")[0]
            error.__traceback__ = None  # its frames refer to the group, too
            raise TransportBroken(f"the group broke: {text}", is_late=is_late) from None
        finally:
            works.clear()
            del group


class _Nccl(Group):
    """Works on torch's current device at construction."""

    def __init__(self, address: GroupAddress, store: Store, rank: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        name = str(torch.cuda.get_device_properties(self.device).uuid)
        refuse_shared_devices(store, rank, address.size, name, address.wait_s)
        super().__init__(address, store, rank)

    def _form(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _UNBOUNDED
        with _without_watchdog():
            group: Any = dist.ProcessGroupNCCL(PrefixStore(name, self._store), rank, size, options)

        def connect() -> None:
            with torch.cuda.device(self.device):
                group.eager_connect_single_device(self.device)

        _run_in_thread(connect, self._wait_s)  # NCCL waits without a bound for a member that ends in the meantime
        return group

    def _run(self, group: Any, operations: Callable[[Any], list[Any]], check: Check) -> None:
        # After a failure inside a coalesced block, NCCL keeps its state in the thread that opened the block.
        try:
            _run_in_thread(lambda: self._run_coalesced(group, operations, check))
        except RuntimeError as error:
            raise TransportBroken(f"the group broke: {error}") from error

    def _run_coalesced(self, group: Any, operations: Callable[[Any], list[Any]], check: Check) -> None:
        with torch.cuda.device(self.device):
            group._start_coalescing()
            operations(group)
            work = group._end_coalescing()
            end = time.monotonic() + self._wait_s
            while not work.is_completed():
                check()
                if time.monotonic() > end:
                    raise TransportBroken(
                        f"the group broke: a member was not there within {self._wait_s:g} s", is_late=True
                    )
                time.sleep(_POLL_S)
            work.wait()  # makes this thread's stream wait for the received bytes

    def leave(self) -> None:
        groups = [self._all, *self._subgroups.values()]
        super().leave()
        for group in groups:
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()  # otherwise this process's kernels would wait without a bound


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Form a group without torch's watchdog, which ends the process at the first network error."""
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


def _run_in_thread(function: Callable[[], None], wait_s: float | None = None) -> None:
    """Raise what ``function`` raises, or ``RuntimeError`` after ``wait_s``; the thread then continues unobserved."""
    called = run_daemon(function, "bcp-push-nccl")
    try:
        if not wait([called], wait_s).done:
            raise RuntimeError(
                f"NCCL took longer than {wait_s:g} s; has a member ended, or does NCCL_SOCKET_IFNAME name no interface "
                "by which the members reach each other?"
            )
        called.result()
    finally:
        del called  # breaks the reference cycle with this frame
