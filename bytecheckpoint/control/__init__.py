"""The control plane: how the ranks of a job agree, hand each other plans, and learn of each other's failures."""

from __future__ import annotations

from .base import Communicator, Operation
from .current import current_communicator
from .single import SingleProcess
from .store import StoreCommunicator
from .streams import Streams

__all__ = ["Communicator", "Operation", "SingleProcess", "StoreCommunicator", "Streams", "current_communicator"]
