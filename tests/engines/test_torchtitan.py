"""``BcpCheckpointManager``: a training of torchtitan is killed, resumes, and equals an uninterrupted one."""

from __future__ import annotations

import runpy
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import bytecheckpoint as bcp
from bytecheckpoint.errors import UsageError
from bytecheckpoint.rules import Rules
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

pytest.importorskip("torchtitan")

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_OVERRIDDEN = ("_close", "_load", "_maybe_wait_for_staging", "_save", "_wait_for_saving")
"""The methods of ``BaseCheckpointManager`` that the library implements."""
_USED = ("dp_rank", "dp_world_size", "_rank_id")
"""The attributes of ``ParallelAwareDataloader`` that it uses."""

FSDP = {"data_parallel_shard_degree": 2}


def _train(rank: int, world_size: int, folder: Path, arguments: dict[str, Any]) -> Any:
    from torchtitan_training import train  # it takes seconds, which only the ranks need

    return train(rank, world_size, folder, **arguments)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _alone(pool: RankPool, folder: Path, steps: int, **arguments: Any) -> Any:
    return pool.run(_train, folder, {"steps": steps, **arguments}, world_size=1)[0]


def _names(folder: Path) -> set[str]:
    return {one.name for one in (folder / "checkpoint").glob("step-*")}


def _sections(folder: Path, step: int) -> set[str]:
    return {*bcp.open(folder / "checkpoint" / f"step-{step}").sections}


def test_a_folder_of_torchtitan_is_resumed_in_place(pool: RankPool, tmp_path: Path) -> None:
    native = _alone(pool, tmp_path / "native", 4, native=True)
    found = bcp.open(tmp_path / "native" / "checkpoint" / "step-4")
    assert {*found.sections} == {"model", "optimizer", "lr_scheduler", "dataloader", "train_state"}
    shutil.copytree(tmp_path / "native", tmp_path / "own")
    assert _alone(pool, tmp_path / "own", 4).sums == native.sums
    own = _alone(pool, tmp_path / "own", 6, dropout=0)  # torchtitan does not store the random states
    native = _alone(pool, tmp_path / "native", 6, dropout=0, native=True)
    assert (own.losses, own.sums) == (native.losses, native.sums)
    assert {*own.losses} == {5, 6}
    assert _alone(pool, tmp_path / "own", 7).losses.keys() == {7}, "step 6 is a checkpoint of this library"
    assert _names(tmp_path / "own") == {"step-2", "step-4", "step-6", "step-7"}


def test_when_it_saves_and_what_it_keeps(pool: RankPool, tmp_path: Path) -> None:
    options = {"enable_first_step_checkpoint": True, "keep_latest_k": 2, "async_mode": "async_with_pinned_mem"}
    whole = _alone(pool, tmp_path, 1, **options)
    assert _names(tmp_path) == {"step-1"}
    assert _sections(tmp_path, 1) == {"model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"}
    whole = _alone(pool, tmp_path, 6, **options)
    assert _names(tmp_path) == {"step-4", "step-6"}
    with bcp.CheckpointManager(tmp_path / "checkpoint") as another_job:
        assert another_job.latest().step == 6
        assert _alone(pool, tmp_path, 6, load_step=4, load_only=True).sums == whole.sums
        assert _alone(pool, tmp_path, 6, load_only=True).losses == {}
    assert _names(tmp_path) == {"step-4", "step-6"}
    _alone(pool, tmp_path, 10, sigterm_at=7, async_mode="disabled")
    assert _names(tmp_path) == {"step-4", "step-6", "step-7"}
    again = _alone(pool, tmp_path, 1, exclude_from_loading=["train_state", "dataloader"], load_only=True)
    assert {*again.losses} == {1}, "the step and the data begin anew"
    assert _alone(pool, tmp_path, 7, enable=False).losses.keys() == {*range(1, 8)}
    with pytest.raises(RanksFailed, match="exclude_from_loading names states that do not exist"):
        _alone(pool, tmp_path, 6, exclude_from_loading=["scheduler"])


