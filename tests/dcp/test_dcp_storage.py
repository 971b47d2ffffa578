"""DCP in one process, with torch's storage classes and with those of this library: both behave in the same way."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_storages import STORAGES, both, causes, load, save
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.testing import time_limit

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.sampled(12, of=__name__),
]


class Counter:
    """A stateful object, as DCP accepts them."""

    def __init__(self, count: int) -> None:
        self.count, self.ramp = count, torch.arange(3.0) + count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "ramp": self.ramp}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.ramp = state["count"], state["ramp"]


def example(seed: float) -> dict[str, Any]:
    """A state dict with everything that DCP flattens, and much that it does not."""
    ramp = torch.arange(12.0).reshape(3, 4) + seed
    return {
        "model": {"weight": ramp, "layers.0.bias": ramp[:, 1].clone(), "transposed": (ramp * 2).t()},
        "dtypes": {
            str(dtype)[6:]: (torch.arange(5) + seed).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool)
        },
        "odd": {"scalar": torch.tensor(seed), "empty": torch.zeros(0, 3), "complex": torch.complex(ramp, ramp)},
        "list": [ramp[0].clone(), {"name": f"entry {seed}", "nested": [ramp[1].clone(), 2]}],
        "tuple": {"pair": (ramp[2].clone(), int(seed)), "plain": (1, "two", None)},
        "values": {
            "int": int(seed), "float": seed, "text": f"seed {seed}", "none": None, "flags": [True, False],
            "array": np.arange(3) + seed, "set": {1, 2}, "bytes": b"\0\1", "ordered": OrderedDict(a=seed, b=[1]),
            "size": torch.Size([2, 3]), "dtype": torch.float16,
        },
        "step": int(seed),
        "counter": Counter(int(seed)),
    }  # fmt: skip


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected)):
            assert_equal(*pair, f"{where}.{index}")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        assert np.array_equal(found, expected), where
    elif isinstance(expected, Counter):
        assert_equal(found.state_dict(), expected.state_dict(), where)
    else:
        assert found == expected, where


# ---------------------------------------------------------------------- both storages


@both
def test_a_nested_state_dict_returns_as_it_was(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", example(5.0))
    state = example(-1.0)
    weight = state["model"]["weight"]
    load(storage, tmp_path / "c", state)
    assert_equal(state, example(5.0))
    assert state["model"]["weight"] is weight


@both
def test_flattened_off_keeps_top_level_entries_whole(storage: str, tmp_path: Path) -> None:
    state = {"weight": torch.ones(2, 3), "nested": {"inner": [torch.zeros(2), 1]}, "step": 3}
    save(storage, tmp_path / "c", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    found: dict[str, Any] = {"weight": torch.zeros(2, 3), "nested": None, "step": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(storage, tmp_path / "c", found, planner=planner)
    assert_equal(found, state)


@both
def test_missing_names_and_other_shapes_are_refused(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", {"model": {"a": torch.ones(3)}})
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.b"):
        load(storage, tmp_path / "c", {"model": {"a": torch.zeros(3), "b": torch.zeros(3)}})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(storage, tmp_path / "c", {"model": {"a": torch.zeros(4)}})
    partial = {"model": {"a": torch.zeros(3), "b": torch.zeros(3)}}
    load(storage, tmp_path / "c", partial, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_equal(partial, {"model": {"a": torch.ones(3), "b": torch.zeros(3)}})


@both
def test_part_of_a_checkpoint(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", {"model": {"a": torch.ones(3), "b": torch.zeros(3)}, "extra": {"n": [1, 2]}})
    state = {"model": {"b": torch.ones(3)}}
    load(storage, tmp_path / "c", state)
    assert_equal(state, {"model": {"b": torch.zeros(3)}})
    for keys, expected in (
        ("model.a", {"model": {"a": torch.ones(3)}}),
        ({"extra"}, {"extra": {"n": [1, 2]}}),
        (None, {"model": {"a": torch.ones(3), "b": torch.zeros(3)}, "extra": {"n": [1, 2]}}),
    ):
        reader = STORAGES[storage].reader(str(tmp_path / "c"))
        assert_equal(_load_state_dict_from_keys(keys, storage_reader=reader), expected)


@both
def test_checkpoint_id_replaces_the_path(storage: str, tmp_path: Path) -> None:
    writer = STORAGES[storage].writer(str(tmp_path / "unused"))
    for step in (1, 2):
        dcp.save({"m": {"w": torch.full((3,), step)}}, checkpoint_id=tmp_path / str(step), storage_writer=writer)
    reader = STORAGES[storage].reader(str(tmp_path / "unused"))
    for step in (2, 1):
        state = {"m": {"w": torch.zeros(3, dtype=torch.int64)}}
        dcp.load(state, checkpoint_id=str(tmp_path / str(step)), storage_reader=reader)
        assert state["m"]["w"].tolist() == [step] * 3
        assert str(reader.checkpoint_id) == str(tmp_path / str(step))
    assert not (tmp_path / "unused").exists()


@both
def test_a_save_replaces_a_checkpoint(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", {"m": {"w": torch.zeros(3), "old": torch.zeros(3)}})
    save(storage, tmp_path / "c", {"m": {"w": torch.ones(4)}})
    state = {"m": {"w": torch.zeros(4)}}
    load(storage, tmp_path / "c", state)
    assert torch.equal(state["m"]["w"], torch.ones(4))
    with pytest.raises(CheckpointException, match="Missing key"):
        load(storage, tmp_path / "c", {"m": {"old": torch.zeros(3)}})


@both
def test_overwrite_false_refuses(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", {"m": {"w": torch.zeros(3)}})
    writer = STORAGES[storage].writer(str(tmp_path / "c"), overwrite=False)
    with pytest.raises(CheckpointException, match="already"):
        dcp.save({"m": {"w": torch.ones(3)}}, storage_writer=writer)
    state = {"m": {"w": torch.ones(3)}}
    load(storage, tmp_path / "c", state)
    assert torch.equal(state["m"]["w"], torch.zeros(3))


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"new_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Halving(DefaultSavePlanner):
    """Stores floating-point tensors in half precision."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.half()


