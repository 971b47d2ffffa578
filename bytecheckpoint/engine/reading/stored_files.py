"""Open the files of a checkpoint, check their heads, and describe how they differ from the manifest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ...codecs import Codec, find_codec
from ...errors import (
    CorruptionError,
    KeyNotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from ...format.checksums import checksum_of
from ...format.manifest.document import Manifest
from ...format.manifest.files import COMPANION
from ...storage_backends.base import ObjectReader, StorageBackend

_log = logging.getLogger(__name__)

_damaged: set[str] = set()

Fault = Callable[[int, CorruptionError], None]
"""Called with the row of a shard and the fault in one of its chunks: raises the fault, or records it and returns.

The row is -1 for a fault of a whole file or reference.
"""


def read_stored_file(backend: StorageBackend, manifest: Manifest, row: int, *, head_only: bool) -> bytes:
    """Return the checked head of file ``row``: a safetensors header, or a whole values document.

    Raises ``CorruptionError`` if the file is missing, was changed, or (unless ``head_only``) has another size, and
    ``StorageError`` if the store fails.
    """
    try:
        return _read_stored_file(backend, manifest, row, head_only)
    except (CorruptionError, StorageError) as error:
        other = source_after(backend, error)
        if other is None:
            raise
    return _read_stored_file(other, manifest, row, head_only)


def source_after(backend: StorageBackend, error: CorruptionError | StorageError) -> StorageBackend | None:
    """Return the store to read from again after ``error``; None if it must be raised.

    That is the other copy, if there is one. Bytes from a remote store may have changed on their way, and a mount may
    have cached others.
    """
    other = backend.fall_back(error)
    is_far = backend.is_remote or backend.staleness_s() > 0
    if other is None and is_far and isinstance(error, CorruptionError):
        _log.warning("reading again: %s", error)
        return backend
    return other


def _read_stored_file(backend: StorageBackend, manifest: Manifest, row: int, head_only: bool) -> bytes:  # noqa: FBT001
    files = manifest.files
    key, size, length = files.name[row], int(files.size[row]), int(files.head_length[row])
    head: bytes | bytearray
    try:
        if length == size and not head_only:
            head = backend.get(key, max_size=size)  # one request, which also finds bytes after the last
        else:
            head = bytearray(length)
            if not head_only and (found := backend.stat(key).size) != size:
                raise _wrong_size(backend, key, found, size)
            backend.read_into(key, 0, head)
    except KeyNotFoundError as error:
        raise _missing(backend, manifest, key, f"section {manifest.sections[int(files.section[row])].name}") from error
    except StorageError as error:
        raise _unreadable(backend, key, size, f"its first {length} bytes", error) from error
    if len(head) != length:
        raise _wrong_size(backend, key, len(head), size)
    if checksum_of(head) != files.head_checksum[row].item():
        what = {"tensors": "header", COMPANION: "text"}.get(files.kind[row], "values")
        section = manifest.sections[int(files.section[row])].name
        raise _corruption(
            backend,
            key,
            f"checksum mismatch in the {what} of section {section}, bytes [0, {length}): this is not the file that was "
            f"saved (changed, or swapped with another)",
        )
    return bytes(head)


class StoredFiles:
    """The data files of one checkpoint. Builds the errors that describe their faults. Thread-safe.

    ``backend`` is where the data files are (``Index.data``).
    """

    def __init__(self, backend: StorageBackend, manifest: Manifest) -> None:
        self.backend = backend
        self.manifest = manifest

    def codec(self, file: int) -> Codec:
        """Return the codec of an encoded file. Raises ``UnsupportedVersionError`` if it is not installed."""
        try:
            return find_codec(self.manifest.files.codec[file])
        except UnsupportedVersionError as error:
            raise UnsupportedVersionError(f"{self.backend.url}/{self.manifest.files.name[file]}: {error}") from None

    def check_codecs(self, files: Iterable[int]) -> None:
        """Raise ``UnsupportedVersionError`` if the codec of one of these files is not installed."""
        for file in files:
            if self.is_encoded(file):
                self.codec(file)

    def is_encoded(self, file: int) -> bool:
        """Whether the file consists of frames."""
        return self.manifest.files.codec[file] != "raw"

    def open(self, file: int, row: int) -> ObjectReader:
        """Open a file to read its shard ``row``. Raises what ``read_error`` returns."""
        try:
            return self.backend.open_object(self.manifest.files.name[file])
        except StorageError as error:
            begin = int(self.manifest.files.head_length[file] + self.manifest.shard_offset[row])
            raise self.read_error(file, row, begin, begin + int(self.manifest.shard_nbytes[row]), error) from error

    def read_error(
        self, file: int, row: int, begin: int, end: int, error: StorageError, *, source: int = 0
    ) -> CorruptionError | StorageError:
        """Return the error for bytes ``[begin, end)`` of a file, part of shard ``row``, that cannot be read.

        If ``source`` is not 0, the file is that reference (see ``FrameTable``).
        """
        backend, key, size = self.holder(file, source)
        if isinstance(error, KeyNotFoundError):
            return _missing(backend, self.manifest, key, self._where(row))
        what = f"bytes [{begin}, {end}) of {self._where(row)}"
        return _unreadable(backend, key, size, what, error)

    def holder(self, file: int, source: int) -> tuple[StorageBackend, str, int]:
        """Return where a file or a reference is, and its size."""
        if not source:
            return self.backend, self.manifest.files.name[file], int(self.manifest.files.size[file])
        references = self.manifest.references
        return self.backend, references.name[source - 1], int(references.size[source - 1])

    def check_size(self, opened: ObjectReader, file: int, on_fault: Fault, *, source: int = 0) -> None:
        """Call ``on_fault`` if the store has stated another size of a file or a reference than the manifest does."""
        backend, key, size = self.holder(file, source)
        if opened.size is not None and opened.size != size:
            on_fault(-1, _wrong_size(backend, key, opened.size, size))

    def mismatch(self, file: int, row: int, begin: int, end: int) -> CorruptionError:
        """Return the error for bytes of shard ``row`` whose checksum differs from the manifest's."""
        key, problem = self.manifest.files.name[file], f"checksum mismatch in {self._where(row)}"
        if self.is_encoded(file):
            return _corruption(
                self.backend,
                key,
                f"{problem}, decoded bytes [{begin}, {end}): the codec {self.manifest.files.codec[file]} returns other "
                f"bytes than were saved. Install the version of its package that wrote them, or load an earlier "
                f"checkpoint",
            )
        return _changed(self.backend, key, f"{problem}, bytes [{begin}, {end})")

    def frame_place(self, file: int, frame: int) -> tuple[int, int, int]:
        """Return the shard of a frame, and the range of its stored bytes."""
        frames = self.manifest.files.frames
        assert frames is not None
        rows = self.manifest.shards_in(file)
        rows = rows[self.manifest.shard_nbytes[rows] > 0]
        at = int(np.searchsorted(self.manifest.shard_offset[rows], frames.begin[frame], side="right")) - 1
        begin = int(frames.position[frame])
        return int(rows[at]), begin, begin + int(frames.length[frame])

    def frame_fault(self, file: int, frame: int, problem: str) -> tuple[int, CorruptionError]:
        """Return the shard of a frame, and the error for a ``problem`` with its stored bytes."""
        row, begin, end = self.frame_place(file, frame)
        frames = self.manifest.files.frames
        assert frames is not None
        backend, key, _ = self.holder(file, int(frames.source[frame]))
        return row, _changed(backend, key, f"{problem} in {self._where(row)}, bytes [{begin}, {end})")

    def crc_mismatch(self, file: int, begin: int, end: int) -> CorruptionError:
        """Return the error for bytes of a file whose CRC-32 differs from the one that is stored with them."""
        start = self.manifest.files.head_length[file] + self.manifest.shard_offset
        inside = (self.manifest.shard_file == file) & (start >= begin) & (start < end)
        where = ", ".join(map(self._where, np.flatnonzero(inside).tolist()[:3]))
        problem = f"CRC-32 mismatch in {where}, bytes [{begin}, {end})"
        return _changed(self.backend, self.manifest.files.name[file], problem)

    def present_size(self, file: int, error: StorageError, *, source: int = 0) -> int:
        """Return the size of the file or the reference after ``error``; the manifest's if the store does not answer."""
        return _present_size(*self.holder(file, source), error)

    def _where(self, row: int) -> str:
        tensors, shards = self.manifest.tensors, self.manifest.shards
        return f"tensor {tensors.names[int(shards.tensor[row])]} {shards.box_of(row)}"


