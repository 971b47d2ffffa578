"""Random sequences of operations on a store, compared with a dictionary. Needs hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    multiple,
    rule,
    run_state_machine_as_test,
)

from ...errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError
from ...storage_backends.base import Conditions, ObjectWriter, StorageBackend
from .reading import StoreTests

# No key is a directory of another one: file systems cannot store both.
_KEYS = ("a", "b", "d/a", "d/b", "d/e/a", "d-x/a", "größe/Ω")
_PREFIXES = ("", "d", "d/", "d/e/", "g", "none/")
_MAX_OBJECT_BYTES = 300
_ALL = Conditions(if_absent=True, if_version=True)

_numbers = count()

_keys = st.sampled_from(_KEYS)
_content = st.binary(max_size=_MAX_OBJECT_BYTES)


@dataclass(eq=False)
class _OpenObject:
    """An object that is being written, and its final content."""

    key: str
    content: bytes
    writer: ObjectWriter
    missing: list[tuple[int, int]] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with a model, a dictionary from key to content.

    A rule that changes the store changes the model. A rule that reads compares both. While an object is being written
    under a key, no other rule uses that key.

    Args:
        backend: The store.
        conditions: Which conditions of ``put`` it decides.
    """

    open_objects = Bundle("open_objects")

    def __init__(self, backend: StorageBackend, conditions: Conditions = _ALL) -> None:
        super().__init__()
        self.backend, self.conditions = backend, conditions
        # Each sequence has its own keys, so that a store that fails to delete does not disturb the next one.
        self.root = f"sequence-{next(_numbers)}/"
        self.model: dict[str, bytes] = {}
        self.old_version = "0-0-0"
        self.open: list[_OpenObject] = []

    @rule(key=_keys, content=_content)
    def put(self, key: str, content: bytes) -> None:
        if self._is_open(key):
            return
        self.backend.put(self.root + key, content)
        self.model[key] = content

    @rule(key=_keys, content=_content)
    def put_if_absent(self, key: str, content: bytes) -> None:
        if not self.conditions.if_absent or self._is_open(key):
            return
        try:
            self.backend.put(self.root + key, content, if_absent=True)
        except KeyExistsError:
            assert key in self.model, f"put(if_absent=True) found {key!r}, which does not exist"
        else:
            assert key not in self.model, f"put(if_absent=True) replaced {key!r}"
            self.model[key] = content

    @rule(key=_keys, content=_content, is_current=st.booleans())
    def put_if_version(self, key: str, content: bytes, *, is_current: bool) -> None:
        if not self.conditions.if_version or self._is_open(key):
            return
        current = self.backend.stat(self.root + key).version if key in self.model else ""
        version = current if is_current and current else self.old_version
        try:
            self.backend.put(self.root + key, content, if_version=version)
        except KeyChangedError:
            assert version != current, f"put(if_version=...) did not find the version {version!r} of {key!r}"
        else:
            assert version == current, f"put(if_version={version!r}) replaced {key!r}, which has {current!r}"
            self.model[key] = content
            self.old_version = current

    @rule(target=open_objects, key=_keys, content=_content, cuts=st.sets(st.integers(1, _MAX_OBJECT_BYTES), max_size=3))
    def create(self, key: str, content: bytes, cuts: set[int]) -> Any:
        if self._is_open(key):
            return multiple()
        bounds = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
        opened = _OpenObject(key, content, self.backend.create(self.root + key, len(content)), list(pairwise(bounds)))
        self.open.append(opened)
        return opened

    @rule(opened=open_objects, last=st.booleans())
    def write(self, opened: _OpenObject, *, last: bool) -> None:
        if not opened.missing:
            return
        start, end = opened.missing.pop(-1 if last else 0)
        opened.writer.write(start, opened.content[start:end])

    @rule(opened=consumes(open_objects))
    def complete(self, opened: _OpenObject) -> None:
        for start, end in opened.missing:
            opened.writer.write(start, opened.content[start:end])
        opened.writer.complete()
        self.open.remove(opened)
        self.model[opened.key] = opened.content

    @rule(opened=consumes(open_objects))
    def abandon(self, opened: _OpenObject) -> None:
        if opened.missing:
            try:
                opened.writer.complete()
            except StorageError:
                pass
            else:
                raise AssertionError(f"{opened.key!r} was completed without the bytes {opened.missing}")
        opened.writer.abort()
        self.open.remove(opened)
        # A store may remove the previous object when the new one is created or when it is complete.
        if opened.key in self.model and self.root + opened.key not in [
            found.key for found in self.backend.list(self.root + opened.key)
        ]:
            del self.model[opened.key]

    @rule(keys=st.lists(_keys, max_size=4))
    def delete(self, keys: list[str]) -> None:
        keys = [key for key in keys if not self._is_open(key)]
        self.backend.delete([self.root + key for key in keys])
        for key in keys:
            self.model.pop(key, None)

    @rule(key=_keys)
    def get(self, key: str) -> None:
        if self._is_open(key):
            return
        if key in self.model:
            assert self.backend.get(self.root + key) == self.model[key]
        else:
            _check_missing(self.backend, self.root + key)

    @rule(key=_keys)
    def stat(self, key: str) -> None:
        if self._is_open(key):
            return
        if key in self.model:
            found = self.backend.stat(self.root + key)
            assert (found.key, found.size) == (self.root + key, len(self.model[key]))
        else:
            _check_missing(self.backend, self.root + key)

    @rule(key=_keys, offset=st.integers(0, _MAX_OBJECT_BYTES), lengths=st.lists(st.integers(0, 99), max_size=4))
    def read_range(self, key: str, offset: int, lengths: list[int]) -> None:
        if self._is_open(key) or key not in self.model:
            return
        content = self.model[key]
        offset %= len(content) + 1  # reading no bytes past the end is allowed and may fail
        end = offset + sum(lengths)
        if end > len(content):
            self._check_read_past_end(key, offset, end)
            return
        one, several = bytearray(sum(lengths)), [bytearray(length) for length in lengths]
        self.backend.read_into(self.root + key, offset, one)
        with self.backend.open_object(self.root + key) as opened:
            opened.read(offset, several)
        assert one == b"".join(several) == content[offset:end]

    @rule(prefix=st.sampled_from(_PREFIXES))
    def list(self, prefix: str) -> None:
        writing = {opened.key for opened in self.open}
        listed = [(stat.key.removeprefix(self.root), stat.size) for stat in self.backend.list(self.root + prefix)]
        found = [(key, size) for key, size in listed if key not in writing]
        expected = {key: content for key, content in self.model.items() if key not in writing}
        assert found == sorted((key, len(content)) for key, content in expected.items() if key.startswith(prefix))

    @rule(prefix=st.sampled_from(["", "d/", "d/e/", "none/"]))
    def list_children(self, prefix: str) -> None:
        if self.open:
            return
        below = [key.removeprefix(prefix) for key in self.model if key.startswith(prefix)]
        expected = {name + slash for name, slash, _ in (key.partition("/") for key in below)}
        assert [*self.backend.list_children(self.root + prefix)] == sorted(expected)

    def teardown(self) -> None:
        for key, content in self.model.items():
            if not self._is_open(key):
                self._check_read_past_end(key, 0, len(content) + 1)
        for opened in self.open:
            opened.writer.abort()
        self.backend.delete([self.root + key for key in _KEYS])
        assert [*self.backend.list(self.root)] == []

    def _check_read_past_end(self, key: str, offset: int, end: int) -> None:
        try:
            self.backend.read_into(self.root + key, offset, bytearray(end - offset))
        except KeyNotFoundError:
            raise AssertionError(f"{key!r} exists, but a read past its end does not find it") from None
        except StorageError:
            return
        raise AssertionError(f"read bytes [{offset}, {end}) of {key!r}, which has {len(self.model[key])} bytes")

    def _is_open(self, key: str) -> bool:
        return any(opened.key == key for opened in self.open)


class SequenceTests(StoreTests):
    """Any sequence of operations has the same effect on the store as on a dictionary."""

    sequences: ClassVar[int] = 30
    """Number of random sequences."""

    sequence_steps: ClassVar[int] = 40
    """Operations in a sequence, at most."""

    def test_sequences_of_operations_match_the_model(self, backend: StorageBackend) -> None:
        conditions = Conditions(self.supports_if_absent, self.supports_if_version)

        class Machine(StoreMachine):
            def __init__(self) -> None:
                super().__init__(backend, conditions)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.sequences,
                stateful_step_count=self.sequence_steps,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=[*HealthCheck],
            ),
        )


def _check_missing(backend: StorageBackend, key: str) -> None:
    for read in (lambda: backend.get(key), lambda: backend.stat(key)):
        try:
            read()
        except KeyNotFoundError:
            continue
        raise AssertionError(f"{key!r} can be read, but it does not exist")
