"""Headers: the stock library opens every one that is built here, and hostile ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sampling import examples

from bytecheckpoint.errors import FormatError
from bytecheckpoint.format.safetensors import DATA_ALIGNMENT, build_header, parse_header, shard_name
from bytecheckpoint.tensors.dtypes import DTYPES, find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta


def entry(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, BasicMeta]:
    return name, BasicMeta(find_dtype(dtype), shape)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__")
ENTRIES = st.lists(
    st.builds(entry, NAMES, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
    unique_by=lambda e: e[0],
).map(lambda entries: sorted(entries, key=lambda e: -e[1].dtype.itemsize))


@settings(deadline=None, max_examples=examples(100))
@given(ENTRIES, st.dictionaries(NAMES, NAMES, max_size=2))
def test_stock_library_opens_what_is_built(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, BasicMeta]], metadata: dict[str, str]
) -> None:
    head = build_header(entries, metadata)
    body = bytes(i % 256 for i in range(sum(meta.nbytes for _, meta in entries)))
    path = tmp_path_factory.getbasetemp() / "stock.safetensors"
    path.write_bytes(head + body)
    assert len(head) % DATA_ALIGNMENT == 0
    at = 0
    with safe_open(path, framework="pt") as stock:
        assert sorted(stock.keys()) == sorted(name for name, _ in entries)
        assert (stock.metadata() or {}) == metadata
        for name, e in entries:
            tensor = stock.get_tensor(name)
            if e.dtype.safetensors is None or (e.dtype.safetensors == "F4" and not e.shape):  # F4 counts pairs in a row
                assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (*e.shape, e.dtype.itemsize))
            else:
                assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{e.dtype}", e.shape)
            assert bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) == body[at : at + e.nbytes]
            at += e.nbytes
    header = parse_header(reader(head + body), len(head + body))
    assert header.data_start == len(head)
    assert header.metadata == metadata
    assert {r.name for r in header.entries} == {name for name, _ in entries}


def test_files_of_the_stock_library_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save

    data = save({"b": torch.arange(6).view(2, 3), "a": torch.zeros((), dtype=torch.bfloat16)}, {"k": "v"})
    header = parse_header(reader(data), len(data))
    found = {r.name: (r.dtype, r.shape, r.end - r.begin) for r in header.entries}
    assert found == {"b": ("I64", (2, 3), 48), "a": ("BF16", (), 2)}
    assert header.metadata == {"k": "v"}


def test_build_refuses() -> None:
    for entries in (
        [entry("a", "int8", (1,)), entry("a", "int8", (1,))],
        [entry("__metadata__", "int8", (1,))],
        [entry("a\0", "int8", (1,))],
        [entry("\ud800", "int8", (1,))],
    ):
        with pytest.raises(FormatError):
            build_header(entries, {})


def test_shard_name() -> None:
    assert shard_name("w", Box((0, 3), (2, 1)), whole=False) == "w[0:2,3:4]"
    assert shard_name("w", Box((0,), (2,)), whole=True) == "w"


A = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
B = {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}


def test_parse_accepts() -> None:
    for header in (
        {"a": A, "b": B},
        {"b": B, "a": A},
        {"a": A, "e": {**A, "shape": [0], "data_offsets": [2, 2]}, "b": B},
    ):
        data = raw(header, b"abcd")
        assert [r.name for r in parse_header(reader(data), len(data)).entries][:1] == ["a"]
    half = raw({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"ab")
    assert parse_header(reader(half), len(half)).entries[0].dtype == "F4"


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "short": b"\0\0\0",
    "no header": bytes(8),
    "ten gigabytes": (10 << 30).to_bytes(8, "little") + b"{}",
    "header beyond the file": (100).to_bytes(8, "little") + b"{}",
    "length of 2^64-1": b"\xff" * 8 + b"{}",
    "pickle": b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x08builtins\x8c\x04exec\x93.",
    "not json": raw(b"{hello}"),
    "space before": raw(b' {"a":1}'),
    "list": raw(b"[]"),
    "not utf-8": raw(b'{"\xff":{}}'),
    "duplicate name": raw(b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(A).encode() + b"}", b"ab"),
    "duplicate key": raw(b'{"a":{"dtype":"U8","shape":[2],"shape":[2],"data_offsets":[0,2]}}', b"ab"),
    "deep": raw(b'{"a":' + b"[" * 200_000),
    "deep maps": raw(b'{"a":' * 100_000),
    "overlap": raw({"a": A, "b": {**B, "data_offsets": [1, 3]}}, b"abc"),
    "same range": raw({"a": A, "b": A}, b"ab"),
    "hole": raw({"a": A, "b": {**B, "data_offsets": [3, 5]}}, b"abcde"),
    "hole in front": raw({"b": B}, b"abcd"),
    "bytes behind": raw({"a": A}, b"abc"),
    "bytes missing": raw({"a": A}, b"a"),
    "negative offset": raw({"a": {**A, "data_offsets": [-2, 0]}}, b""),
    "backwards": raw({"a": {**A, "data_offsets": [2, 0]}}, b"ab"),
    "negative dimensions": raw({"a": {**A, "shape": [-1, -2]}}, b"ab"),
    "shape of 10^12 x 10^12": raw({"a": {**A, "shape": [10**12, 10**12]}}, b"ab"),
    "shape that wraps to 2": raw({"a": {**A, "shape": [(1 << 63) + 1, 2]}}, b"ab"),
    "product that wraps to 2": raw({"a": {**A, "shape": [1 << 32, 1 << 32, 2]}}, b"ab"),
    "shape is a number": raw({"a": {**A, "shape": 2}}, b"ab"),
    "shape of floats": raw({"a": {**A, "shape": [2.0]}}, b"ab"),
    "shape of true": raw({"a": {**A, "shape": [True, 2]}}, b"ab"),
    "NaN": raw(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', b"ab"),
    "number of 5000 digits": raw(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,2]}}', b"ab"),
    "too many dimensions": raw({"a": {**A, "shape": [1] * 100 + [2]}}, b"ab"),
    "three offsets": raw({"a": {**A, "data_offsets": [0, 1, 2]}}, b"ab"),
    "unknown dtype": raw({"a": {**A, "dtype": "O"}}, b"ab"),
    "dtype is a list": raw({"a": {**A, "dtype": ["U8"]}}, b"ab"),
    "missing key": raw({"a": {"dtype": "U8", "shape": [2]}}, b"ab"),
    "extra key": raw({"a": {**A, "code": "exec"}}, b"ab"),
    "entry is a number": raw({"a": 1}, b"ab"),
    "metadata of numbers": raw({"__metadata__": {"a": 1}}),
    "metadata is a list": raw({"__metadata__": []}),
    "surrogate in a name": raw(b'{"\\ud800":' + json.dumps(A).encode() + b"}", b"ab"),
    "zero byte in a name": raw({"a\0b": A}, b"ab"),
    "half a byte": raw({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"ab"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_header(reader(data), len(data))


def test_nothing_is_read_for_a_header_that_cannot_be() -> None:
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return (10 << 30).to_bytes(8, "little")

    with pytest.raises(FormatError, match="10737418240"):
        parse_header(read, 1 << 40)
    assert asked == [8]
