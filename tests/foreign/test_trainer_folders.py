"""Checkpoints of the Trainer of transformers, in place. ``tests/engines`` has the same with a real Trainer."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from trainer_folders import Block, optimizer_of, write_trainer_folder

import bytecheckpoint as bcp
from bytecheckpoint.errors import CorruptionError, FormatError, MismatchError
from bytecheckpoint.frameworks.stored_state_dict import only_division
from bytecheckpoint.testing.ranks import RankPool


def _state(seed: int, *, groups: int = 2, decay: float = 0.1) -> dict[str, Any]:
    model = Block(seed)
    optimizer = optimizer_of(model, lr=0.05 * (seed + 1), groups=groups, decay=decay)
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    }


def _train(state: dict[str, Any], steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(state["model"](tokens).flatten(0, 1), tokens.flatten())
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["lr_scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    state = _state(0)
    _train(state)
    write_trainer_folder(tmp_path / "checkpoint-3", state, step=3)
    return state


def test_a_run_continues(tmp_path: Path, saved: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint-3"
    before = sorted(path.iterdir())
    found = bcp.open(path)
    assert found.sections == ["model", "optimizer", "lr_scheduler", "rng", "extra_state"]
    assert (found.step, found.index.system) == (3, "transformers")
    state = _state(1)
    extra = {"global_step": 0, "epoch": 0.0, "log_history": []}
    random.seed(7)
    report = bcp.load(path, {**state, "rng": bcp.RNGState(), "extra_state": extra})
    assert (extra["global_step"], extra["epoch"], extra["log_history"][0]["step"]) == (3, 0.5, 1)
    assert math.isnan(extra["log_history"][0]["loss"])
    assert report.resumed["rng.python"][0] == "continued"
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert drawn == [random.random(), np.random.rand(), torch.rand(1).item()]
    assert state["optimizer"].state_dict()["param_groups"] == saved["optimizer"].state_dict()["param_groups"]
    assert state["lr_scheduler"].state_dict() == saved["lr_scheduler"].state_dict()
    assert _train(state) == _train(saved)
    assert sorted(path.iterdir()) == before


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _differing(state: dict[str, Any], saved: dict[str, dict[str, Any]]) -> list[str]:
    """Names whose state differs from that of the parameter of the same name."""
    own = {id(param): name for name, param in state["model"].named_parameters()}
    bad = []
    for group in state["optimizer"].param_groups:
        for param in group["params"]:
            name = own[id(param)]
            entries = {**state["optimizer"].state[param], "lr": group["lr"], "data": param.detach()}
            bad += [
                f"{name}.{key}" for key, value in saved[name].items() if not torch.equal(_tensor(entries[key]), value)
            ]
    return bad


def _tensor(value: Any) -> torch.Tensor:
    return _whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)


def _by_name(state: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    own = {id(param): name for name, param in state["model"].named_parameters()}
    return {
        own[id(param)]: {
            **{key: _tensor(value) for key, value in state["optimizer"].state[param].items()},
            "lr": torch.tensor(group["lr"]),
            "data": param.detach().clone(),
        }
        for group in state["optimizer"].param_groups
        for param in group["params"]
    }


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _load_sharded(rank: int, world_size: int, path: str, saved: dict[str, Any]) -> None:
    model = Block(1)
    fully_shard(model)
    state = {"model": model, "optimizer": optimizer_of(model, lr=1.0, groups=1)}
    report = bcp.load(path, {**state, "rng": bcp.RNGState()})
    assert _differing(state, saved) == []
    assert report.resumed["rng.torch"][0] == "continued"
    drawn = torch.rand(1)
    torch.manual_seed(rank)
    assert torch.equal(drawn, torch.rand(1)), "each rank continues its own generators"


def test_two_ranks_with_one_group(tmp_path: Path, pool: RankPool) -> None:
    """The parameters have numbers in the file; the groups of the target differ."""
    state = _state(0, decay=0.0)
    _train(state)
    write_trainer_folder(tmp_path / "run", state, step=3, ranks=2)
    pool.run(_load_sharded, str(tmp_path / "run"), _by_name(state))


def test_names_follow_from_shapes_or_the_load_is_refused(tmp_path: Path) -> None:
    state = _state(0, decay=0.0)
    _train(state)
    write_trainer_folder(tmp_path / "run", state, step=3)
    other = _state(1, groups=1)
    report = bcp.load(tmp_path / "run", {name: other[name] for name in ("model", "optimizer")})
    assert _differing(other, _by_name(state)) == []
    assert "their shapes allow only one assignment" in report.notes[0]
    # Two groups of vectors: which norm is in which one is unknown.
    vectors = [param for param in state["model"].parameters() if param.ndim == 1]
    split = torch.optim.AdamW([{"params": vectors[::2]}, {"params": vectors[1::2]}])
    split.step()
    torch.save(split.state_dict(), tmp_path / "run/optimizer.pt")
    before = other["model"].embed.weight.clone()
    with pytest.raises(MismatchError, match="do not allow exactly one assignment"):
        bcp.load(tmp_path / "run", {name: other[name] for name in ("model", "optimizer")})
    assert torch.equal(before, other["model"].embed.weight)
    # Weight decay differs between the stored groups, and one group cannot have both.
    with_decay = _state(0)
    _train(with_decay)
    write_trainer_folder(tmp_path / "decay", with_decay, step=3)
    with pytest.raises(MismatchError, match=r"weight_decay = 0\.0, but embed\.weight has 0\.1"):
        bcp.load(tmp_path / "decay", {name: other[name] for name in ("model", "optimizer")})


def test_divisions_equal_brute_force() -> None:
    generator = random.Random(4)
    unique = several = none = 0
    for _ in range(400):
        sizes = [generator.randint(0, 3) for _ in range(generator.randint(1, 3))]
        names = [str(number) for number in range(sum(sizes))]
        shapes = {name: (generator.randint(1, 2),) for name in names}
        members = [number for number, size in enumerate(sizes) for _ in range(size)]
        generator.shuffle(members)
        groups = [[f"g{name}" for name, member in zip(names, members) if member == n] for n in range(len(sizes))]
        known = {f"g{name}": shape for name, shape in shapes.items() if generator.random() < 0.9}
        params = list(shapes.items())
        if generator.random() < 0.3:
            params.reverse()
        ways = set()
        for choice in set(itertools.permutations(members)):
            parts = [iter(group) for group in groups]
            keys = [next(parts[number]) for number in choice]
            if all(known.get(key, shape) == shape for key, (_, shape) in zip(keys, params)):
                ways.add(tuple(sorted((key, name) for key, (name, _) in zip(keys, params))))
        found = only_division(groups, known, params)
        assert (None if found is None else tuple(sorted(found.items()))) == (
            next(iter(ways)) if len(ways) == 1 else None
        )
        unique, several, none = unique + (len(ways) == 1), several + (len(ways) > 1), none + (not ways)
    assert min(unique, several, none) > 10


def _load_flat(rank: int, world_size: int, path: str) -> None:
    model = FullyShardedDataParallel(Block(1), use_orig_params=False, device_id=torch.device("cpu"))
    with pytest.raises(MismatchError, match="do not allow exactly one assignment"):
        bcp.load(path, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_flat_parameters_do_not_show_the_order(tmp_path: Path, pool: RankPool) -> None:
    state = _state(0, decay=0.0)
    _train(state)
    write_trainer_folder(tmp_path / "run", state, step=3)
    pool.run(_load_flat, str(tmp_path / "run"))


def test_damaged_and_missing_files(tmp_path: Path, saved: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint-3"
    (path / "scheduler.pt").unlink()
    (path / "rng_state.pth").rename(path / "rng_state_1.pth")  # of a node that has only its own ranks' files
    assert bcp.open(path).sections == ["model", "optimizer", "extra_state"]
    torch.save({"python": 1}, path / "rng_state_0.pth")
    found = bcp.open(path)
    assert found.manifest.world_size == 2
    with pytest.raises(MismatchError, match="no state of numpy's random generator, which this library does not read"):
        bcp.load(path, {"rng": bcp.RNGState(on_resize="lowest")})
    (path / "trainer_state.json").write_text("[]")
    with pytest.raises(FormatError, match=r"trainer_state\.json is not a JSON object"):
        bcp.open(path)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": -3}))
    assert bcp.open(path).step is None
    data = bytearray((path / "optimizer.pt").read_bytes())
    data[80] ^= 1
    (path / "optimizer.pt").write_bytes(data)
    with pytest.raises((FormatError, CorruptionError), match=r"optimizer\.pt"):
        bcp.open(path)


def test_import_keeps_everything(tmp_path: Path, saved: dict[str, Any]) -> None:
    from bytecheckpoint.convert.importing import import_checkpoint

    import_checkpoint(bcp.open(tmp_path / "checkpoint-3"), str(tmp_path / "own"))
    assert bcp.open(tmp_path / "own").verify().ok
    state = _state(1)
    report = bcp.load(tmp_path / "own", {**state, "rng": bcp.RNGState()})
    assert report.resumed["rng.numpy"][0] == "continued"
    assert _train(state) == _train(saved)


class _Adapted(nn.Module):
    """Named as a model of PEFT: a frozen layer, a LoRA adapter for it, and a whole module."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.peft_config = {"default": None}
        self.base_model = nn.Module()
        self.base_model.model = nn.Module()
        layer = self.base_model.model.layer = nn.Module()
        layer.base_layer = nn.Linear(4, 6)
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)})
        head = self.base_model.model.head = nn.Module()
        head.modules_to_save = nn.ModuleDict({"default": nn.Linear(6, 3)})


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_adapters_load_under_the_names_of_live_models(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(3)
    prefix = "base_model.model."
    stored = {
        f"{prefix}layer.lora_A.weight": torch.randn(2, 4),
        f"{prefix}layer.lora_B.weight": torch.randn(6, 2),
        f"{prefix}head.weight": torch.randn(3, 6),
        f"{prefix}head.bias": torch.randn(3),
    }
    if suffix == "bin":
        torch.save(stored, tmp_path / "adapter_model.bin")
    else:
        save_file(stored, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    assert set(bcp.open(tmp_path)) == {f"model.{name}" for name in stored}
    model = _Adapted(0)
    base = model.base_model.model.layer.base_layer.weight.clone()
    report = bcp.load(tmp_path, {"model": model})
    live = model.state_dict()
    assert torch.equal(live[f"{prefix}layer.lora_A.default.weight"], stored[f"{prefix}layer.lora_A.weight"])
    assert torch.equal(live[f"{prefix}layer.lora_B.default.weight"], stored[f"{prefix}layer.lora_B.weight"])
    assert torch.equal(live[f"{prefix}head.modules_to_save.default.bias"], stored[f"{prefix}head.bias"])
    assert torch.equal(live[f"{prefix}layer.base_layer.weight"], base)
    assert set(report.lazy) == {f"model.{prefix}layer.base_layer.bias", f"model.{prefix}layer.base_layer.weight"}
    # A part of the adapter that is not stored is a fault, and so is a stored one that the model lacks.
    model.base_model.model.layer.lora_C = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    with pytest.raises(MismatchError, match=r"lora_C\.default\.weight"):
        bcp.load(tmp_path, {"model": model})
    del model.base_model.model.layer.lora_C, model.base_model.model.head.modules_to_save
    with pytest.raises(MismatchError, match=r"head\.bias"):
        bcp.load(tmp_path, {"model": model})
