"""Folders of Megatron's own ``dist_checkpointing.save``, opened and loaded in place. Its own loads are the oracle."""

from __future__ import annotations

import enum
import io
import re
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_cpu import megatron_on_cpu
from mcore_folders import Form, read_folder, scheduler, write_folder, write_state
from mcore_training import Layout, Recipe, differences, stored_name, training
from sampling import is_full, sample
from stored_modules import full_state, stored_module, two_groups
from written_files import written_files

pytestmark = [pytest.mark.megatron, pytest.mark.sampled(5, of=__name__)]

MOE = Recipe(experts=4)
STACKED = Form(per_layer=False)
BUCKETS = Form(optimizer="dp_reshardable")
DENSE = [Layout(tp=2, pp=2), Layout(tp=2), Layout(world=1), Layout(pp=2, vp=2), Layout(world=2)]
EXPERTS = [Layout(ep=2, world=2), Layout(ep=2), Layout(tp=2, ep=2, etp=1), Layout(pp=2, ep=2)]


def _scope(fixture_name: str, config: pytest.Config) -> Any:
    """Megatron leaves the threads of some process groups behind, of which a full run would have thousands."""
    return "function" if is_full() else "module"


@pytest.fixture(scope=_scope)
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


# ----------------------------------------------------------------------------------------------------- as if saved live


def _compare_with_live(rank: int, world_size: int, layout: Layout, recipe: Recipe, form: Form, path: str) -> list[str]:
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        write_folder(job, path, form)
        bcp.save(f"{path}-live", job.state, step=job.steps)
        return _unlike(path, f"{path}-live")


def _unlike(folder: str, live: str) -> list[str]:
    """What the index of a folder has that a live save has not, or the other way round."""
    found, expected = bcp.open(folder), bcp.open(live)
    contents = []
    for checkpoint in (found, expected):
        held: dict[Any, Any] = {
            ".".join(map(str, (one.section, *one.path))): one.decode()
            for one in checkpoint.index.values()
            if one.section in ("model", "optimizer") and one.path[0] not in ("class", "empty_groups")
        }
        for name in checkpoint:
            if name.startswith(("model.", "optimizer.")):
                tensor = checkpoint[name].load()
                held[name] = tensor.item() if name.endswith(".step") else tensor  # the folder has one for all
        contents.append(held)
    first, second = contents
    faults = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        left, right = first[name], second[name]
        if isinstance(left, torch.Tensor):
            is_equal = left.dtype == right.dtype and torch.equal(left, right)
        else:
            is_equal = left == right
        if not is_equal:
            faults.append(name)
    return faults


FOLDERS = {
    "per layer": (Layout(tp=2, pp=2), Recipe(), Form()),
    "stacked": (Layout(tp=2, pp=2), Recipe(), STACKED),
    "virtual stages, untied": (Layout(pp=2, vp=2), Recipe(tied=False), Form()),
    "experts": (Layout(ep=2), MOE, Form()),
    "stacked experts": (Layout(tp=2, ep=2, etp=1), MOE, STACKED),
    "prefixes": (Layout(ep=2, world=2), MOE, Form(prefix=True)),
    "multi-latent attention": (Layout(tp=2, world=2), Recipe(mla=True), Form()),
    "multi-token prediction": (Layout(tp=2, world=2), Recipe(mtp=2), STACKED),
    "multi-token prediction per layer": (Layout(tp=2, world=2), Recipe(mtp=2, experts=4), Form()),
    "replicated optimizer": (Layout(tp=2), Recipe(distributed=False), STACKED),
    "float32": (Layout(world=2), Recipe(bf16=False), Form()),
    "float32, replicated optimizer": (Layout(world=2), Recipe(bf16=False, distributed=False), Form()),
    "float16 with a loss scale": (Layout(world=2), Recipe(fp16=True), Form()),
    "precision-aware": (Layout(world=2), Recipe(scaled="fp16"), Form()),
}