class OpenFiles:
    """Opens each file on its first use and closes it after its last one. Thread-safe.

    ``uses`` maps each file to the number of its uses.
    """

    def __init__(self, source: StoredFiles, uses: Mapping[int, int]) -> None:
        self.source = source
        self._uses_left = dict(uses)
        self._open: dict[int, ObjectReader] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, file: int, row: int) -> Iterator[ObjectReader]:
        """Return the open file for one of its uses. Raises as ``StoredFiles.open`` does."""
        try:
            with self._lock:
                if file not in self._open:
                    self._open[file] = self.source.open(file, row)
                opened = self._open[file]
            yield opened
        finally:
            with self._lock:
                self._uses_left[file] -= 1
                if not self._uses_left[file] and file in self._open:
                    self._open.pop(file).close()

    def close(self) -> None:
        """Close all files, after a failure. No thread may be using one."""
        with self._lock:
            for opened in self._open.values():
                opened.close()
            self._open.clear()


def damaged_files() -> list[str]:
    """Return the names of all data files that this process has found damaged or missing.

    No two attempts have the same name, so these names identify the files, wherever they are.
    """
    return sorted(_damaged)


def _corruption(backend: StorageBackend, key: str, problem: str) -> CorruptionError:
    _damaged.add(key)
    return CorruptionError(f"{backend.url}/{key}: {problem}", key=key)