class Scaling(DefaultLoadPlanner):
    """Reads into a buffer, and scales what it has received when it is committed."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor * 10)


@both
def test_planners_of_the_user(storage: str, tmp_path: Path) -> None:
    save(storage, tmp_path / "c", {"m": {"w": torch.ones(3)}, "step": 1}, planner=Renaming())
    state = {"new_m": {"w": torch.zeros(3)}, "new_step": 0}
    load(storage, tmp_path / "c", state)
    assert_equal(state, {"new_m": {"w": torch.ones(3)}, "new_step": 1})
    save(storage, tmp_path / "h", {"m": {"w": torch.full((3,), 1 / 3)}, "step": 1}, planner=Halving())
    half = {"m": {"w": torch.zeros(3)}, "step": 0}
    load(storage, tmp_path / "h", half, planner=Scaling())
    assert_equal(half, {"m": {"w": torch.full((3,), 1 / 3).half().float() * 10}, "step": 1})


@both
def test_a_cached_plan_serves_several_saves(storage: str, tmp_path: Path) -> None:
    class Cached(DefaultSavePlanner):  # torch caches by the name of the class
        pass

    Cached.__name__ = f"Cached_{storage}"
    for step, path in enumerate(("a", "a", "b", "a")):
        state = {"m": {"w": torch.full((3,), float(step))}, "step": step}
        save(storage, tmp_path / path, state, planner=Cached(enable_plan_caching=True))
        found = {"m": {"w": torch.zeros(3)}, "step": -1}
        load(storage, tmp_path / path, found)
        assert_equal(found, state)
    save(storage, tmp_path / "a", {"m": {"w": torch.ones(5)}}, planner=Cached(enable_plan_caching=True))
    grown = {"m": {"w": torch.zeros(5)}}
    load(storage, tmp_path / "a", grown)
    assert torch.equal(grown["m"]["w"], torch.ones(5))
    if storage == "bytecheckpoint":
        assert bcp.open(tmp_path / "a").verify().ok
        assert len(list((tmp_path / "a").iterdir())) == 2  # the manifest and one attempt


@both
def test_conversion_to_one_torch_file(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"m": {"w": torch.ones(3)}, "list": [torch.zeros(2), {"a": 1}], "step": 4}
    save(storage, tmp_path / "c", state)
    if storage == "bytecheckpoint":
        monkeypatch.setattr("torch.distributed.checkpoint.format_utils.FileSystemReader", bcp.dcp.Reader)
    dcp_to_torch_save(str(tmp_path / "c"), str(tmp_path / "whole.pt"))
    assert_equal(torch.load(tmp_path / "whole.pt"), state)


@both
def test_async_save_on_a_thread(storage: str, tmp_path: Path) -> None:
    state = {"m": {"w": torch.ones(1000)}, "step": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future = dcp.async_save(state, storage_writer=STORAGES[storage].writer(str(tmp_path / "c")))
    state["m"]["w"].zero_()  # staged by DCP
    future.result()
    found = {"m": {"w": torch.zeros(1000)}, "step": 0}
    load(storage, tmp_path / "c", found)
    assert_equal(found, {"m": {"w": torch.ones(1000)}, "step": 1})


def test_the_metadata_of_a_save_are_those_at_its_start(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"run": {"tokens": [1]}}
    writer = bcp.dcp.Writer(tmp_path / "c", step=1, metadata=metadata)
    metadata["run"]["tokens"].append(2)

    def prepare_the_next_save(name: str, event: str) -> None:
        if (name, event) == ("save.commit", "enter"):
            writer.step, writer.metadata = 2, {}

    stop = telemetry.observe(prepare_the_next_save)
    try:
        dcp.save({"m": {"w": torch.ones(10)}}, storage_writer=writer)
    finally:
        stop()
    stored = bcp.open(tmp_path / "c")
    assert (stored.step, stored.metadata["run"], writer.step) == (1, {"tokens": [1]}, 2)


PROCESS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main(storage, path):
    import dcp_storages
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous", rank=0, world_size=1)
    writer = dcp_storages.STORAGES[storage].writer(path)
    for step in (1, 2):
        state = {"m": {"w": torch.full((100,), float(step))}, "step": step}
        save = dcp.async_save(state, checkpoint_id=f"{path}-{step}", storage_writer=writer,
                              async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        state["m"]["w"].zero_()
        print(type(save.result()).__name__)
    bad = dcp.async_save({"m": {"w": object()}}, checkpoint_id=f"{path}-bad", storage_writer=writer,
                         async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    print(type(bad.exception()).__name__ if storage == "bytecheckpoint" else "CheckpointException")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@both
def test_async_save_in_a_process(storage: str, tmp_path: Path) -> None:
    """torch chooses a free port before it binds it, so another program may take it in between."""
    script = tmp_path / "saving.py"
    script.write_text(PROCESS)
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(support)])}
    for number in range(3):
        path = tmp_path / f"c{number}"
        command = [sys.executable, str(script), storage, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=time_limit(80))
        if "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Metadata", "Metadata", "CheckpointException"]
    for step in (1, 2):
        found = {"m": {"w": torch.zeros(100)}, "step": 0}
        load(storage, f"{path}-{step}", found)
        assert_equal(found, {"m": {"w": torch.full((100,), float(step))}, "step": step})


# ---------------------------------------------------------------------- an ordinary checkpoint, and back


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # get_optimizer_state_dict creates no state if there are gradients
    return model, optimizer


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    for tensor in model.state_dict().values():
        tensor.zero_()
    other = torch.optim.AdamW([{"params": g["params"], "weight_decay": 0.5} for g in optimizer.param_groups], lr=9.0)
    return model, other


def assert_same_training(found: Any, expected: Any) -> None:
    for (name, a), b in zip(found[0].state_dict().items(), expected[0].state_dict().values()):
        assert torch.equal(a, b), name
    assert_equal(found[1].state_dict(), expected[1].state_dict())


@pytest.mark.parametrize("form", ["names", "flat names", "numbers"])
def test_load_reads_what_dcp_saved(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat names")
    optim = get_optimizer_state_dict(model, optimizer, options=options)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict() if form == "numbers" else optim}
    state["extra"] = {"step": 7, "table": torch.arange(3)}
    dcp.save(state, storage_writer=bcp.dcp.Writer(tmp_path / "c", step=7, metadata={"run": "x"}))
    found = fresh()
    extra: dict[str, Any] = {}
    report = bcp.load(tmp_path / "c", {"model": found[0], "optim": found[1], "extra": extra})
    assert not (report.missing)
    assert not (report.unexpected)
    assert not (report.cast)
    assert_same_training(found, (model, optimizer))
    assert_equal(extra, state["extra"])
    checkpoint = bcp.open(tmp_path / "c")
    assert checkpoint.step == 7
    assert checkpoint.metadata["run"] == "x"
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint["model.0.weight"][1:3], model[0].weight[1:3])
    assert_equal(checkpoint.tree("extra"), state["extra"])


@pytest.mark.parametrize("flat", [False, True])
def test_dcp_loads_what_save_stored(flat: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"step": 7, "table": torch.arange(3), "pair": (torch.ones(1), "x"), "kinds": [1, {"a": None}]}
    bcp.save(tmp_path / "c", {"model": model, "optim": optimizer, "extra": extra, "step": 3})
    found = fresh()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": found[0].state_dict(),
        "optim": get_optimizer_state_dict(*found, options=options),
        "extra": {"step": 0, "table": torch.zeros(3, dtype=torch.int64), "pair": (), "kinds": [0, {"a": 1}]},
        "step": 0,
    }
    dcp.load(state, storage_reader=bcp.dcp.Reader(tmp_path / "c"))
    set_optimizer_state_dict(*found, state["optim"], options=options)
    assert_same_training(found, (model, optimizer))
    assert_equal(state["extra"], extra)
    assert state["step"] == 3


def test_a_model_alone_is_the_section_model(tmp_path: Path) -> None:
    model, _ = trained()
    dcp.save(model.state_dict(), storage_writer=bcp.dcp.Writer(tmp_path / "c"))
    assert bcp.open(tmp_path / "c").sections == ["model"]
    found, _ = fresh()
    bcp.load(tmp_path / "c", {"model": found})
    assert_equal(dict(found.state_dict()), dict(model.state_dict()))
    again = fresh()[0].state_dict()
    dcp.load(again, storage_reader=bcp.dcp.Reader(tmp_path / "c"))
    assert_equal(dict(again), dict(model.state_dict()))


def test_top_level_tensors_and_an_entry_called_model(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "w": torch.zeros(2), "a.b": {"w": torch.full((2,), 3.0)}, "n": 4}
    dcp.save(state, storage_writer=bcp.dcp.Writer(tmp_path / "c"))
    assert bcp.open(tmp_path / "c").sections == ["model", "n", "top_level"]
    found = copy.deepcopy(state)
    for tensor in (found["model"]["w"], found["w"], found["a.b"]["w"]):
        tensor.fill_(-1)
    load("bytecheckpoint", tmp_path / "c", found)
    assert_equal(found, state)


def test_tied_weights_that_were_stored_twice_load_into_a_tied_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    dcp.save({"model": model.state_dict()}, storage_writer=bcp.dcp.Writer(tmp_path / "c"))
    expected = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.zero_()
    bcp.load(tmp_path / "c", {"model": model})
    assert torch.equal(model["b"].weight, expected)


# ---------------------------------------------------------------------- checks and failures


def only_file(root: Path, pattern: str) -> Path:
    (found,) = root.rglob(pattern)
    return found


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    save("bytecheckpoint", tmp_path / "c", {"m": {"w": torch.ones(3), "v": torch.zeros(3)}})
    file = only_file(tmp_path, "m-*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointException) as caught:
        load("bytecheckpoint", tmp_path / "c", {"m": {"w": torch.zeros(3), "v": torch.ones(3)}})
    (cause,) = causes(caught.value)
    assert isinstance(cause, bcp.errors.CorruptionError)
    assert "m.v" in str(cause)
    assert file.name in str(cause)
    unchecked = {"m": {"v": torch.ones(3)}}
    load(
        "bytecheckpoint",
        tmp_path / "c",
        unchecked,
        reader=bcp.dcp.Reader(tmp_path / "c", options=bcp.LoadOptions(verify=False)),
    )
    assert unchecked["m"]["v"][:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("damage", ["values", "manifest", "truncated", "absent", "empty"])
def test_damage_is_reported_as_what_it_is(damage: str, tmp_path: Path) -> None:
    save("bytecheckpoint", tmp_path / "c", {"m": {"w": torch.ones(3)}, "step": 1})
    pattern = {"values": "step-*.msgpack", "manifest": "manifest.msgpack"}.get(damage, "m-*.safetensors")
    file = only_file(tmp_path, pattern)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "absent":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    path = tmp_path / ("nothing" if damage == "empty" else "c")
    with pytest.raises(CheckpointException) as caught:
        load("bytecheckpoint", path, {"m": {"w": torch.zeros(3)}, "step": 0})
    (cause,) = causes(caught.value)
    expected = bcp.errors.CheckpointNotFoundError if damage == "empty" else bcp.errors.CorruptionError
    assert type(cause) is expected


@both
def test_a_failed_save_leaves_the_old_checkpoint(storage: str, tmp_path: Path) -> None:
    """Torch's class writes into the files of the old checkpoint; this library's does not."""

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "m.v":
                raise RuntimeError("no data")
            return super().resolve_data(write_item)

    save(storage, tmp_path / "c", {"m": {"w": torch.ones(3), "v": torch.ones(3)}})
    before = sorted(str(path) for path in (tmp_path / "c").rglob("*"))
    with pytest.raises(CheckpointException, match="no data"):
        save(storage, tmp_path / "c", {"m": {"w": torch.zeros(3), "v": torch.zeros(3)}}, planner=Failing())
    assert sorted(str(path) for path in (tmp_path / "c").rglob("*")) == before
    if storage == "bytecheckpoint":
        state = {"m": {"w": torch.zeros(3), "v": torch.zeros(3)}}
        load(storage, tmp_path / "c", state)
        assert_equal(state, {"m": {"w": torch.ones(3), "v": torch.ones(3)}})
        assert bcp.open(tmp_path / "c").verify().ok


def test_a_failed_commit_removes_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise bcp.errors.StorageError("the store is away")

    writer = bcp.dcp.Writer(tmp_path / "c")
    monkeypatch.setattr("bytecheckpoint.dcp.writer.commit", fail)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"m": {"w": torch.ones(3)}}, storage_writer=writer)
    assert isinstance(causes(caught.value)[0], bcp.errors.StorageError)
    assert only_file(tmp_path, "m-*.safetensors")
    monkeypatch.undo()
    dcp.save({"m": {"w": torch.zeros(3)}}, storage_writer=writer)
    assert len(list((tmp_path / "c").iterdir())) == 2  # the manifest and the second attempt
    assert bcp.open(tmp_path / "c").verify().ok


def test_the_attempt_is_removed_with_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bcp.dcp.Writer, "finish", lambda *args, **kwargs: 1 / 0)
    writer = bcp.dcp.Writer(tmp_path / "c")
    with pytest.raises(CheckpointException, match="division by zero") as caught:
        dcp.save({"m": {"w": torch.ones(3)}}, storage_writer=writer)
    assert only_file(tmp_path, "m-*.safetensors")
    assert caught.value.__traceback__ is not None
    del caught, writer
    gc.collect()  # the frames of the error refer to each other
    assert not list(tmp_path.rglob("m-*"))


class Custom:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]


def test_values_that_are_not_plain_are_refused_unless_pickles_are_allowed(tmp_path: Path) -> None:
    state = {"extra": {"custom": [Custom()]}, "m": {"w": torch.ones(2)}}
    with pytest.raises(CheckpointException, match=r"extra\.custom") as caught:
        save("bytecheckpoint", tmp_path / "c", state)
    assert isinstance(causes(caught.value)[0], bcp.errors.UnserializableError)
    assert not list(tmp_path.rglob("*-0*"))
    dcp.save(state, storage_writer=bcp.dcp.Writer(tmp_path / "c", options=bcp.SaveOptions(allow_pickle=True)))
    found = {"extra": {"custom": None}}
    with pytest.raises(CheckpointException, match="allow_pickle") as caught:
        load("bytecheckpoint", tmp_path / "c", found)
    assert isinstance(causes(caught.value)[0], bcp.errors.StateError)
    other = {"m": {"w": torch.zeros(2)}}
    load("bytecheckpoint", tmp_path / "c", other)
    assert torch.equal(other["m"]["w"], torch.ones(2))
    load(
        "bytecheckpoint",
        tmp_path / "c",
        found,
        reader=bcp.dcp.Reader(tmp_path / "c", options=bcp.LoadOptions(allow_pickle=True)),
    )
    assert_equal(found, {"extra": {"custom": [Custom()]}})


def test_unusual_items_are_refused(tmp_path: Path) -> None:
    class Raw(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(b"raw") if write_item.type == WriteItemType.BYTE_IO else object

    class Unchecked(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            all_plans, metadata = super().create_global_plan(all_plans)
            item = all_plans[0].items[0]
            larger = replace(item.tensor_data, size=torch.Size([5]))
            all_plans[0] = replace(all_plans[0], items=[replace(item, tensor_data=larger)])
            return all_plans, metadata

    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            return self.plan

    for planner, kind, state in (
        (Raw(), bcp.errors.UnserializableError, {"step": 1}),
        (Forgetful(), bcp.errors.PlanError, {"m": {"w": torch.ones(3)}}),
        (Unchecked(), bcp.errors.PlanError, {"m": {"w": torch.ones(3)}}),
        (None, bcp.errors.UnsupportedTensorError, {"m": {"w": torch.ones(3).to_sparse()}}),
        (None, bcp.errors.NameCollisionError, {"m": {"w@1": torch.ones(3)}}),
    ):
        with pytest.raises(CheckpointException) as caught:
            save("bytecheckpoint", tmp_path / "c", state, planner=planner)
        assert type(causes(caught.value)[0]) is kind
        assert not list(tmp_path.rglob("*-0*"))


def test_a_cast_that_rounds_needs_permission(tmp_path: Path) -> None:
    save("bytecheckpoint", tmp_path / "c", {"m": {"w": torch.full((2,), 1 / 3), "h": torch.ones(2).half()}})
    state = {"m": {"w": torch.zeros(2).half(), "h": torch.zeros(2)}}
    with pytest.raises(CheckpointException, match=r"m.w is .* cast='any'") as caught:
        load("bytecheckpoint", tmp_path / "c", state)
    assert isinstance(causes(caught.value)[0], bcp.errors.MismatchError)
    assert state["m"]["h"].tolist() == [0, 0]
    load("bytecheckpoint", tmp_path / "c", state, reader=bcp.dcp.Reader(tmp_path / "c", cast="any"))
    assert_equal(state, {"m": {"w": torch.full((2,), 1 / 3).half(), "h": torch.ones(2)}})


def test_arguments() -> None:
    with pytest.raises(bcp.errors.UsageError, match="reserved"):
        bcp.dcp.Writer("x", metadata={"dcp": 1})
    with pytest.raises(bcp.errors.UsageError, match="step"):
        bcp.dcp.Writer("x", step=-1)
    with pytest.raises(bcp.errors.UsageError, match="cast"):
        bcp.dcp.Reader("x", cast="all")  # type: ignore[arg-type]
    for kind in (bcp.dcp.Writer, bcp.dcp.Reader):
        assert kind.validate_checkpoint_id("some/path")
        assert not kind.validate_checkpoint_id("nosuchscheme://x")


def test_other_stores(tmp_path: Path) -> None:
    url = f"memory://dcp-{os.getpid()}"
    save("bytecheckpoint", url, {"m": {"w": torch.ones(3)}})
    state = {"m": {"w": torch.zeros(3)}}
    load("bytecheckpoint", url, state)
    assert torch.equal(state["m"]["w"], torch.ones(3))


def test_importing_the_library_does_not_import_dcp() -> None:
    found = "print('torch.distributed.checkpoint' in sys.modules)"
    code = f"import sys, bytecheckpoint as bcp; {found}; bcp.dcp.Writer; {found}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
