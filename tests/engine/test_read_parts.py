"""Read any number of overlapping parts of stored shards into any memory, on every path that bytes take."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from counting_backend import CountingBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leak_watch import files_left_below
from sampling import examples

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.manifest_file import read_manifest
from bytecheckpoint.engine.reading import fetch
from bytecheckpoint.engine.reading.bounce import BouncePool
from bytecheckpoint.engine.reading.reader import ReadPart, ShardReader
from bytecheckpoint.errors import CorruptionError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.local import objects as local_objects
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.tensors.geometry import Box

_CHUNKS = (64, 65, 1000, 1 << 20)  # 65 is no multiple of any larger element size; 1000 does not divide the read size
_SIZES = (64, 4096, 2 << 20)

_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "flag": (torch.bool, (3,)),
    "scalar": (torch.float32, ()),
    "matrix": (torch.float32, (70, 50)),
    "half": (torch.bfloat16, (13, 7, 5)),
    "wide": (torch.complex128, (9, 11)),
    "bytes": (torch.uint8, (5001,)),
    "cube": (torch.int64, (6, 5, 4, 3)),
    "small": (torch.float16, (5,)),
    "empty": (torch.float32, (0, 4)),
}


def _content() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape) in _SHAPES.items():
        numel = torch.Size(shape).numel()
        noise = torch.randint(0, 2 if dtype == torch.bool else 120, (numel,), generator=generator)
        tensors[name] = noise.to(dtype).reshape(shape)
    return tensors


_TENSORS = _content()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    for chunk in _CHUNKS:
        bcp.save(path / str(chunk), {"model": _TENSORS}, options=bcp.SaveOptions(chunk_size=chunk))
    return path


@pytest.fixture(params=["cached", "direct", "ranges"])
def read_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read through the page cache, directly from the device, or with the ranged reads that every store supports."""
    if request.param == "direct":
        monkeypatch.setattr(fetch, "_MIN_DIRECT_BYTES", 0)
        monkeypatch.setattr(local_objects.LocalReader, "is_cached", lambda *arguments: False)
    path: str = request.param
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def _open(path: Path, read_path: str, size: int) -> StorageBackend:
    backend: StorageBackend = LocalBackend(path, direct_io=read_path == "direct")
    if read_path == "ranges":
        backend = CountingBackend(backend)
    backend.read_size = size
    return backend


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@st.composite
def _requests(draw: st.DrawFn) -> list[tuple[str, Box, str]]:
    """Names, boxes and kinds of memory."""
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(_SHAPES)))
        shape = _SHAPES[name][1]
        box = draw(st.one_of(st.just(Box.whole(shape)), _boxes(shape)))
        requests.append((name, box, draw(st.sampled_from(["plain", "plain", "transposed", "cast", "strided"]))))
    return requests


