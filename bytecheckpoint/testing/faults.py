"""Backends that wrap another one: to count what is done, and to make the n-th operation fail, stop or come late."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from typing_extensions import Buffer

from ..errors import StorageError
from ..storage_backends.base import ObjectStat, ObjectWriter, StorageBackend

__all__ = ["OPERATIONS", "Call", "CountingBackend", "FaultRule", "FaultyBackend"]

OPERATIONS = (
    "put",
    "create",
    "write",
    "complete",
    "abort",
    "read_into",
    "get",
    "stat",
    "list",
    "list_children",
    "delete",
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call:
    """One operation on a backend. ``size`` is the bytes it moves, as far as that is known before it runs."""

    operation: str
    key: str
    offset: int = 0
    size: int = 0


@dataclass
class FaultRule:
    """What to do at some of the operations that match.

    An operation matches by its name (one of ``OPERATIONS``, or ``*``) and its key (a shell pattern; for ``list`` and
    ``list_children`` the prefix; ``delete`` matches once for each key). The rule acts on the matches number ``nth`` to
    ``nth + times - 1``, counted from 1 over all threads; ``times=None`` is for ever. It then does, in this order:

    - ``hook(call)``, on the calling thread (to kill a process, to record, to change something behind the back);
    - ``wait``: blocks until this event is set; ``StorageError`` after ``wait_limit`` seconds, so that a test fails;
    - ``cut``: only the first ``cut`` bytes go through. A torn ``put`` or ``write`` reaches the store, a ``get`` returns
      less, and the rest of a ``read_into`` buffer stays as it was. Without ``error`` nobody is told;
    - ``error``: raised in place of the operation (with ``after=True`` or with a cut: when it was done, as where only
      the reply is lost). A class or a function of no arguments is called to make one.
    """

    operation: str = "*"
    key: str = "*"
    nth: int = 1
    times: int | None = 1
    error: BaseException | Callable[[], BaseException] | None = None
    cut: int | None = None
    wait: threading.Event | None = None
    wait_limit: float = 60.0
    hook: Callable[[Call], None] | None = None
    after: bool = False
    matched: int = field(default=0, init=False)
    """How many operations matched so far."""

    def __post_init__(self) -> None:
        if self.operation not in (*OPERATIONS, "*"):
            raise ValueError(f"no operation {self.operation!r}; there are {', '.join(OPERATIONS)}")
        if self.nth < 1:
            raise ValueError(f"operations are counted from 1, got nth={self.nth}")
        self._lock = threading.Lock()

    def strikes(self, call: Call) -> bool:
        """Count ``call`` if it matches; true if the rule acts on it."""
        if self.operation not in ("*", call.operation) or not fnmatchcase(call.key, self.key):
            return False
        with self._lock:
            self.matched += 1
            return self.matched >= self.nth and (self.times is None or self.matched < self.nth + self.times)

    def make_error(self) -> BaseException | None:
        """The error to raise, if any; a new one where ``error`` is a class or a function."""
        return self.error if self.error is None or isinstance(self.error, BaseException) else self.error()


class _WrappingBackend(StorageBackend):
    """Every operation goes through ``_around``, which may do something else instead. A cut operation is given the
    number of bytes that go through, or None for all."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.atomic_writer = inner.atomic_writer

    @property
    def url(self) -> str:
        return self.inner.url

    def _around(self, call: Call, operation: Callable[[int | None], _T]) -> _T:
        raise NotImplementedError

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        view = memoryview(bytes(data))
        self._around(Call("put", key, 0, len(view)), lambda cut: self.inner.put(key, view[:cut], if_absent=if_absent))

    def create(self, key: str, size: int) -> ObjectWriter:
        call = Call("create", key, 0, size)
        return _WrappingWriter(self, key, self._around(call, lambda cut: self.inner.create(key, size)))

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if view.nbytes and view.c_contiguous:
            view = view.cast("B")

        def read(cut: int | None) -> None:
            if cut is None:
                self.inner.read_into(key, offset, view)
                return
            # Whole first: a cut makes a reader see less, it does not make a missing object appear.
            whole = bytearray(view.nbytes)
            self.inner.read_into(key, offset, whole)
            view[:cut] = whole[:cut]

        self._around(Call("read_into", key, offset, view.nbytes), read)

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self._around(Call("get", key), lambda cut: self.inner.get(key, max_size=max_size)[:cut])

    def stat(self, key: str) -> ObjectStat:
        return self._around(Call("stat", key), lambda cut: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._around(Call("list", prefix), lambda cut: self.inner.list(prefix))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        return self._around(Call("list_children", prefix), lambda cut: self.inner.list_children(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._around(Call("delete", key), lambda cut, key=key: self.inner.delete([key]))  # type: ignore[misc]

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()


class _WrappingWriter(ObjectWriter):
    def __init__(self, backend: _WrappingBackend, key: str, inner: ObjectWriter) -> None:
        self._backend = backend
        self._key = key
        self._inner = inner

    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(bytes(data))
        self._backend._around(
            Call("write", self._key, offset, len(view)), lambda cut: self._inner.write(offset, view[:cut])
        )

    def complete(self) -> None:
        self._backend._around(Call("complete", self._key), lambda cut: self._inner.complete())

    def abort(self) -> None:
        # A rule cannot make abort raise, only see it: the contract says that it never does.
        try:
            self._backend._around(Call("abort", self._key), lambda cut: None)
        finally:
            self._inner.abort()


class FaultyBackend(_WrappingBackend):
    """``inner`` with ``rules``; for each operation, the first rule that acts decides. Rules may be added any time."""

    def __init__(self, inner: StorageBackend, rules: Sequence[FaultRule] = ()) -> None:
        super().__init__(inner)
        self.rules = [*rules]

    def _around(self, call: Call, operation: Callable[[int | None], _T]) -> _T:
        # Every rule counts every match, also where an earlier rule acts.
        striking = [rule for rule in tuple(self.rules) if rule.strikes(call)]
        if not striking:
            return operation(None)
        rule = striking[0]
        if rule.hook is not None:
            rule.hook(call)
        if rule.wait is not None and not rule.wait.wait(rule.wait_limit):
            raise StorageError(f"{call.operation} {call.key!r}: nobody set the event within {rule.wait_limit} s")
        error = rule.make_error()
        if error is not None and rule.cut is None and not rule.after:
            raise error
        result = operation(rule.cut)
        if error is not None:
            raise error
        return result


class CountingBackend(_WrappingBackend):
    """``inner``, with a record of every operation in ``calls``, in the order in which they began.

    Operations that fail are counted too; ``size`` of a ``get`` is entered when it has returned."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def count(self, operation: str = "*", key: str = "*") -> int:
        """How many calls match, by name and by shell pattern."""
        return len(self.matching(operation, key))

    def operations(self) -> Counter[str]:
        """How many calls there were of each operation."""
        with self._lock:
            return Counter(call.operation for call in self.calls)

    def matching(self, operation: str = "*", key: str = "*") -> list[Call]:
        """The calls that match, by name and by shell pattern."""
        with self._lock:
            calls = tuple(self.calls)
        return [call for call in calls if operation in ("*", call.operation) and fnmatchcase(call.key, key)]

    def bytes_written(self, key: str = "*") -> int:
        return sum(call.size for operation in ("put", "write") for call in self.matching(operation, key))

    def bytes_read(self, key: str = "*") -> int:
        return sum(call.size for operation in ("get", "read_into") for call in self.matching(operation, key))

    def reset(self) -> None:
        with self._lock:
            self.calls.clear()

    def _around(self, call: Call, operation: Callable[[int | None], _T]) -> _T:
        with self._lock:
            self.calls.append(call)
            at = len(self.calls) - 1
        result = operation(None)
        if isinstance(result, bytes):
            with self._lock:
                if at < len(self.calls) and self.calls[at] is call:
                    self.calls[at] = Call(call.operation, call.key, 0, len(result))
        return result