def test_a_model_alone_and_names_of_hugging_face(pool: RankPool, tmp_path: Path) -> None:
    trained = _alone(pool, tmp_path / "full", 2)
    _alone(pool, tmp_path / "model", 1, last_save_model_only=True, export_dtype="bfloat16")
    assert _sections(tmp_path / "model", 1) == {"model"}
    stored = bcp.open(tmp_path / "model" / "checkpoint" / "step-1").state_dict("model")
    assert {one.dtype for one in stored.values()} == {torch.bfloat16}
    source = str(tmp_path / "full" / "checkpoint" / "step-2")
    exporting = {"last_save_model_only": True, "last_save_in_hf": True}
    exported = _alone(pool, tmp_path / "hf", 1, initial_load_path=source, **exporting)
    directory = bcp.open(tmp_path / "hf" / "checkpoint" / "step-1").model_directory
    tensors = {name: one for file in Path(directory).glob("*.safetensors") for name, one in load_file(file).items()}
    assert "model.layers.1.self_attn.q_proj.weight" in tensors
    loaded = _alone(pool, tmp_path / "from-hf", 0, initial_load_in_hf=True, initial_load_path=str(directory))
    assert loaded.sums == exported.sums
    continued = _alone(pool, tmp_path / "continued", 2, initial_load_path=source, initial_load_model_only=False)
    assert (continued.losses, continued.sums) == ({}, trained.sums)


def test_a_seed_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    seed = _alone(pool, tmp_path, 2, create_seed_checkpoint=True, last_save_model_only=True)
    assert _names(tmp_path) == {"step-0"}
    elsewhere = {"root": str(tmp_path / "checkpoint"), "save": {"codec": "zstd"}}
    both = pool.run(_train, tmp_path / "other", {"steps": 0, "parallelism": FSDP, "checkpoints": elsewhere})
    assert [one.sums for one in both] == [seed.sums] * 2
    _alone(pool, tmp_path / "other", 1, checkpoints=elsewhere)
    assert "zstd" in bcp.latest(tmp_path / "checkpoint").manifest.files.codec


@pytest.mark.parametrize(
    ("kind", "parallelism"),
    [
        ("llama3", FSDP),
        pytest.param("llama3", {"tensor_parallel_degree": 2}, marks=pytest.mark.full),
        pytest.param("llama3", {"pipeline_parallel_degree": 2}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {**FSDP, "expert_parallel_degree": 2}, marks=pytest.mark.full),
    ],
    ids=["fsdp", "tp", "pp", "ep"],
)
def test_two_ranks_die_in_a_save_and_resume(pool: RankPool, tmp_path: Path, kind: str, parallelism: Any) -> None:
    arguments = {"kind": kind, "parallelism": parallelism}
    whole = pool.run(_train, tmp_path / "whole", arguments)
    with pytest.raises(RanksFailed, match="rank 1"):
        pool.run(_train, tmp_path / "killed", {**arguments, "killed_in_save": 4})
    assert bcp.latest(tmp_path / "killed" / "checkpoint").step == 2
    # Saves that are not asynchronous are not prepared for, which would start the data loader.
    resumed = pool.run(_train, tmp_path / "killed", {**arguments, "async_mode": "disabled"})
    assert [{*one.losses} for one in resumed] == [{3, 4, 5, 6}] * 2
    for before, after in zip(whole, resumed, strict=True):
        assert before.losses.items() >= after.losses.items()
        assert (before.sums, before.rng) == (after.sums, after.rng)
    if "data_parallel_shard_degree" in parallelism:
        with pytest.raises(RanksFailed, match="MismatchError"):
            _alone(pool, tmp_path / "killed", 6, kind=kind)
    continued = _alone(pool, tmp_path / "killed", 6, kind=kind, dataloader_on_resize="skip")
    assert (continued.losses, continued.sums) == (
        {},
        {name: one for rank in resumed for name, one in rank.sums.items()},
    )
    assert _alone(pool, tmp_path / "killed", 7, kind=kind, dataloader_on_resize="skip").losses.keys() == {7}


