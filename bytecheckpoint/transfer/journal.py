"""What a transfer has done so far, in a file that another process can continue from.

The journal is next to the local copy of the checkpoint. Its name is that of a temporary file, so that no listing shows
it, and it is removed with the checkpoint. Of a copy between two stores, it is in a directory of the user, where
``find_journals`` does not find it. It is a sequence of records, each a length, a checksum and a msgpack list:

    ["transfer", version, direction, URL of the other side, attempt, rank or nil, source]       first, once
    ["file", key, size, token, part size]                  an upload began; forgets an earlier one of this file
    ["part", key, number, tag]                             the store has acknowledged a part
    ["stored", key]                                        the file is complete and durable
    ["committed"]                                          the local copy is committed, by all ranks of the save
    ["attempt", name]                                      the attempt that a copy makes of it at the target

A record that is incomplete or damaged ends the journal: what follows it is sent again. If that is the first one, the
name of an upload's journal still shows which of the checkpoints at its side it is about (``repair_journals``).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgpack
import xxhash

from ..checkpoint.nearest import JOURNAL_PREFIX
from ..errors import StorageError, UsageError
from ..format.manifest.document import Manifest

_VERSION = 1
_FRAME = struct.Struct("<IQ")  # length and xxh3-64 of the record that follows
_MAX_RECORD = 64 << 10
_MAX_JOURNAL = 256 << 20

_log = logging.getLogger(__name__)

Direction = Literal["to", "from", "between"]


@dataclass(frozen=True)
class JournalHead:
    """What a journal is about.

    Attributes:
        direction: Whether the copy next to the journal is sent "to" the other side, or comes "from" it; or "between",
            if the journal is next to neither side.
        url: The other side, without user and password; of a copy between two stores, the target.
        attempt: The attempt of the checkpoint.
        rank: The rank whose files are transferred; None if all are.
        source: Where a copy between two stores comes from, without user and password.
    """

    direction: Direction
    url: str
    attempt: str
    rank: int | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"from {self.source} to {self.url}" if self.source else f"{self.direction} {self.url}"


@dataclass
class FileUpload:
    """The upload of one file: its ``token`` and part size, and the tags of the parts that are stored, by number."""

    size: int
    token: str
    part_bytes: int
    tags: dict[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class Progress:
    """What a transfer has done.

    Attributes:
        attempt: The attempt that a copy makes of the checkpoint at the target; empty if there is none yet.
        uploads: The uploads of files that are not complete, by key.
        stored: The keys of complete files.
        is_committed: Whether the local copy was committed after the journal was begun.
    """

    attempt: str = ""
    uploads: dict[str, FileUpload] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    is_committed: bool = False

    def apply(self, record: list[Any]) -> None:
        """Add what a record of a journal says; one of an unknown kind says nothing."""
        match record:
            case ["file", str(key), int(size), str(token), int(part_bytes)] if part_bytes > 0:
                self.stored.discard(key)
                self.uploads[key] = FileUpload(size, token, part_bytes)
            case ["part", str(key), int(number), str(tag)] if key in self.uploads:
                self.uploads[key].tags[number] = tag
            case ["stored", str(key)]:
                self.uploads.pop(key, None)
                self.stored.add(key)
            case ["committed"]:
                self.is_committed = True
            case ["attempt", str(name)]:
                self.attempt = name


def _journal_path(directory: str, head: JournalHead) -> str:
    """Return the path of the journal in a local directory."""
    if head.direction == "between":
        sides = f"{head.source}\n{head.url}"
        return os.path.join(directory, f"copy-{xxhash.xxh3_64_hexdigest(sides.encode())}.journal")
    # A copy of another checkpoint to the same place finds the journal, and what remains to be removed. The uploads of
    # a rank to one path, one after the other, have a journal each.
    named = head.url if head.rank is None else f"{head.url} {head.attempt} {head.rank}"
    return os.path.join(directory, f"{JOURNAL_PREFIX}{head.direction}-{xxhash.xxh3_64_hexdigest(named.encode())}")


def user_directory() -> str:
    """Return the directory for the journals of this user's copies between two stores.

    Raises ``StorageError`` if the user has no home directory.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the standard ignores such a value
        state = os.path.expanduser("~/.local/state")
    if not os.path.isabs(state):
        raise StorageError("there is no directory for the journal: neither XDG_STATE_HOME nor HOME is set")
    return os.path.join(state, "bytecheckpoint", "copies")


def find_journals(root: str) -> Iterator[tuple[str, JournalHead]]:
    """Yield the path and the head of every journal below a directory, except those of copies between two stores."""
    for path, head in _walk(root):
        if head is not None:
            yield path, head


def find_upload_journals(root: str) -> Iterator[str]:
    """Yield the path of every journal of an upload below a directory, also of damaged ones."""
    for path, head in _walk(root):
        if head.direction == "to" if head is not None else _is_of_upload(path):
            yield path


def find_damaged_journals(root: str) -> Iterator[str]:
    """Yield the path of every journal of an upload below a directory that does not show what it is about."""
    for path, head in _walk(root):
        if head is None and _is_of_upload(path):
            yield path


def _is_of_upload(path: str) -> bool:
    return os.path.basename(path).startswith(f"{JOURNAL_PREFIX}to-")


