"""The interface of a contestant: save a state, and load it back into the same tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Contestant", "Pending", "Tensors"]


class Tensors(Protocol):
    """A state of plain tensors, by section and name, and by ``section.name``."""

    sections: dict[str, dict[str, torch.Tensor]]
    flat: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pending:
    """A save that continues in the background.

    ``wait`` returns when it is complete, or raises its error. ``gate`` must be called before the state is changed; it
    waits for tensors that are not copied yet.
    """

    wait: Callable[[], object]
    gate: Callable[[], object] | None = None


class Contestant(ABC):
    """One checkpointing system, configured as its documentation advises. Used from one thread of a separate process."""

    durable = False
    """Whether a save that is over has synced its files and directories; if not, the benchmark does and counts it."""

    @abstractmethod
    def save(self, path: str, state: Any) -> Pending | None:
        """Save to ``path``, a new name in an existing folder. Return None if the save is complete."""

    @abstractmethod
    def load(self, path: str, state: Any) -> None:
        """Fill the state's tensors from ``path``."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of its distributions."""
        return {}

    def stages(self) -> Mapping[str, float]:
        """Return the seconds of the inner steps of the last save or load, if it reports them."""
        return {}

    def close(self) -> None:
        """Release all resources."""
        return
