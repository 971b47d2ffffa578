"""Plain values round-trip exactly, and all other values are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import FormatError, StateError, UnserializableError
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.encoding import encode_value
from bytecheckpoint.format.values.files import (
    decode_path,
    decode_values_file,
    encode_path,
    encode_values_file,
    value_digest,
)
from bytecheckpoint.format.values.types import Container, path_name

DTYPES = ["?", "i1", "<i2", ">i4", "<i8", "u1", "<u8", "<f2", "<f4", ">f8", "<c8", "<c16"]


def same(a: Any, b: Any) -> bool:
    """Whether two values have equal types at every level, and equal bits of floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.keys(), b.keys())) and all(map(same, a.values(), b.values()))
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, float) and type(a) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    if type(a) is complex:
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def arrays() -> st.SearchStrategy[Any]:
    def build(dtype: str, shape: list[int], data: bytes) -> Any:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        raw = (data * (size // max(len(data), 1) + 1))[:size] if data else bytes(size)
        array = np.frombuffer(bytearray(raw), "u1" if dtype == "?" else kind).reshape(shape)
        return array > 7 if dtype == "?" else array

    return st.builds(
        build, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.binary(min_size=1, max_size=40)
    )


ANY_FLOAT = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
FLOATS = ANY_FLOAT | st.floats()
KEY_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = KEY_LEAVES | st.lists(KEY_LEAVES, max_size=3).map(tuple)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | FLOATS
    | st.complex_numbers()
    | st.text(st.characters())
    | st.sampled_from(["\ud800", "a\udcff", "\x00"])
    | st.binary(max_size=20)
    | st.binary(max_size=20).map(bytearray)
    | st.builds(range, st.integers(-(2**70), 2**70), st.integers(-9, 9), st.integers(1, 9))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers())
    | arrays()
    | arrays().filter(lambda a: a.size and a.dtype.str[0] != ">").map(lambda a: a.reshape(-1)[0])
    | st.sets(KEYS, max_size=4)
    | st.frozensets(KEYS, max_size=4)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")])
    | st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size)
    | st.builds(Container, st.sampled_from(["list", "tuple", "dict", "tensor"]), st.integers(0, 9))
    | st.builds(Container, st.just("dict"), st.just(0), st.lists(st.text() | st.integers(), unique=True).map(tuple))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
    ),
    max_leaves=8,
)


@given(VALUES)
@settings(deadline=None, max_examples=examples(400))
def test_round_trip_is_exact(value: Any) -> None:
    data = encode_value(value, "v")
    back = decode_value(data)
    assert same(value, back)
    assert encode_value(back, "v") == data
    msgpack.unpackb(data, strict_map_key=False, object_pairs_hook=list)


def test_key_order_is_kept_and_sets_are_sorted() -> None:
    assert list(decode_value(encode_value({"b": 1, "a": 2}, "v"))) == ["b", "a"]
    numbers = list(range(1000))
    assert encode_value(set(numbers), "v") == encode_value({*numbers[::-1]}, "v")


def test_arrays_are_decoded_writable_and_in_row_major_order() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    back = decode_value(encode_value({"a": array}, "v"))["a"]
    back[0, 0] = 9
    assert back.tolist() == [[9, 1, 2], [3, 4, 5]]
    assert decode_value(encode_value(np.zeros((0, 2**40)), "v")).shape == (0, 2**40)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class Text(str):
    pass


class Number(int):
    pass


class Shape(enum.Enum):
    THING = object()


@dataclasses.dataclass
class Options:
    rate: Any = 0.1
    colour: Any = Colour.RED


def tagged(value: Any) -> Any:
    value.tag = 1
    return value


class Thing:
    pass


def cyclic() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


# The value, and the plain value that is read.
BY_KIND = {
    "enum": (Colour.RED, 1),
    "namedtuple": (Point(1, Colour.RED), (1, 1)),
    "dataclass": (Options(0.5), {"rate": 0.5, "colour": 1}),
    "defaultdict": (defaultdict(list, a=[1]), {"a": [1]}),
    "str subclass": (Text("a"), "a"),
    "int subclass": (Number(2**70), 2**70),
    "path": (Path("/a/b"), Path("/a/b")),
    "pure path": (PurePosixPath("a"), Path("a")),
    "time": (datetime(2020, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=1)), fold=1),) * 2,
    "date": (date(2020, 1, 2),) * 2,
    "duration": (timedelta(-1, 2, 3),) * 2,
    "namespace": (Namespace(a=1, b=Namespace(c=(2,))),) * 2,
    "numpy text": (np.str_("a"),) * 2,
    "numpy bytes": (np.bytes_(b"a"),) * 2,
    "no numpy text": (np.str_(""),) * 2,
}


