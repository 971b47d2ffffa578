"""The communicator of a job of several ranks, and that of the default process group."""

from __future__ import annotations

import collections
import os
import threading
import weakref
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from ..errors import ControlError
from ..runtime.threads import before_exit
from .base import Communicator, SingleProcess
from .network import Network
from .operation import SocketOperation
from .peers import PeerIdentity
from .rendezvous import connect_ranks
from .router import Router
from .timings import LINGER_S
from .tree import Tree

GROUP_VARIABLE = "BYTECHECKPOINT_CONTROL_GROUP_SIZE"
"""Environment variable, equal on every rank: the number of ranks in a group, where ``connect`` does not get one."""


class SocketCommunicator(Communicator):
    """Ranks that are connected in a tree. Thread-safe; each operation belongs to one thread at a time.

    When the process of a rank ends, every later operation that needs it raises ``RankFailedError`` at once, until the
    job makes a new communicator.
    """

    def __init__(self, router: Router, network: Network) -> None:
        self.router, self._network = router, network
        self.rank, self.world_size = router.rank, router.tree.world_size
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers: collections.Counter[str] = collections.Counter()

    @classmethod
    def connect(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        *,
        deadline_s: float = 60.0,
        group_size: int | None = None,
        identity: PeerIdentity | None = None,
    ) -> SocketCommunicator:
        """Connect to the other ranks. Every rank calls it at about the same time.

        Args:
            store: A ``torch.distributed.Store`` that all ranks share, to exchange addresses and a key.
            rank: This process's rank.
            world_size: The number of ranks.
            deadline_s: How long to wait for the other ranks, in seconds.
            group_size: The number of ranks per group (``tree.py``), equal on every rank. By default, the environment
                variable ``BYTECHECKPOINT_CONTROL_GROUP_SIZE``, or else a size that depends on ``world_size``.
            identity: The identity of this process; by default the library determines it.

        Returns:
            The communicator; the caller closes it.

        Raises:
            DeadlineError: Some ranks did not connect in time; the message names them.
            ControlError: A rank or the store cannot be reached.
        """
        if group_size is None and os.environ.get(GROUP_VARIABLE):
            group_size = int(os.environ[GROUP_VARIABLE])
        here = identity or PeerIdentity.of_this_process(rank)
        return cls(*connect_ranks(store, here, Tree.of(world_size, group_size), deadline_s))

    def operation(self, kind: str, *, deadline_s: float) -> SocketOperation:
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
        return SocketOperation(self.router, self._network, f"{kind}/{number}", deadline_s)

    def close(self) -> None:
        self.router.wait_until_finished(LINGER_S)
        self._close_connections()

    def close_if_unused(self) -> bool:
        """Close unless an operation is in progress on this rank or below; return whether it is closed. Never waits."""
        if self.router.has_operations():
            return False
        self._close_connections()
        return True

    def _close_connections(self) -> None:
        self.router.announce_closing()
        self._network.close()


class _GroupCommunicators:
    """The communicators that this process made for default process groups. Thread-safe.

    A destroyed group's communicator is closed once no save that began before is in progress here or below. A forked
    child must neither use nor close its parent's connections, so it keeps the objects without touching them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: weakref.ref[Any] | None = None
        self._current: SocketCommunicator | None = None
        self._retired: list[SocketCommunicator] = []
        self._inherited: list[SocketCommunicator] = []

    def get(self, deadline_s: float) -> Communicator:
        with self._lock:
            group = _default_group()
            self._retire_others(group)
            if group is None or torch.distributed.get_world_size() == 1:
                return SingleProcess()
            if self._current is None:
                rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
                self._current = SocketCommunicator.connect(_shared_store(), rank, world_size, deadline_s=deadline_s)
                self._group = weakref.ref(group)
            return self._current

    def close(self) -> None:
        for made in [*self._retired, *([self._current] if self._current is not None else [])]:
            if made.pid == os.getpid():
                made.close()

    def _retire_others(self, group: Any) -> None:
        is_current = group is not None and self._group is not None and self._group() is group
        if self._current is not None and not (is_current and self._current.pid == os.getpid()):
            self._retired.append(self._current)
            self._current = None
        self._inherited += [made for made in self._retired if made.pid != os.getpid()]
        self._retired = [made for made in self._retired if made.pid == os.getpid() and not made.close_if_unused()]


_communicators = _GroupCommunicators()
# The other ranks may still need this one to forward messages, so it waits for them before its process ends.
before_exit(_communicators.close)


def current_communicator(*, deadline_s: float = 60.0) -> Communicator:
    """Return the communicator of the default process group; ``SingleProcess`` without a group or with one rank.

    The first call for a group is collective. It exchanges addresses through the group's store and never uses the group
    itself. Later calls return the same object until the group is destroyed. Thread-safe.

    Args:
        deadline_s: How long the first call waits for the other ranks, in seconds.

    Returns:
        The communicator, which this module closes.

    Raises:
        DeadlineError: Some ranks did not make the first call in time; the message names them.
        ControlError: The group has no store, or a rank cannot be reached.
    """
    return _communicators.get(deadline_s)


def _default_group() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD


def _shared_store() -> Any:
    store = distributed_c10d._get_default_store()
    if store is None:
        raise ControlError(
            f"the default process group ({torch.distributed.get_backend()}) has no store through which the ranks could "
            "exchange addresses; initialize it with store= or init_method="
        )
    return store
