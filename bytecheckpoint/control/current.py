"""The communicator of the default process group, made when it is first needed."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from ..errors import ControlError
from .base import Communicator
from .single import SingleProcess
from .store import StoreCommunicator

__all__ = ["current_communicator"]


@dataclass
class _Made:
    pid: int
    group: weakref.ref[Any]
    communicator: StoreCommunicator


_lock = threading.Lock()
_made: _Made | None = None
# Of groups that were destroyed: saves that began before that still go on, here or on other ranks.
_retired: list[_Made] = []
# A forked child must neither use nor destroy its parent's connections, so it keeps them without touching them.
_of_parents: list[_Made] = []


def current_communicator(*, deadline_s: float = 60.0) -> Communicator:
    """The line between the ranks of the default process group; ``SingleProcess`` when there is none, or of one rank.

    The first call for a group is collective: every rank makes it within ``deadline_s`` of the others, or
    ``DeadlineError`` names who did not. Later calls return the same object until the group is destroyed. It exchanges
    addresses through the group's store and never uses the group itself. Thread-safe.
    """
    global _made
    with _lock:
        group = _default_group()
        if _made is not None:
            if _made.pid != os.getpid():
                _of_parents.append(_made)
                _made = None
            elif group is None or _made.group() is not group:
                _retired.append(_made)
                _made = None
        _retired[:] = [one for one in _retired if one.pid != os.getpid() or not one.communicator.close_if_over()]
        if group is None or torch.distributed.get_world_size() == 1:
            return SingleProcess()
        if _made is None:
            communicator = StoreCommunicator.connect(
                _shared_store(), torch.distributed.get_rank(), torch.distributed.get_world_size(), deadline_s=deadline_s
            )
            _made = _Made(os.getpid(), weakref.ref(group), communicator)
        return _made.communicator


def _default_group() -> Any:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD


def _shared_store() -> Any:
    store = distributed_c10d._get_default_store()
    if store is None:
        raise ControlError(
            f"the default process group ({torch.distributed.get_backend()}) has no store through which the ranks could "
            "exchange addresses; initialise it with store= or init_method="
        )
    return store


@atexit.register
def _close_at_exit() -> None:
    # Rank 0 may be the first to end; the others still read its last answer.
    for one in [*_retired, *([_made] if _made is not None else [])]:
        if one.pid == os.getpid():
            one.communicator.close()
