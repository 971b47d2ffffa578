"""Folders of Megatron's own ``dist_checkpointing.save``, opened and loaded in place. Its own loads are the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_folders import Form, read_folder, scheduler, write_folder
from mcore_training import Layout, Recipe, differences, stored_name, training
from sampling import sample
from stored_modules import full_state, stored_module, two_groups
from written_files import written_files

pytestmark = pytest.mark.megatron

MOE = Recipe(experts=4)
STACKED = Form(per_layer=False)
DENSE = [Layout(tp=2, pp=2), Layout(tp=2), Layout(world=1), Layout(pp=2, vp=2), Layout(world=2)]
EXPERTS = [Layout(ep=2, world=2), Layout(ep=2), Layout(tp=2, ep=2, etp=1), Layout(pp=2, ep=2)]


@pytest.fixture(scope="module")
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
    "replicated optimizer": (Layout(tp=2), Recipe(distributed=False), STACKED),
    "float32": (Layout(world=2), Recipe(bf16=False), Form()),
    "float32, replicated optimizer": (Layout(world=2), Recipe(bf16=False, distributed=False), Form()),
    "float16 with a loss scale": (Layout(world=2), Recipe(fp16=True), Form()),
    "precision-aware": (Layout(world=2), Recipe(scaled="fp16"), Form()),
}


@pytest.mark.parametrize("kind", sample(list(FOLDERS), 6))
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
    if (source.ep > 1) == (target.ep > 1):  # otherwise Megatron's chains of optimizers differ, and it loads nothing
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


@pytest.mark.parametrize("form", [Form(), STACKED], ids=["per layer", "stacked"])
@pytest.mark.parametrize(
    ("layout", "recipe"), [(Layout(tp=2, pp=2), Recipe()), (Layout(ep=2), MOE)], ids=["dense", "experts"]
)
def test_plain_modules_of_the_same_names(
    pool: RankPool, tmp_path: Path, layout: Layout, recipe: Recipe, form: Form
) -> None:
    folder = str(tmp_path / "folder")
    saved = pool.run(_write, layout, recipe, form, folder, world_size=layout.world, timeout_s=120)[0]
    for kind, world_size in (("FSDP-2", 2), ("one process", 1)):
        plain = pool.run(_load_without_megatron, folder, kind, world_size=world_size)[0]
        for key, value in (saved or {}).items():
            if not key.endswith("/model"):  # the fp32 module holds the master weights
                found = plain[stored_name(key)]
                assert torch.equal(value, found[: len(value)] if value.ndim else found), (kind, key)
