"""A checkpoint's sections as plain objects: state dicts and trees; handles in other processes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_training import training
from torch import nn
from torch.utils.data import DataLoader, Dataset

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, NameNotFoundError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


TREES: dict[str, Any] = {
    "mapping": {"step": 3, "table": torch.arange(4), "nested": {"a.b": {"c": torch.ones(2)}, "none": None}},
    "items": {"list": [torch.ones(1), {"x": 1}, (2, torch.zeros(2, 0))], "empty": [], "none": {}},
    "ordered": {"o": OrderedDict([("z", torch.ones(1)), ("a", 1)]), "numbers": {1: {2: torch.ones(1)}}},
    "sequence": [1, {"t": torch.ones(3)}, "two"],
    "pair": (torch.zeros(2), {"y": 1.5}),
    "number": 7,
    "nothing": {},
}


def test_trees(tmp_path: Path) -> None:
    bcp.save(tmp_path, TREES)
    found = bcp.open(tmp_path)
    for section, tree in TREES.items():
        restored = found.tree(section)
        assert _same(restored, tree), section
        empty: dict[str, Any] = {section: {}}
        bcp.load(tmp_path, empty)  # an empty template gets the whole tree
        assert _same(empty[section], restored), section
    mapping = found.tree("mapping")
    assert torch.equal(mapping["nested"]["a.b"]["c"], torch.ones(2))
    assert mapping["nested"]["none"] is None
    assert found.tree("items")["list"][2][1].shape == (2, 0)
    assert type(found.tree("ordered")["o"]) is OrderedDict
    with pytest.raises(NameNotFoundError, match="no section 'traner'; it has"):
        found.tree("traner")


def test_a_scheduler_is_a_tree(tmp_path: Path) -> None:
    state = training(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 2)
    bcp.save(tmp_path, {**state, "scheduler": scheduler})
    assert bcp.open(tmp_path).tree("scheduler") == scheduler.state_dict()


def test_tied_tensors_of_a_tree_stay_tied(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    bcp.save(tmp_path, {"extra": {"one": tensor, "two": {"same": tensor}}})
    tree = bcp.open(tmp_path).tree("extra")
    assert tree["one"] is tree["two"]["same"]


def test_state_dicts(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 5, bias=False), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("count", torch.tensor(4))
    bcp.save(tmp_path, {"model": model, "ema": {"embed.weight": torch.zeros(5, 3)}})
    found = bcp.open(tmp_path)
    state = found.state_dict()
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    assert state["head.weight"] is state["embed.weight"]
    other = nn.ModuleDict({"embed": nn.Linear(3, 5, bias=False), "head": nn.Linear(3, 5, bias=False)})
    other.register_buffer("count", torch.tensor(0))
    other.load_state_dict(state)
    assert torch.equal(other["head"].weight, model["head"].weight)
    assert list(found.state_dict("ema")) == ["embed.weight"]
    lazy = bcp.open(tmp_path)
    stored = lazy.state_dict("model", lazy=True)
    assert lazy.stats.read == 0
    assert torch.equal(stored["head.weight"][1:3], model["head"].weight[1:3])
    with pytest.raises(NameNotFoundError, match="no section"):
        found.state_dict("modle")


def _save_own(rank: int, world_size: int, path: str) -> None:
    bcp.save(
        path,
        {"extra": {"own": torch.full((2,), rank), "number": rank, "shared": 1}},
        options=bcp.SaveOptions(deadline_s=time_limit(30)),
    )


def test_values_of_one_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_own, str(tmp_path))
    found = bcp.open(tmp_path)
    for rank in (0, 1):
        assert _same(found.tree("extra", rank=rank), {"number": rank, "shared": 1, "own": torch.full((2,), rank)})
        assert list(found.state_dict("extra", rank=rank)) == ["own"]


# -- look-ups ----------------------------------------------------------------------------------------------------------


def test_a_wrong_name_suggests_others(tmp_path: Path) -> None:
    bcp.save(tmp_path, training(1.0))
    found = bcp.open(tmp_path)
    with pytest.raises(KeyError, match=r"no tensor 'model\.0\.wieght' in .* \(nearest: 'model\.0\.weight'"):
        found["model.0.wieght"]
    assert "model.0.wieght" not in found
    assert 3 not in found  # type: ignore[comparison-overlap]
    assert found.get("model.0.wieght") is None
    assert found.get("model.0.weight", None) is not None


# -- other processes ---------------------------------------------------------------------------------------------------


class _Rows(Dataset[torch.Tensor]):
    def __init__(self, checkpoint: bcp.Checkpoint) -> None:
        self.checkpoint, self.tensor = checkpoint, checkpoint["model.0.weight"]

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.tensor[row] if row % 2 else self.checkpoint["model.0.weight"][row]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(tmp_path: Path, start: str) -> None:
    bcp.save(tmp_path, training(1.0))
    found = bcp.open(tmp_path)
    expected = found["model.0.weight"].load()  # has started threads, which a fork does not copy
    loader = DataLoader(_Rows(found), num_workers=1, multiprocessing_context=start, timeout=time_limit(60))
    assert torch.equal(torch.cat(list(loader)), expected)


@pytest.mark.parametrize("kind", ["own", "foreign", "latest"])
def test_pickles(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "step-1"
    if kind == "foreign":
        path.mkdir()
        save_file({"0.weight": torch.ones(2, 3)}, path / "model.safetensors")
    else:
        bcp.save(path, training(1.0), step=1)
    found = bcp.latest(tmp_path) if kind == "latest" else bcp.open(path, options=bcp.LoadOptions(verify=False))
    assert found is not None
    copied = pickle.loads(pickle.dumps(found))
    assert type(copied) is type(found)
    assert copied.url == found.url
    assert torch.equal(copied["model.0.weight"].load(), found["model.0.weight"].load())
    tensor = pickle.loads(pickle.dumps(found["model.0.weight"]))
    assert torch.equal(tensor[:1], found["model.0.weight"][:1])
    if kind == "own":
        data = pickle.dumps(found)
        bcp.save(path, training(2.0), step=1)
        with pytest.raises(CheckpointError, match="overwritten"):
            pickle.loads(data)


def test_a_handle_without_a_path_stays_in_its_process(tmp_path: Path) -> None:
    bcp.save(tmp_path, training(1.0))
    found = bcp.open(tmp_path)
    internal = bcp.Checkpoint(found.index, found._engine)
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(internal)
