"""Parts of stored shards, in any number, overlapping, into any memory: bit for bit, on every way that bytes take."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.engine.reading import fetch
from bytecheckpoint.engine.reading.bounce import BounceRing
from bytecheckpoint.engine.reading.reader import Reader, ReadPart
from bytecheckpoint.engine.writing.commit import read_manifest
from bytecheckpoint.errors import CorruptionError
from bytecheckpoint.geometry import Box
from bytecheckpoint.storage_backends import StorageBackend, local_objects, open_backend
from bytecheckpoint.storage_backends.local import LocalBackend
from bytecheckpoint.testing.faults import CountingBackend

_CHUNKS = (3, 64, 1000, 1 << 20)  # 3 fits no element; 1000 is no multiple of what is read at once
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
        bcp.save(path / str(chunk), {"model": _TENSORS}, chunk_size=chunk)
    return path


@pytest.fixture(params=["cached", "direct", "ranges"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Right out of the page cache, past it, or by the ranged reads that every store has."""
    if request.param == "direct":
        monkeypatch.setattr(fetch, "_MIN_DIRECT", 0)
        monkeypatch.setattr(local_objects.LocalReader, "is_at_hand", lambda *arguments: False)
    monkeypatch.setattr(fetch, "_STRAIGHT", 100)
    way: str = request.param
    return way


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def _open(path: Path, way: str, size: int) -> StorageBackend:
    backend: StorageBackend = LocalBackend(path, direct_io=way == "direct")
    if way == "ranges":
        backend = CountingBackend(backend)
    backend.read_size = size
    return backend


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@st.composite
def _wants(draw: st.DrawFn) -> list[tuple[str, Box, str]]:
    """Names, boxes and kinds of memory."""
    wants = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(_SHAPES)))
        shape = _SHAPES[name][1]
        box = draw(st.one_of(st.just(Box.whole(shape)), _boxes(shape)))
        wants.append((name, box, draw(st.sampled_from(["plain", "plain", "transposed", "cast", "strided"]))))
    return wants


def _memory(box: Box, dtype: torch.dtype, kind: str) -> torch.Tensor:
    if kind == "cast":
        return torch.zeros(box.lengths, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    if kind == "transposed":
        return torch.zeros(box.lengths[::-1], dtype=dtype).permute([*reversed(range(box.ndim))])
    if kind == "strided" and box.ndim:
        return torch.zeros((*box.lengths[:-1], 2 * box.lengths[-1]), dtype=dtype)[..., ::2]
    return torch.zeros(box.lengths, dtype=dtype)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wants=_wants(),
    chunk=st.sampled_from(_CHUNKS),
    size=st.sampled_from(_SIZES),
    verify=st.booleans(),
)
def test_any_parts_into_any_memory(
    saved: Path,
    pool: ThreadPoolExecutor,
    way: str,
    wants: list[tuple[str, Box, str]],
    chunk: int,
    size: int,
    verify: bool,
) -> None:
    backend = _open(saved / str(chunk), way, size)
    manifest = read_manifest(backend)
    reader = Reader(backend, manifest, pool, verify=verify, ring=BounceRing(8 * size))
    parts = []
    for name, box, kind in wants:
        row = manifest.tensor_row(f"model.{name}")
        assert row is not None
        parts.append(ReadPart(manifest.shards_of(row).start, box, _memory(box, _SHAPES[name][0], kind)))
    reader.read(parts)
    for (name, box, kind), part in zip(wants, parts):
        assert torch.equal(part.out, _TENSORS[name][box.slices()].to(part.out.dtype)), f"{name} {box} {kind}"
    wanted = sum(box.numel * _SHAPES[name][0].itemsize for name, box, _ in wants)
    assert reader.stats.wanted == wanted
    heads = int(manifest.files.head_length.sum())
    assert reader.stats.read <= sum(t.nbytes for t in _TENSORS.values()) + heads, "nothing is read twice"


