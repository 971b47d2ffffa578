"""Objects in this process's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, ClassVar

from typing_extensions import Buffer

from ..errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError, UnsupportedURLError
from .base import Conditions, ObjectStat, ObjectWriter, StorageBackend
from .buffers import check_max_size, writable_view
from .keys import check_children_prefix, check_key, check_prefix
from .writers import BufferedWriter

_URL = re.compile(r"memory://(?P<name>[^/]+)(?:/(?P<prefix>.*))?", re.DOTALL)


@dataclass
class _Store:
    """The objects of one store by key.

    A stored object may be replaced but never changes, so readers copy it without the lock.
    """

    lock: Lock = field(default_factory=Lock)
    objects: dict[str, tuple[memoryview, int]] = field(default_factory=dict)
    versions: Iterator[int] = field(default_factory=lambda: count(1))


_stores: dict[str, _Store] = {}


class MemoryBackend(StorageBackend):
    """The in-memory store ``name`` of this process, below ``prefix``.

    All backends with the same name share one store. It exists until the process ends or ``delete_store`` is called. A
    forked child has its own copy.
    """

    schemes: ClassVar[tuple[str, ...]] = ("memory",)
    is_remote: bool = False

    def __init__(self, name: str, prefix: str = "") -> None:
        """Open a store, and create it if it does not exist.

        Args:
            name: The name of the store, without slashes.
            prefix: The root within the store; empty or a key.

        Raises:
            StorageError: The name or the prefix is not valid.
        """
        if not name or "/" in name:
            raise StorageError(f"a memory store needs a name without slashes, got {name!r}")
        if prefix:
            check_key(prefix)
        self._name = name
        self._prefix = prefix + "/" if prefix else ""
        self._store = _stores.setdefault(name, _Store())

    @classmethod
    def from_url(cls, url: str, **options: Any) -> MemoryBackend:
        """Open ``memory://name`` or ``memory://name/prefix``. There are no options."""
        if options:
            raise UnsupportedURLError(f"memory storage takes no options, got {sorted(options)} for {url!r}")
        found = _URL.fullmatch(url)
        if found is None:
            raise UnsupportedURLError(f"{url!r} has no name; pass a URL such as memory://name/path")
        return cls(found["name"], (found["prefix"] or "").rstrip("/"))

    @classmethod
    def delete_store(cls, name: str) -> None:
        """Delete a store and free its memory. Backends that are open on it keep their objects."""
        _stores.pop(name, None)

    @property
    def url(self) -> str:
        return f"memory://{self._name}/{self._prefix}".rstrip("/")

    def conditions(self) -> Conditions:
        return Conditions(if_absent=True, if_version=True)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        return self._put(key, memoryview(bytes(data)), if_absent=if_absent, if_version=if_version)

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        check_key(key)
        return BufferedWriter(f"writing {key!r} in {self.url}", size, partial(self._put, key))

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        action = f"reading {key!r} in {self.url}"
        view = writable_view(action, buffer)
        content, _ = self._find(key)
        end = offset + len(view)
        if offset < 0 or end > len(content):
            raise StorageError(
                f"{action}: requested bytes [{offset}, {end}), got "
                f"{max(0, len(content) - max(offset, 0))}: the object has only {len(content)} bytes"
            )
        view[:] = content[offset:end]

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        content, version = self._find(key)
        check_max_size(f"reading {key!r} in {self.url}", len(content), max_size)
        return bytes(content), str(version)

    def stat(self, key: str) -> ObjectStat:
        content, version = self._find(key)
        return ObjectStat(key, len(content), str(version))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        full = self._prefix + prefix
        with self._store.lock:
            found = [(key, len(data), version) for key, (data, version) in self._store.objects.items()]
        skip = len(self._prefix)
        return (
            ObjectStat(key[skip:], size, str(version)) for key, size, version in sorted(found) if key.startswith(full)
        )

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        full = self._prefix + prefix
        with self._store.lock:
            below = [key[len(full) :] for key in self._store.objects if key.startswith(full)]
        return sorted({name + slash for name, slash, _ in (key.partition("/") for key in below)})

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with self._store.lock:
            for key in keys:
                self._store.objects.pop(self._prefix + key, None)

    def _find(self, key: str) -> tuple[memoryview, int]:
        check_key(key)
        with self._store.lock:
            found = self._store.objects.get(self._prefix + key)
        if found is None:
            raise KeyNotFoundError(f"reading {key!r} in {self.url}: no such object")
        return found

    def _put(self, key: str, data: memoryview, *, if_absent: bool = False, if_version: str = "") -> str:
        with self._store.lock:
            _, found = self._store.objects.get(self._prefix + key, (None, 0))
            if if_absent and found:
                raise KeyExistsError(f"writing {key!r} in {self.url}: the key is taken")
            if if_version and if_version != str(found):
                raise KeyChangedError(f"writing {key!r} in {self.url}: the object was replaced or deleted")
            version = next(self._store.versions)
            self._store.objects[self._prefix + key] = (data, version)
            return str(version)
