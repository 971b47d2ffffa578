"""``bcp.open`` (slices, values, metadata) and ``bcp.latest``."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    NameNotFoundError,
    NotACheckpointError,
    NoValidCheckpointError,
    TensorIndexError,
)
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing.ranks import RankPool

WORLD = 3
CHUNK = 64
SHAPES: dict[str, tuple[int, ...]] = {"c": (3, 4, 5), "w": (5, 7), "v": (11,), "one": (1,)}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(_values(number, shape)))


def _values(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * number


def _expected(name: str) -> torch.Tensor:
    return _values(list(SHAPES).index(name), SHAPES[name])


def _save(rank: int, world_size: int, path: str, layout: str) -> None:
    model: Any = _Net()
    if layout == "flat":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP-1 announces its deprecation
            model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sizes = {name: max(range(len(shape)), key=shape.__getitem__) for name, shape in SHAPES.items()}
        model = {name: distribute_tensor(_expected(name), mesh, [Shard(d)]) for name, d in sizes.items()}
    extra = {"step": 3, "rank": bcp.PerRank(rank), "list": [1, (2, None)]}
    bcp.save(
        path,
        {"model": model, "extra_state": extra},
        step=3,
        metadata={"by": "test", "n": [1, 2]},
        options=bcp.SaveOptions(chunk_size=CHUNK),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same values, sharded into flat ranges by FSDP-1 and into slabs by tensor parallelism."""
    root = tmp_path_factory.mktemp("handle")
    with RankPool(WORLD) as pool:
        for layout in ("flat", "slabs"):
            pool.run(_save, str(root / layout), layout)
    return {layout: root / layout for layout in ("flat", "slabs")}


@pytest.fixture(scope="module", params=["flat", "slabs"])
def checkpoint(saved: dict[str, Path], request: pytest.FixtureRequest) -> bcp.Checkpoint:
    assert not dist.is_initialized()
    return bcp.open(saved[request.param])


# -- slices ------------------------------------------------------------------------------------------------------

_INDICES = [
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(-3, None),
    slice(None, None, 2),
    slice(1, 100, 3),
    slice(4, 2),
    slice(2, 2),
    ...,
    (..., 1),
    (0, ...),
    (slice(1, 4), slice(2, 6)),
    (-2, slice(None, None, 3)),
    (slice(None), -1),
    (slice(3, 1), 2),
    (),
]


@pytest.mark.parametrize("index", _INDICES, ids=repr)
@pytest.mark.sampled(8)
def test_an_index_selects_what_it_selects_from_a_tensor(checkpoint: bcp.Checkpoint, index: Any) -> None:
    expected = _expected("w")[index]
    found = checkpoint["model.w"][index]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "index", [5, -6, (0, 7), (0, 0, 0), (..., ...), slice(None, None, -1), "x", 1.0, [0, 1], None, True], ids=repr
)
def test_an_index_that_does_not_fit(checkpoint: bcp.Checkpoint, index: Any) -> None:
    with pytest.raises(IndexError, match=r"model\.w"):
        checkpoint["model.w"][index]


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[str, Box]:
    name = draw(st.sampled_from(list(SHAPES)))
    offsets, lengths = [], []
    for size in SHAPES[name]:
        begin = draw(st.integers(0, size))
        offsets.append(begin)
        lengths.append(draw(st.integers(0, size - begin)))
    return name, Box(tuple(offsets), tuple(lengths))


@settings(deadline=None, max_examples=examples(60))
@given(what=_boxes())
@pytest.mark.parametrize("layout", ["flat", "slabs"])
def test_any_box_equals_the_slice(saved: dict[str, Path], layout: str, what: tuple[str, Box]) -> None:
    name, box = what
    found = bcp.open(saved[layout])[f"model.{name}"].read(box)
    assert torch.equal(found, _expected(name)[box.slices()])


def test_numpy_integers_are_integers(checkpoint: bcp.Checkpoint) -> None:
    assert torch.equal(checkpoint["model.w"][np.int64(2), np.int32(-1)], _expected("w")[2, -1])