def _changed(backend: StorageBackend, key: str, problem: str) -> CorruptionError:
    advice = "the stored bytes changed after they were written; restore the file or load an earlier checkpoint"
    return _corruption(backend, key, f"{problem}: {advice}")


def _missing(backend: StorageBackend, manifest: Manifest, key: str, where: str) -> CorruptionError:
    if manifest.is_shared:
        advice = (
            "the incremental checkpoint shares it with others of its root: only bcp copy moves it out of there, or "
            "copy the root as a whole"
        )
    else:
        advice = "it was deleted, not copied, or the checkpoint was overwritten during the read (then load again)"
    return _corruption(backend, key, f"file is missing, but the manifest names it for {where}; {advice}")


def _wrong_size(backend: StorageBackend, key: str, found: int, size: int) -> CorruptionError:
    return _corruption(
        backend,
        key,
        f"the file has {found} bytes, but the manifest states {size}; it was changed or replaced; restore it or load "
        f"an earlier checkpoint",
    )


def _unreadable(
    backend: StorageBackend, key: str, size: int, what: str, error: StorageError
) -> CorruptionError | StorageError:
    """Return ``CorruptionError`` for a truncated file, and ``error`` with its context if the store failed."""
    found = _present_size(backend, key, size, error)
    if found == size:
        described = type(error)(f"{backend.url}/{key}: cannot read {what}: {error}")
        described.is_late, described.key = error.is_late, error.key or key
        return described
    return _corruption(
        backend,
        key,
        f"cannot read {what}: the file has {found} bytes, but the manifest states {size}; it was truncated or "
        f"replaced; restore it or load an earlier checkpoint",
    )


def _present_size(backend: StorageBackend, key: str, size: int, error: StorageError) -> int:
    """Return the size of an object that could not be read, or ``size`` if that is unknown."""
    try:
        return size if error.is_late else backend.stat(key).size
    except StorageError:
        return size
