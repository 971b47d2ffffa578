"""The control plane: exchanges between the ranks of a job, and reports of each other's failures."""

from __future__ import annotations

from .base import Communicator, Operation, Streams
from .communicator import SocketCommunicator, current_communicator
from .single import SingleProcess

__all__ = ["Communicator", "Operation", "SingleProcess", "SocketCommunicator", "Streams", "current_communicator"]