def test_a_box_outside_the_tensor(checkpoint: bcp.Checkpoint) -> None:
    with pytest.raises(bcp.errors.BytecheckpointError, match=r"model\.w"):
        checkpoint["model.w"].read(Box((4, 0), (2, 7)))
    with pytest.raises(bcp.errors.BytecheckpointError, match=r"model\.w"):
        checkpoint["model.w"].read(Box((0,), (2,)))


def test_whole_tensors_and_their_shards(checkpoint: bcp.Checkpoint) -> None:
    for name, shape in SHAPES.items():
        tensor = checkpoint[f"model.{name}"]
        assert torch.equal(tensor.load(), _expected(name))
        assert (tensor.name, tensor.shape, tensor.dtype) == (f"model.{name}", shape, torch.float32)
        assert tensor.nbytes == 4 * torch.Size(shape).numel()
        assert sum(shard.box.numel for shard in tensor.shards) == torch.Size(shape).numel()
        assert name in repr(tensor)
    for name in ("model.w", "model.c"):
        assert len(checkpoint[name].shards) > 1, "the tensor has one shard, so this tests nothing"


def test_unusual_tensors(tmp_path: Path) -> None:
    """0-d and empty tensors, and dtypes with little support in torch."""
    state = {
        "zero_d": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "bools": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j]),
    }
    bcp.save(tmp_path, {"model": state})
    checkpoint = bcp.open(tmp_path)
    for name, tensor in state.items():
        found = checkpoint[f"model.{name}"]
        for loaded in (found.load(), found[...]):
            assert loaded.dtype == tensor.dtype
            assert loaded.shape == tensor.shape
            assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert checkpoint["model.zero_d"][()].item() == 5
    assert checkpoint["model.empty"][:, 1].shape == (0,)
    with pytest.raises(IndexError):
        checkpoint["model.zero_d"][0]


def test_a_slice_reads_only_its_chunks(tmp_path: Path) -> None:
    """A slice fetches the chunks around it, not the whole tensor."""
    chunk = 4096
    weight = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)  # 1 MiB
    bcp.save(tmp_path, {"model": {"w": weight}}, options=bcp.SaveOptions(chunk_size=chunk))
    checkpoint = bcp.open(tmp_path)
    stored = checkpoint["model.w"]
    head = 4096
    for index, nbytes in ((slice(3, 5), 2 * 512 * 4), (7, 512 * 4), ((0, 0), 4)):
        before_read, before_requested = checkpoint.stats.read, checkpoint.stats.requested
        assert torch.equal(stored[index], weight[index])
        assert checkpoint.stats.requested - before_requested == nbytes
        assert checkpoint.stats.read - before_read <= nbytes + 2 * chunk + head
    before = checkpoint.stats.read
    assert torch.equal(stored[:, 0], weight[:, 0])
    assert checkpoint.stats.read - before <= weight.nbytes + head
    before = checkpoint.stats.read
    assert stored[4:2].numel() == 0
    assert checkpoint.stats.read == before


@pytest.mark.parametrize("chunk_size", [1_000_003, 9 << 20])
def test_chunks_of_any_size(tmp_path: Path, chunk_size: int) -> None:
    """Reads consist of whole chunks, even if the chunk size does not divide the read size or exceeds it."""
    weight = torch.arange(5 << 19, dtype=torch.float32)  # 10 MiB
    bcp.save(tmp_path / "a", {"model": {"w": weight}}, options=bcp.SaveOptions(chunk_size=chunk_size))
    target = {"model": {"w": torch.zeros_like(weight)}}
    bcp.load(tmp_path / "a", target)
    assert torch.equal(target["model"]["w"], weight)
    checkpoint = bcp.open(tmp_path / "a")
    assert torch.equal(checkpoint["model.w"][7:-7], weight[7:-7])
    progress: list[int] = []
    report = checkpoint.verify(progress.append)
    assert report.ok
    assert report.bytes_checked == sum(progress) == checkpoint.manifest.file_bytes
    copy(checkpoint, str(tmp_path / "b"))
    (file,) = (tmp_path / "b").glob("*/model-*")
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"x")
    (problem,) = bcp.open(tmp_path / "b").verify().problems
    assert f"bytes [{4096 + weight.nbytes // chunk_size * chunk_size}, {4096 + weight.nbytes})" in problem


