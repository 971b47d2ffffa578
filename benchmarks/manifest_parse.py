"""Measure how long it takes to read a manifest of a million shards, for several ways of sharding a model.

    python benchmarks/manifest_parse.py [--shards 1000000] [--repeat 3] [--json benchmarks/results/manifest_parse.json]

``decode`` is everything that a reader does: checksum, decompression, columns, and checking every rule of the format
(``validate`` is part of this). The floor is checksum and decompression alone. Times are processor times, which equal
wall times on an idle core because nothing here waits.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from bytecheckpoint.format.checksums import CHECKSUM_BYTES, checksum_column
from bytecheckpoint.format.manifest.document import Manifest, SectionInfo
from bytecheckpoint.format.manifest.envelope import decode, encode
from bytecheckpoint.format.manifest.files import FileTable
from bytecheckpoint.format.manifest.validation import validate
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

CHUNK = 1 << 20
FILES = 1024


def whole(count: int) -> tuple[int, list[tuple[int, ...]]]:
    """Keep every tensor whole."""
    return count, [(0, 0)]


def rows(count: int) -> tuple[int, list[tuple[int, ...]]]:
    """Split dimension 0 into 100, as FSDP does."""
    return count // 100, [(i, 0) for i in range(100)]


def columns(count: int) -> tuple[int, list[tuple[int, ...]]]:
    """Split dimension 1 into 8, as row-wise tensor parallelism does."""
    return count // 8, [(0, i) for i in range(8)]


def grid(count: int) -> tuple[int, list[tuple[int, ...]]]:
    """Split 16 by 8: tensor parallelism times FSDP."""
    return count // 128, [(i, j) for i in range(16) for j in range(8)]


CASES: dict[str, Callable[[int], tuple[int, list[tuple[int, ...]]]]] = {
    f.__name__: f for f in (whole, rows, columns, grid)
}


def build(case: str, count: int) -> Manifest:
    """Build a manifest of about ``count`` shards of 4 x 8 bfloat16 elements, in files filled one after the other."""
    tensors, cells = CASES[case](count)
    total = tensors * len(cells)
    unit = np.array([4, 8], np.int64)
    shape = (np.array(cells, np.int64).max(axis=0) + 1) * unit
    offsets = np.tile(np.array(cells, np.int64) * unit, (tensors, 1)).reshape(-1)
    table = TensorTable(
        sorted(f"model.layers.{i // 9}.self_attention.linear_{i % 9}.weight" for i in range(tensors)),
        ["model"],
        np.zeros(tensors, np.int64),
        np.full(tensors, DTYPES["bfloat16"].code, np.int64),
        np.full(tensors, 2, np.int64),
        np.tile(shape, tensors),
    )
    file = np.sort(np.arange(total) % FILES)
    first = np.searchsorted(file, np.arange(FILES))
    nbytes = int(unit.prod()) * 2
    # Distribute shards at random: in a real save, neighbours in a file belong to different tensors.
    deal = np.random.default_rng(0).permutation(total)
    held = np.bincount(file, minlength=FILES)
    checksums = checksum_column(np.random.default_rng(1).bytes(CHECKSUM_BYTES * total))
    files = FileTable(
        [f"attempt-0/model-{i:05d}.safetensors" for i in range(FILES)],
        4096 + held * nbytes,
        np.zeros(FILES, np.int64),
        np.arange(FILES),
        ["tensors"] * FILES,
        np.full(FILES, 4096, np.int64),
        checksums[:FILES],
        np.full(FILES, CHUNK, np.int64),
        ["raw"] * FILES,
    )
    return Manifest(
        library_version="0",
        step=1,
        created="2025-01-01T00:00:00.000000Z",
        world_size=FILES,
        attempt="attempt-0",
        metadata={},
        sections=[SectionInfo("model", "torch")],
        files=files,
        tensors=table,
        scope=np.full(tensors, -1, np.int64),
        shards=BoxTable.from_columns(
            table, np.repeat(np.arange(tensors), len(cells)), offsets, np.tile(unit, total).reshape(-1)
        ),
        shard_file=file[deal],
        shard_offset=((np.arange(total) - first[file]) * nbytes)[deal],
        checksums=checksums,
    )


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Return the median processor time of several calls."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def floor(data: bytes) -> None:
    """Do only what every reader must do."""
    xxhash.xxh3_128_digest(data[:-16])
    _, _, codec, _, payload, _ = msgpack.unpackb(data)
    if codec == "zstd":
        zstandard.ZstdDecompressor().decompress(payload)


def measure(case: str, count: int, repeat: int) -> dict[str, Any]:
    manifest = build(case, count)
    data = encode(manifest)
    result = {
        "case": case,
        "shards": len(manifest.shards),
        "tensors": len(manifest.tensors),
        "bytes": len(data),
        "floor_s": seconds(lambda: floor(data), repeat),
        "validate_s": seconds(lambda: validate(manifest), repeat),
        "decode_s": seconds(lambda: decode(data), repeat),
        "encode_s": seconds(lambda: encode(manifest), repeat),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    header = (
        f"{'case':10}{'shards':>10}{'tensors':>10}{'MB':>8}{'floor s':>9}{'validate':>10}{'decode':>9}{'encode':>9}"
    )
    print(header)
    results = []
    for case in CASES:
        r = measure(case, options.shards, options.repeat)
        results.append(r)
        print(
            f"{r['case']:10}{r['shards']:10}{r['tensors']:10}{r['bytes'] / 1e6:8.1f}{r['floor_s']:9.3f}"
            f"{r['validate_s']:10.3f}{r['decode_s']:9.3f}{r['encode_s']:9.3f}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {"python": platform.python_version(), "machine": platform.machine(), "numpy": np.__version__}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
