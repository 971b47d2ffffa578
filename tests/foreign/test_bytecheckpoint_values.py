"""What the ranks of the ByteCheckpoint package stored besides tensors is divided into what is shared, and the rest."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp
from bytecheckpoint.errors import FormatError
from bytecheckpoint.format.values.types import UnreadObject, path_name


def _written(folder: Path, *extra: Any) -> Path:
    """A folder as the package writes it: that of DCP with another class, and one file for each rank."""
    return _written_with({"w": torch.ones(2)}, folder, *extra)


def _written_with(model: dict[str, Any], folder: Path, *extra: Any) -> Path:
    dcp.save(model, checkpoint_id=folder / "model", no_dist=True)
    metadata = pickle.dumps(pickle.loads((folder / "model" / ".metadata").read_bytes()), protocol=2)
    theirs = b"cbytecheckpoint.checkpointer.meta_type\nMetadata\n"
    (folder / "model" / ".metadata").write_bytes(
        metadata.replace(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", theirs)
    )
    (folder / "extra_state").mkdir()
    for rank, tree in enumerate(extra):
        torch.save(tree, folder / "extra_state" / f"extra_state_rank_{rank}.pt")
    return folder


def _generator(*numbers: int) -> tuple[Any, ...]:
    """Like the state of numpy's generator."""
    return "MT19937", np.array(numbers), 1, 0, 0.0


@pytest.mark.parametrize("value", [[1, 2], 3, "text", {}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_equal_on_all_ranks_is_shared(value: Any, ranks: int, tmp_path: Path) -> None:
    found = bcp.open(_written(tmp_path, *[value] * ranks))
    assert found.index.system == "ByteCheckpoint"
    assert found.tree("extra_state") == value


def test_a_folder_of_the_model_with_something_else(tmp_path: Path) -> None:
    optimizer = {"state": {"0": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(FormatError, match="model: its metadata has no section 'model'"):
        bcp.open(_written_with(optimizer, tmp_path))


def test_values_of_two_ranks(tmp_path: Path) -> None:
    first = {"same": _generator(1, 2), "own": _generator(3, 4), "data": {"seen": [1], "epoch": 5}, "only": 1}
    second = {"same": _generator(1, 2), "own": _generator(3, 5), "data": {"seen": [2], "epoch": 5}}
    found = bcp.open(_written(tmp_path, first, second))
    held: dict[str, list[int | None]] = {}
    for value in found.index.foreign_values:
        held.setdefault(path_name(value.path), []).append(value.rank)
    assert held["same"] == held["data.epoch"] == [None]
    assert held["own"] == held["data.seen"] == [0, 1]
    assert held["only"] == [0]
    tree = found.tree("extra_state")
    assert np.array_equal(tree["own"][1], [3, 4])
    assert tree["data"] == {"seen": [1], "epoch": 5}


def test_tensors_inside_lists(tmp_path: Path) -> None:
    same, other = [torch.ones(2)], [torch.zeros(2)]
    tree = bcp.open(_written(tmp_path, {"a": same, "b": same}, {"a": same, "b": other})).tree("extra_state")
    assert torch.equal(tree["a"][0], torch.ones(2))
    assert tree["b"] == UnreadObject("a tensor that differs between the ranks")