def test_parts_in_one_chunk_share_its_read(saved: Path, pool: ThreadPoolExecutor) -> None:
    """What FSDP's flat shards come to: many boxes side by side, none of them on the border of a chunk."""
    backend = open_backend(saved / "1000")
    manifest = read_manifest(backend)
    row = manifest.tensor_row("model.matrix")
    assert row is not None
    shard = manifest.shards_of(row).start
    reader = Reader(backend, manifest, pool)
    rows = [torch.zeros(1, 50) for _ in range(70)]
    reader.read([ReadPart(shard, Box((i, 0), (1, 50)), out) for i, out in enumerate(rows)])
    assert torch.equal(torch.cat(rows), _TENSORS["matrix"])
    assert reader.stats.read == reader.stats.wanted + int(manifest.files.head_length.sum())


@pytest.mark.parametrize("chunk", _CHUNKS)
def test_a_changed_byte_is_found_on_every_way(
    saved: Path, pool: ThreadPoolExecutor, way: str, chunk: int, tmp_path: Path
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
    damaged = _open(tmp_path, way, 4096)
    with damaged.create(name, len(content)) as writer:
        writer.write(0, content)
        writer.complete()
    out = torch.zeros(70, 1)
    begin = at - manifest.byte_meta(shard).offset
    low = at - begin % chunk
    high = min(low + chunk, manifest.byte_meta(shard).offset + manifest.byte_meta(shard).length)
    for box, memory in ((Box((0, 4), (70, 1)), out), (Box.whole((70, 50)), torch.zeros(70, 50))):
        if chunk == 3 and box.lengths[1] == 1:
            continue  # the chunk with the damage is not among those that the column needs
        with pytest.raises(CorruptionError, match=rf"model\.matrix .*bytes \[{low}, {high}\)"):
            Reader(damaged, manifest, pool).read([ReadPart(shard, box, memory)])
    Reader(damaged, manifest, pool, verify=False).read([ReadPart(shard, Box((0, 0), (33, 50)), torch.zeros(33, 50))])


def test_a_file_that_was_cut_names_the_tensor_that_is_missing(
    saved: Path, pool: ThreadPoolExecutor, way: str, tmp_path: Path
) -> None:
    backend = open_backend(saved / "1000")
    manifest = read_manifest(backend)
    name = manifest.files.name[0]
    last = max(range(len(manifest.shards)), key=lambda row: int(manifest.shard_offset[row]))
    tensor = manifest.tensors.names[int(manifest.shards.tensor[last])]
    content = backend.get(name)[:-1]
    damaged = _open(tmp_path, way, 2 << 20)
    with damaged.create(name, len(content)) as writer:
        writer.write(0, content)
        writer.complete()
    parts = []
    for row in range(len(manifest.shards)):
        box = manifest.shards.box_of(row)
        dtype = _SHAPES[manifest.tensors.names[int(manifest.shards.tensor[row])].removeprefix("model.")][0]
        parts.append(ReadPart(row, box, torch.zeros(box.lengths, dtype=dtype)))
    with pytest.raises(CorruptionError, match=rf"{tensor} .*the file has {len(content)} bytes"):
        Reader(damaged, manifest, pool).read(parts)


def test_nothing_outlives_a_read(saved: Path, pool: ThreadPoolExecutor) -> None:
    """Neither descriptors nor, by a cycle, the tensors."""
    backend = open_backend(saved / "64")
    manifest = read_manifest(backend)
    row = manifest.tensor_row("model.matrix")
    assert row is not None
    before = len(os.listdir("/proc/self/fd"))
    out = torch.zeros(70, 50)
    gone = weakref.ref(out)
    gc.collect()
    gc.disable()
    try:
        ring = BounceRing()
        reader = Reader(backend, manifest, pool, ring=ring)
        reader.read([ReadPart(manifest.shards_of(row).start, Box.whole((70, 50)), out)])
        del out
        assert gone() is None
    finally:
        gc.enable()
    assert len(os.listdir("/proc/self/fd")) == before
