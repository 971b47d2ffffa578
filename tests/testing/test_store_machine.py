"""The state machine of the storage suite finds faulty stores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sampling import examples
from typing_extensions import Buffer

from bytecheckpoint.storage_backends import ObjectStat
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.storage import StoreMachine


class _OverwritesIfAbsent(MemoryBackend):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        return super().put(key, data, if_version=if_version)


class _IgnoresVersions(MemoryBackend):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        return super().put(key, data, if_absent=if_absent)


class _KeepsDeleted(MemoryBackend):
    def delete(self, keys: Sequence[str]) -> None:
        super().delete(keys[1:])


class _ListsOneKeyOnly(MemoryBackend):
    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        found = [*super().list(prefix)]
        return iter(found[:1])


class _ReadsShort(MemoryBackend):
    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        view = memoryview(buffer)
        available = min(len(view), max(self.stat(key).size - offset, 0))
        super().read_into(key, min(offset, self.stat(key).size), view[:available])


@pytest.mark.parametrize(
    "faulty", [_OverwritesIfAbsent, _IgnoresVersions, _KeepsDeleted, _ListsOneKeyOnly, _ReadsShort]
)
def test_the_machine_finds_a_faulty_store(faulty: type[MemoryBackend]) -> None:
    name = uuid.uuid4().hex

    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(faulty(name))

    # Without shrinking, which takes a minute.
    thorough = settings(
        max_examples=examples(200),
        phases=[Phase.generate],
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    try:
        with pytest.raises(AssertionError):
            run_state_machine_as_test(Machine, settings=thorough)
    finally:
        MemoryBackend.delete_store(name)
