"""``independent_reader`` reads what the library writes, and ``docs/format.md`` is right about its own example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from golden import EXAMPLE
from independent_reader import NUMPY, checksums, choices, names, numbers, read_checkpoint, read_payload
from made_manifests import make_manifest

from bytecheckpoint.format.checksums import checksum_column, checksum_of
from bytecheckpoint.format.manifest.document import Manifest
from bytecheckpoint.format.manifest.envelope import encode
from bytecheckpoint.format.safetensors import build_header, shard_name
from bytecheckpoint.tensors.dtypes import DTYPES, find_dtype
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.metadata import BasicMeta

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


def write_checkpoint(root: Path, manifest: Manifest, contents: dict[str, np.ndarray[Any, Any]]) -> None:
    """The files of a made-up manifest, with its checksums made true."""
    sums: list[list[bytes]] = [[] for _ in range(len(manifest.shards))]
    heads: list[bytes] = []
    for file, name in enumerate(manifest.files.name):
        rows = np.flatnonzero(manifest.shard_file == file)
        rows = rows[np.lexsort((manifest.shard_nbytes[rows], manifest.shard_offset[rows]))]
        entries, body = [], b""
        for row in rows.tolist():
            tensor = int(manifest.shards.tensor[row])
            meta, box = manifest.tensors.meta_of(tensor), manifest.shards.box_of(row)
            data = contents[manifest.tensors.names[tensor]][box.slices()].tobytes()
            fqn = shard_name(manifest.tensors.fqn_of(tensor), box, whole=box == Box.whole(meta.shape))
            entries.append((fqn, BasicMeta(meta.dtype, box.lengths)))
            step = int(manifest.files.chunk_size[file])
            sums[row] = [checksum_of(data[at : at + step]) for at in range(0, len(data), step)]
            body += data
        head = build_header(entries, {})
        heads.append(checksum_of(head))
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(head + body)
    manifest.checksums = checksum_column(value for row in sums for value in row)
    manifest.files.head_checksum = checksum_column(heads)
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


def plain(column: Any) -> Any:
    """Return what a column holds, with checksums as numbers."""
    if not isinstance(column, dict):
        return [int.from_bytes(one, "big") for one in checksums(column)]
    if "of" in column:
        return choices(column)
    return names(column) if "n" in column else numbers(column)


def test_the_example_in_the_document() -> None:
    example = re.search(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert example is not None
    document = read_payload(EXAMPLE.read_bytes())
    found = {
        key: {name: plain(column) for name, column in value.items()} if isinstance(value, dict) else value
        for key, value in document.items()
    }
    found["metadata"] = msgpack.unpackb(document["metadata"])
    assert json.loads(example[1]) == found


@pytest.mark.parametrize("name", DTYPES)
def test_the_document_lists_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {dtype.itemsize} |")]
    assert any(f"`{name}` ({dtype.safetensors or '-'})" in row for row in rows)