@pytest.mark.parametrize("kind", sample(list(FOLDERS), 2))
def test_a_folder_is_what_a_live_save_stores(pool: RankPool, tmp_path: Path, kind: str) -> None:
    layout, recipe, form = FOLDERS[kind]
    faults = pool.run(
        _compare_with_live, layout, recipe, form, str(tmp_path / "folder"), world_size=layout.world, timeout_s=120
    )
    assert faults[0] == []


# ---------------------------------------------------------------------------------------------------------------- loads


def _write(
    rank: int, world_size: int, layout: Layout, recipe: Recipe, form: Form, path: str
) -> dict[str, torch.Tensor] | None:
    """Write a folder. Returns what it must contain, on rank 0."""
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        write_folder(job, path, form)
        full = job.full_state()
        return full if rank == 0 else None


def _load(
    rank: int, world_size: int, layout: Layout, recipe: Recipe, form: Form, path: str
) -> tuple[Any, list[float], dict[str, Any], list[str]]:
    with training(layout, recipe, seed=2) as job:
        rates = scheduler(job)
        with written_files(path) as written:
            report = bcp.load(path, {**job.state, "opt_param_scheduler": rates})
        job.steps = report.step or 0
        full = job.full_state()
        return full if rank == 0 else None, job.train(2), rates.state_dict(), written


def _load_with_megatron(
    rank: int, world_size: int, layout: Layout, recipe: Recipe, form: Form, path: str
) -> tuple[Any, list[float]]:
    with training(layout, recipe, seed=3) as job:
        read_folder(job, path, form)
        full = job.full_state()
        return full if rank == 0 else None, job.train(2)


def _require_loads(
    pool: RankPool, path: Path, source: Layout, target: Layout, recipe: Recipe, form: Form, other: Recipe | None = None
) -> None:
    folder, after = str(path / "folder"), other or recipe
    saved = pool.run(_write, source, recipe, form, folder, world_size=source.world, timeout_s=120)[0]
    loads = pool.run(_load, target, after, form, folder, world_size=target.world, timeout_s=120)
    found, losses, rates, _ = loads[0]
    assert saved is not None
    assert differences(saved, found) == []
    assert (rates["num_steps"], rates["max_lr"]) == (2, recipe.lr)
    assert [written for *_, written in loads] == [[]] * target.world
    # If its chains of optimizers differ, Megatron loads nothing. Before it loads buckets, it reads scales, which the
    # stand-in for Transformer Engine does not have then.
    if (source.ep > 1) == (target.ep > 1) and not (recipe.scaled and form == BUCKETS):
        oracle = pool.run(_load_with_megatron, target, after, form, folder, world_size=target.world, timeout_s=120)
        expected, expected_losses = oracle[0]
        assert differences(expected, found) == []
        assert losses == expected_losses


FORMS = {"per layer": Form(), "stacked": STACKED, "prefixes": Form(prefix=True)}
DENSE_PAIRS, EXPERT_PAIRS = list(product(DENSE, DENSE)), list(product(EXPERTS, [*EXPERTS, Layout(world=2)]))
LOADS = [
    *((Recipe(), *pair, list(FORMS)[number % 2]) for number, pair in enumerate(DENSE_PAIRS)),
    *((MOE, *pair, list(FORMS)[number % 3]) for number, pair in enumerate(EXPERT_PAIRS)),
]


@pytest.mark.parametrize(
    ("recipe", "source", "target", "form"),
    [*sample(LOADS[: len(DENSE_PAIRS)], 2), *sample(LOADS[len(DENSE_PAIRS) :], 2)],
    ids=lambda value: "experts" if value is MOE else "dense" if isinstance(value, Recipe) else str(value),
)
def test_loads_equal_those_of_megatron(
    pool: RankPool, tmp_path: Path, recipe: Recipe, source: Layout, target: Layout, form: str
) -> None:
    _require_loads(pool, tmp_path, source, target, recipe, FORMS[form])


def test_the_vocabulary_may_have_another_padding(pool: RankPool, tmp_path: Path) -> None:
    _require_loads(
        pool, tmp_path, Layout(tp=2, world=2), Layout(world=1), Recipe(), Form(), Recipe(padded_vocabulary=72)
    )


