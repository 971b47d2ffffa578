"""Tests of ``put``, ``get``, ``stat`` and of keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ...errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError, UnansweredError
from ...storage_backends.base import Conditions, StorageBackend
from .reading import StoreTests, content_of, in_threads, reads_of

HOSTILE_KEYS = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "a/./b",
    "./a",
    "a//b",
    "a/",
    "a\\b",
    "..\\x",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 256,
    "/".join(["d"] * 600),
)
"""Keys that a hostile manifest may contain and that every operation must refuse."""

_UNICODE_KEYS = (
    "größe/Ω",
    "数据/チェック",
    "emoji-\U0001f9ea",
    "space in name",
    "percent%20",
    "a+b=c&d?e#f",
    "quo'te\"s",
)


class ObjectTests(StoreTests):
    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
    def test_put_then_get(self, backend: StorageBackend, size: int) -> None:
        data = content_of(size)
        backend.put("dir/object", data)
        assert backend.get("dir/object") == data
        assert backend.stat("dir/object").key == "dir/object"
        assert backend.stat("dir/object").size == size

    @pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda make: make.__name__)
    def test_put_takes_any_buffer(self, backend: StorageBackend, make: Callable[[bytes], Any]) -> None:
        backend.put("object", make(b"some bytes"))
        got = backend.get("object")
        assert got == b"some bytes"
        assert type(got) is bytes

    def test_put_does_not_keep_the_buffer(self, backend: StorageBackend) -> None:
        data = bytearray(b"before")
        backend.put("object", data)
        data[:] = b"after!"
        assert backend.get("object") == b"before"

    def test_version_changes(self, backend: StorageBackend) -> None:
        if not self.reports_versions:
            pytest.skip("this store does not report versions")
        backend.put("object", b"one")
        first = backend.stat("object").version
        assert first == backend.stat("object").version
        backend.put("object", b"three")
        assert first
        assert backend.stat("object").version != first

    def test_get_max_size(self, backend: StorageBackend) -> None:
        backend.put("object", b"12345")
        assert backend.get("object", max_size=5) == b"12345"
        with pytest.raises(StorageError, match="object") as caught:
            backend.get("object", max_size=4)
        assert not isinstance(caught.value, KeyNotFoundError)

    def test_missing_keys(self, backend: StorageBackend) -> None:
        backend.put("there/object", b"x")
        for key in ("missing", "there", "there/missing", "there/object/below"):
            for operation in reads_of(backend, key):
                with pytest.raises(KeyNotFoundError, match=key):
                    operation()

    def test_unicode_keys(self, backend: StorageBackend) -> None:
        refused = [key for key in _UNICODE_KEYS if set(key) & set(self.refused_characters)]
        keys = [key for key in _UNICODE_KEYS if key not in refused]
        for key in refused:
            with pytest.raises(StorageError) as caught:
                backend.put(key, b"x")
            assert not isinstance(caught.value, KeyNotFoundError)
        for key in keys:
            backend.put(key, key.encode())
        for key in keys:
            assert backend.get(key) == key.encode()
        assert [found.key for found in backend.list()] == sorted(keys)
        backend.delete(keys)
        assert [*backend.list()] == []

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: ascii(key[:12]))
    def test_hostile_keys_are_refused(self, backend: StorageBackend, key: str) -> None:
        operations: list[Callable[[], object]] = [
            *reads_of(backend, key),
            lambda: backend.put(key, b"x"),
            lambda: backend.create(key, 1),
            lambda: backend.delete([key]),
        ]
        for operation in operations:
            with pytest.raises(StorageError) as caught:
                operation()
            # "Not found" would mean that the store looked for it.
            assert not isinstance(caught.value, KeyNotFoundError)
        assert [*backend.list()] == []

    def test_hostile_prefixes_are_refused(self, backend: StorageBackend) -> None:
        for prefix in ("../", "/", "a/../", "a//", "\0"):
            with pytest.raises(StorageError):
                backend.list(prefix)
            with pytest.raises(StorageError):
                backend.list_children(prefix)
        with pytest.raises(StorageError):
            backend.list_children("no-slash-at-the-end")

    # Conditional writes

    def test_conditions(self, backend: StorageBackend) -> None:
        assert backend.conditions() == Conditions(self.supports_if_absent, self.supports_if_version)

    def test_versions_of_one_object_agree(self, backend: StorageBackend) -> None:
        put = backend.put("object", b"content")
        content, version = backend.get_versioned("object", max_size=7)
        assert content == b"content"
        assert version == backend.stat("object").version
        assert put in (version, "")
        assert put or not self.supports_if_version
        with pytest.raises(StorageError):
            backend.get_versioned("object", max_size=6)
        with pytest.raises(KeyNotFoundError):
            backend.get_versioned("none")

    def test_if_version(self, backend: StorageBackend) -> None:
        first = backend.put("dir/object", b"first") or "some version"
        if not self.supports_if_version:
            with pytest.raises(StorageError) as caught:
                backend.put("dir/object", b"second", if_version=first)
            assert not isinstance(caught.value, KeyChangedError)
            assert backend.get("dir/object") == b"first"
            return
        second = backend.put("dir/object", b"the second", if_version=first)
        assert second not in (first, "")
        with pytest.raises(KeyChangedError, match="dir/object"):
            backend.put("dir/object", b"third", if_version=first)
        assert backend.get_versioned("dir/object") == (b"the second", second)
        backend.delete(["dir/object"])
        for key in ("dir/object", "other/object"):
            with pytest.raises(KeyChangedError):
                backend.put(key, b"third", if_version=second)
        assert [*backend.list()] == []
        self.check_no_leftovers(backend)

    def test_if_version_loses_no_update(self, backend: StorageBackend) -> None:
        if not self.supports_if_version:
            pytest.skip("this store has no compare-and-swap")
        backend.put("race/object", b"")
        gate = threading.Barrier(self.writers)

        def append(me: int) -> None:
            gate.wait(60)
            for _ in range(1000):
                content, version = backend.get_versioned("race/object")
                try:
                    backend.put("race/object", content + bytes([me]), if_version=version)
                except KeyChangedError:
                    continue
                except UnansweredError:  # a store may only say that it failed, and another writer was next
                    if bytes([me]) not in backend.get("race/object"):
                        continue
                return
            raise AssertionError("1000 conditional puts in sequence were refused")

        in_threads(self.writers, append)
        assert sorted(backend.get("race/object")) == [*range(self.writers)]
        assert [found.key for found in backend.list()] == ["race/object"]

    def test_if_absent(self, backend: StorageBackend) -> None:
        if not self.supports_if_absent:
            with pytest.raises(StorageError) as caught:
                backend.put("object", b"first", if_absent=True)
            assert not isinstance(caught.value, KeyExistsError)
            return
        backend.put("dir/object", b"first", if_absent=True)
        with pytest.raises(KeyExistsError, match="dir/object"):
            backend.put("dir/object", b"second", if_absent=True)
        assert backend.get("dir/object") == b"first"
        assert [found.key for found in backend.list()] == ["dir/object"]

    def test_if_absent_has_one_winner(self, backend: StorageBackend) -> None:
        if not self.supports_if_absent:
            pytest.skip("this store has no conditional put")
        gate = threading.Barrier(self.writers)

        def write(me: int) -> bytes | None:
            content = f"writer {me}".encode()
            gate.wait(60)
            try:
                backend.put("race/object", content, if_absent=True)
            except KeyExistsError:
                return None
            return content

        won = [result for result in in_threads(self.writers, write) if result is not None]
        assert len(won) == 1
        assert backend.get("race/object") == won[0]
        assert [found.key for found in backend.list()] == ["race/object"]

    def test_readers_see_old_or_new(self, backend: StorageBackend) -> None:
        if not self.atomic_replace:
            pytest.skip("replacing is not atomic on this store")
        versions = [bytes([65 + index]) * (20_000 + 1000 * index) for index in range(12)]
        backend.put("object", versions[0])
        done = threading.Event()

        def read() -> int:
            last = 0
            while not done.is_set():
                content = backend.get("object")
                assert content in versions
                assert versions.index(content) >= last
                last = versions.index(content)
            return last

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for content in versions[1:]:
                    backend.put("object", content)
            finally:
                done.set()
            for reader in readers:
                reader.result(60)
        assert backend.get("object") == versions[-1]
