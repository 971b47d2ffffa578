"""The uploads that wait, in one process: the newest checkpoint goes first, and what retention would remove is left out.

Ranks must choose the same upload, although they commit in the tier at different moments. So every save is followed by
one *turn* on every rank, in the order of the saves, in which rank 0 chooses one of the checkpoints that wait then. As
there are as many turns as saves, each checkpoint is uploaded, or left out, in one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from ..runtime.waiting import Waiters

_MOST_WITHOUT = 1024  # rank 0 chooses none that has waited for so many others

T = TypeVar("T")


class UploadQueue(Generic[T]):
    """The uploads of this rank that wait, by attempt. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._waiters = threading.Lock(), Waiters()
        self._waiting: dict[str, T] = {}  # from the oldest to the newest
        # Attempts that rank 0 has left out (True), also of earlier jobs, or whose saves have failed here.
        self._without: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, attempt: str, upload: T) -> bool:
        """Let an upload wait. Returns False if rank 0 has left it out already."""
        with self._lock:
            if attempt in self._without:
                del self._without[attempt]
                return False
            self._waiting[attempt] = upload
        self._waiters.wake()
        return True

    def refuse(self, attempt: str) -> None:
        """Note that the save has failed on this rank, so that ``take`` does not wait for its upload."""
        with self._lock:
            self._waiting.pop(attempt, None)
            self._note_without(attempt, is_left_out=False)
        self._waiters.wake()

    def choose(self, superfluous: Sequence[str]) -> list[str]:
        """On rank 0, return the attempt that is next (empty if none waits), and those that are left out."""
        with self._lock:
            return [next((one for one in reversed(self._waiting) if one not in superfluous), ""), *superfluous]

    def take(self, attempt: str) -> T | None:
        """Remove an upload and return it, once it waits; None if its save has failed on this rank.

        Rank 0 has committed that save, so that it ends on this rank too, at the latest at its deadline.
        """
        self._waiters.wait_until(lambda: attempt in self._waiting or attempt in self._without)
        with self._lock:
            return self._waiting.pop(attempt, None)

    def leave_out(self, attempt: str) -> T | None:
        """Remove an upload and return it; if it does not wait yet, ``add`` returns False."""
        with self._lock:
            found = self._waiting.pop(attempt, None)
            if found is None:
                self._note_without(attempt, is_left_out=True)
            return found

    def is_left_out(self, attempt: str) -> bool:
        """Whether ``leave_out`` was called for an attempt that did not wait."""
        return self._without.get(attempt, False)

    def _note_without(self, attempt: str, *, is_left_out: bool) -> None:
        self._without[attempt] = is_left_out
        while len(self._without) > _MOST_WITHOUT:
            del self._without[next(iter(self._without))]

    def take_any(self, attempt: str) -> T | None:
        """Remove this upload, or else the oldest one, and return it; None if none waits."""
        with self._lock:
            key = attempt if attempt in self._waiting else next(iter(self._waiting), "")
            return self._waiting.pop(key, None)