@pytest.mark.parametrize("name", BY_KIND)
def test_values_of_other_kinds_are_read_as_plain_values(name: str) -> None:
    value, plain = BY_KIND[name]
    back = decode_value(encode_value([value], "v"))[0]
    assert back == plain
    assert type(back) is type(plain)
    assert getattr(back, "fold", 0) == getattr(plain, "fold", 0)


def test_text_arrays_and_buffers() -> None:
    array = np.array([["a", "longer"]])
    back = decode_value(encode_value(array, "v"))
    assert (back.tolist(), back.dtype) == (array.tolist(), array.dtype)
    buffer = io.BytesIO(b"abc")
    buffer.seek(2)
    back = decode_value(encode_value(buffer, "v"))
    assert (back.getvalue(), back.read()) == (b"abc", b"c")


REFUSED = {
    "lambda": lambda: 1,
    "instance": Thing(),
    "type": Thing,
    "module": math,
    "enum of objects": Shape.THING,
    "str subclass with attributes": tagged(Text("a")),
    "dataclass with attributes": tagged(Options()),
    "dataclass of objects": Options(Thing()),
    "zoned time": datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")),
    "decimal": Decimal(1),
    "object array": np.array([None]),
    "record array": np.zeros(2, [("a", "<f4")]),
    "long double": np.zeros(2, np.longdouble),
    "datetime64": np.datetime64("2020-01-01"),
    "matrix": np.zeros((2, 2)).view(type("Sub", (np.ndarray,), {})),
    "tensor": torch.zeros(2),
    "parameter": torch.nn.Parameter(torch.zeros(2)),
    "nan key": {float("nan"): 1},
    "nan in tuple key": {(1, float("nan")): 1},
    "frozenset key": {frozenset(): 1},
    "instance key": {Thing(): 1},
    "cycle": cyclic(),
    "tensor in set": {torch.zeros(1)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_by_path(name: str) -> None:
    with pytest.raises(UnserializableError, match=r"^extra\.box\.1"):
        encode_value([0, REFUSED[name]], "extra.box")


def test_pickle_needs_consent_on_both_sides() -> None:
    value = {"a": [1, Decimal(3)]}
    data = encode_value(value, "extra", allow_pickle=True)
    with pytest.raises(StateError, match=r"extra.*allow_pickle=True"):
        decode_value(data, where="extra")
    back = decode_value(data, allow_pickle=True)
    assert back == value
    with pytest.raises(UnserializableError, match=r"extra\.0.*pickle cannot store it either"):
        encode_value([lambda: 1], "extra", allow_pickle=True)
    with pytest.raises(UnserializableError, match="tensor inside a plain value"):
        encode_value([torch.zeros(1)], "extra", allow_pickle=True)


def test_depth_limit_holds_on_both_sides() -> None:
    value: Any = 1
    for level in range(64):
        value = [value] if level % 2 else (value,)
    assert decode_value(encode_value(value, "v")) == value
    with pytest.raises(UnserializableError, match="64 levels"):
        encode_value([[value]], "v")
    with pytest.raises(FormatError, match="levels deep"):
        decode_value(b"\x91" * 100_000 + b"\xc0")
    nested = b"\xc0"
    for _ in range(200):
        nested = msgpack.packb(msgpack.ExtType(5, b"\x91" + nested))
    with pytest.raises(FormatError, match="levels deep"):
        decode_value(nested)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\x7f\xff\xff\xff" + bytes(100),
        b"\xc6\xff\xff\xff\xff",
        b"\x92" * 30 + b"\xdd\x00\x0f\xff\xff" + bytes(1000),
        msgpack.packb(msgpack.Timestamp(1, 1)),
        msgpack.packb([msgpack.ExtType(99, b"")]),
        msgpack.packb(msgpack.ExtType(2, b"short")),
        msgpack.packb(msgpack.ExtType(6, msgpack.packb([[1]]))),
        msgpack.packb(msgpack.ExtType(6, msgpack.packb([1, 1]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<f8", [2**40, 2**40], b""]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<f8", [0] * 100, b""]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["|O8", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<f8", [-1, -1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(14, msgpack.packb(["<f8", b"1"]))),
        msgpack.packb(msgpack.ExtType(11, msgpack.packb([1, 2, 0]))),
        msgpack.packb(msgpack.ExtType(10, msgpack.packb([1, [1, 2]]))),
        msgpack.packb(msgpack.ExtType(15, b"_dynamo")),
        msgpack.packb(msgpack.ExtType(16, msgpack.packb(["nonsense", 1]))),
        msgpack.packb(msgpack.ExtType(17, msgpack.packb(["a"]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["os", 0]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["dict", 0, "ab"]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["dict", 0, [1, [2]]]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["dict", 0, ["a", "a"]]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["list", 1, [0]]))),
        msgpack.packb(msgpack.ExtType(18, msgpack.packb(["dict", 0, ["a"], 1]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<U1", [1], b"\xff\xff\xff\xff"]))),
        msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<U0", [2**62], b""]))),
        msgpack.packb(msgpack.ExtType(14, msgpack.packb(["|S999999999", b"1"]))),
        msgpack.packb(msgpack.ExtType(19, msgpack.packb(["os.system", "true"]))),
        msgpack.packb(msgpack.ExtType(19, msgpack.packb(["enum", 1, "os"]))),
        msgpack.packb(msgpack.ExtType(20, b"\xff")),
        msgpack.packb(msgpack.ExtType(21, msgpack.packb(["2020-13-01", 0]))),
        msgpack.packb(msgpack.ExtType(21, msgpack.packb(["2020-01-01", 2]))),
        msgpack.packb(msgpack.ExtType(22, b"tomorrow")),
        msgpack.packb(msgpack.ExtType(23, msgpack.packb([10**18, 0, 0]))),
        msgpack.packb(msgpack.ExtType(23, msgpack.packb([1.5, 0, 0]))),
        msgpack.packb(msgpack.ExtType(24, msgpack.packb([1, 2]))),
        msgpack.packb(msgpack.ExtType(25, msgpack.packb([b"", -1]))),
        msgpack.packb(msgpack.ExtType(25, msgpack.packb([[], 0]))),
        b"\x82\x01\x01\x01\x02",
        b"\x81\x90\x01",
        b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
        b"\xa1\xff",
    ],
)
def test_hostile_documents_are_format_errors(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_value(data)


def decode_or_refuse(decode: Callable[[bytes], Any], data: bytes) -> None:
    """Expect a FormatError, or a StateError if the bytes form a pickle; no code runs."""
    with contextlib.suppress(FormatError, StateError):
        decode(data)


@given(VALUES, st.integers(0, 2**16), st.integers(0, 255), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(300))
def test_mutated_bytes_are_a_value_or_a_format_error(value: Any, at: int, byte: int, cut: int) -> None:
    data = bytearray(encode_value(value, "v"))
    data[at % len(data)] = byte
    for mutated in (bytes(data), bytes(data[: cut % len(data)])):
        decode_or_refuse(decode_value, mutated)


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=examples(300))
def test_random_bytes_are_a_value_or_a_format_error(data: bytes) -> None:
    for decode in (decode_value, decode_path, decode_values_file):
        decode_or_refuse(decode, data)


@given(st.lists(st.text() | st.integers(-(2**63), 2**64 - 1), max_size=4).map(tuple))
@settings(deadline=None, max_examples=examples(100))
def test_path_round_trip(path: Any) -> None:
    assert same(decode_path(encode_path(path)), path)


def test_invalid_paths_are_refused() -> None:
    for path in [(True,), (1.0,), ("\ud800",), (2**64,)]:
        with pytest.raises(UnserializableError):
            encode_path(path)  # type: ignore[arg-type]
    assert path_name(("a", 0, "b")) == "a.0.b"


def test_values_file_round_trip_and_rules() -> None:
    entries = [
        (("step",), True, encode_value(3, "step")),
        (("rng", 0), False, encode_value((1, 2), "rng")),
        ((), True, encode_value({}, "")),
    ]
    encoded = [(encode_path(path), shared, value) for path, shared, value in entries]
    data = encode_values_file(encoded)
    assert decode_values_file(data) == entries
    assert [decode_value(raw) for _, _, raw in decode_values_file(data)] == [3, (1, 2), {}]
    assert msgpack.unpackb(data)["values_version"] == 1
    with pytest.raises(FormatError, match="twice"):
        decode_values_file(encode_values_file([encoded[0], encoded[0]]))
    for document in (
        {"values_version": 2, "entries": []},
        [],
        {"values_version": 1},
        {"values_version": 1, "entries": [1]},
    ):
        with pytest.raises(FormatError):
            decode_values_file(msgpack.packb(document))
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            decode_values_file(data[:cut])


def test_digests_of_different_types_differ() -> None:
    digests = {value_digest(encode_value(v, "v")) for v in (1, 1.0, True, "1", b"1", [1], (1,), np.int64(1), 1 + 0j)}
    assert len(digests) == 9
    assert all(len(d) == 16 for d in digests)
