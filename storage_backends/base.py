"""The storage interface: what the library needs from a store.

Keys are relative strings with ``/`` between components. A store has no directories, no rename and no append.
``bytecheckpoint.testing.storage`` contains the conformance suite that checks this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Self

from typing_extensions import Buffer

from ..errors import CorruptionError, StorageError, UnsupportedURLError, without_userinfo


@dataclass(frozen=True)
class ObjectStat:
    """The metadata of one object.

    Attributes:
        key: The object's key.
        size: Its size in bytes.
        version: A string that changes when the object is replaced by another content; empty if the store has no
            versions.
    """

    key: str
    size: int
    version: str = ""


@dataclass(frozen=True)
class IncompleteUpload:
    """An object that was begun and is neither complete nor aborted. The store keeps its parts until it is ended.

    Attributes:
        key: The object's key.
        upload_id: The store's name for it.
        age_s: How long ago it was begun, in seconds, by the store's clock.
    """

    key: str
    upload_id: str
    age_s: float


@dataclass(frozen=True)
class Conditions:
    """Which conditions of ``put`` a store decides itself, so that exactly one of two concurrent writers succeeds.

    Where it does not, callers look first and then put. Of two that do this at the same moment, the second one replaces
    what the first one has stored, and neither learns of it.

    Attributes:
        if_absent: ``put(if_absent=True)`` works.
        if_version: ``put(if_version=...)`` works (compare-and-swap).
    """

    if_absent: bool = False
    if_version: bool = False


class ObjectWriter(ABC):
    """Write one object in parts.

    Before ``complete`` returns, neither ``stat`` nor ``get`` shows the new object under its key, except on a store that
    writes in place (see ``StorageBackend.atomic_writer``). Use it as a context manager to call ``abort`` when an
    exception leaves the block.
    """

    @abstractmethod
    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset.

        Several threads may call it at the same time and in any order. The ranges must not overlap, and together they
        must cover ``[0, size)`` before ``complete``.

        Args:
            offset: The first byte in the object.
            data: A contiguous buffer. The caller may reuse it as soon as the call returns.

        Raises:
            StorageError: The range overlaps an earlier one or exceeds the size, the writer is closed, or the write
                failed.
            StorageFullError: The store has no space left.
        """

    def shrink(self, size: int) -> None:
        """Make the object shorter than it was created: it ends after ``size`` bytes.

        Call it before ``complete``, when no thread is inside ``write``. The save of encoded data uses it, because it
        learns the length of a file by writing it. The default implementation raises ``StorageError``.

        Args:
            size: The new size, at most that of ``create``. No byte after it has been written.

        Raises:
            StorageError: This store cannot do it, bytes after ``size`` have been written, or the writer is closed.
        """
        raise StorageError(f"{type(self).__name__} cannot shorten an object; save without a codec, or to another store")

    @abstractmethod
    def complete(self) -> None:
        """Make the object visible and durable: once this returns, a power failure does not lose it.

        Call it once, when no thread is inside ``write``.

        Raises:
            StorageError: Some bytes were never written, the writer is closed, or the store failed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written (parts, temporary files). Never raises. Does nothing after ``complete``."""

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()


class PartWriter(ABC):
    """Write one object in numbered parts, in an upload that another process may continue.

    Several threads may store parts at the same time and in any order. Nothing ends the upload except ``complete`` and
    ``abort``: if ``token`` is not empty, the store keeps the parts of a process that was killed.

    Attributes:
        part_bytes: Bytes of every part but the last, which has the rest. An object without bytes has no parts.
        token: Identifies the upload for ``StorageBackend.create_parts`` in a later process; empty if no process can
            continue it.
    """

    part_bytes: int
    token: str

    @abstractmethod
    def put_part(self, number: int, data: Buffer) -> str:
        """Store one part.

        Args:
            number: The number of the part, from 0.
            data: Its bytes, contiguous. The caller may reuse the memory as soon as the call returns.

        Returns:
            A tag to pass to ``complete``. With a ``token``, the store has kept the part when it is returned.

        Raises:
            KeyNotFoundError: The store no longer has the upload.
            StorageError: The part was not stored.
        """

    @abstractmethod
    def complete(self, tags: Sequence[str]) -> None:
        """Make the object visible and durable. Call it once, when no thread is inside ``put_part``.

        Args:
            tags: The tags of all parts, in order, also of those that another process has stored.

        Raises:
            KeyNotFoundError: The store no longer has the upload, and it was not this call that completed it.
            StorageError: Some parts were not stored, or the store failed.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the upload and remove its parts. Never raises. Does nothing after ``complete``."""


