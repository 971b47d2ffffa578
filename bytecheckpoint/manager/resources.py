"""What a manager holds until it is closed: signal handlers, the lease of its root, housekeeping, and unfinished saves.

They outlive a manager that is dropped without ``close``. The heartbeat of the lease then finishes the saves and
releases the root, and signals have the effect that they had before.
"""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial

from ..checkpoint.lease import Lease
from ..checkpoint.location import Location
from ..runtime.threads import before_exit
from .coordinator import SavesInFlight
from .housekeeping import Housekeeping
from .signals import SignalWatch
from .tier import TierFolder

_log = logging.getLogger(__name__)


class ManagerResources:
    """The resources of one manager on one rank. ``lease`` and ``housekeeping`` exist on rank 0 only."""

    def __init__(self, owner: object, root: Location) -> None:
        self._owner, self._root = weakref.ref(owner), root
        self._pid = os.getpid()
        self.in_flight = SavesInFlight()
        self.signals = SignalWatch(())
        self.lease: Lease | None = None
        self.housekeeping: Housekeeping | None = None
        self.tier_folder: TierFolder | None = None
        self.is_closed = False
        self._is_released = False
        before_exit(partial(_release_at_exit, weakref.ref(self)))

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child: the saves, the lease and the threads belong to its parent."""
        return self._pid != os.getpid()

    def is_abandoned(self) -> bool:
        """Whether the manager was dropped without ``close``."""
        return self._owner() is None

    def finish_if_abandoned(self) -> bool:
        """If the manager was dropped and its saves have ended, finish housekeeping and return True.

        Takes no lock that the collected manager may have held; called by the heartbeat of the lease.
        """
        is_uploading = self.tier_folder is not None and self.tier_folder.is_busy()
        if not self.is_abandoned() or self.in_flight.is_any_running() or is_uploading:
            return False
        _log.warning(
            "%s: the CheckpointManager was dropped without close(); its lease is released. Use `with` or close()",
            self._root,
        )
        if self.housekeeping is not None:
            self.housekeeping.close()
        return True

    def release(self) -> None:
        """Wait for this rank's part of all saves, log failures, and release everything. Does not wait for others.

        In a forked child, release nothing. If it is interrupted, another call does the rest.
        """
        self.is_closed = True
        if self._is_released or self.is_inherited:
            return
        self.in_flight.drain()
        if self.tier_folder is not None:
            self.tier_folder.drain()
        if self.housekeeping is not None:
            self.housekeeping.close()
        if self.lease is not None:
            self.lease.close()
        self.signals.close()
        self._is_released = True


def _release_at_exit(resources: weakref.ref[ManagerResources]) -> None:
    # The heartbeat keeps the resources of a dropped manager alive, so that its thread ends here too.
    alive = resources()
    if alive is not None:
        alive.release()