# -- names, values, metadata -------------------------------------------------------------------------------------


def test_names_and_metadata(checkpoint: bcp.Checkpoint) -> None:
    assert sorted(checkpoint) == [f"model.{name}" for name in sorted(SHAPES)]
    assert len(checkpoint) == len(SHAPES)
    assert "model.w" in checkpoint
    assert "model.nothing" not in checkpoint
    assert checkpoint.step == 3
    assert checkpoint.metadata == {"by": "test", "n": [1, 2]}
    assert checkpoint.world_size == WORLD
    assert checkpoint.sections == ["extra_state", "model"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", checkpoint.created)
    assert "step=3" in repr(checkpoint)
    assert checkpoint.url in repr(checkpoint)
    assert checkpoint.verify().ok


def test_an_unknown_name(checkpoint: bcp.Checkpoint) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'model\.x' in "):
        checkpoint["model.x"]
    with pytest.raises(NameNotFoundError, match=r"no section 'optimizer'; it has extra_state, model"):
        checkpoint.section_values("optimizer")


def test_values(checkpoint: bcp.Checkpoint) -> None:
    for rank in range(WORLD):
        values = checkpoint.section_values("extra_state", rank=rank)
        assert values == {("step",): 3, ("rank",): rank, ("list",): [1, (2, None)]}


def test_tied_names(tmp_path: Path) -> None:
    model = nn.Module()
    model.first = nn.Linear(3, 3, bias=False)
    model.second = nn.Linear(3, 3, bias=False)
    model.second.weight = model.first.weight
    bcp.save(tmp_path, {"model": model})
    checkpoint = bcp.open(tmp_path)
    assert dict(checkpoint.aliases) == {"model.second.weight": "model.first.weight"}
    assert sorted(checkpoint) == ["model.first.weight", "model.second.weight"]
    assert torch.equal(checkpoint["model.second.weight"][1], model.first.weight[1])
    assert checkpoint["model.second.weight"].name == "model.second.weight"
    assert checkpoint.manifest.nbytes == 9 * 4


# -- no checkpoint -----------------------------------------------------------------------------------------


def test_opening_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing is stored there; check the path"):
        bcp.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError):
        bcp.open(tmp_path)
    (tmp_path / "model.pt").write_text("something")
    with pytest.raises(NotACheckpointError, match=r"has no manifest\.msgpack but holds model\.pt"):
        bcp.open(tmp_path)
    with pytest.raises(NotACheckpointError, match=r"torch\.save did not write it"):
        bcp.open(tmp_path / "model.pt")
    (tmp_path / "manifest.msgpack").mkdir()
    with pytest.raises(bcp.errors.BytecheckpointError, match=r"manifest\.msgpack"):
        bcp.open(tmp_path)


def _steps(root: Path, *steps: int, name: str = "step-{}") -> None:
    for step in steps:
        bcp.save(root / name.format(step), {"extra_state": {"value": step}}, step=step)


def test_latest_is_the_highest_step(tmp_path: Path) -> None:
    _steps(tmp_path, 9, 100, 20)
    found = bcp.latest(tmp_path)
    assert found is not None
    assert found.step == 100
    assert found.section_values("extra_state")[("value",)] == 100


def test_latest_uses_the_stored_step_before_the_name(tmp_path: Path) -> None:
    """The number in a name counts only for checkpoints that were saved without a step."""
    bcp.save(tmp_path / "a-good-one", {"extra_state": {}}, step=50)
    bcp.save(tmp_path / "step-7", {"extra_state": {}}, step=7)
    found = bcp.latest(tmp_path)
    assert found is not None
    assert found.step == 50
    bcp.save(tmp_path / "run-60", {"extra_state": {}})
    found = bcp.latest(tmp_path)
    assert found is not None
    assert found.url.endswith("run-60")


def test_latest_skips_broken_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-4" / "manifest.msgpack").write_bytes(b"garbage")
    (tmp_path / "step-3" / "manifest.msgpack").unlink()  # as if it was never committed
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-6.txt").write_text("a file")
    (tmp_path / "logs-9").mkdir()
    (tmp_path / "logs-9" / "log.txt").write_text("not a checkpoint")
    with caplog.at_level(logging.WARNING):
        found = bcp.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert "step-4" in caplog.text
    assert "manifest" in caplog.text


