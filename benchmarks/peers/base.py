"""What a contestant does: save a state, load it back into the same tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Contestant", "Pending", "Tensors"]


class Tensors(Protocol):
    """A state of plain tensors: by section and name, and by ``section.name``."""

    sections: dict[str, dict[str, torch.Tensor]]
    flat: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Pending:
    """A save that goes on behind the caller. ``wait`` returns when it is over or raises what went wrong; ``gate``
    must be called before the state may be changed, and waits for what is not copied yet."""

    wait: Callable[[], object]
    gate: Callable[[], object] | None = None


class Contestant(ABC):
    """One checkpointing system, set up as its documentation advises. Used from one thread of its own process."""

    durable = False
    """Whether a save that is over has synced its files and directories; if not, the benchmark does and counts it."""

    @abstractmethod
    def save(self, path: str, state: Any) -> Pending | None:
        """Save to ``path``, which does not exist yet in a folder that does. None: it is over."""

    @abstractmethod
    def load(self, path: str, state: Any) -> None:
        """Fill the state's own tensors from ``path``."""

    def versions(self) -> Mapping[str, str]:
        """Versions of what it is, by distribution."""
        return {}

    def stages(self) -> Mapping[str, float]:
        """Seconds of the inner steps of the last save or load, where it tells."""
        return {}

    def close(self) -> None:
        """Give everything back."""
        return
