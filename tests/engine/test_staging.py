"""Staging: how images are split into pieces, that all bytes of all tensors arrive, and how waits end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.engine.blocks import PAGE
from bytecheckpoint.engine.files import FileImage
from bytecheckpoint.engine.staging.arena import Arena
from bytecheckpoint.engine.staging.pieces import copy_piece, split_images
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.engine.tensor_bytes import as_bytes
from bytecheckpoint.errors import DeadlineError, StateError
from bytecheckpoint.telemetry import Timings
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import Shard, basic_meta
from bytecheckpoint.testing import time_limit


def _image(key: str, tensors: Sequence[torch.Tensor], head: bytes = b"h" * 64) -> FileImage:
    shards = []
    for index, tensor in enumerate(tensors):
        meta = basic_meta(tensor.dtype, tensor.shape)
        shards.append(Shard(f"t{index}", meta, Box.whole(meta.shape), tensor))
    sizes = [tensor.nbytes for tensor in tensors]
    return FileImage(key, "model", "tensors", head, [0, *accumulate(sizes)][: len(sizes)], sizes, shards)


def _plain_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(as_bytes(tensor.resolve_conj().resolve_neg().contiguous()).numpy())


def _content(image: FileImage) -> bytes:
    return image.head + b"".join(_plain_bytes(shard.tensor) for shard in image.shards)


def _empty(sizes: Sequence[int]) -> list[FileImage]:
    return [FileImage(str(index), "model", "values", b"v" * size) for index, size in enumerate(sizes)]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 40_000), max_size=6), st.integers(1, 5))
def test_images_are_split_without_gaps(sizes: list[int], pages: int) -> None:
    images = _empty(sizes)
    pieces = split_images(images, pages * PAGE)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    for image in images:
        own = [piece for piece in pieces if piece.image is image]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])][: len(own)]
        assert (own[-1].stop if own else 0) == image.size
        assert all(piece.start % PAGE == piece.offset % PAGE == 0 for piece in own)
    places = [(piece.block * pages * PAGE + piece.offset, piece.nbytes) for piece in pieces]
    assert all(0 < nbytes <= pages * PAGE for _, nbytes in places)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
    assert not pieces or pieces[-1].block == max(piece.block for piece in pieces)


def _strange_tensors() -> list[torch.Tensor]:
    base = torch.arange(7 * 30 * 11, dtype=torch.float32)
    cube = base.view(7, 30, 11)
    wide = torch.randn(200, 300, dtype=torch.complex64)
    return [
        wide,
        wide.conj(),
        wide.imag,
        wide.conj().imag,  # torch records the negation but does not apply it
        base.double(),
        cube,
        cube.permute(2, 0, 1),
        cube[::2, 3:29, 1:],
        cube.transpose(0, 2)[1:],
        base[5:6].expand(3, 40),
        base[::3],
        torch.tensor(3.5),
        base[4],
        torch.empty(0, 4),
        base.half(),
        torch.randint(0, 2, (3333,)).bool(),
    ]


@pytest.mark.parametrize("pages", [1, 3])
def test_every_byte_arrives(pages: int) -> None:
    tensors = sorted(_strange_tensors(), key=lambda tensor: -tensor.element_size())
    images = [_image("a", tensors, head=b"h" * 5000), _image("b", []), _image("c", tensors[-3:])]
    expected = [_content(image) for image in images]
    arena = Arena()
    arena.block_size = pages * PAGE
    staging = Staging(arena, images, Timings("save"))
    with ThreadPoolExecutor(2) as pool:
        staging.fill(pool, 2)
    for image, content in zip(images, expected):
        assert b"".join(bytes(staging.content(piece)) for piece in staging.pieces_of(image)) == content
    assert staging.is_copied()
    assert not any(image.shards for image in images), "the caller's tensors are still referenced"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_arrives(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 64 * 160, dtype=np.uint8))
    raw = raw % 2 if name == "bool" else raw
    whole = raw.view(dtype).view(64, -1)
    image = _image("a", [whole, whole.t(), whole[3:50, 1:7]])
    expected = image.head + b"".join(
        bytes(raw.view(64, -1, dtype.itemsize)[rows, columns].permute(order).contiguous().view(-1).numpy())
        for rows, columns, order in [
            (slice(None), slice(None), (0, 1, 2)),
            (slice(None), slice(None), (1, 0, 2)),
            (slice(3, 50), slice(1, 7), (0, 1, 2)),
        ]
    )
    arena = Arena(3 * PAGE)
    arena.make_room(1)
    block = arena.acquire()
    found = b""
    for start in range(0, image.size, PAGE):
        stop = min(start + PAGE, image.size)
        copy_piece(image, start, stop, block, 0)
        found += bytes(block.view[: stop - start])
    assert found == expected


def test_temporary_copies_are_bounded() -> None:
    """A non-contiguous tensor is copied box by box, without a contiguous copy of it."""
    tall = torch.zeros(4096, 1024)  # 16 MiB
    image = _image("a", [tall.t()])
    arena = Arena()
    arena.make_room(1)
    block = arena.acquire()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        copy_piece(image, 0, 1 << 20, block, 0)
    made = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert made <= 1 << 20


def test_a_save_that_exceeds_the_memory() -> None:
    """Filling continues as pieces are given back, and all memory is given back at the end."""
    images = [_image("a", [torch.arange(9000)]), _image("b", [torch.arange(500)])]
    expected = [_content(image) for image in images]
    arena = Arena(4 * PAGE)
    timings = Timings("save")
    staging = Staging(arena, images, timings, deadline_s=time_limit(60))
    assert not staging.fits
    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(staging.fill)
        for image, content in zip(images, expected):
            found = b""
            for piece in staging.pieces_of(image):
                found += bytes(staging.content(piece))
                staging.release(piece)
            assert found == content
        filling.result(time_limit(60))
    assert arena.nbytes <= 4 * PAGE
    assert not arena.would_wait(100)
    assert timings.work["copy"].nbytes == sum(map(len, expected))


def test_on_demand_staging_reuses_a_few_blocks() -> None:
    images = [_image("a", [torch.arange(9000)]), _image("b", [torch.arange(500)])]
    expected = [_content(image) for image in images]
    arena = Arena()
    arena.block_size = PAGE
    staging = Staging(arena, images, Timings("save"), deadline_s=time_limit(60), on_demand=2)
    for image, content in zip(images, expected):
        found = b""
        for piece in staging.pieces_of(image):
            found += bytes(staging.content(piece))
            staging.release(piece)
        assert found == content
    assert arena.nbytes <= 2 * PAGE
    assert staging.is_copied()


@pytest.mark.parametrize("on_demand", [None, 1])
def test_a_wait_for_memory_ends(on_demand: int | None) -> None:
    arena = Arena(4 * PAGE)
    staging = Staging(arena, [_image("a", [torch.arange(9000)])], Timings("save"), deadline_s=0.01, on_demand=on_demand)

    def proceed() -> None:
        for piece in staging.pieces if on_demand else ():
            staging.content(piece)
        staging.fill()

    with pytest.raises(DeadlineError):
        proceed()
    staging.discard(StateError("over"))
    assert not arena.would_wait(100)


def test_a_failure_ends_every_wait() -> None:
    arena = Arena(4 * PAGE)
    staging = Staging(arena, [_image("a", [torch.arange(9000)])], Timings("save"), deadline_s=time_limit(60))
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(staging.content, staging.pieces[-1])
        filler = pool.submit(staging.fill)
        staging.content(staging.pieces[0])
        staging.fail(StateError("failed by test"))
        with pytest.raises(StateError, match="failed by test"):
            reader.result(time_limit(60))
        staging.discard(StateError("over"))
        with pytest.raises(StateError, match="failed by test"):
            filler.result(time_limit(60))
    assert staging.is_copied()
    assert not arena.would_wait(100)


def test_a_copy_that_fails_in_any_thread_fails_the_filling() -> None:
    arena = Arena()
    arena.block_size = PAGE
    nowhere = torch.empty(1 << 15, device="meta")
    staging = Staging(arena, [_image("a", [torch.arange(1 << 15), nowhere])], Timings("save"))
    with ThreadPoolExecutor(2) as pool, pytest.raises(NotImplementedError):
        staging.fill(pool, 2)
    staging.discard(StateError("over"))
    assert staging.is_copied()
    assert not arena.would_wait(100)


@pytest.mark.parametrize(("pages", "pieces"), list(product([1, 2], [1, 5])))
def test_busy_helpers_are_not_waited_for(pages: int, pieces: int) -> None:
    arena = Arena()
    arena.block_size = pages * PAGE
    image = _image("a", [torch.arange(pieces * pages * PAGE // 8 - 8)])
    staging = Staging(arena, [image], Timings("save"))
    proceed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(proceed.wait, 60)
        staging.fill(pool, 1)
        assert staging.is_copied()
        proceed.set()