def _load_without_megatron(rank: int, world_size: int, path: str, kind: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    root = stored_module(path)
    model = fully_shard(root) if kind == "FSDP-2" else root
    optimizer = two_groups(root)
    with written_files(path) as written:
        bcp.load(path, {"model": model, "optimizer": optimizer})
    assert written == []
    return full_state(root, optimizer)


@pytest.mark.parametrize("kind", sample(["per layer", "stacked", "experts", "stacked experts"], 1))
def test_plain_modules_of_the_same_names(pool: RankPool, tmp_path: Path, kind: str) -> None:
    layout, recipe, form = FOLDERS[kind]
    folder = str(tmp_path / "folder")
    saved = pool.run(_write, layout, recipe, form, folder, world_size=layout.world, timeout_s=120)[0]
    for target, world_size in (("FSDP-2", 2), ("one process", 1)):
        plain = pool.run(_load_without_megatron, folder, target, world_size=world_size)[0]
        for key, value in (saved or {}).items():
            if not key.endswith("/model"):  # the fp32 module holds the master weights
                found = plain[stored_name(key)]
                assert torch.equal(value, found[: len(value)] if value.ndim else found), (target, key)


# --------------------------------------------------------------------------------------------- optimizers without names


BUCKET_LOADS = {
    "more ranks": (Recipe(bucket=2000), Layout(world=2), Layout(world=4)),
    "one rank": (Recipe(bucket=2000), Layout(world=2), Layout(world=1)),
    "float32": (Recipe(bf16=False, bucket=2000), Layout(world=2), Layout(world=1)),
    "float16 with a loss scale": (Recipe(fp16=True), Layout(world=2), Layout(world=4)),
    "tensor parallel": (Recipe(), Layout(tp=2), Layout(tp=2, world=2)),
    "pipeline parallel": (Recipe(), Layout(pp=2, world=2), Layout(pp=2)),
    "virtual stages": (Recipe(tied=False), Layout(pp=2, vp=2, world=2), Layout(pp=2, vp=2)),
    "experts": (MOE, Layout(ep=2), Layout(ep=2, world=2)),
    "precision-aware": (Recipe(scaled="fp16"), Layout(world=2), Layout(world=1)),
    "several instances": (Recipe(instances=2), Layout(), Layout(world=2)),
}


@pytest.mark.parametrize("kind", sample(list(BUCKET_LOADS), 2))
def test_buckets_load_on_any_number_of_data_parallel_ranks(pool: RankPool, tmp_path: Path, kind: str) -> None:
    recipe, source, target = BUCKET_LOADS[kind]
    _require_loads(pool, tmp_path, source, target, recipe, BUCKETS)


def _load_swapped(rank: int, world_size: int, recipe: Recipe, path: str) -> str:
    """The error of a load in which other ranks request each other's buckets, which have the same sizes."""
    with training(Layout(tp=2, world=2), recipe, seed=2) as job:
        for leaf in job.optimizer.chained_optimizers:
            leaf.data_parallel_group_idx = 1 - rank
        with pytest.raises(errors.MismatchError) as error:
            bcp.load(path, job.state)
        return str(error.value)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(bf16=False)], ids=["bfloat16", "float32"])
def test_buckets_of_other_ranks_are_no_success(pool: RankPool, tmp_path: Path, recipe: Recipe) -> None:
    path = str(tmp_path / "folder")
    pool.run(_write, Layout(tp=2, world=2), recipe, BUCKETS, path, world_size=2, timeout_s=120)
    for text in pool.run(_load_swapped, recipe, path, world_size=2):
        assert path in text
        assert "have other weights than the loaded model" in text


def _load_unread(
    rank: int, world_size: int, recipe: Recipe, form: Form, layout: Layout, after: Recipe, path: str
) -> tuple[str, bool, bool]:
    """The error of a load with the optimizer, whether that changed nothing, and whether one without it is complete."""
    with training(Layout(tp=2, world=2), recipe, seed=1) as job:
        job.train(2)
        write_folder(job, path, form)
        saved = job.full_state()
    with training(layout, after, seed=2) as job:
        job.train(1)
        before = job.full_state()
        with pytest.raises(errors.MismatchError) as error:
            bcp.load(path, job.state)
        unchanged = not differences(before, job.full_state())
        report = bcp.load(path, {"model": job.state["model"]})
        model = {key: value for key, value in job.full_state().items() if key.endswith("/model")}
        assert any("reload_model_params()" in note for note in report.notes)
        return str(error.value), unchanged, not differences(model, {key: saved[key] for key in model})


