"""Dicts and sets whose keys all have the same hash: to build one of n keys would take n² comparisons inside C."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.errors import FormatError, UnserializableError
from bytecheckpoint.foreign.pickles.interpreter import interpret
from bytecheckpoint.format.values import encoding, types
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.encoding import encode_value

COUNT = 150
_WORD = 1 << 64
_P1, _P2, _P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261


def _pairs(count: int) -> list[tuple[int, int]]:
    """Return tuples of two integers that CPython gives one hash (xxHash's rounds, which can be inverted)."""
    found, first = list[tuple[int, int]](), 0
    while len(found) < count:
        first += 1
        lane = (_P5 + first * _P2) % _WORD
        after = ((lane << 31 | lane >> 33) % _WORD) * _P1 % _WORD
        second = (12345 - after) * pow(_P2, -1, _WORD) % _WORD
        if second < (1 << 61) - 1:
            found.append((first, second))
    return found


KEYS: dict[str, list[Any]] = {
    "integers": [number * (2**61 - 1) for number in range(COUNT)],
    "complex": [complex(-1000003 * number, number) for number in range(1, COUNT)],
    "tuples": list(_pairs(COUNT)),
}


@pytest.mark.parametrize("kind", KEYS)
def test_the_keys_collide(kind: str) -> None:
    assert len({hash(key) for key in KEYS[kind]}) == 1


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("container", [set, frozenset, OrderedDict.fromkeys, dict.fromkeys])
def test_stored_values(kind: str, container: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save refuses them, and a load of what another program made of them."""
    value = container(KEYS[kind])
    if kind == "complex" and isinstance(value, dict):
        value = container([(key,) for key in KEYS[kind]])  # keys may not be complex
    with pytest.raises(UnserializableError, match=r"have the same hash|key"):
        encode_value(value, "value")
    monkeypatch.setattr(encoding, "check_hashes", lambda keys: None)
    monkeypatch.setattr(encoding, "check_key", lambda key, where: None)
    monkeypatch.setattr(types, "check_key", lambda key, where: None)
    data = encode_value(value, "value")
    with pytest.raises(FormatError, match="have the same hash"):
        decode_value(data)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("container", [set, frozenset, dict.fromkeys])
@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles(kind: str, container: Any, protocol: int) -> None:
    with pytest.raises(FormatError, match=r"have the same hash|more than 64 bits"):
        interpret(pickle.dumps(container(KEYS[kind]), protocol), "file")


def test_a_pickle_that_adds_one_key_at_a_time() -> None:
    """It can insert only so many, and a file of ordinary keys as many as it likes."""

    def added_singly(keys: list[Any]) -> bytes:
        return b"\x80\x04}" + b"".join(pickle.dumps(key, 4)[11:-1] + b"Ns" for key in keys) + b"."

    with pytest.raises(FormatError, match="more than 10000 keys"):
        interpret(added_singly(_pairs(10_001)), "file")
    numbers = list(range(20_000))
    assert interpret(pickle.dumps(dict.fromkeys(numbers), 4), "file") == dict.fromkeys(numbers)


def test_ordinary_values_of_that_kind(tmp_path: Path) -> None:
    values = {"pairs": {(a, b) for a in range(100) for b in range(100)}, "numbers": dict.fromkeys(range(-300, 300))}
    bcp.save(tmp_path / "c", {"extra_state": values})
    assert bcp.open(tmp_path / "c").tree("extra_state") == values
