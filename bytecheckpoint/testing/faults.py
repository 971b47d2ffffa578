"""Wrap a storage backend, so that chosen operations fail, block or transfer less."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from typing_extensions import Buffer

from ..errors import StorageError, UsageError
from ..storage_backends.base import IncompleteUpload, ObjectStat, ObjectWriter, PartWriter, StorageBackend
from ..storage_backends.wrapping import WrappingBackend

OPERATIONS = (
    "put",
    "create",
    "write",
    "put_part",
    "complete",
    "abort",
    "read_into",
    "get",
    "stat",
    "list",
    "list_children",
    "delete",
    "incomplete",
    "abort_incomplete",
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Call:
    """One operation on a backend.

    Attributes:
        operation: One of ``OPERATIONS``.
        key: The key; for ``list``, ``list_children`` and ``incomplete`` the prefix.
        offset: Where a ``write``, ``put_part`` or ``read_into`` begins, in bytes.
        size: Bytes that the operation transfers, 0 if that is not known before it runs.
    """

    operation: str
    key: str
    offset: int = 0
    size: int = 0


@dataclass
class FaultRule:
    """A fault at some of the operations that match.

    The rule counts the operations that match, over all threads. It acts on the matches number ``nth`` to
    ``nth + times - 1``. When it acts, it first calls ``hook``, then waits for ``wait``, then runs the operation with at
    most ``cut`` bytes, and then raises ``error``. Without ``cut`` and ``after``, ``error`` is raised in place of the
    operation.

    Attributes:
        operation: One of ``OPERATIONS``, or ``*`` for all of them.
        key: A shell pattern for the key; for ``list`` and ``list_children``, the prefix. ``delete`` matches once for
            each of its keys.
        nth: The first match on which the rule acts, counted from 1.
        times: On how many matches the rule acts; ``None`` for all later matches.
        error: What to raise: an exception, or a class or function without arguments that makes one.
        cut: How many bytes of the operation to transfer. A ``put``, ``write`` or ``put_part`` stores an incomplete
            object, a ``get`` returns less, and ``read_into`` leaves the rest of the buffer unchanged. Without
            ``error``, the caller does not notice.
        wait: An event to wait for.
        wait_limit: Seconds after which the wait raises ``StorageError``, so that a test fails instead of hanging.
        hook: Called with the operation on the calling thread, for example to kill the process.
        after: Raise ``error`` after the operation has succeeded, as if only its response was lost.
        matched: How many operations have matched so far.

    Raises:
        UsageError: ``operation`` or ``nth`` is invalid.

    Example:
        >>> backend = FaultyBackend(inner, [FaultRule("put", "*.msgpack", nth=2, error=StorageError("lost"))])
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

    def __post_init__(self) -> None:
        if self.operation not in (*OPERATIONS, "*"):
            raise UsageError(
                f"{self.operation!r} is not an operation of a backend; the operations are {', '.join(OPERATIONS)}"
            )
        if self.nth < 1:
            raise UsageError(f"operations are counted from 1, got nth={self.nth}")
        self._lock = threading.Lock()

    def acts_on(self, call: Call) -> bool:
        """Whether the rule acts on ``call``. Counts it if it matches."""
        if self.operation not in ("*", call.operation) or not fnmatchcase(call.key, self.key):
            return False
        with self._lock:
            self.matched += 1
            return self.matched >= self.nth and (self.times is None or self.matched < self.nth + self.times)

    def make_error(self) -> BaseException | None:
        """Return the error to raise, if any; a new one if ``error`` is a class or a function."""
        return self.error if self.error is None or isinstance(self.error, BaseException) else self.error()