SAME, ZERO = Layout(tp=2, world=2), Form(optimizer="dp_zero_gather_scatter")


@pytest.mark.parametrize(
    ("recipe", "form", "layout", "after", "message"),
    [
        (Recipe(), ZERO, SAME, Recipe(), "in a form (dp_zero_gather_scatter) whose buckets do not state"),
        (Recipe(scaled="remainders"), Form(), SAME, Recipe(scaled="remainders"), "store_param_remainders"),
        (Recipe(scaled="remainders"), BUCKETS, SAME, Recipe(scaled="remainders"), "store_param_remainders"),
        (Recipe(), BUCKETS, Layout(pp=2, world=2), Recipe(), " buckets of this rank differ: dp_group_idx_"),
        (Recipe(), BUCKETS, SAME, Recipe(bucket=2000), "bucket_idx_2 has no elements there and 1152 here"),
        (MOE, BUCKETS, Layout(tp=2, ep=2, etp=1, world=2), MOE, "Load it with the tensor, pipeline, virtual pipeline"),
        (
            Recipe(),
            BUCKETS,
            SAME,
            Recipe(distributed=False),
            "This optimizer is a Float16OptimizerWithFloat16Params without",
        ),
    ],
    ids=["dp_zero", "remainders", "buckets of remainders", "stages", "bucket size", "experts", "not distributed"],
)
@pytest.mark.sampled(2)
def test_only_the_model_of_an_optimizer_that_does_not_fit_is_read(
    pool: RankPool, tmp_path: Path, recipe: Recipe, form: Form, layout: Layout, after: Recipe, message: str
) -> None:
    path = str(tmp_path / "folder")
    for text, unchanged, complete in pool.run(_load_unread, recipe, form, layout, after, path, world_size=2):
        assert message in text
        assert "optimizer" in text
        assert unchanged
        assert complete


def test_buckets_need_an_optimizer_of_megatron(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "folder")
    pool.run(_write, Layout(world=1), Recipe(), BUCKETS, path, world_size=1)
    module = stored_module(path)
    with pytest.raises(errors.MismatchError, match=f"{path} has the flat buckets of Megatron's distributed optimizer"):
        bcp.load(path, {"model": module, "optimizer": two_groups(module)})
    bcp.load(path, {"model": module})


# ------------------------------------------------------------------------------------------------------ crafted folders


