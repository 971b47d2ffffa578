"""A reader written from docs/format.md alone. The library is used to write, and for nothing in the reading."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard

from bytecheckpoint.dtypes import DTYPES, dtype_named
from bytecheckpoint.geometry import Box, decompose
from bytecheckpoint.manifest import Manifest, encode
from bytecheckpoint.metadata import BasicMeta
from bytecheckpoint.safetensors_file import HeaderEntry, build_header, shard_name
from bytecheckpoint.testing.manifests import make_manifest

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
NUMPY = {"float32": "<f4", "int64": "<i8", "uint8": "u1", "bool": "?", "complex128": "<c16"}


def names(column: dict[str, Any]) -> list[str]:
    return column["d"].decode().split("\0")[:-1]


def numbers(column: dict[str, Any]) -> list[int]:
    return np.frombuffer(column["d"], f"<u{column['w']}").tolist()


def choices(column: dict[str, Any]) -> list[str]:
    return [names(column["of"])[i] for i in numbers(column["index"])]


def ragged(column: dict[str, Any], ndim: list[int]) -> list[list[int]]:
    rest = numbers(column)
    return [[rest.pop(0) for _ in range(n)] for n in ndim]


def read_payload(data: bytes) -> dict[str, Any]:
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    magic, version, codec, raw_length, payload, _ = msgpack.unpackb(data)
    assert (magic, version) == ("bytecheckpoint", 1)
    if codec == "zstd":
        payload = zstandard.decompress(payload)
    assert len(payload) == raw_length
    document: dict[str, Any] = msgpack.unpackb(payload)
    return document


def read_checkpoint(root: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor, whole, by full name; every chunk checked."""
    document = read_payload((root / "manifest.msgpack").read_bytes())
    files, tensors, shards = document["files"], document["tensors"], document["shards"]
    ndim = numbers(tensors["ndim"])
    owner = [row for row, count in enumerate(numbers(tensors["shards"])) for _ in range(count)]
    dtypes = [np.dtype(NUMPY[dtype]) for dtype in choices(tensors["dtype"])]
    out = [np.zeros(shape, dtype) for shape, dtype in zip(ragged(tensors["shape"], ndim), dtypes)]
    offsets, lengths = (ragged(shards[key], [ndim[row] for row in owner]) for key in ("offsets", "lengths"))
    checksums = numbers(shards["checksums"])
    for shard, row in enumerate(owner):
        file = numbers(shards["file"])[shard]
        begin = numbers(files["head_length"])[file] + numbers(shards["offset"])[shard]
        nbytes = math.prod(lengths[shard]) * dtypes[row].itemsize
        data = (root / names(files["name"])[file]).read_bytes()[begin : begin + nbytes]
        step = numbers(files["chunk_size"])[file]
        for at in range(0, nbytes, step):
            assert xxhash.xxh3_64_intdigest(data[at : at + step]) == checksums.pop(0)
        box = tuple(slice(o, o + n) for o, n in zip(offsets[shard], lengths[shard]))
        out[row][box] = np.frombuffer(data, dtypes[row]).reshape(lengths[shard])
    assert checksums == []
    found = dict(zip(names(tensors["name"]), out))
    return found | {
        a: found[t] for a, t in zip(names(document["aliases"]["name"]), names(document["aliases"]["target"]))
    }


def write_checkpoint(root: Path, manifest: Manifest, contents: dict[str, np.ndarray[Any, Any]]) -> None:
    """The files of a made-up manifest, with its checksums made true."""
    sums: list[list[int]] = [[] for _ in range(len(manifest.shards))]
    for file, name in enumerate(manifest.files.name):
        rows = np.flatnonzero(manifest.shard_file == file)
        rows = rows[np.lexsort((manifest.shard_nbytes[rows], manifest.shard_offset[rows]))]
        entries, body = [], b""
        for row in rows.tolist():
            tensor = int(manifest.shards.tensor[row])
            meta, box = manifest.tensors.meta_of(tensor), manifest.shards.box_of(row)
            data = contents[manifest.tensors.names[tensor]][box.slices()].tobytes()
            fqn = shard_name(manifest.tensors.fqn_of(tensor), box, box == Box.whole(meta.shape))
            entries.append(HeaderEntry(fqn, meta.dtype, box.lengths, len(data)))
            step = int(manifest.files.chunk_size[file])
            sums[row] = [xxhash.xxh3_64_intdigest(data[at : at + step]) for at in range(0, len(data), step)]
            body += data
        head = build_header(entries, {})
        manifest.files.head_checksum[file] = xxhash.xxh3_64_intdigest(head)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(head + body)
    manifest.checksums[:] = [value for row in sums for value in row]
    (root / "manifest.msgpack").write_bytes(encode(manifest))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shape = (5, 4)
    grid = [Box((i, j), (n, 2)) for i, n in ((0, 3), (3, 2)) for j in (0, 2)]
    rows = [
        ("model", "w", BasicMeta(dtype_named("float32"), shape), grid),
        (
            "model",
            "flat",
            BasicMeta(dtype_named("complex128"), shape),
            [*decompose(0, 7, shape), *decompose(7, 13, shape)],
        ),
        ("model", "scalar", BasicMeta(dtype_named("int64"), ()), [Box((), ())]),
        ("optim", "none", BasicMeta(dtype_named("bool"), (0, 3)), [Box((0, 0), (0, 3))]),
        ("optim", "rng@1", BasicMeta(dtype_named("uint8"), (9,)), [Box((0,), (9,))]),
    ]
    manifest = make_manifest(rows, ranks=2, aliases=[("model.tied", "model.w")], scope={"optim.rng@1": 1})
    random = np.random.default_rng(0)
    contents = {
        f"{section}.{fqn}": np.asarray(random.integers(0, 255, meta.shape)).astype(NUMPY[meta.dtype.name])
        for section, fqn, meta, _ in rows
    }
    write_checkpoint(tmp_path, manifest, contents)
    found = read_checkpoint(tmp_path)
    assert found.keys() == {*contents, "model.tied"}
    for name, tensor in (*contents.items(), ("model.tied", contents["model.w"])):
        np.testing.assert_array_equal(found[name], tensor, strict=True)


def test_the_example_in_the_document() -> None:
    lines = re.findall(r"^    [0-9a-f]{4}  ((?:[0-9a-f]{2} ?){1,16})(?:  .*)?$", DOCUMENT.read_text(), re.MULTILINE)
    data = bytes.fromhex("".join(lines))
    document = read_payload(data)
    assert len(data) == 826
    assert names(document["tensors"]["name"]) == ["model.b", "model.w"]
    assert ragged(document["shards"]["lengths"], [1, 2, 2]) == [[3], [2, 3], [2, 3]]
    boxes = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    tiny = make_manifest(
        [
            ("model", "w", BasicMeta(dtype_named("float32"), (4, 3)), boxes),
            ("model", "b", BasicMeta(dtype_named("bfloat16"), (3,)), [Box((0,), (3,))]),
        ],
        ranks=2,
        chunk_size=16,
        aliases=[("model.tied", "model.w")],
        metadata={"run": "a"},
    )
    assert encode(tiny, compress=False) == data


@pytest.mark.parametrize("name", DTYPES)
def test_the_document_lists_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {dtype.itemsize} |")]
    assert any(f"`{name}` ({dtype.safetensors or '-'})" in row for row in rows)
