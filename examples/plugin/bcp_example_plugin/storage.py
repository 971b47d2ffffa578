"""A storage backend that keeps all objects in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Buffer

from bytecheckpoint.errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError, UnsupportedURLError
from bytecheckpoint.storage_backends import (
    BufferedWriter,
    Conditions,
    ObjectStat,
    ObjectWriter,
    StorageBackend,
    byte_view,
    check_children_prefix,
    check_key,
    check_prefix,
)

__all__ = ["SQLiteBackend"]

_SCHEME = "sqlite://"
_LOCK_TIMEOUT_S = 60.0
_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
    version INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, content BLOB NOT NULL
)
"""


class SQLiteBackend(StorageBackend):
    """Objects in the SQLite file ``path``; their keys begin with ``prefix``.

    SQLite makes each transaction atomic and durable, also among processes of one host. An object is held in memory
    until it is complete.
    """

    schemes: ClassVar[tuple[str, ...]] = ("sqlite",)

    def __init__(self, path: str | Path, prefix: str = "") -> None:
        self._path = Path(path)
        self._prefix = prefix
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.url} cannot be created: {error}") from error
        with self._connection("opening") as connection:
            connection.execute(_TABLE)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SQLiteBackend:
        """Open ``sqlite:///directory/file.db`` or ``sqlite:///directory/file.db/prefix``."""
        file, suffix, prefix = url.removeprefix(_SCHEME).partition(".db")
        if options or not file.startswith("/") or not suffix or (prefix and not prefix.startswith("/")):
            raise UnsupportedURLError(f"{url!r}: expected sqlite:///directory/file.db and no options")
        inside = prefix.strip("/")
        return cls(file + suffix, inside + "/" if inside else "")

    @property
    def url(self) -> str:
        return f"{_SCHEME}{self._path}/{self._prefix}".rstrip("/")

    def conditions(self) -> Conditions:
        return Conditions(if_absent=True, if_version=True)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        statement = "INSERT" if if_absent or if_version else "INSERT OR REPLACE"
        with self._connection(f"writing {key!r}") as connection:
            if if_version:
                replaced = connection.execute(
                    "DELETE FROM objects WHERE key = ? AND version = ?", (self._prefix + key, if_version)
                )
                if not replaced.rowcount:
                    raise KeyChangedError(f"writing {key!r} in {self.url}: the object was replaced or deleted")
            try:
                stored = connection.execute(
                    f"{statement} INTO objects (key, content) VALUES (?, ?)", self._row(key, bytes(data))
                )
                return str(stored.lastrowid)
            except sqlite3.IntegrityError:
                raise KeyExistsError(f"writing {key!r} in {self.url}: the key exists") from None

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        check_key(key)
        return BufferedWriter(f"writing {key!r} in {self.url}", size, lambda content: self.put(key, content))

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        view = byte_view(buffer)
        if view.readonly:
            raise StorageError(f"reading {key!r} in {self.url}: the buffer is read-only")
        content = self.get(key) if offset < 0 else self._content(key, offset, len(view))
        if offset < 0 or len(content) != len(view) or offset > self.stat(key).size:
            raise StorageError(f"reading {key!r} in {self.url}: bytes [{offset}, {offset + len(view)}) do not exist")
        view[:] = content

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        if max_size is not None and (size := self.stat(key).size) > max_size:
            raise StorageError(f"reading {key!r} in {self.url}: {size} bytes, at most {max_size} were expected")
        # One query: the object may be replaced between two.
        content, version = self._find(key, "content, version")
        return content, str(version)

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        version, size = self._find(key, "version, length(content)")
        return ObjectStat(key, size, str(version))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        start = self._prefix + prefix
        with self._connection("listing") as connection:
            rows = connection.execute(
                "SELECT key, length(content), version FROM objects WHERE substr(key, 1, ?) = ? ORDER BY key",
                (len(start), start),
            ).fetchall()
        return (ObjectStat(key.removeprefix(self._prefix), size, str(version)) for key, size, version in rows)

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        below = (found.key.removeprefix(prefix).partition("/") for found in self.list(prefix))
        return sorted({name + slash for name, slash, _ in below})

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with self._connection("deleting") as connection:
            connection.executemany("DELETE FROM objects WHERE key = ?", [(self._prefix + key,) for key in keys])

    def _content(self, key: str, offset: int, length: int) -> bytes:
        check_key(key)
        content: bytes | None = self._find(key, "substr(content, ?, ?)", offset + 1, length)[0]
        return content or b""  # SQLite returns NULL for a part of an empty object

    def _find(self, key: str, columns: str, *values: int) -> tuple[Any, ...]:
        with self._connection(f"reading {key!r}") as connection:
            row = connection.execute(
                f"SELECT {columns} FROM objects WHERE key = ?", (*values, self._prefix + key)
            ).fetchone()
        if row is None:
            raise KeyNotFoundError(f"reading {key!r} in {self.url}: no such object")
        return tuple(row)

    def _row(self, key: str, content: bytes) -> tuple[str, bytes]:
        return self._prefix + key, content

    @contextmanager
    def _connection(self, action: str) -> Iterator[sqlite3.Connection]:
        """A transaction on a new connection: a connection must not be shared by threads."""
        try:
            with closing(sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S)) as connection, connection:
                yield connection
        except sqlite3.Error as error:
            raise StorageError(f"{action} in {self.url}: {error}") from error
