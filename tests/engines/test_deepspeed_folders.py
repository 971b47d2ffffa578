"""Folders of DeepSpeed's own ``save_checkpoint``, opened and loaded in place. DeepSpeed's own loads are the oracle."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed_engines import expert_engine, expert_steps, muon_engine, train
from deepspeed_jobs import KINDS, deepspeed_job, initialize
from engines import TORCH_KINDS, Decoder, Job, adamw, differences, lenient_warnings, torch_job
from sampling import is_full, sample
from written_files import written_files

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.deepspeed, pytest.mark.sampled(3, of=__name__)]

BEFORE, AFTER = range(2), range(2, 4)
STAGES = ("zero0", "zero1", "zero2", "zero3")
TARGETS = (*TORCH_KINDS, *STAGES)
RATE = 7e-4  # stored in the folder; targets are built with another one


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def build(kind: str, seed: int) -> Job:
    return torch_job(kind, seed, lr=0.5) if kind in TORCH_KINDS else deepspeed_job(kind, seed, lr=0.5)


def _save_folder(engine: Any, path: str, **options: Any) -> None:
    with lenient_warnings():
        engine.save_checkpoint(path, **options)


def _trained(kind: str) -> Job:
    job = deepspeed_job(kind, 1, lr=RATE)
    job.train(BEFORE)
    return job


# ----------------------------------------------------------------------------------------------------- as if saved live


def _compare_with_live(rank: int, world_size: int, folder: str, kinds: list[str]) -> list[str]:
    faults = []
    for kind in kinds:
        if kind == "muon":
            engine = muon_engine(2, 1)
            train(engine, BEFORE)
        elif kind.startswith("experts"):
            engine = expert_engine(2, int(kind[-1]), 1)
            expert_steps(engine, BEFORE)
        else:
            engine = _trained(kind).model
        _save_folder(engine, f"{folder}/{kind}")
        bcp.save(f"{folder}/{kind}-live", {"model": engine, "optimizer": engine.optimizer})
        faults += [f"{kind}: {fault}" for fault in _unlike(f"{folder}/{kind}", f"{folder}/{kind}-live")]
    return faults


def _unlike(folder: str, live: str) -> list[str]:
    """What the index of a folder has that a live save has not, or the other way round."""
    found, expected = bcp.open(folder), bcp.open(live)
    masters = [name for name in expected if name.endswith(".master") and name not in found]  # ZeRO-3
    faults = sorted(found.keys() ^ (expected.keys() - set(masters)))
    for name in found.keys() & expected.keys():
        tensor, other = found[name].load(), expected[name].load()
        if name.startswith("model.") and tensor.dtype != other.dtype:
            tensor = tensor.to(other.dtype)  # ZeRO-3 has the master weights only
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            faults.append(name)
    for name in masters:
        fqn = name.removeprefix("optimizer.state.").removesuffix(".master")
        if not torch.equal(found[f"model.{fqn}"].load(), expected[name].load()):
            faults.append(name)
    values = [
        {
            (one.section, one.path): one.decode()
            for one in checkpoint.index.values()
            if one.section in ("model", "optimizer") and one.path[0] not in ("class", "masters_of", "empty_groups")
        }
        for checkpoint in (found, expected)
    ]
    faults += [str(key) for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)]
    return faults


LIVE = [kind for kind in KINDS if kind != "zero0-fp32"]  # without names


@pytest.mark.parametrize("kinds", [[*sample(LIVE, 2), *(["muon"] if is_full() else []), "experts1", "experts2"]])
def test_a_folder_is_what_a_live_save_stores(kinds: list[str], pool: RankPool, tmp_path: Path) -> None:
    """For Muon, DeepSpeed compiles an extension, which takes more than a minute."""
    faults = pool.run(_compare_with_live, str(tmp_path), kinds, world_size=2, timeout_s=280)[0]
    assert faults == []


# ---------------------------------------------------------------------------------------------------------------- loads


def _save_with_oracle(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    """Save folders, and what DeepSpeed itself loads from them."""
    for kind in kinds:
        path = f"{folder}/{kind}"
        _save_folder(_trained(kind).model, path)
        job = build(kind, seed=3)
        with lenient_warnings():
            job.model.load_checkpoint(path)
        form = job.full_form()
        losses = job.train(AFTER)
        if rank == 0:
            torch.save((form, losses), f"{path}.expected")


def _load(rank: int, world_size: int, folder: str, pairs: list[tuple[str, str]]) -> list[str]:
    faults = []
    for saved, target in pairs:
        path = f"{folder}/{saved}"
        form, losses = torch.load(f"{folder}/{saved.partition('/')[0]}.expected")
        job = build(target, seed=2)
        with written_files(folder) as written:
            report = bcp.load(path, job.state, cast="any")  # the frozen parameter has no master weight
        bad = differences(job.full_form(), form)
        if written:
            bad.append(f"written: {written}")
        if {group["lr"] for group in job.optimizer.param_groups} != {RATE}:
            bad.append("learning rate")
        found = job.train(AFTER)
        apart = max(abs(a / b - 1) for a, b in zip(found, losses))
        if bad or report.missing or report.unexpected or apart > (0 if saved == target and world_size == 2 else 1e-3):
            faults.append(f"{saved} -> {target} on {world_size}: {bad[:5]} {report} {apart:.1e}")
    return faults


PAIRS = [*product(STAGES, TARGETS), *product([kind for kind in KINDS if kind not in STAGES], TARGETS)]


def test_loads_equal_those_of_deepspeed(pool: RankPool, tmp_path: Path) -> None:
    pairs = [("zero3", "fsdp2"), ("zero1", "fsdp2"), *sample(PAIRS[:28], 2), *sample(PAIRS[28:], 2)]
    kinds = sorted({saved for saved, _ in pairs})
    pool.run(_save_with_oracle, str(tmp_path), kinds, world_size=2, timeout_s=600 if is_full() else 280)
    for world_size in (2, 1):
        faults = pool.run(_load, str(tmp_path), pairs, world_size=world_size, timeout_s=600 if is_full() else 280)
        assert [fault for rank in faults for fault in rank] == []


def _to_universal(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    if rank == 0:
        with lenient_warnings():
            from deepspeed.checkpoint import ds_to_universal
        for kind in kinds:
            tag = f"{folder}/{kind}/global_step2"
            options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
            sys.argv = ["ds_to_universal", "--input_folder", tag, "--output_folder", f"{tag}_universal", *options]
            with lenient_warnings():
                ds_to_universal.main(ds_to_universal.parse_arguments())
    dist.barrier()


def test_universal_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    kinds = ["zero1", "zero3"]
    pool.run(_save_with_oracle, str(tmp_path), kinds, world_size=2, timeout_s=280)
    pool.run(_to_universal, str(tmp_path), kinds, world_size=2, timeout_s=280)
    pairs = [(f"{kind}/global_step2_universal", target) for kind in kinds for target in ("fsdp2", "zero2")]
    faults = pool.run(_load, str(tmp_path), pairs, world_size=2, timeout_s=280)
    assert [fault for rank in faults for fault in rank] == []
    (tmp_path / "zero1/global_step2_universal/zero/norm.bias/fp32.pt").unlink()
    with pytest.raises(errors.CorruptionError, match=r"zero/norm\.bias/fp32\.pt: file is missing"):
        bcp.open(tmp_path / "zero1/global_step2_universal")


# ------------------------------------------------------------------------------------------------ one process, the rest


def _save_with_client_state(rank: int, world_size: int, folder: str, stage: int) -> None:
    model = Decoder(1)
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    zero = {"stage": stage, "memory_efficient_linear": False}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "scheduler": scheduler}
    engine = initialize(model, adamw(model, 1e-3), config)
    train(engine, range(3))
    _save_folder(engine, folder, tag="ours", client_state={"epoch": 4, "order": torch.arange(5)})
    rates = engine.get_lr()
    model = Decoder(2)
    engine = initialize(model, adamw(model, 1e-3), config)
    extra: dict[str, Any] = {"epoch": 0, "order": torch.zeros(5, dtype=torch.int64)}
    state = {"model": engine, "optimizer": engine.optimizer, "lr_scheduler": engine.lr_scheduler}
    bcp.load(folder, {**state, "extra_state": extra}, strict={"extra_state": False}, cast="any")
    assert engine.get_lr() == rates
    assert (engine.global_steps, engine.global_samples, extra["epoch"]) == (3, 6, 4)
    assert torch.equal(extra["order"], torch.arange(5))


@pytest.mark.parametrize("stage", sample([1, 2, 3], 1))
def test_one_process_without_deepspeed(stage: int, pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_with_client_state, str(tmp_path), stage, world_size=2, timeout_s=280)
    with lenient_warnings():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        expected = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    model = Decoder(2)
    report = bcp.load(tmp_path, {"model": model})
    found = model.state_dict()
    trained = [name for name in expected if name not in ("position", "seed")]
    assert len(trained) == 22
    assert [name for name in trained if not torch.equal(found[name], expected[name])] == []
    assert report.step == 3
    # A slice reads only its own bytes.
    checkpoint = bcp.open(tmp_path / "ours")
    name = "model" if stage == 3 else "optimizer.state"
    rows = checkpoint[f"{name}.embedding.weight" + ("" if stage == 3 else ".master")][7:11]
    assert torch.equal(rows, expected["embedding.weight"][7:11])


def _save_as_lightning(rank: int, world_size: int, folder: str) -> Any:
    """Save as ``DeepSpeedStrategy`` does, which passes its own schedulers in the client state."""
    model = Decoder(1)
    optimizer = adamw(model, 1e-3)
    engine = initialize(model, optimizer, {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    train(engine, range(1))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.5), 1)
    scheduler.last_epoch = 7
    rest = {"lr_schedulers": [scheduler.state_dict()], "epoch": 4, "global_step": 1, "loops": {}}
    _save_folder(engine, folder, tag="checkpoint", client_state=rest)
    return scheduler.state_dict()


def test_the_schedulers_of_lightning(pool: RankPool, tmp_path: Path) -> None:
    (expected,) = pool.run(_save_as_lightning, str(tmp_path), world_size=1, timeout_s=280)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Decoder(2).parameters(), lr=0.1), 1)
    extra = {"epoch": 0}
    bcp.load(tmp_path, {"lr_scheduler": scheduler, "extra_state": extra}, strict={"extra_state": False})
    assert (scheduler.state_dict(), extra) == (expected, {"epoch": 4})


# ---------------------------------------------------------------------------------------------------------------- bytes


def _count_bytes(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    def large() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))

    model = large()
    config = {"zero_optimization": {"stage": 3, "memory_efficient_linear": False}, "bf16": {"enabled": True}}
    engine = initialize(model, torch.optim.AdamW(model.parameters()), config)
    with lenient_warnings():
        engine.backward(engine(torch.randn(2, 512, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    _save_folder(engine, folder)
    from torch.distributed.fsdp import fully_shard

    target = fully_shard(large())
    optimizer = torch.optim.AdamW(target.parameters())
    report = bcp.load(folder, {"model": target, "optimizer": optimizer})
    return report.bytes_read + report.bytes_received, report.bytes_requested


def test_only_requested_bytes_are_read(pool: RankPool, tmp_path: Path) -> None:
    for moved, requested in pool.run(_count_bytes, str(tmp_path), world_size=2, timeout_s=280):
        assert requested > 9 << 20
        assert moved <= 1.1 * requested + (64 << 10)


# --------------------------------------------------------------------------------------------------------------- damage


def _save_kinds(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        _save_folder(_trained(kind).model, f"{folder}/{kind}")


def test_damaged_folders_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_kinds, str(tmp_path), ["zero1", "zero3"], world_size=2, timeout_s=280)
    first, third = tmp_path / "zero1", tmp_path / "zero3"

    def refuse(path: Path, kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match):
            bcp.open(path)

    def missing(path: Path, match: str) -> None:
        path.rename(path.with_name("aside"))
        refuse(path.parents[1], errors.CorruptionError, match)
        path.with_name("aside").rename(path)

    tag = third / "global_step2"
    missing(tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank_1_.*optim_states.*is missing")
    missing(tag / "zero_pp_rank_1_mp_rank_00_model_states.pt", "rank_1_.*model_states.*is missing")
    missing(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", "rank_0_.*model_states.*is missing")
    (third / "latest").write_text("global_step9")
    refuse(third, errors.CorruptionError, "names the tag 'global_step9'")
    (third / "latest").write_text("../zero1/global_step2")
    refuse(third, errors.NotACheckpointError, "is not a checkpoint")

    tag = first / "global_step2"
    optimizer = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    extra = tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    extra.write_bytes(optimizer.read_bytes())
    refuse(first, errors.FormatError, "rank_2_.*belongs to another save")
    extra.rename(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refuse(first, errors.FormatError, "are both of rank 1")
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    model = tag / "mp_rank_00_model_states.pt"
    (tag / "mp_rank_01_model_states.pt").write_bytes(model.read_bytes())
    refuse(first, errors.CheckpointError, "mp_rank_01_model_states.pt belongs to tensor parallelism")
    (tag / "mp_rank_01_model_states.pt").rename(tag / "layer_00-model_00-model_states.pt")
    refuse(first, errors.CheckpointError, "pipeline parallelism")
    (tag / "layer_00-model_00-model_states.pt").unlink()
    model.write_bytes((third / "global_step2" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes())
    refuse(first, errors.FormatError, "it is no model file")
    data = bytearray(optimizer.read_bytes())
    optimizer.write_bytes(data[: len(data) // 2])
    model.write_bytes(b"")
    refuse(tag, errors.FormatError, "mp_rank_00_model_states.pt")


def test_the_files_of_a_trainer_are_read_as_well(pool: RankPool, tmp_path: Path) -> None:
    """A Trainer stores its scheduler, the generators and its state next to what the engine writes."""
    pool.run(_save_kinds, str(tmp_path), ["zero2"], world_size=2, timeout_s=280)
    folder = tmp_path / "zero2"
    model, optimizer = _one_process()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    torch.save(scheduler.state_dict() | {"last_epoch": 3}, folder / "scheduler.pt")
    for rank in range(2):
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
        torch.save(states, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "epoch": 0.5}))

    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "extra_state": {}}
    bcp.load(folder, state, cast="any")
    assert scheduler.last_epoch == 3
    found = bcp.open(folder)
    assert (found.step, found.tree("extra_state")["global_step"], found.tree("extra_state")["epoch"]) == (2, 2, 0.5)
    assert found.tree("extra_state")["global_steps"] == 2, "the engine's own counters stay"
    bcp.load(folder, {"rng": bcp.RNGState()}, options={"per_rank": "lowest"})
    assert found.manifest.world_size == 2


def test_a_flipped_bit_is_found(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_kinds, str(tmp_path), ["zero2"], world_size=2, timeout_s=280)
    path = tmp_path / "zero2/global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    found = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    data = bytearray(path.read_bytes())
    at = data.index(found.numpy().tobytes())
    data[at + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.CorruptionError, match="rank_0"):
        bcp.load(tmp_path / "zero2", dict(zip(("model", "optimizer"), _one_process())), cast="any")


def _one_process() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Decoder(2)
    return model, adamw(model, 0.5)
