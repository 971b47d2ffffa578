"""What the library needs of a store, and nothing more.

Keys are ``str``, relative, with ``/`` between components; a store has no directories, no rename and no append.
Every method blocks, may be called from any thread, and raises a ``StorageError`` (or a subclass) that names the
backend and the key. ``testing.storage`` holds the conformance suite that defines this contract in code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from typing_extensions import Buffer, Self

from ..errors import UnsupportedURLError

__all__ = ["ObjectReader", "ObjectStat", "ObjectWriter", "StorageBackend"]


@dataclass(frozen=True)
class ObjectStat:
    """``size`` in bytes; ``version`` changes whenever the object is replaced, where the store can tell (else "")."""

    key: str
    size: int
    version: str = ""


class ObjectWriter(ABC):
    """One object being written in pieces. Nothing of it is visible under its key to ``stat`` or ``get`` as a whole
    object until ``complete``, except on stores that write in place (see ``StorageBackend.atomic_writer``)."""

    @abstractmethod
    def write(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``. Pieces may come from several threads and in any order; they must not overlap
        and must tile ``[0, size)`` before ``complete``. ``data`` may be reused as soon as this returns."""

    @abstractmethod
    def complete(self) -> None:
        """Make the object whole and durable: when this returns, a power cut does not lose it."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written (parts, temporary files). Never raises. A no-op after ``complete``."""

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()


class ObjectReader(ABC):
    """One object opened for many reads, by several threads at once. Every byte is of the object that had the key when
    it was opened, unless the store cannot hold on to it and the object was replaced meanwhile. Close it when no thread
    is inside a call."""

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """As ``StorageBackend.read_scattered``."""

    def is_at_hand(self, offset: int, length: int) -> bool:
        """Whether these bytes (at least one) seem to be in this machine's memory already, so that reading them is a
        copy and no wait: then more threads than processors gain nothing."""
        return False

    def direct_pages(self) -> int:
        """What ``read_direct`` wants offsets, addresses and lengths to be multiples of; 0 where there is none."""
        return 0

    def read_direct(self, offset: int, buffer: Buffer) -> int:
        """Fill ``buffer`` from the device, past any cache; the number of bytes, less than its length only at the end
        of the object. To be called only where ``direct_pages`` is not 0."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - optional to override
        """Give the descriptor back. Never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StorageBackend(ABC):
    """A place that holds objects below one root. Made from a URL by ``storage_backends.open_backend``."""

    schemes: ClassVar[tuple[str, ...]] = ()

    atomic_writer: bool = True
    """False where a half-written object is visible under its key (local files). Readers never rely on it: only the
    manifest, written by ``put``, makes an object count."""

    read_size: int = 8 << 20
    """Bytes that one read had best fetch: enough to make little of the wait before the first of them."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> StorageBackend:
        """Open the root that ``url`` names. ``open_backend`` calls this; every backend that is an entry point has it.
        Raises ``UnsupportedURLError`` where the URL, or an option, makes no sense."""
        raise UnsupportedURLError(f"{cls.__name__} cannot be opened from a URL ({url!r}); construct it directly")

    @property
    @abstractmethod
    def url(self) -> str:
        """The root, in a form that ``open_backend`` takes and a person recognises."""

    @abstractmethod
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Store a small object, atomically and durably: any reader sees the old one or the new one, whole.
        With ``if_absent``, raise ``KeyExistsError`` where the key is taken, decided by the store itself."""

    @abstractmethod
    def create(self, key: str, size: int) -> ObjectWriter:
        """Begin a new object of exactly ``size`` bytes; one that had this key before is replaced, at the latest by
        ``complete``. Raises ``StorageFullError`` at once where that can be seen."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        """Fill the writable ``buffer`` with the bytes at ``offset``. Raises ``KeyNotFoundError``, or ``StorageError``
        where the object ends early (never a short read)."""

    def read_scattered(self, key: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """``read_into`` for many small buffers at the price of one: fills them, one after the other, with consecutive
        bytes from ``offset`` on. Where a store has nothing better, all of them are held in memory once more: ask for
        some MiB at a time."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        whole = bytearray(sum(map(len, views)))
        self.read_into(key, offset, whole)
        content, at = memoryview(whole), 0
        for view in views:
            view[:] = content[at : at + len(view)]
            at += len(view)

    def open_object(self, key: str) -> ObjectReader:
        """Open an object for many reads. Raises ``KeyNotFoundError``, now or at the first read. Where a store has
        nothing better, each is a ``read_scattered`` of its own."""
        return _RangedReader(self, key)

    @abstractmethod
    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        """A whole small object. Raises ``KeyNotFoundError``; ``StorageError`` before reading if over ``max_size``."""

    @abstractmethod
    def stat(self, key: str) -> ObjectStat:
        """Raises ``KeyNotFoundError``."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Every object whose key starts with ``prefix``, in key order. An empty store lists nothing."""

    @abstractmethod
    def list_children(self, prefix: str = "") -> Sequence[str]:
        """Names of the next component below ``prefix`` ("" or ending in "/"), sorted; those with objects below them
        end in "/". This is what finds ``step-*`` in a root of a million objects."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove these objects; those already gone are no error. Leaves no empty directories behind where the store
        has directories."""

    def free_bytes(self) -> int | None:
        """How many more bytes the store says that it can take; None where it does not say. Never raises."""
        return None

    def close(self) -> None:  # noqa: B027 - optional to override
        """Release connections and descriptors. The backend may be used again afterwards."""


class _RangedReader(ObjectReader):
    def __init__(self, backend: StorageBackend, key: str) -> None:
        self._backend, self._key = backend, key

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if len(buffers) == 1:
            self._backend.read_into(self._key, offset, buffers[0])
        else:
            self._backend.read_scattered(self._key, offset, buffers)