def test_latest_without_a_complete_checkpoint(tmp_path: Path) -> None:
    assert bcp.latest(tmp_path) is None
    assert bcp.latest(tmp_path / "nowhere") is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "attempt-x").mkdir()
    (tmp_path / "step-1" / "attempt-x" / "model-00000.safetensors").write_text("half")
    with pytest.raises(NoValidCheckpointError, match=r"step-1: .*none was committed"):
        bcp.latest(tmp_path)
    assert bcp.latest(tmp_path, allow_fresh=True) is None


def test_latest_skips_a_checkpoint_that_lost_a_file(tmp_path: Path) -> None:
    _steps(tmp_path, 1, 2, 3)
    lost = next((tmp_path / "step-3").glob("attempt-*/*"))
    lost.unlink()
    truncated = next((tmp_path / "step-2").glob("attempt-*/*"))
    os.truncate(truncated, truncated.stat().st_size - 1)
    found = bcp.latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_memory_urls_work_the_same() -> None:
    root = "memory://handle-test"
    for step in (1, 2):
        bcp.save(f"{root}/step-{step}", {"extra_state": {"value": step}}, step=step)
    found = bcp.latest(root)
    assert found is not None
    assert found.step == 2
    assert found.verify().ok


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def test_a_chunk_size_that_is_no_multiple_of_the_element_size(tmp_path: Path) -> None:
    """A slab may start anywhere in a chunk, even if its elements are then not aligned in the buffer."""
    weight = torch.arange(600, dtype=torch.float64).reshape(20, 30).to(torch.complex128)
    bcp.save(tmp_path / "a", {"model": {"w": weight}}, options=bcp.SaveOptions(chunk_size=1000))
    stored = bcp.open(tmp_path / "a")["model.w"]
    for index in ((slice(3, 17), slice(5, 7)), (slice(4, 5),), (slice(None), 29)):
        assert torch.equal(stored[index], weight[index])


def test_adjacent_small_tensors_are_fetched_together(tmp_path: Path) -> None:
    tensors = {f"w{i:03}": torch.full((i % 7, 3), float(i)) for i in range(200)}
    bcp.save(tmp_path / "a", {"x": dict(tensors)})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    calls: list[int] = []
    read_into = LocalBackend.read_into

    def counted(self: LocalBackend, key: str, offset: int, buffer: memoryview) -> None:
        calls.append(len(buffer))
        read_into(self, key, offset, buffer)

    with mock.patch.object(LocalBackend, "read_into", counted):
        report = bcp.load(tmp_path / "a", {"x": loaded})
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert len(calls) <= 5, "one read for all small tensors, in addition to header and values"
    assert report.bytes_requested == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    "index",
    [
        [0, 1], None, True, np.bool_(1), torch.tensor([0, 1]), torch.tensor(True), torch.tensor([True, False]),
        np.arange(2), (0, [1]), (torch.tensor([0]), ...), (None, 0), "a", 1.5, slice("a"),
        slice(0, 4, 0), slice(None, None, -1),
        (..., ...), (0, 0, 0), 99, -99,
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_indexed(tmp_path: Path, index: Any) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.arange(12.0).reshape(4, 3)}})
    with pytest.raises(TensorIndexError, match=r"^model\.w: "):
        bcp.open(tmp_path)["model.w"][index]


def test_integers_of_other_libraries_index(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    bcp.save(tmp_path, {"model": {"w": weight}})
    tensor = bcp.open(tmp_path)["model.w"]
    for index in (np.int64(2), torch.tensor(2), (slice(np.int64(1), None), torch.tensor(-1)), (..., np.uint8(0))):
        assert torch.equal(tensor[index], weight[index])


def test_what_is_not_a_name_is_not_in_a_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(1)}})
    checkpoint = bcp.open(tmp_path)
    for name in (5, None, ["model.w"], b"model.w", "model"):
        assert name not in checkpoint
        with pytest.raises(NameNotFoundError):
            checkpoint[name]  # type: ignore[index]
    assert checkpoint.get(5) is None  # type: ignore[call-overload]
