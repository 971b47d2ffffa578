"""A storage backend that records the operations that it passes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TypeVar

from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.testing.faults import Call, FaultyBackend

__all__ = ["CountingBackend"]

_T = TypeVar("_T")


class CountingBackend(FaultyBackend):
    """A backend that records the operations that it passes on to another one.

    The attribute ``calls`` lists the operations in the order in which they began, including those that failed. The size
    of a ``get`` is recorded when it returns.

    Args:
        inner: The backend to wrap.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def count(self, operation: str = "*", key: str = "*") -> int:
        """Return how many calls match the name ``operation`` and the shell pattern ``key``."""
        return len(self.matching(operation, key))

    def operations(self) -> Counter[str]:
        """Return the number of calls of each operation."""
        with self._lock:
            return Counter(call.operation for call in self.calls)

    def matching(self, operation: str = "*", key: str = "*") -> list[Call]:
        """Return the calls that match the name ``operation`` and the shell pattern ``key``."""
        with self._lock:
            calls = tuple(self.calls)
        return [call for call in calls if operation in ("*", call.operation) and fnmatchcase(call.key, key)]

    def bytes_written(self, key: str = "*") -> int:
        """Return the bytes written to keys that match the shell pattern ``key``."""
        return sum(call.size for operation in ("put", "write", "put_part") for call in self.matching(operation, key))

    def bytes_read(self, key: str = "*") -> int:
        """Return the bytes read from keys that match the shell pattern ``key``."""
        return sum(call.size for operation in ("get", "read_into") for call in self.matching(operation, key))

    def reset(self) -> None:
        """Forget all calls."""
        with self._lock:
            self.calls.clear()

    def _around(self, call: Call, operation: Callable[[int | None], _T]) -> _T:
        with self._lock:
            self.calls.append(call)
            at = len(self.calls) - 1
        result = super()._around(call, operation)
        if call.operation == "get":
            assert isinstance(result, tuple)
            with self._lock:
                if at < len(self.calls) and self.calls[at] is call:
                    self.calls[at] = Call(call.operation, call.key, 0, len(result[0]))
        return result
