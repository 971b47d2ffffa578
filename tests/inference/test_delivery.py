"""From a stored checkpoint into an engine's parameters: right bytes, few bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.control.base import Operation, SingleProcess
from bytecheckpoint.control.communicator import current_communicator
from bytecheckpoint.errors import CorruptionError, NameNotFoundError
from bytecheckpoint.inference.delivery import DeliveryReport, StoredWeights
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

HIDDEN, VOCABULARY = 256, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.experts = nn.Parameter(torch.empty(4, 2 * HIDDEN, HIDDEN))
        self.norm = nn.Parameter(torch.empty(HIDDEN))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.block = Block()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


def _model() -> Model:
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 100_000 * number)
    return model


def _save_sharded(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"model": fully_shard(_model())}, options=bcp.SaveOptions(chunk_size=4096))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by three ranks, none of which holds a whole tensor."""
    folder = tmp_path_factory.mktemp("weights") / "checkpoint"
    with RankPool(3) as pool:
        pool.run(_save_sharded, str(folder))
    return folder


class Engine(nn.Module):
    """One tensor-parallel rank of an inference engine, with fused and padded parameters."""

    def __init__(self, tp: int, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tp, self.rank, self.part = tp, rank, HIDDEN // tp
        self.embedding = nn.Parameter(torch.full((64 // tp, HIDDEN), -1.0, dtype=dtype))
        self.qkv = nn.Parameter(torch.full((3 * self.part, HIDDEN), -1.0, dtype=dtype))
        self.out = nn.Parameter(torch.full((HIDDEN, self.part), -1.0, dtype=dtype))
        self.gate_up = nn.Parameter(torch.full((4, 2 * self.part, HIDDEN), -1.0, dtype=dtype))
        self.norm = nn.Parameter(torch.full((HIDDEN,), -1.0, dtype=dtype))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        begin, part = self.rank * self.part, self.part
        rows = 64 // self.tp
        first = self.rank * rows
        here = weights["embedding.weight"][first : min(first + rows, VOCABULARY)]
        self.embedding.data[: here.shape[0]].copy_(here)
        self.embedding.data[here.shape[0] :].fill_(0)
        for index, name in enumerate(("q", "k", "v")):
            self.qkv.data.narrow(0, index * part, part).copy_(weights[f"block.{name}.weight"].narrow(0, begin, part))
        self.out.data.copy_(weights["block.out.weight"].narrow(1, begin, part))
        for expert in range(4):
            gate, up = weights["block.experts"][expert].chunk(2)
            self.gate_up.data[expert, :part].copy_(gate[begin : begin + part])
            self.gate_up.data[expert, part:].copy_(up[begin : begin + part])
        self.norm.data.copy_(weights["block.norm"])


def _alone() -> Operation:
    return SingleProcess().operation("load", deadline_s=time_limit(60))


def _expected(engine: Engine) -> Engine:
    twin = Engine(engine.tp, engine.rank, engine.norm.dtype)
    twin.load_weights({name: tensor.detach() for name, tensor in _model().state_dict().items()})
    return twin


def _assert_equal(found: Engine, expected: Engine) -> None:
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_every_rank_gets_its_part_and_reads_little_more(path: Path, tp: int, rank: int) -> None:
    weights = StoredWeights(bcp.open(path))
    engine = Engine(tp, rank)
    engine.load_weights(dict(weights.tensors()))
    delivered = weights.deliver(_alone())
    _assert_equal(engine, _expected(engine))
    assert delivered.direct == delivered.requested
    assert delivered.seen == ()
    assert delivered.requested == sum(copy.target.nbytes for copy in weights.recorder.copies)
    # Some columns of a matrix stored by rows cost the whole matrix; all else whole chunks, pages, and short gaps.
    columns = HIDDEN * HIDDEN * 4 - engine.out.nbytes
    assert delivered.read < 1.1 * delivered.requested + columns + (64 << 10)


def test_a_type_of_its_own(path: Path) -> None:
    weights = StoredWeights(bcp.open(path))
    engine = Engine(2, 1, torch.bfloat16)
    engine.load_weights(dict(weights.tensors()))
    delivered = weights.deliver(_alone())
    _assert_equal(engine, _expected(engine))
    # Cast on its way.
    assert delivered.direct == delivered.requested


def _start_together(rank: int, world_size: int, path: str, share_reads: str) -> DeliveryReport:
    weights = StoredWeights(bcp.open(path))
    engine = Engine(world_size, rank)
    with current_communicator(deadline_s=time_limit(60)).operation("load", deadline_s=time_limit(60)) as op:
        engine.load_weights(dict(weights.tensors()))
        delivered = weights.deliver(op, share_reads)
    _assert_equal(engine, _expected(engine))
    return delivered


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_of_one_engine_read_each_byte_once(path: Path, tp: int) -> None:
    """Columns cost a rank that is alone whole rows; together, the rows are read once and handed out."""
    with RankPool(tp) as pool:
        together = pool.run(_start_together, str(path), "always")
        alone = pool.run(_start_together, str(path), "never")
    saved = sum(one.read for one in alone) - sum(one.read for one in together)
    assert saved > 0.9 * (tp - 1) * HIDDEN * HIDDEN * 4
    assert all(one.received > 0.9 * HIDDEN * HIDDEN * 4 * (tp - 1) / tp**2 for one in together)
    assert all(one.received == 0 for one in alone)


def test_values_that_a_loader_computes_with_are_read(path: Path) -> None:
    weights = StoredWeights(bcp.open(path))
    tensors = dict(weights.tensors())
    parameter = torch.zeros(HIDDEN)
    parameter.copy_(tensors["block.norm"] * 2)
    assert torch.equal(parameter, _model().block.norm.detach() * 2)
    assert tensors["block.q.weight"].narrow(0, 3, 1).flatten()[5].item() == _model().block.q.weight.detach()[3, 5]
    assert weights.deliver(_alone()).seen == ("block.norm", "block.q.weight")


def test_tied_names_are_there(path: Path) -> None:
    weights = StoredWeights(bcp.open(path))
    tensors = dict(weights.tensors())
    assert {"head.weight", "embedding.weight"} <= set(tensors)
    target = torch.zeros(VOCABULARY, HIDDEN)
    target.copy_(tensors["head.weight"])
    weights.deliver(_alone())
    assert torch.equal(target, _model().embedding.weight.detach())


def test_elements_in_another_order(path: Path) -> None:
    weights = StoredWeights(bcp.open(path))
    target = torch.zeros(HIDDEN, 4)
    target.copy_(dict(weights.tensors())["block.q.weight"][::64].t())
    strided = torch.zeros(2 * HIDDEN)[::2]
    strided.copy_(dict(weights.tensors())["block.norm"])
    delivered = weights.deliver(_alone())
    assert torch.equal(target, _model().block.q.weight.detach()[::64].t())
    assert torch.equal(strided, _model().block.norm.detach())
    assert delivered.direct < delivered.requested


def test_damaged_bytes_are_found(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(path, copy)
    file = sorted(copy.glob("attempt-*/model-00001.safetensors"))[0]
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 1)
        opened.write(b"\xff")
    weights = StoredWeights(bcp.open(copy))
    Engine(1, 0).load_weights(dict(weights.tensors()))
    with pytest.raises(CorruptionError, match="model-00001"):
        weights.deliver(_alone())


def test_a_section_that_is_not_there(path: Path) -> None:
    with pytest.raises(NameNotFoundError, match="no section 'policy'; it has model"):
        StoredWeights(bcp.open(path), "policy")
