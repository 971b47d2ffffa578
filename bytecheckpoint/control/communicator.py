"""The communicator of a job of several ranks."""

from __future__ import annotations

import collections
import os
import threading
from typing import Any

from .base import Communicator
from .network import Network
from .operation import SocketOperation
from .peers import PeerIdentity
from .rendezvous import connect_ranks
from .router import Router
from .timings import LINGER_S
from .tree import Tree

__all__ = ["GROUP_VARIABLE", "SocketCommunicator"]

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