class ObjectReader(ABC):
    """Read one object, opened once, from several threads.

    Every read returns bytes of the object that had the key when the reader was opened. A store that cannot guarantee
    this may fail or return bytes of an object that has replaced it. Close the reader when no thread is inside a call.

    Attributes:
        size: The object's size in bytes, if the store has stated it by itself, at the latest with the first bytes; else
            None. A load compares it with the manifest.
        is_near: Whether it is a copy in a tier of this machine, for the timings of a load.
    """

    size: int | None = None
    is_near: bool = False

    @abstractmethod
    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill buffers with consecutive bytes of the object in one operation.

        Args:
            offset: The first byte to read.
            buffers: Writable contiguous buffers, filled one after the other.

        Raises:
            StorageError: The object ends before the last buffer is full, or the read failed.
        """

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether these bytes seem to be in this machine's memory.

        Reading cached bytes is a copy without a wait, so more threads than processors do not make it faster.

        Args:
            offset: The first byte.
            length: The number of bytes, at least 1.

        Returns:
            An estimate; false if it is unknown.
        """
        return False

    def direct_alignment(self) -> int:
        """The alignment of direct reads.

        Returns:
            The number of bytes that offsets, addresses and lengths of ``read_direct`` must be multiples of; 0 if the
            store has no direct reads.
        """
        return 0

    def read_direct(self, offset: int, buffer: Buffer) -> int:
        """Read from the device, bypassing any cache. Call it only if ``direct_alignment`` is not 0.

        Args:
            offset: The first byte to read, aligned.
            buffer: A writable buffer with an aligned address and length.

        Returns:
            The number of bytes read, less than the buffer's length only at the end of the object.

        Raises:
            StorageError: The read failed.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - optional to override
        """Release the descriptor. Never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StorageBackend(ABC):
    """A store of objects below one root, opened from a URL by ``open_backend``.

    All methods block and may be called from any thread. They raise ``StorageError`` or one of its subclasses, with a
    message that names the backend and the key; each method lists the errors that callers depend on.
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    atomic_writer: bool = True
    """False if an object is visible under its key while a writer writes it, as on a local file system.

    Readers do not depend on it: objects count only once a manifest, which is written with ``put``, refers to them.
    """

    is_remote: bool = True
    """Whether bytes leave this machine, so that it may pay to encode them."""

    read_size: int = 8 << 20
    """The preferred size of one read in bytes, large enough to make the latency of a request negligible."""

    deadline_s: float = 600.0
    """How long one call may wait for the store, in seconds. The caller of ``open_backend`` sets it.

    A backend that repeats requests itself stops then, and raises ``StorageError``.
    """

    options: Mapping[str, Any] = MappingProxyType({})
    """What ``open_backend`` was called with, to open other roots in the same way. ``open_backend`` sets it."""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> StorageBackend:
        """Open the root that a URL names. A backend that is registered as an entry point must implement this.

        Args:
            url: The URL as the user has passed it.
            **options: Options of the backend.

        Returns:
            The backend. Nothing has been read or written yet.

        Raises:
            UnsupportedURLError: The URL or an option is not valid for this backend.
        """
        raise UnsupportedURLError(f"{cls.__name__} cannot be opened from a URL ({url!r}); construct it directly")

    @property
    @abstractmethod
    def url(self) -> str:
        """The root, in a form that ``open_backend`` accepts and that a person recognizes."""

    @property
    def display_url(self) -> str:
        """The root without user and password, for messages."""
        return without_userinfo(self.url)

    def endpoint(self) -> str:
        """Return what distinguishes this store from others that have a root with the same ``url``.

        Returns:
            For example the URL of a server that is an option, without user and password; empty, as by default, if
            ``url`` names one store only, or the backend cannot find it out.

        Raises:
            StorageError: An option is not valid.
        """
        return ""

    def conditions(self) -> Conditions:
        """Return which conditions ``put`` accepts. The default implementation returns that it accepts none.

        Returns:
            The conditions. They do not change while the backend is in use.

        Raises:
            StorageError: The store failed. A backend may have to ask it.
        """
        return Conditions()

    @abstractmethod
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        """Store a small object atomically and durably.

        Any reader sees either the complete old object or the complete new one. Once the call returns, a power failure
        does not lose the object.

        Args:
            key: The object's key.
            data: Its contents.
            if_absent: If true, store the object only if the key does not exist. The store itself decides this, so that
                of two concurrent writers exactly one succeeds.
            if_version: If not empty, store the object only if it replaces this version of it, which ``put``, ``stat``
                or ``get_versioned`` has returned. The store itself decides this, too. Not with ``if_absent``.

        Returns:
            The version of the stored object; empty if it is unknown.

        Raises:
            KeyExistsError: ``if_absent`` is true and the key exists.
            KeyChangedError: The object does not have the version ``if_version``, or was deleted.
            StorageError: The store cannot decide this condition (see ``conditions``), or the write failed. The object
                may or may not have been stored.
            StorageFullError: The store has no space left.
        """

    @abstractmethod
    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        """Begin to write a new object.

        An object that has this key already is replaced at the latest by ``complete``.

        Args:
            key: The object's key.
            size: Its exact size in bytes.
            at_most: ``size`` is the most that it may have, and ``ObjectWriter.shrink`` will state the exact size.

        Returns:
            A writer for the object.

        Raises:
            StorageFullError: It is already clear that ``size`` bytes do not fit, and ``at_most`` is false.
            StorageError: The object cannot be created.
        """

    def create_parts(self, key: str, size: int, *, token: str = "") -> PartWriter:
        """Begin to write a new object in parts, or continue an upload.

        The default implementation writes with ``create``, and no process can continue it.

        Args:
            key: The object's key.
            size: Its exact size in bytes.
            token: The ``PartWriter.token`` of an earlier writer of the same key and size; empty to begin a new upload.

        Returns:
            A writer. That the store still has the upload of ``token`` is not checked.

        Raises:
            StorageFullError: It is already clear that ``size`` bytes do not fit.
            StorageError: The object cannot be created, or ``token`` is not of this backend.
        """
        if token:
            raise StorageError(f"writing {key!r} in {self.display_url}: this store cannot continue an upload")
        return _PiecewiseWriter(self.create(key, size))

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        """Fill a buffer with consecutive bytes of an object.

        Args:
            key: The object's key.
            offset: The first byte to read.
            buffer: A writable contiguous buffer. It is filled completely.

        Raises:
            KeyNotFoundError: The key does not exist.
            StorageError: The object ends before the buffer is full, or the read failed.
        """

    def open_object(self, key: str) -> ObjectReader:
        """Open an object for many reads.

        The default implementation calls ``read_into`` for every read, and copies from a second buffer if there are
        several to fill.

        Args:
            key: The object's key.

        Returns:
            A reader. Close it when it is no longer needed.

        Raises:
            KeyNotFoundError: The key does not exist. A store may raise this at the first read instead.
        """
        return _RangedReader(self, key)

    @abstractmethod
    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        """Read a complete small object.

        Args:
            key: The object's key.
            max_size: The largest size in bytes to accept; None for no limit.

        Returns:
            The contents.

        Raises:
            KeyNotFoundError: The key does not exist.
            StorageError: The object is larger than ``max_size`` (checked before reading), or the read failed.
        """

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        """Read a complete small object and its version.

        The default implementation calls ``stat`` first. If the object is replaced then, the version is that of the old
        one, and a ``put`` with it fails.

        Args:
            key: The object's key.
            max_size: The largest size in bytes to accept; None for no limit.

        Returns:
            The contents, and the version for ``put(if_version=...)``; empty if the store has no versions.

        Raises:
            KeyNotFoundError: The key does not exist.
            StorageError: The object is larger than ``max_size``, or the read failed.
        """
        version = self.stat(key).version
        return self.get(key, max_size=max_size), version

    @abstractmethod
    def stat(self, key: str) -> ObjectStat:
        """Return the metadata of an object.

        Args:
            key: The object's key.

        Returns:
            Its size and version.

        Raises:
            KeyNotFoundError: The key does not exist.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """List every object whose key starts with a prefix.

        Args:
            prefix: The beginning of the keys. It may end inside a component.

        Returns:
            An iterator over the objects in key order. It is empty if there are none.

        Raises:
            StorageError: The listing failed. An iterator may raise this as well.
        """

    @abstractmethod
    def list_children(self, prefix: str = "") -> Sequence[str]:
        """List the next component of the keys below a prefix.

        The cost must depend on the number of children, not on the number of objects below them: this finds ``step-*``
        in a root of a million objects.

        Args:
            prefix: Empty, or a prefix that ends in ``/``.

        Returns:
            The names, sorted. A name with objects below it ends in ``/``.

        Raises:
            StorageError: The listing failed.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. A key that does not exist is not an error.

        A store with directories also removes the directories that this leaves empty.

        Args:
            keys: The keys of the objects.

        Raises:
            StorageError: An object could not be deleted. Others may have been deleted.
        """

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        """List the objects below a prefix that were begun and are neither complete nor aborted.

        A killed process leaves them, and so does a writer whose ``abort`` failed. Some belong to writers that are still
        in use. The default implementation is for stores that keep nothing of such an object.

        Args:
            prefix: The beginning of the keys.

        Returns:
            An iterator over the uploads.

        Raises:
            StorageError: The listing failed. The iterator may raise this as well.
        """
        return iter(())

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:  # noqa: B027 - optional to override
        """End uploads and remove their parts. One that has ended already is not an error.

        Args:
            uploads: What ``incomplete`` has returned. A writer that is still in use will fail.

        Raises:
            StorageError: An upload could not be ended. Others may have been ended.
        """

    def fall_back(self, error: CorruptionError | StorageError) -> StorageBackend | None:
        """Return another store with the same objects, to read what could not be read from this one.

        The default implementation is for stores that are the only copy.

        Args:
            error: Why the bytes are needed from elsewhere: they could not be read, or differ from their checksum. Its
                ``key`` is that of the file.

        Returns:
            The other store; None if there is none.
        """
        return None

    def open_other(self, url: str) -> StorageBackend | None:
        """Return the backend of another root of the same store, if it must be made from this one.

        The default implementation is for stores that ``open_backend`` opens.

        Args:
            url: The other root.

        Returns:
            The backend; None if ``open_backend`` makes it.
        """
        return None

    def remarks(self) -> Sequence[str]:
        """Describe what was unusual about the reads so far, for the report of a load.

        Returns:
            Sentences without a period; usually none.
        """
        return ()

    def staleness_s(self) -> float:
        """Return for how long a read or a listing may return what was there before another host has written.

        Returns:
            The time in seconds, 0 as by default if the store is consistent. Never raises.
        """
        return 0.0

    def free_bytes(self) -> int | None:
        """Return how many more bytes the store can hold.

        Returns:
            The number of bytes, or None if it is unknown. Never raises.
        """
        return None

    def close(self) -> None:  # noqa: B027 - optional to override
        """Release connections and descriptors. The backend may be used again afterwards."""


class _RangedReader(ObjectReader):
    """The default reader: every read is a request by key."""

    def __init__(self, backend: StorageBackend, key: str) -> None:
        self._backend, self._key = backend, key

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if len(buffers) == 1:
            self._backend.read_into(self._key, offset, buffers[0])
            return
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        whole = bytearray(sum(map(len, views)))
        self._backend.read_into(self._key, offset, whole)
        content, at = memoryview(whole), 0
        for view in views:
            view[:] = content[at : at + len(view)]
            at += len(view)


class _PiecewiseWriter(PartWriter):
    """The default writer of parts: each is written at its offset, and the object exists when all are written."""

    part_bytes = 8 << 20
    token = ""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    def put_part(self, number: int, data: Buffer) -> str:
        self._writer.write(number * self.part_bytes, data)
        return ""

    def complete(self, tags: Sequence[str]) -> None:
        self._writer.complete()

    def abort(self) -> None:
        self._writer.abort()
