"""``independent_reader`` reads what the library writes, and ``docs/format.md`` is right about its own example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from independent_reader import NUMPY, names, ragged, read_checkpoint, read_payload

from bytecheckpoint.format.manifest import Manifest, encode
from bytecheckpoint.format.safetensors import HeaderEntry, build_header, shard_name
from bytecheckpoint.tensors.dtypes import DTYPES, find_dtype
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.testing.manifests import make_manifest

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


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
            fqn = shard_name(manifest.tensors.fqn_of(tensor), box, whole=box == Box.whole(meta.shape))
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
        ("model", "w", BasicMeta(find_dtype("float32"), shape), grid),
        (
            "model",
            "flat",
            BasicMeta(find_dtype("complex128"), shape),
            [*decompose(0, 7, shape), *decompose(7, 13, shape)],
        ),
        ("model", "scalar", BasicMeta(find_dtype("int64"), ()), [Box((), ())]),
        ("optim", "none", BasicMeta(find_dtype("bool"), (0, 3)), [Box((0, 0), (0, 3))]),
        ("optim", "rng@1", BasicMeta(find_dtype("uint8"), (9,)), [Box((0,), (9,))]),
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
            ("model", "w", BasicMeta(find_dtype("float32"), (4, 3)), boxes),
            ("model", "b", BasicMeta(find_dtype("bfloat16"), (3,)), [Box((0,), (3,))]),
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