@pytest.mark.s3
@pytest.mark.full
def test_a_store_with_a_tier(pool: RankPool, tmp_path: Path, s3: dict[str, Any], bucket: str) -> None:
    store = bcp.Location(f"s3://{bucket}/run", storage_options=s3)
    given = {
        "checkpoints": {"root": bcp.Location(store.url, tier=bcp.Tier(tmp_path / "tier"), storage_options=s3)},
        "keep_latest_k": 2,
    }
    whole = _alone(pool, tmp_path / "whole", 6)
    killed = {"steps": 6, "killed_in_save": 4, **given}
    pool.run(_train, tmp_path, killed, world_size=1, expect_death={0: signal.SIGKILL})
    assert bcp.latest(given["checkpoints"]["root"]).step == 2
    resumed = _alone(pool, tmp_path, 6, **given)
    assert {*resumed.losses} == {3, 4, 5, 6}
    assert whole.losses.items() >= resumed.losses.items()
    assert (resumed.sums, resumed.rng) == (whole.sums, whole.rng)
    names = [one.rstrip("/") for one in store.open().list_children("") if one.startswith("step-")]
    assert {bcp.open(store.join(name)).step for name in names} == {4, 6}


def _gone_and_refused(rank: int, world_size: int) -> None:
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan_training import parsed

    from bytecheckpoint.integrations.torchtitan import OPTIONS, BcpCheckpointManager

    assert [name for name in _OVERRIDDEN if not hasattr(BaseCheckpointManager, name)] == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = ParallelAwareDataloader([1], 0, 1)
    assert [name for name in _USED if not hasattr(loader, name)] == []
    assert {*OPTIONS} == {*BaseCheckpointManager.Config.__slots__}
    with pytest.raises(UsageError, match="initial_load_in_hf_quantized"):
        BcpCheckpointManager.Config(initial_load_in_hf=True, initial_load_in_hf_quantized=True, initial_load_path="/a")
    given = BcpCheckpointManager.Config(checkpoints={"save": {"codec": "zstd"}})
    arguments = ("--checkpoint.async-mode", "disabled", "--checkpoint.interval", "3")
    found = parsed(*arguments, checkpoint=given).checkpoint
    assert found == replace(given, async_mode="disabled", interval=3)


def test_the_release_has_what_is_used(pool: RankPool) -> None:
    pool.run(_gone_and_refused, world_size=1)


def _run_example(rank: int, world_size: int, *arguments: str) -> None:
    import torchtitan_training
    from torchtitan.models.llama3 import config_registry

    with (
        mock.patch.object(config_registry, "llama3_debugmodel", return_value=torchtitan_training.debug_model()),
        mock.patch.object(sys, "argv", ["train_torchtitan.py", *arguments]),
    ):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_torchtitan.py"), run_name="__main__")


def test_the_example(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_run_example, "--folder", str(tmp_path), "--steps", "6", world_size=1)
    assert _names(tmp_path) == {"step-5", "step-6"}
    pool.run(_run_example, "--folder", str(tmp_path), "--steps", "7", world_size=1)
    assert bcp.latest(tmp_path / "checkpoint").tree("train_state")["step"] == 7


def _convert(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    """The names of tensors that rules and torchtitan's own conversion make different, by direction."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import save
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    dim, head, heads, kv_heads = 32, 8, 4, 2
    attention = SimpleNamespace(n_heads=heads, n_kv_heads=kv_heads, head_dim=head)
    layer = SimpleNamespace(attention=attention)
    config = SimpleNamespace(layers=[layer, layer], dim=dim, enable_weight_tying=False)
    adapter = Llama3StateDictAdapter(config, None)  # type: ignore[arg-type]
    rows = {"wq": head * heads, "wk": head * kv_heads, "wv": head * kv_heads}
    native = {
        (name or "").replace("{}", str(number)): torch.randn(rows.get((name or "").split(".")[-2], 24), dim)
        for name in adapter.from_hf_map.values()
        for number in range(2)
        if name is not None
    }
    hub = {name: tensor.contiguous() for name, tensor in adapter.to_hf(dict(native)).items()}
    save(dict(native), checkpoint_id=folder / "native")
    save_file(hub, folder / "model.safetensors")
    rules = Rules.shipped("torchtitan-llama3", head_dim=head)
    found = {}
    for path, expected, chosen in (("native", hub, rules), ("model.safetensors", native, rules.inverse())):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        bcp.load(folder / path, {"model": loaded}, options={"rules": chosen})
        found[path] = [name for name, tensor in loaded.items() if not torch.equal(tensor, expected[name])]
        assert len(loaded) == 21
    return found


def test_the_rules_convert_as_torchtitan_does(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_convert, tmp_path, world_size=1) == [{"native": [], "model.safetensors": []}]