def _memory(box: Box, dtype: torch.dtype, kind: str) -> torch.Tensor:
    if kind == "cast":
        return torch.zeros(box.lengths, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    if kind == "transposed":
        return torch.zeros(box.lengths[::-1], dtype=dtype).permute([*reversed(range(box.ndim))])
    if kind == "strided" and box.ndim:
        return torch.zeros((*box.lengths[:-1], 2 * box.lengths[-1]), dtype=dtype)[..., ::2]
    return torch.zeros(box.lengths, dtype=dtype)


@settings(deadline=None, max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=_requests(),
    chunk=st.sampled_from(_CHUNKS),
    size=st.sampled_from(_SIZES),
    verify=st.booleans(),
)
def test_any_parts_into_any_memory(
    saved: Path,
    pool: ThreadPoolExecutor,
    read_path: str,
    requests: list[tuple[str, Box, str]],
    chunk: int,
    size: int,
    verify: bool,
) -> None:
    backend = _open(saved / str(chunk), read_path, size)
    manifest = read_manifest(backend)
    reader = ShardReader(backend, manifest, pool, bounce_pool=BouncePool(8 * size), verify=verify)
    parts = []
    for name, box, kind in requests:
        row = manifest.tensor_row(f"model.{name}")
        assert row is not None
        parts.append(ReadPart(manifest.shards_of(row).start, box, _memory(box, _SHAPES[name][0], kind)))
    reader.read(parts)
    for (name, box, kind), part in zip(requests, parts):
        assert torch.equal(part.out, _TENSORS[name][box.slices()].to(part.out.dtype)), f"{name} {box} {kind}"
    requested = sum(box.numel * _SHAPES[name][0].itemsize for name, box, _ in requests)
    assert reader.stats.requested == requested
    heads = int(manifest.files.head_length.sum())
    assert reader.stats.read <= sum(t.nbytes for t in _TENSORS.values()) + heads, "nothing is read twice"


def test_parts_in_one_chunk_share_its_read(saved: Path, pool: ThreadPoolExecutor) -> None:
    """What FSDP's flat shards come to: many boxes side by side, none of them on the border of a chunk."""
    backend = open_backend(saved / "1000")
    manifest = read_manifest(backend)
    row = manifest.tensor_row("model.matrix")
    assert row is not None
    shard = manifest.shards_of(row).start
    reader = ShardReader(backend, manifest, pool)
    rows = [torch.zeros(1, 50) for _ in range(70)]
    reader.read([ReadPart(shard, Box((i, 0), (1, 50)), out) for i, out in enumerate(rows)])
    assert torch.equal(torch.cat(rows), _TENSORS["matrix"])
    head = int(manifest.files.head_length[manifest.shard_file[shard]])
    assert reader.stats.read == reader.stats.requested + head


@pytest.mark.parametrize("chunk", _CHUNKS)
def test_a_changed_byte_is_found_on_every_path(
    saved: Path, pool: ThreadPoolExecutor, read_path: str, chunk: int, tmp_path: Path
) -> None:
    backend = open_backend(saved / str(chunk))
    manifest = read_manifest(backend)
    name = manifest.files.name[0]
    content = bytearray(backend.get(name))
    row = manifest.tensor_row("model.matrix")
    assert row is not None
    shard = manifest.shards_of(row).start
    at = manifest.byte_meta(shard).offset + 50 * 4 * 33 + 17
    content[at] ^= 4
    damaged = _open(tmp_path, read_path, 4096)
    with damaged.create(name, len(content)) as writer:
        writer.write(0, content)
        writer.complete()
    out = torch.zeros(70, 1)
    begin = at - manifest.byte_meta(shard).offset
    low = at - begin % chunk
    high = min(low + chunk, manifest.byte_meta(shard).offset + manifest.byte_meta(shard).length)
    for box, memory in ((Box((0, 4), (70, 1)), out), (Box.whole((70, 50)), torch.zeros(70, 50))):
        if chunk == 3 and box.lengths[1] == 1:
            continue  # the column does not need the damaged chunk
        with pytest.raises(CorruptionError, match=rf"model\.matrix .*bytes \[{low}, {high}\)"):
            ShardReader(damaged, manifest, pool).read([ReadPart(shard, box, memory)])
    ShardReader(damaged, manifest, pool, verify=False).read(
        [ReadPart(shard, Box((0, 0), (33, 50)), torch.zeros(33, 50))]
    )


def test_the_error_for_a_truncated_file_names_the_missing_tensor(
    saved: Path, pool: ThreadPoolExecutor, read_path: str, tmp_path: Path
) -> None:
    backend = open_backend(saved / "1000")
    manifest = read_manifest(backend)
    name = manifest.files.name[0]
    last = max(range(len(manifest.shards)), key=lambda row: int(manifest.shard_offset[row]))
    tensor = manifest.tensors.names[int(manifest.shards.tensor[last])]
    content = backend.get(name)[:-1]
    damaged = _open(tmp_path, read_path, 2 << 20)
    with damaged.create(name, len(content)) as writer:
        writer.write(0, content)
        writer.complete()
    parts = []
    for row in range(len(manifest.shards)):
        box = manifest.shards.box_of(row)
        dtype = _SHAPES[manifest.tensors.names[int(manifest.shards.tensor[row])].removeprefix("model.")][0]
        parts.append(ReadPart(row, box, torch.zeros(box.lengths, dtype=dtype)))
    with pytest.raises(CorruptionError, match=rf"{tensor} .*the file has {len(content)} bytes"):
        ShardReader(damaged, manifest, pool).read(parts)


def test_nothing_outlives_a_read(saved: Path, pool: ThreadPoolExecutor) -> None:
    """No descriptor stays open, and no reference cycle keeps the tensors alive."""
    backend = open_backend(saved / "64")
    manifest = read_manifest(backend)
    row = manifest.tensor_row("model.matrix")
    assert row is not None
    out = torch.zeros(70, 50)
    gone = weakref.ref(out)
    gc.collect()
    gc.disable()
    try:
        bounce_pool = BouncePool()
        reader = ShardReader(backend, manifest, pool, bounce_pool=bounce_pool)
        reader.read([ReadPart(manifest.shards_of(row).start, Box.whole((70, 50)), out)])
        del out
        assert gone() is None
    finally:
        gc.enable()
    assert files_left_below(saved) == []
