"""How long a save took, in the form that is stored with the checkpoint.

Each rank sends the seconds of its steps with the checksums of its files, so that no exchange is added. Rank 0 stores a
document of a byte per rank and step in the metadata of the manifest. What happens later, from the put of the manifest
on, is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .trace import SAVE_STEPS, Timings

Seconds: TypeAlias = npt.NDArray[np.float64]

_STEPS = SAVE_STEPS[: SAVE_STEPS.index("confirm")]
_STEPS_OF_CALLER = _STEPS.index("stage") + 1
_LEVELS = 255
_MOST_RANKS = 1 << 20  # of which a hostile manifest would fill memory

PACKED_STEPS = 4 * len(_STEPS)
"""Bytes that ``pack_steps`` returns."""


def pack_steps(timings: Timings) -> bytes:
    """Encode how long each step before ``confirm`` took on this rank."""
    return np.array([timings.seconds.get(step, 0.0) for step in _STEPS], "<f4").tobytes()


@dataclass(frozen=True, eq=False)
class SaveTimes:
    """How long a save took until the commit, on all ranks.

    Attributes:
        seconds: From the call until rank 0 had everything for the commit.
        stall: How long training waited on the slowest rank: for the steps of the call, or for all if it was not
            asynchronous.
        ranks: The seconds of each step by rank, without steps that did not run. Read from a checkpoint, they are exact
            to 1/255 of the slowest rank.
    """

    seconds: float
    stall: float
    ranks: Mapping[str, Seconds]

    @classmethod
    def of(cls, timings: Timings, packed: Sequence[bytes], *, is_async: bool) -> SaveTimes:
        """Combine what ``pack_steps`` returned on each rank. ``timings`` are those of rank 0."""
        seconds = perf_counter() - timings.begun
        by_rank = np.stack([np.frombuffer(one, "<f4") for one in packed]).astype(np.float64)
        stall = float(by_rank[:, :_STEPS_OF_CALLER].sum(1).max()) if is_async else seconds
        return cls(seconds, stall, {step: by_rank[:, at] for at, step in enumerate(_STEPS) if by_rank[:, at].any()})

    def to_document(self) -> dict[str, Any]:
        """Return plain values, for ``from_document``."""
        slowest = {step: float(seconds.max()) for step, seconds in self.ranks.items()}
        return {
            "seconds": self.seconds,
            "stall": self.stall,
            "slowest": slowest,
            "ranks": {step: _levels(seconds / slowest[step]) for step, seconds in self.ranks.items()},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], world_size: int) -> SaveTimes | None:
        """Decode what ``to_document`` returned. None for anything else: the bytes may come from anywhere."""
        try:
            if world_size > _MOST_RANKS:
                return None
            ranks = {
                step: np.frombuffer(document["ranks"][step], np.uint8).astype(np.float64) * (float(slowest) / _LEVELS)
                for step, slowest in document["slowest"].items()
                if step in _STEPS
            }
            found = cls(float(document["seconds"]), float(document["stall"]), ranks)
            figures = [found.seconds, found.stall, *(float(one.max()) for one in ranks.values())]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
        is_valid = all(len(one) == world_size for one in ranks.values()) and np.isfinite(figures).all()
        return found if is_valid and min(figures) >= 0 else None


def _levels(shares: Seconds) -> bytes:
    return np.rint(shares * _LEVELS).astype(np.uint8).tobytes()