def repair_journals(directory: str, manifest: Manifest, urls: Iterable[str]) -> None:
    """Begin the damaged journals of the checkpoint in a directory again: nothing is known to be sent.

    ``urls`` are those to which it may be uploaded, without user and password. Raises ``StorageError``.
    """
    damaged = {*find_damaged_journals(directory)}
    ranks = (None, *sorted({*manifest.files.rank.tolist()})) if damaged else ()
    for head in (JournalHead("to", url, manifest.attempt, rank) for url in urls for rank in ranks):
        path = _journal_path(directory, head)
        if path in damaged:
            with suppress(UsageError), Journal(directory, head):  # its process may have begun it this moment
                _log.warning("%s was damaged; the upload begins again", path)


def _walk(root: str) -> Iterator[tuple[str, JournalHead | None]]:
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.startswith(JOURNAL_PREFIX):
                yield os.path.join(directory, name), _read_head(os.path.join(directory, name))


class Journal(Progress):
    """An open journal, locked against other processes. Thread-safe.

    Attributes:
        outdated: What the journal held about another checkpoint, if the one at its side was replaced; else None.
    """

    def __init__(self, directory: str, head: JournalHead) -> None:
        """Open the journal in a local directory, or begin a new one.

        Raises ``UsageError`` if another process has it open, and ``StorageError`` if the file cannot be written.
        """
        super().__init__()
        self._path = path = _journal_path(directory, head)
        self._lock = threading.Lock()
        self.outdated: Progress | None = None
        try:
            os.makedirs(directory, 0o700 if head.direction == "between" else 0o777, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StorageError(f"cannot open the journal {path}: {error.strerror}") from error
        try:
            self._begin(head)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"cannot read or write the journal {path}: {error.strerror}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. The file remains."""
        with suppress(OSError):
            os.close(self._fd)

    def _begin(self, head: JournalHead) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise UsageError(
                    f"another process copies this checkpoint {head}: it has locked {self._path}; "
                    f"wait until it has ended"
                ) from None
            # A file system without locks: parts that two processes send are equal.
        with open(self._path, "rb") as file:
            found = list(_records(file.read(_MAX_JOURNAL)))
        known = _head(found[0][0]) if found else None
        if known not in (None, head):
            self.outdated = Progress()
        for record, _ in found[1:] if known is not None else ():
            (self.outdated or self).apply(record)
        if known == head:
            os.ftruncate(self._fd, found[-1][1])
            return
        os.ftruncate(self._fd, 0)
        first = ["transfer", _VERSION, head.direction, head.url, head.attempt, head.rank, head.source]
        try:
            self._append(first, durable=True)
        except StorageError:
            self.remove()  # an empty one would say for ever that something is not uploaded
            raise

    def begin(self, key: str, upload: FileUpload) -> None:
        """Record a new upload. It is durable on return: a lost record would hide the upload, which costs money."""
        self._append(["file", key, upload.size, upload.token, upload.part_bytes], durable=True)

    def add_part(self, key: str, number: int, tag: str) -> None:
        """Record that the store has a part."""
        self._append(["part", key, number, tag])

    def add_stored(self, key: str) -> None:
        """Record that a file is complete."""
        self._append(["stored", key])

    def begin_attempt(self, attempt: str) -> None:
        """Record the attempt of a copy, before its first file is written."""
        self._append(["attempt", attempt], durable=True)

    def add_committed(self) -> None:
        """Record that the checkpoint is committed in the journal's folder."""
        self._append(["committed"])

    def forget(self, key: str) -> None:
        """Forget what is known of a file. The next ``begin`` records it."""
        self.uploads.pop(key, None)
        self.stored.discard(key)

    def remove(self) -> None:
        """Remove the file: nothing is left to continue. Logs a failure."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s cannot be removed, so the transfer seems unfinished: %s", self._path, error.strerror)

    def _append(self, record: list[Any], *, durable: bool = False) -> None:
        body = msgpack.packb(record)
        data = _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body
        with self._lock:
            try:
                end = os.lseek(self._fd, 0, os.SEEK_END)
                if os.write(self._fd, data) < len(data):
                    os.ftruncate(self._fd, end)  # what follows a torn record would be lost
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if durable:
                    os.fdatasync(self._fd)
            except OSError as error:
                raise StorageError(f"cannot write the journal {self._path}: {error.strerror}") from error
            self.apply(record)


def _records(data: bytes) -> Iterator[tuple[list[Any], int]]:
    """Yield each intact record from the start, and where it ends."""
    at = 0
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        body = data[at : at + length]
        if length > _MAX_RECORD or len(body) < length or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        at += length
        try:
            record = msgpack.unpackb(body)
        except ValueError:
            return
        yield record, at


def _read_head(path: str) -> JournalHead | None:
    with suppress(OSError), open(path, "rb") as file:
        return next((_head(record) for record, _ in _records(file.read(_FRAME.size + _MAX_RECORD))), None)
    return None


def _head(record: Any) -> JournalHead | None:
    match record:
        case [
            "transfer",
            int(version),
            "to" | "from" | "between" as direction,
            str(url),
            str(attempt),
            int() | None as rank,
            str(source),
        ] if version == _VERSION:
            return JournalHead(direction, url, attempt, rank, source)
    return None
