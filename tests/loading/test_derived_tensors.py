"""Tensors that an object only hands out as copies: saved and loaded one at a time, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, CorruptionError
from bytecheckpoint.frameworks.base import Adapter, Context
from bytecheckpoint.frameworks.layout import ParamLayout, ParamPart
from bytecheckpoint.tensors.derived import DerivedTensor
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import (
    IrregularShard,
    SectionSource,
    SectionTarget,
    Shard,
    StoredSection,
    whole_tensor,
)
from bytecheckpoint.testing.ranks import RankPool

# The first two are longer than a staging block.
SHAPES = {"a": (6 << 20,), "b": (2500, 2000), "c": (5,), "scalar": (), "empty": (0, 3)}


class Scaled:
    """Keeps powers of two as exponents, and converts them to float32 on request."""

    def __init__(self, first: int, kind: type[Shard] = Shard) -> None:
        self.kind = kind
        self.exponents = {
            name: ((torch.arange(torch.Size(shape).numel()) + first) % 100).to(torch.int8).view(shape)
            for name, shape in SHAPES.items()
        }
        self.handed_out: list[DerivedTensor] = []
        self.most_at_once = 0

    def shards(self) -> tuple[dict[str, Any], list[Shard]]:
        places = {name: whole_tensor(torch.float32, torch.Size(shape)) for name, shape in SHAPES.items()}
        self.handed_out = [
            DerivedTensor.of(
                shape,
                torch.float32,
                read=lambda name=name: self._read(name),  # type: ignore[misc]
                write=lambda values, name=name: self._write(name, values),  # type: ignore[misc]
            )
            for name, shape in SHAPES.items()
        ]
        shards = [self.kind(name, *place, tensor) for (name, place), tensor in zip(places.items(), self.handed_out)]
        return {name: meta for name, (meta, _) in places.items()}, shards

    def _read(self, name: str) -> torch.Tensor:
        self.most_at_once = max(self.most_at_once, 1 + sum(one._computed is not None for one in self.handed_out))
        return self.exponents[name].float().exp2()

    def _write(self, name: str, values: torch.Tensor) -> None:
        self.exponents[name].copy_(torch.log2(values).round())


class ScaledAdapter(Adapter):
    name = "test-scaled"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, Scaled)

    def capture(self, obj: Scaled, context: Context) -> SectionSource:
        return SectionSource(*obj.shards())

    def target(self, obj: Scaled, context: Context, stored: StoredSection) -> SectionTarget:
        return SectionTarget(*obj.shards())


@pytest.fixture(scope="module", autouse=True)
def adapter() -> None:
    bcp.register_adapter(ScaledAdapter())


def check_loaded(path: Path, saved: Scaled) -> None:
    loaded = Scaled(50)
    bcp.load(path, {"scaled": loaded})
    for name in SHAPES:
        assert torch.equal(loaded.exponents[name], saved.exponents[name])


@pytest.mark.parametrize("kind", [Shard, IrregularShard])
@pytest.mark.parametrize("layout", ["shards", "whole"])
@pytest.mark.parametrize("async_save", [False, True])
def test_round_trip(tmp_path: Path, kind: type[Shard], layout: Any, async_save: bool) -> None:
    saved = Scaled(3, kind)
    expected = {name: exponents.float().exp2() for name, exponents in saved.exponents.items()}
    bcp.save(tmp_path / "c", {"scaled": saved}, async_save=async_save, options=bcp.SaveOptions(layout=layout)).result()
    checkpoint = bcp.open(tmp_path / "c")
    for name, values in expected.items():
        assert torch.equal(checkpoint[f"scaled.{name}"][()], values)
    check_loaded(tmp_path / "c", saved)
    assert 1 <= saved.most_at_once <= 4  # one for each copying thread
    assert all(one._computed is None for one in saved.handed_out)


def _on_each_rank(rank: int, world_size: int, path: str) -> list[int]:
    bcp.register_adapter(ScaledAdapter())
    saved, loaded = Scaled(3), Scaled(50)
    bcp.save(path, {"scaled": saved})
    report = bcp.load(path, {"scaled": loaded}, options=bcp.LoadOptions(share_reads="always"))
    for name in SHAPES:
        assert torch.equal(loaded.exponents[name], saved.exponents[name])
    return [report.bytes_requested, report.bytes_received]


def test_ranks_do_not_share_their_reads(tmp_path: Path) -> None:
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    with RankPool(2) as pool:
        assert pool.run(_on_each_rank, str(tmp_path / "c")) == [[nbytes, 0]] * 2


def test_damage_is_found(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"scaled": Scaled(3)})
    (file,) = (tmp_path / "c").rglob("*.safetensors")
    with file.open("r+b") as data:
        data.seek(-5, 2)
        last = data.read(1)[0]
        data.seek(-5, 2)
        data.write(bytes([last ^ 1]))
    with pytest.raises(CorruptionError, match="checksum mismatch in tensor scaled"):
        bcp.load(tmp_path / "c", {"scaled": Scaled(50)})


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    class Wrong(Scaled):
        def _read(self, name: str) -> torch.Tensor:
            return super()._read(name).flatten()[:3]

    with pytest.raises((BytecheckpointError, TypeError), match=r"read\(\) of a derived tensor returned torch.float32"):
        bcp.save(tmp_path / "c", {"scaled": Wrong(3)})
    assert not (tmp_path / "c" / "manifest.msgpack").exists()


class Flat:
    """Two parameters and padding in one flat buffer of exponents, the second with its columns in order."""

    shapes: ClassVar = {"first": (20, 30), "second": (500, 7)}

    def __init__(self, first: int) -> None:
        self.exponents = ((torch.arange(600 + 3500 + 5) + first) % 100).to(torch.int8)
        self.writes = 0

    def values(self) -> dict[str, torch.Tensor]:
        flat = self.exponents.float().exp2()
        return {"first": flat[:600].view(20, 30), "second": flat[600:4100].view(7, 500).T}

    def shards(self) -> tuple[dict[str, Any], list[Shard]]:
        whole = DerivedTensor.of(
            self.exponents.shape, torch.float32, read=lambda: self.exponents.float().exp2(), write=self._write
        )
        parts = [
            ParamPart("first", (20, 30), Box.whole((20, 30)), 0),
            ParamPart("second", (500, 7), Box((0, 0), (250, 7)), 600, (1, 500)),
            ParamPart("second", (500, 7), Box((250, 0), (250, 7)), 850, (1, 500)),
        ]
        return ParamLayout(tuple(whole.shape), tuple(parts), self.shapes).describe(whole, str)

    def _write(self, values: torch.Tensor) -> None:
        self.writes += 1
        self.exponents.copy_(torch.log2(values).round())


class FlatAdapter(ScaledAdapter):
    name = "test-flat"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, Flat)


@pytest.fixture(scope="module")
def flat_adapter() -> None:
    bcp.register_adapter(FlatAdapter())


@pytest.mark.usefixtures("flat_adapter")
@pytest.mark.parametrize("layout", ["shards", "whole"])
def test_parts_of_a_tensor_are_written_together(tmp_path: Path, layout: Any) -> None:
    saved = Flat(3)
    bcp.save(tmp_path / "c", {"flat": saved}, options=bcp.SaveOptions(layout=layout))
    checkpoint = bcp.open(tmp_path / "c")
    for name, values in saved.values().items():
        assert torch.equal(checkpoint[f"flat.{name}"][()], values)

    loaded, before = Flat(50), Flat(50)
    bcp.load(tmp_path / "c", {"flat": loaded}, exclude=["flat.first"])
    assert loaded.writes == 1
    assert torch.equal(loaded.exponents[600:4100], saved.exponents[600:4100])
    # What is not requested keeps its values.
    assert torch.equal(loaded.exponents[:600], before.exponents[:600])
    assert torch.equal(loaded.exponents[4100:], before.exponents[4100:])

    bcp.load(tmp_path / "c", {"flat": loaded})
    assert loaded.writes == 2
    assert torch.equal(loaded.exponents[:4100], saved.exponents[:4100])


def test_a_part_cannot_be_assigned() -> None:
    whole = DerivedTensor.of((6,), torch.float32, read=lambda: torch.arange(6.0), write=lambda values: None)
    part = whole.part((2, 2), lambda values: values[1:5].view(2, 2))
    inner = part.part((2,), lambda values: values[:, 1])
    assert part.compute().tolist() == [[1, 2], [3, 4]]
    assert inner.compute().tolist() == [2, 4]
    assert inner.whole is whole
    with pytest.raises(TypeError, match="only a complete derived tensor"):
        part.assign(torch.zeros(2, 2))


def test_an_operation_on_the_stand_in_fails_loudly() -> None:
    tensor = DerivedTensor.of((3, 4), torch.float32, read=lambda: torch.ones(3, 4), write=lambda values: None)
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.is_cpu) == ((3, 4), torch.float32, 12, True)
    for operation in (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.data_ptr, torch.Tensor.contiguous):
        with pytest.raises(TypeError, match=r"needs the values of a derived tensor; call compute\(\)"):
            operation(tensor)
    with pytest.raises(TypeError):
        tensor + 1