def _group(**options: Any) -> dict[str, Any]:
    fixed = {"is_expert_parallel": False, "wd_mult": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return {**fixed, "lr": 0.01, **options}


def _with_state(make: Any, key: str, data: torch.Tensor) -> dict[str, Any]:
    """A parameter in bfloat16 and its state. ``make`` describes the shard of a key and a tensor."""
    state = {"param": data, "exp_avg": data + 1, "exp_avg_sq": data + 2}
    return {
        key: make(key, data.bfloat16()),
        **{f"{name} {key}": make(f"optimizer.state.{name}.{key}", value) for name, value in state.items()},
    }


def _write_large(rank: int, world_size: int, path: str) -> None:
    """A stack of three layers of which each rank has half."""
    with megatron_on_cpu():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        torch.manual_seed(rank)
        state: dict[str, Any] = {"optimizer": {"optimizer": {"param_groups": [_group(step=3)]}}, "iteration": 3}
        for layer in range(3):

            def make(key: str, data: torch.Tensor, layer: int = layer) -> Any:
                return ShardedTensor.from_rank_offsets(key, data, (0, layer, 3), (1, rank, 2), prepend_axis_num=1)

            for name in ("a", "b"):
                entries = _with_state(make, f"decoder.layers.{name}.weight", torch.randn(256, 512))
                state.update({f"{layer} {key}": entry for key, entry in entries.items()})
        write_state(path, state)


def _count_bytes(rank: int, world_size: int, path: str) -> tuple[int, int]:
    from torch.distributed.fsdp import fully_shard

    root = stored_module(path)
    fully_shard(root)
    report = bcp.load(path, {"model": root, "optimizer": torch.optim.AdamW(root.parameters())})
    assert report.step == 3
    return report.bytes_read + report.bytes_received, report.bytes_requested


def test_only_requested_bytes_are_read(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "folder")
    pool.run(_write_large, path, world_size=2)
    for moved, requested in pool.run(_count_bytes, path, world_size=2):
        assert requested == 9 << 20
        assert moved <= 1.1 * requested + (64 << 10)


class _Kind(enum.Enum):
    FLASH = 1


def _write_unusual(rank: int, world_size: int, path: str) -> None:
    with megatron_on_cpu():
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        make = ShardedTensor.from_rank_offsets
        bottom = "module.decoder.layers.0.self_attention."
        state: dict[str, Any] = {
            **_with_state(make, f"{bottom}q_layernorm.weight", torch.arange(4.0) + 0.5),
            **_with_state(make, f"{bottom}linear_proj.weight", torch.arange(8.0).view(4, 2) + 0.5),
            **_with_state(make, f"{bottom}linear_proj.bias", torch.arange(4.0) + 0.5),
            "args": Namespace(apply_wd_to_qk_layernorm=True, kind=_Kind.FLASH, params_dtype=torch.bfloat16),
            "optimizer": {
                "optimizer": {
                    "param_groups": [_group(lr=torch.tensor(0.5)), _group(wd_mult=0.0, weight_decay=0.0)],
                    "state": {"common_step": torch.tensor(7.0)},
                }
            },
            "iteration": 7,
        }
        values = {"tensor": torch.arange(5, dtype=torch.uint8), "stream": io.BytesIO(b"state"), "plain": {"scale": 2}}
        for layer, (name, value) in enumerate({**values, "none": None, "empty": torch.empty(0)}.items()):
            key = "module.decoder.layers.mlp._extra_state"
            state[name] = ShardedObject(key, value, (5,), (layer,))
        state["alone"] = ShardedObject("alone", {"seed": 3}, (1,), (0,))
        state["grid"] = ShardedObject("grid", [torch.arange(3)], (1, 2), (0, 0))
        state["other"] = ShardedObject("grid", [torch.arange(4)], (1, 2), (0, 1))
        write_state(path, state)


def test_names_in_wrappers_extra_state_and_other_objects(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    pool.run(_write_unusual, str(path), world_size=1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for url in (path, tmp_path):
        found = bcp.open(url)
        bottom = "decoder.layers.0.self_attention"
        assert found.sections == ["model", "optimizer", "extra_state"]
        assert found[f"model.{bottom}.linear_proj.weight"][1:3].tolist() == [[2.5, 3.5], [4.5, 5.5]]
        assert found[f"optimizer.state.{bottom}.linear_proj.weight.exp_avg"][3].tolist() == [7.5, 8.5]
        values = {(one.section, *one.path): one.decode() for one in found.index.values()}
        options = {
            name: [values["optimizer", "param_groups", f"{bottom}.{name}"][key] for key in ("lr", "weight_decay")]
            for name in ("q_layernorm.weight", "linear_proj.weight", "linear_proj.bias")
        }
        decayed = [0.5, 0.1]
        assert options == {
            "q_layernorm.weight": decayed,
            "linear_proj.weight": decayed,
            "linear_proj.bias": [0.01, 0.0],
        }
        assert values["optimizer", "state", f"{bottom}.linear_proj.bias", "step"] == 7
        states = {path[2]: value for path, value in values.items() if path[:2] == ("model", "_extra_state")}
        assert states.pop("decoder.layers.0.mlp").tolist() == [0, 1, 2, 3, 4]
        assert states == {"decoder.layers.1.mlp": b"state", "decoder.layers.2.mlp": {"scale": 2}}
        extra = found.tree("extra_state")
        assert extra["args"].params_dtype is torch.bfloat16
        assert extra["alone"] == {"seed": 3}
        assert [extra["grid"][key][0].tolist() for key in ("0.0", "0.1")] == [[0, 1, 2], [0, 1, 2, 3]]

    counters: dict[str, Any] = {"iteration": 0, "alone": {"seed": 0}}
    bcp.load(path, {"extra_state": counters}, strict={"extra_state": False})
    assert counters == {"iteration": 7, "alone": {"seed": 3}}
    with pytest.raises(
        errors.MismatchError, match=r"args: an object of class .*_Kind, which this library does not read"
    ):
        bcp.load(path, {"extra_state": {"args": None}}, strict={"extra_state": False})


def _write_ambiguous(rank: int, world_size: int, path: str) -> None:
    with megatron_on_cpu():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        groups = [_group(step=2), _group(step=2, lr=0.02)]
        parameter = _with_state(ShardedTensor.from_rank_offsets, "weight", torch.rand(4, 2))
        write_state(path, {**parameter, "optimizer": {"optimizer": {"param_groups": groups}}})


def test_hyper_parameters_that_could_be_of_several_groups(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "folder")
    pool.run(_write_ambiguous, path, world_size=1)
    module = torch.nn.Linear(2, 4, bias=False)
    state = {"model": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=0.03)}
    with pytest.raises(errors.MismatchError, match="one of 2 different param groups"):
        bcp.load(path, state)
    bcp.load(path, state, exclude=["optimizer.param_groups.*"])
    (entry,) = state["optimizer"].state.values()
    assert torch.equal(entry["exp_avg"], module.weight + 1)
    assert (entry["step"], state["optimizer"].param_groups[0]["lr"]) == (2, 0.03)


# --------------------------------------------------------------------------------------------------------------- damage


def _write_broken(rank: int, world_size: int, path: str) -> None:
    with megatron_on_cpu():
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        make = ShardedTensor.from_rank_offsets
        weight = torch.rand(4, 2)
        states = {
            "good": {"a": make("weight", weight)},
            "gap": {"a": make("layers.weight", weight[None], (0, 0, 2))},
            "unknown": {"a": make("optimizer.state.exp_avg.weight", weight)},
            "shape": {"a": make("weight", weight), "b": make("optimizer.state.exp_avg.weight", weight[:2])},
            "twice": {"a": make("layers.weight", weight[None], (0, 0, 1)), "b": make("layers.0.weight", weight)},
        }
        for name, state in states.items():
            write_state(f"{path}/{name}", state, validate_access_integrity=False)


def test_damaged_folders_and_other_formats_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_write_broken, str(tmp_path), world_size=1)

    def refuse(path: Path, kind: Any, match: str) -> None:
        with pytest.raises(kind, match=match):
            bcp.open(path)

    refuse(tmp_path / "gap", errors.FormatError, r"'layers\.weight' of shape \[2, 4, 2\] has nothing at \[1\]")
    for name in ("unknown", "shape"):
        unread = bcp.open(tmp_path / name).tree("optimizer")
        assert "whose exp_avg of 'weight' is float32[" in unread.what
    refuse(tmp_path / "twice", errors.FormatError, "stored alone and in a stack")
    good = tmp_path / "good"
    assert bcp.open(good).sections == ["model", "extra_state"]
    for name in (".metadata", "common.pt", "__0_0.distcp"):
        (good / name).rename(tmp_path / "aside")
        refuse(good, (errors.FormatError, errors.CorruptionError), f"{re.escape(name)}: file is missing")
        (tmp_path / "aside").rename(good / name)
    common = (good / "common.pt").read_bytes()
    torch.save([1], good / "common.pt")
    refuse(good, errors.FormatError, "it holds no dict")
    (good / "common.pt").write_bytes(common)
    (good / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refuse(good, errors.CheckpointError, "Megatron's format 'zarr', which is not read")

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    refuse(tmp_path, errors.CorruptionError, "names '12', but .*iter_0000012/metadata.json is not there")
    (tmp_path / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    for path in (tmp_path, tmp_path / "iter_0000012"):
        refuse(path, errors.CheckpointError, "format 'torch' for each model parallel rank, which is not read")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../good")
    refuse(tmp_path, errors.NotACheckpointError, "is not a checkpoint")
