"""The control plane: how the ranks of a job agree, hand each other plans, and learn of each other's failures."""

from __future__ import annotations

from bytecheckpoint.control.base import Communicator, Operation
from bytecheckpoint.control.current import current_communicator
from bytecheckpoint.control.single import SingleProcess
from bytecheckpoint.control.store import StoreCommunicator

__all__ = ["Communicator", "Operation", "SingleProcess", "StoreCommunicator", "current_communicator"]