class FaultyBackend(WrappingBackend):
    """A backend that passes operations on to another one, except those on which a rule acts.

    If several rules act on an operation, the first one decides. Every rule counts every match.

    Args:
        inner: The backend to wrap.
        rules: The faults. The attribute ``rules`` may be changed at any time.
    """

    def __init__(self, inner: StorageBackend, rules: Sequence[FaultRule] = ()) -> None:
        super().__init__(inner)
        self.rules = [*rules]

    def _around(self, call: Call, operation: Callable[[int | None], _T]) -> _T:
        """Run an operation, which is a function of the number of bytes to transfer, ``None`` for all."""
        # A list, not a generator: every rule counts every match.
        acting = [rule for rule in tuple(self.rules) if rule.acts_on(call)]
        if not acting:
            return operation(None)
        rule = acting[0]
        if rule.hook is not None:
            rule.hook(call)
        if rule.wait is not None and not rule.wait.wait(rule.wait_limit):
            raise StorageError(
                f"{call.operation} {call.key!r}: the event of a fault rule was not set within {rule.wait_limit} s"
            )
        error = rule.make_error()
        if error is not None and rule.cut is None and not rule.after:
            raise error
        result = operation(rule.cut)
        if error is not None:
            raise error
        return result

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        view = memoryview(bytes(data))
        return self._around(
            Call("put", key, 0, len(view)),
            lambda cut: self.inner.put(key, view[:cut], if_absent=if_absent, if_version=if_version),
        )

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        call = Call("create", key, 0, size)
        return _FaultyWriter(self, key, self._around(call, lambda cut: self.inner.create(key, size, at_most=at_most)))

    def create_parts(self, key: str, size: int, *, token: str = "") -> PartWriter:
        call = Call("create", key, 0, size)
        return _FaultyPartWriter(
            self, key, self._around(call, lambda cut: self.inner.create_parts(key, size, token=token))
        )

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if view.nbytes and view.c_contiguous:
            view = view.cast("B")

        def read(cut: int | None) -> None:
            if cut is None:
                self.inner.read_into(key, offset, view)
                return
            # Read everything first: a cut must not hide that the object is missing or too short.
            content = bytearray(view.nbytes)
            self.inner.read_into(key, offset, content)
            view[:cut] = content[:cut]

        self._around(Call("read_into", key, offset, view.nbytes), read)

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        def get(cut: int | None) -> tuple[bytes, str]:
            content, version = self.inner.get_versioned(key, max_size=max_size)
            return content[:cut], version

        return self._around(Call("get", key), get)

    def stat(self, key: str) -> ObjectStat:
        return self._around(Call("stat", key), lambda cut: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._around(Call("list", prefix), lambda cut: self.inner.list(prefix))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        return self._around(Call("list_children", prefix), lambda cut: self.inner.list_children(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._around(Call("delete", key), lambda cut, key=key: self.inner.delete([key]))  # type: ignore[misc]

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        return self._around(Call("incomplete", prefix), lambda cut: self.inner.incomplete(prefix))

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:
        for upload in uploads:
            self._around(
                Call("abort_incomplete", upload.key),
                lambda cut, upload=upload: self.inner.abort_incomplete([upload]),  # type: ignore[misc]
            )


class _FaultyObject:
    def __init__(self, backend: FaultyBackend, key: str, inner: Any) -> None:
        self._backend, self._key, self._inner = backend, key, inner

    def complete(self, *tags: Sequence[str]) -> None:
        self._backend._around(Call("complete", self._key), lambda cut: self._inner.complete(*tags))

    def abort(self) -> None:
        # A rule can observe abort but not make it raise, as abort never raises.
        try:
            self._backend._around(Call("abort", self._key), lambda cut: None)
        finally:
            self._inner.abort()


class _FaultyWriter(_FaultyObject, ObjectWriter):
    def write(self, offset: int, data: Buffer) -> None:
        view = memoryview(bytes(data))
        self._backend._around(
            Call("write", self._key, offset, len(view)), lambda cut: self._inner.write(offset, view[:cut])
        )

    def shrink(self, size: int) -> None:
        self._inner.shrink(size)


class _FaultyPartWriter(_FaultyObject, PartWriter):
    def __init__(self, backend: FaultyBackend, key: str, inner: PartWriter) -> None:
        super().__init__(backend, key, inner)
        self.part_bytes, self.token = inner.part_bytes, inner.token

    def put_part(self, number: int, data: Buffer) -> str:
        view = memoryview(bytes(data))
        return self._backend._around(
            Call("put_part", self._key, number * self.part_bytes, len(view)),
            lambda cut: str(self._inner.put_part(number, view[:cut])),
        )
