"""Read a checkpoint from its copy in a tier of this machine, where there is one.

A save with a tier commits a checkpoint to a folder of each machine, and uploads it from there. A machine's folder
has the files of its own ranks only. The names of data files are never used twice, so a file that is there is a copy of
the one in the store; the manifest in the store decides which checkpoint is at a path, unless the upload of a later one
is unfinished, or the store cannot be reached.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Buffer

from ..engine.objects import OBJECTS
from ..errors import HIDDEN_PASSWORD, CheckpointError, CorruptionError, KeyNotFoundError, StorageError, UsageError
from ..format.manifest.envelope import MANIFEST_KEY
from ..runtime import DEFAULT_DEADLINE_S
from ..storage_backends import ObjectStat, ObjectWriter, StorageBackend, open_backend, open_like
from ..storage_backends.base import ObjectReader
from ..storage_backends.keys import TEMPORARY_PREFIX
from ..storage_backends.local.backend import LocalBackend
from ..storage_backends.wrapping import WrappingBackend
from .attempts import ATTEMPT_PREFIX
from .lineage import ROLLBACK_KEY, Abandoned
from .location import Location, Silence, Tier
from .manifest_file import decode_manifest

JOURNAL_PREFIX = TEMPORARY_PREFIX + "transfer-"
"""The prefix of the names of journals; that of an upload continues with ``to-``."""

_LEAST_S = 0.5

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def open_tier(tier: str | os.PathLike[str], store: StorageBackend) -> LocalBackend:
    """Return the folder below ``tier`` for what ``store`` holds: its URL as a path, without user and password.

    An endpoint in the options of ``store`` follows the scheme: a bucket may have the same name at two of them. So one
    tier serves all paths, and ``join`` of names below the URL is ``join`` of folders.

    Raises ``UsageError`` if ``tier`` is not a local folder.
    """
    root = open_backend(tier)
    if not isinstance(root, LocalBackend):
        raise UsageError(f"a tier must be a local folder, not {root.display_url}")
    scheme, _, path = store.display_url.replace(HIDDEN_PASSWORD, "").rpartition("://")
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    endpoint = re.sub(r"[^\w.-]+", "-", urlsplit(_endpoint(store.options)).netloc.rpartition("@")[2])
    top = (scheme.replace("/", "-") or "file") + (f"@{endpoint}" if endpoint else "")
    return LocalBackend(os.path.join(root.url, top, *parts), direct_io=root.direct_io)


def _endpoint(options: Mapping[str, Any]) -> str:
    return str(options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url") or "")


def open_nearest(location: Location, deadline_s: float = DEFAULT_DEADLINE_S) -> StorageBackend:
    """Return the backend of a location, for reading: with a tier, it prefers the copies there.

    Of several backends of one location and what is below it, only the first one waits long for a silent store.
    """
    store = location.open(deadline_s)
    tier = location.tier
    return store if tier is None else NearestBackend(tier, store, location.silence)


class NearestBackend(WrappingBackend):
    """Reads data files in ``near`` where they are there, and everything else in ``far``.

    Writes nothing to ``near``, except the record of a rollback, which a search needs while the store does not answer.
    """

    def __init__(self, tier: Tier, far: StorageBackend, silence: Silence) -> None:
        super().__init__(far)
        self._tier, self._near, self._far, self._silence = tier, open_tier(tier.path, far), far, silence
        self._lock = threading.Lock()
        self._here: set[str] = set()  # data files that were read in near
        self._elsewhere: set[str] = set()  # data files that are not in near
        self._damaged: set[str] = set()  # descriptions of what could not be read in near

    def fall_back(self, error: CorruptionError | StorageError) -> StorageBackend | None:
        """Return the store, if it is the copy on this machine that is damaged."""
        with self._lock:
            if error.key not in self._here:
                return None  # it was read from the store, as are the files of older checkpoints
        self._note_damage(error)
        return self._far

    def _note_damage(self, error: CorruptionError | StorageError) -> None:
        with self._lock:
            self._damaged.add(str(error))
        _log.warning("the copy in %s cannot be used, reading %s instead: %s", self._near.url, self.display_url, error)

    def open_other(self, url: str) -> StorageBackend:
        return NearestBackend(self._tier, open_like(self._far, url), self._silence)

    def remarks(self) -> Sequence[str]:
        """Describe which files were not read on this machine."""
        found = []
        if self._elsewhere:
            found.append(f"{len(self._elsewhere)} file(s) are not in {self._near.url} and were read from the store")
        if self._damaged:
            found.append(f"{len(self._damaged)} range(s) in {self._near.url} are damaged and were read from the store")
        return found

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        if key == MANIFEST_KEY:
            return self._manifest(max_size)
        if key == ROLLBACK_KEY:
            return self._rollback(max_size)
        return self._read(key, lambda store: store.get(key, max_size=max_size))

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        if key == MANIFEST_KEY:
            self._far.read_into(key, offset, buffer)
        else:
            self._read(key, lambda store: store.read_into(key, offset, buffer))

    def open_object(self, key: str) -> ObjectReader:
        def opened(store: StorageBackend) -> ObjectReader:
            found = store.open_object(key)
            found.is_near = store is self._near
            return found

        return self._read(key, opened)

    def stat(self, key: str) -> ObjectStat:
        return self._far.stat(key) if key == MANIFEST_KEY else self._read(key, lambda store: store.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        found = {one.key: one for one in self._near.list(prefix) if one.key.startswith(ATTEMPT_PREFIX)}
        for one in self._of_store(lambda: tuple(self._far.list(prefix)), tuple[ObjectStat, ...]()):
            # A read takes the copy that is whole, and a file that is still being uploaded, or was cut off, is shorter.
            if one.key not in found or one.size >= found[one.key].size:
                found[one.key] = one
        return iter(sorted(found.values(), key=lambda one: one.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        near = self._near.list_children(prefix)
        of_checkpoints = prefix in ("", f"{OBJECTS}/")
        # Before the store is listed, so that an upload which ends in between is in one of both.
        pending = {name for name in near if of_checkpoints and _is_pending(os.path.join(self._near.url, name))}
        far = self._of_store(lambda: self._far.list_children(prefix), None)
        if far is not None and of_checkpoints:
            # A checkpoint that is here and not in the store was removed there, unless its upload is unfinished.
            near = [name for name in near if name in far or name == ROLLBACK_KEY or name in pending]
        return sorted({*near, *(far or ())})

    def _read(self, key: str, read: Callable[[StorageBackend], _T]) -> _T:
        if not key.startswith(ATTEMPT_PREFIX):
            return read(self._far)
        try:
            found = read(self._near)
        except KeyNotFoundError:
            with self._lock:
                self._elsewhere.add(key)
        except StorageError as error:
            self._note_damage(error)
        else:
            with self._lock:
                self._here.add(key)
            return found
        return read(self._far)

    def _manifest(self, max_size: int | None) -> bytes:
        try:
            near = self._near.get(MANIFEST_KEY, max_size=max_size)
        except StorageError:
            return self._far.get(MANIFEST_KEY, max_size=max_size)
        is_pending = _is_pending(self._near.url)
        try:
            with self._asking():
                far = self._far.get(MANIFEST_KEY, max_size=max_size)
        except KeyNotFoundError:
            if not is_pending:
                raise
            return near
        except StorageError as error:
            _log.warning("%s cannot be read; using the copy in %s: %s", self.display_url, self._near.url, error)
            return near
        return near if is_pending and _is_later(near, far) else far

    def _rollback(self, max_size: int | None) -> bytes:
        """Return the record of the store, unless it cannot be read, or could not be put when a job went back."""
        try:
            near = self._near.get(ROLLBACK_KEY, max_size=max_size)
        except KeyNotFoundError:
            return self._far.get(ROLLBACK_KEY, max_size=max_size)
        try:
            with self._asking():
                far = self._far.get(ROLLBACK_KEY, max_size=max_size)
        except StorageError:  # it is missing there, or the store does not answer
            return near
        counts = [Abandoned.decode(one, self.display_url).count for one in (near, far)]
        return near if counts[0] > counts[1] else far

    def _of_store(self, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            with self._asking():
                return read()
        except StorageError as error:
            if not os.path.isdir(self._near.url):
                raise
            _log.warning("%s cannot be listed; using the copies in %s: %s", self.display_url, self._near.url, error)
            return otherwise

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the store what the copies here can answer too. If it did not answer before, do not wait long."""
        deadline_s = self._far.deadline_s
        if self._silence.is_silent:
            self._far.deadline_s = min(_LEAST_S, deadline_s)
        self._silence.is_silent = False
        try:
            yield
        except StorageError as error:
            self._silence.is_silent = error.is_late
            raise
        finally:
            self._far.deadline_s = deadline_s

    # -- the store alone -----------------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        if key != ROLLBACK_KEY:
            return self._far.put(key, data, if_absent=if_absent, if_version=if_version)
        version = self._near.put(key, data)
        try:
            with self._asking():
                self._far.put(key, data)
        except StorageError as error:
            _log.warning("%s: the rollback is recorded in %s only: %s", self.display_url, self._near.url, error)
        return version

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        return self._far.create(key, size, at_most=at_most)

    def delete(self, keys: Sequence[str]) -> None:
        self._far.delete(keys)


def _is_pending(folder: str) -> bool:
    """Whether a checkpoint in a tier has files that are not uploaded."""
    try:
        return any(name.startswith(JOURNAL_PREFIX + "to-") for name in os.listdir(folder))
    except OSError:
        return False


def _is_later(one: bytes, other: bytes) -> bool:
    """Whether the first of two manifests is of a later save; false if it cannot be decoded."""
    try:
        created = decode_manifest(one, "").created
    except CheckpointError:
        return False
    try:
        return created > decode_manifest(other, "").created
    except CheckpointError:
        return True
