"""Real models and optimizers of Megatron-core, saved in one layout and loaded into another.

Megatron runs on the CPU (``mcore_cpu``), so these tests show what is stored and where it goes, and nothing about CUDA.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, StateError, UnsupportedTensorError
from bytecheckpoint.frameworks.sections import resolve_sections
from bytecheckpoint.tensors.derived import is_derived
from bytecheckpoint.tensors.shards import StoredSection
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_training import Layout, Recipe, differences, renewed_pools, stored_name, training
from sampling import sample
from stored_modules import full_state, stored_module, two_groups

pytestmark = [pytest.mark.megatron, pytest.mark.sampled(8, of=__name__)]

DENSE = [
    Layout(tp=2, pp=2),
    Layout(world=1),
    Layout(tp=2, world=2),
    Layout(pp=2),
    Layout(pp=2, vp=2),
    Layout(tp=4),
    Layout(cp=2),
    Layout(cp=2, world=2),
    Layout(world=4),
]
EXPERTS = [
    Layout(ep=2, world=2),
    Layout(world=1),
    Layout(ep=2),
    Layout(tp=2, ep=2, etp=1),
    Layout(tp=2, ep=1, etp=2, world=2),
    Layout(pp=2, ep=2),
]
GROUPED, MOE = Recipe(), Recipe(experts=4)
FURTHER = Recipe(mtp=2, tied=False)
SHARDED = Recipe(fsdp="optim_grads_params")

# Clipping is off: with "no_shard", Megatron-FSDP clips by the sum of the norms of all ranks.
SHARDINGS = {
    "distributed": (Layout(), Recipe(clip=0)),
    "distributed, TP2 PP2": (Layout(tp=2, pp=2), Recipe(clip=0)),
    "distributed in two instances": (Layout(), Recipe(clip=0, instances=2)),
    **{
        f"Megatron-FSDP {kind}": (Layout(world=2), Recipe(clip=0, fsdp=kind))
        for kind in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    },
    "Megatron-FSDP no_shard in two instances": (Layout(), Recipe(clip=0, fsdp="no_shard", instances=2)),
    "HSDP optim_grads": (Layout(), Recipe(clip=0, fsdp="optim_grads", instances=2)),
    "HSDP optim_grads_params": (Layout(), Recipe(clip=0, fsdp="optim_grads_params", instances=2)),
    "HSDP with sharded instances": (Layout(), Recipe(clip=0, fsdp="optim_grads_params", instances=2, outer="optim")),
}
Scaled = Literal["", "fp16", "fp8", "remainders"]
SCALED: tuple[Scaled, ...] = ("fp16", "fp8", "remainders")


@pytest.fixture(scope="module")
def next_pool() -> Iterator[Callable[[], RankPool]]:
    with renewed_pools(4, tests=15) as next_pool:
        yield next_pool


@pytest.fixture
def pool(next_pool: Callable[[], RankPool]) -> RankPool:
    return next_pool()


def _save(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> tuple[Any, list[float]]:
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        bcp.save(path, job.state, step=job.steps)
        full = job.full_state()
        return full if rank == 0 else None, job.train(3)


def _load(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> tuple[Any, list[float]]:
    with training(layout, recipe, seed=2) as job:
        bcp.load(path, job.state)
        job.steps = 2
        full = job.full_state()
        return full if rank == 0 else None, job.train(3)


def _require_equal(
    pool: RankPool, folder: Path, source: Layout, target: Layout, recipe: Recipe, other: Recipe | None = None
) -> None:
    saved, losses = pool.run(_save, source, recipe, str(folder), world_size=source.world)[0]
    loaded, resumed = pool.run(_load, target, other or recipe, str(folder), world_size=target.world)[0]
    dtype = (other or recipe).dtype
    if dtype != recipe.dtype:
        saved |= {key: saved[key.replace("/model", "/master")].to(dtype).float() for key in saved if "/model" in key}
    assert differences(saved, loaded) == []
    if (source, recipe) == (target, other or recipe):
        assert resumed == losses
    if "optim" not in {recipe.fsdp, (other or recipe).fsdp}:  # which adds each rank's own gradient twice
        assert resumed == pytest.approx(losses, abs=1e-3)


def _ids(pair: Any) -> str:
    return " ".join(map(str, pair))


@pytest.mark.parametrize("pair", sample(list(product(DENSE, DENSE)), 2), ids=_ids)
def test_dense_models_load_in_any_layout(pool: RankPool, tmp_path: Path, pair: tuple[Layout, Layout]) -> None:
    _require_equal(pool, tmp_path / "checkpoint", *pair, GROUPED)


@pytest.mark.parametrize("pair", sample(list(product(EXPERTS, EXPERTS)), 2), ids=_ids)
def test_experts_load_in_any_layout(pool: RankPool, tmp_path: Path, pair: tuple[Layout, Layout]) -> None:
    _require_equal(pool, tmp_path / "checkpoint", *pair, MOE)


@pytest.mark.parametrize(
    ("source", "target", "recipe", "other"),
    [
        pytest.param(Layout(tp=2), Layout(), Recipe(), Recipe(distributed=False), id="distributed to replicated"),
        pytest.param(Layout(), Layout(tp=2, pp=2), Recipe(distributed=False), Recipe(), id="replicated to distributed"),
        pytest.param(Layout(), Layout(tp=2), Recipe(bf16=False), Recipe(bf16=False, distributed=False), id="fp32"),
        pytest.param(
            Layout(), Layout(pp=2), Recipe(distributed=False, layer_wise=True), Recipe(), id="layer-wise to distributed"
        ),
        pytest.param(
            Layout(tp=2), Layout(), Recipe(), Recipe(distributed=False, layer_wise=True), id="distributed to layer-wise"
        ),
        pytest.param(Layout(), Layout(), Recipe(bf16=False), Recipe(), id="fp32 to distributed bf16"),
        pytest.param(
            Layout(), Layout(), Recipe(bf16=False), Recipe(distributed=False, layer_wise=True), id="fp32 to layer-wise"
        ),
        pytest.param(Layout(tp=2), Layout(tp=2), Recipe(fp16=True), None, id="fp16"),
        pytest.param(Layout(tp=2), Layout(), Recipe(fp16=True), Recipe(), id="fp16 to bf16"),
        *(
            pytest.param(Layout(tp=2), Layout(tp=2), Recipe(scaled=kind), None, id=f"precision-aware, {kind}")
            for kind in SCALED
        ),
        pytest.param(Layout(tp=2), Layout(pp=2), Recipe(scaled="fp16"), Recipe(), id="precision-aware to distributed"),
        pytest.param(Layout(pp=2), Layout(tp=2), Recipe(), Recipe(scaled="remainders"), id="distributed to remainders"),
        *(
            pytest.param(Layout(tp=2), Layout(tp=2), Recipe(offloaded=part), None, id=f"offloaded, {part}")
            for part in (0.5, 1.0)
        ),
        pytest.param(Layout(tp=2), Layout(), Recipe(offloaded=0.5), Recipe(), id="offloaded to distributed"),
        pytest.param(Layout(tp=2), Layout(), Recipe(), Recipe(offloaded=0.5), id="distributed to offloaded"),
        pytest.param(
            Layout(ep=2), Layout(ep=2), Recipe(experts=4, fsdp="optim_grads_params"), None, id="Megatron-FSDP, experts"
        ),
        pytest.param(Layout(tp=2), Layout(tp=2), SHARDED, None, id="Megatron-FSDP with tensor parallelism"),
        pytest.param(
            Layout(tp=2),
            Layout(tp=2),
            Recipe(fsdp="optim_grads_params", instances=2, outer="optim"),
            None,
            id="HSDP with tensor parallelism",
        ),
        pytest.param(Layout(tp=2), Layout(), Recipe(query_groups=1), None, id="fewer query groups than ranks"),
        pytest.param(Layout(tp=2, pp=2), Layout(), Recipe(tied=False), None, id="untied"),
        pytest.param(Layout(ep=2, cp=2), Layout(ep=2), MOE, None, id="context parallel experts"),
        pytest.param(Layout(tp=2, pp=2), Layout(), FURTHER, None, id="multi-token prediction"),
        pytest.param(Layout(world=2), Layout(pp=4), FURTHER, None, id="multi-token prediction, more stages"),
        pytest.param(Layout(tp=2), Layout(), Recipe(mtp=1), None, id="multi-token prediction, tied"),
        pytest.param(Layout(), Layout(tp=2, pp=2), Recipe(mla=True), None, id="multi-latent attention"),
    ],
)
@pytest.mark.sampled(1)
def test_optimizers_and_models_load_each_other(
    pool: RankPool, tmp_path: Path, source: Layout, target: Layout, recipe: Recipe, other: Recipe | None
) -> None:
    _require_equal(pool, tmp_path / "checkpoint", source, target, recipe, other)


NAMES = list(SHARDINGS)


# In a sample, every kind saves once and loads once.
@pytest.mark.parametrize("shift", sample(range(len(NAMES)), 1))
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.sampled(2)
def test_shardings_of_data_parallel_ranks_load_each_other(
    pool: RankPool, tmp_path: Path, target: str, shift: int
) -> None:
    (layout, recipe), (other_layout, other) = SHARDINGS[NAMES[NAMES.index(target) - shift]], SHARDINGS[target]
    _require_equal(pool, tmp_path / "checkpoint", layout, other_layout, recipe, other)


def _through_fsdp(rank: int, world_size: int, source: str, path: str, kind: str) -> dict[str, Any]:
    """Load a checkpoint into plain modules of the same names under FSDP-2 or DDP, in fp32, and save it again."""
    from torch.distributed.fsdp import fully_shard

    root = stored_module(source)
    model: Any = fully_shard(root) if kind == "FSDP-2" else torch.nn.parallel.DistributedDataParallel(root)
    optimizer = two_groups(root)
    state = {"model": model, "optimizer": optimizer}
    bcp.load(source, state)
    bcp.save(path, state, step=2)
    return full_state(root, optimizer)


@pytest.mark.parametrize(("kind", "sharding"), sample(list(product(["FSDP-2", "DDP"], SHARDINGS)), 1))
def test_fsdp_and_ddp_modules_of_the_same_names(pool: RankPool, tmp_path: Path, kind: str, sharding: str) -> None:
    first, second = str(tmp_path / "megatron"), str(tmp_path / "plain")
    layout, recipe = SHARDINGS[sharding]
    saved, losses = pool.run(_save, layout, recipe, first, world_size=layout.world)[0]
    plain = pool.run(_through_fsdp, first, second, kind, world_size=2)[0]
    for key, value in saved.items():
        key = stored_name(key)
        if not key.endswith("/model"):  # the fp32 module holds the master weights
            rows = len(value) if value.ndim else None
            assert torch.equal(value, plain[key][:rows] if rows else plain[key]), key
    back, resumed = pool.run(_load, layout, recipe, second, world_size=layout.world)[0]
    assert differences(saved, back) == []
    assert resumed == losses


# --------------------------------------------------------------------------------------------------------- other models


def _save_padded(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> Any:
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        bcp.save(path, job.state, step=2)
        return job.full_state()


def _load_padded(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> Any:
    with training(layout, recipe, seed=2) as job:
        report = bcp.load(path, job.state)
        full = job.full_state()
        last = layout.tp == world_size == rank + 1
        padding = [float(found[-4:].abs().max()) for found in job.embeddings()] if last else []
        job.steps = 2
        job.train(1)
        return full, sorted(report.resized), padding


@pytest.mark.parametrize("scaled", ["", "remainders"])
@pytest.mark.parametrize("unpadded", [0, 60], ids=["padding stored", "padding not stored"])
@pytest.mark.sampled(1)
def test_vocabularies_have_any_padding(pool: RankPool, tmp_path: Path, unpadded: int, scaled: Scaled) -> None:
    path = str(tmp_path / "checkpoint")
    source = Recipe(unpadded=unpadded, scaled=scaled)
    target = Recipe(padded_vocabulary=72, unpadded=unpadded, scaled=scaled)
    saved = pool.run(_save_padded, Layout(tp=2), source, path)[0]
    assert bcp.open(path)["model.embedding.word_embeddings.weight"].shape == (unpadded or 64, 16)
    found = pool.run(_load_padded, Layout(tp=2, world=2), target, path, world_size=2)
    assert differences(saved, found[0][0]) == []
    name = "embedding.word_embeddings.weight"
    resized = [f"model.{name}", *(f"optimizer.state.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "master"))]
    assert found[0][1] == ([] if unpadded else resized)
    assert found[1][2] == [0.0] * (1 if scaled else 2)  # the padding of the embedding and of its master weights


def _start_again(rank: int, world_size: int, path: str, recipe: Recipe) -> list[list[float]]:
    """Save before the first step, then load into an optimizer that has stepped."""
    with training(Layout(world=2), recipe, seed=1) as job:
        bcp.save(path, job.state)
        expected = job.train(2)
    with training(Layout(world=2), recipe, seed=2) as job:
        job.train(2)
        bcp.load(path, job.state)
        job.steps = 0
        return [expected, job.train(2)]


@pytest.mark.parametrize("scaled", ["", "fp16", "remainders"])
@pytest.mark.sampled(1)
def test_an_optimizer_without_state_is_stored(pool: RankPool, tmp_path: Path, scaled: Scaled) -> None:
    for expected, losses in pool.run(_start_again, str(tmp_path / "c"), Recipe(scaled=scaled), world_size=2):
        assert losses == expected


def _conversions(rank: int, world_size: int) -> list[int]:
    """The copies in fp32 when state is described, the derived tensors, and the parameters."""
    with training(Layout(world=1), Recipe(scaled="fp8"), seed=1) as job:
        job.train(1)
        inner = job.optimizer.chained_optimizers[0].optimizer
        inner.copies = 0
        sections = list(
            resolve_sections(job.state, framework=None, rank=rank, world_size=world_size, allow_pickle=False)
        )
        sources = [section.capture() for section in sections]
        for section in sections:
            section.adapter.target(section.obj, section.context, StoredSection({}, {}, {}))
        derived = {id(shard.tensor.whole) for source in sources for shard in source.shards if is_derived(shard.tensor)}
        return [inner.copies, len(derived), sum(len(group["params"]) for group in inner.param_groups)]


def test_scaled_state_is_not_converted_before_it_is_copied(pool: RankPool) -> None:
    ((copies, derived, params),) = pool.run(_conversions, world_size=1)
    assert copies == 0
    assert derived == 2 * params  # both moments


def _sharded_alone(rank: int, world_size: int, path: str, sharding: str) -> list[list[float]]:
    """Load only the model into a job with Megatron-FSDP that has trained."""
    layout, recipe = SHARDINGS[sharding]
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        bcp.save(path, job.state)
        expected = job.train(1)
    with training(layout, recipe, seed=2) as job:
        job.train(3)
        report = bcp.load(path, {"model": job.state["model"]})
        assert report.notes == []
        full = job.full_state()
        for name in full:
            if name.endswith("/model"):
                assert torch.equal(full[name], full[name.replace("/model", "/master")]), name
        job.steps = 2
        return [expected, job.train(1)]


@pytest.mark.parametrize("sharding", ["no_shard", "optim_grads_params"])
@pytest.mark.sampled(1)
def test_a_sharded_model_loads_alone(pool: RankPool, tmp_path: Path, sharding: str) -> None:
    sharding = f"Megatron-FSDP {sharding}"
    for expected, losses in pool.run(_sharded_alone, str(tmp_path / "checkpoint"), sharding, world_size=2):
        assert losses == expected


def _not_gathered(rank: int, world_size: int, path: str) -> bool:
    """Save between a step and the next forward pass, which gathers parameters. Whether some differ between ranks."""
    with training(Layout(world=2), Recipe(fsdp="optim", bucket=500), seed=1) as job:
        (chunk,) = job.chunks
        chunk.module.suggested_AG_prefetch_size = 1  # as if there were more than it gathers in advance
        job.train(2)
        bcp.save(path, job.state)
        everywhere: list[Any] = [None] * world_size
        dist.all_gather_object(everywhere, [param.detach() for param in chunk.module.raw_param.values()])
        return any(not torch.equal(*pair) for pair in zip(*everywhere))


def test_parameters_are_stored_before_they_are_gathered(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    assert pool.run(_not_gathered, path, world_size=2) == [True, True]
    stored = bcp.open(path)
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    for name in names:
        master = stored[f"optimizer.state.{name}.master"][:]
        assert torch.equal(stored[f"model.{name}"][:], master.bfloat16()), name


def _contradictions(rank: int, world_size: int, path: str) -> list[str]:
    """Save parameters whose list of chunks, and whose buffers, claim something else."""
    with training(Layout(world=2), SHARDED, seed=1) as job:
        buffers = job.chunks[0].param_and_grad_buffer
        messages = []

        def attempt() -> None:
            with pytest.raises(UnsupportedTensorError) as error:
                bcp.save(path, job.state)
            messages.append(str(error.value))

        for name, stepped in buffers.optimizer_named_parameters:
            local = buffers.dist_main_weight[name]._local_tensor
            (chunk,) = local.__create_chunk_list__()
            if len(chunk.sizes) > 1 and local.numel() and chunk.sizes[0] < len(stepped.orig_param):
                moved = type(chunk)(torch.Size([chunk.offsets[0] + 1, 0]), chunk.sizes)
                with mock.patch.object(local, "__create_chunk_list__", lambda moved=moved: [moved]):
                    attempt()
                break
        stepped = next(stepped for _, stepped in buffers.optimizer_named_parameters if stepped._local_tensor.numel())
        with mock.patch.object(stepped, "_local_tensor", stepped._local_tensor.clone()):
            attempt()
        group = buffers.parameter_groups[0]
        with mock.patch.object(group.model_weight_buffer, "dtype", torch.uint8):
            attempt()
        with (
            mock.patch.object(job.chunks[0].module.dist_index, "use_hybrid_fsdp", new=True),
            mock.patch.object(group.params[0], "allreduce", new=False, create=True),
        ):
            attempt()
        assert not Path(path).exists()
        return messages


def test_what_megatron_fsdp_does_not_prove_is_refused(pool: RankPool, tmp_path: Path) -> None:
    parts = ["and the same memory", "and other memory", "fp8_param_gather", "ignores expert parallelism"]
    for messages in pool.run(_contradictions, str(tmp_path / "checkpoint"), world_size=2):
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def _unused_output(rank: int, world_size: int, path: str) -> str:
    with training(Layout(pp=2, world=2), Recipe(mtp=1), seed=1) as job:
        with pytest.raises(StateError) as error:
            bcp.save(path, job.state)
        return str(error.value)


def test_tied_multi_token_prediction_on_several_stages_is_refused(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_unused_output, str(tmp_path / "checkpoint"), world_size=2):
        assert "unused output_layer.weight" in message
        assert "untie" in message
    assert not (tmp_path / "checkpoint").exists()


def _load_alone(rank: int, world_size: int, path: str) -> list[list[str]]:
    with training(Layout(world=1), Recipe(), seed=1) as job:
        bcp.save(path, job.state)
        reports = [bcp.load(path, {"model": job.state["model"]}), bcp.load(path, job.state)]
        return [report.notes for report in reports]


def test_a_model_without_its_optimizer_is_noted(pool: RankPool, tmp_path: Path) -> None:
    ((alone, together),) = pool.run(_load_alone, str(tmp_path / "checkpoint"), world_size=1)
    assert together == []
    assert ["reload_model_params()" in note for note in alone] == [True]


def _scale_loss(rank: int, world_size: int, path: str) -> None:
    with training(Layout(world=1), Recipe(fp16=True), seed=1) as job:
        scaler = job.optimizer.chained_optimizers[0].grad_scaler
        scaler._scale.fill_(32)
        scaler._growth_tracker = 7
        bcp.save(f"{path}/fp16", job.state)
        scaler._scale.fill_(1)
        scaler._growth_tracker = 0
        bcp.load(f"{path}/fp16", job.state, strict="exact")
        assert (scaler.scale.item(), scaler._growth_tracker) == (32, 7)
    with training(Layout(world=1), Recipe(), seed=1) as job:
        assert bcp.load(f"{path}/fp16", job.state).unexpected == []
        bcp.save(f"{path}/bf16", job.state)
    with training(Layout(world=1), Recipe(fp16=True), seed=1) as job:
        assert "optimizer.loss_scaler.grad_scaler" in bcp.load(f"{path}/bf16", job.state).lazy
    _through_fsdp(rank, world_size, f"{path}/fp16", f"{path}/ddp", "DDP")


def test_loss_scales_are_needed_only_by_fp16(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_scale_loss, str(tmp_path), world_size=1)


# ------------------------------------------------------------------------------------------------------------ interface


def _schemes_agree(rank: int, world_size: int, layout: Layout, recipe: Recipe) -> None:
    from bytecheckpoint.frameworks.megatron import shards

    with training(layout, recipe, seed=1) as job:
        chunks = [chunk.module.module for chunk in job.chunks]
        per_layer = shards.read_shards(chunks).tensors
        with mock.patch.object(shards, "_METADATA", {}):
            stacked = shards.read_shards(chunks).tensors
        assert [found.layout for found in per_layer.values()] == [found.layout for found in stacked.values()]
        names = {name for found in per_layer.values() for name in found.layout.fqns}
        assert "decoder.layers.3.mlp.experts.experts.3.linear_fc1.weight" in names or not recipe.experts or rank == 0


@pytest.mark.parametrize(("layout", "recipe"), [(Layout(tp=2, pp=2), GROUPED), (Layout(ep=2, world=2), MOE)])
@pytest.mark.sampled(1)
def test_both_schemes_of_keys_give_the_same_layouts(pool: RankPool, layout: Layout, recipe: Recipe) -> None:
    pool.run(_schemes_agree, layout, recipe, world_size=layout.world)


def _describe_without_peers(rank: int, world_size: int) -> None:
    with training(Layout(tp=2, pp=2), GROUPED, seed=1) as job:
        job.train(1)
        if rank == 3:  # a collective on one rank alone would not return
            state = job.state
            for section in resolve_sections(
                state, framework=None, rank=rank, world_size=world_size, allow_pickle=False
            ):
                section.capture()
                section.adapter.target(section.obj, section.context, StoredSection({}, {}, {}))


def test_describing_communicates_with_no_rank(pool: RankPool) -> None:
    pool.run(_describe_without_peers, timeout_s=60)


def _refused(rank: int, world_size: int, path: str) -> list[str]:
    with training(Layout(world=1), Recipe(), seed=1) as job:
        import mcore_modules as modules

        square = {"weight": (2, 2)}
        states: list[dict[str, Any]] = [
            {"optimizer": job.optimizer},
            {"model": modules.Described(square, modules.shuffled)},
            {"model": modules.Described(square, modules.copied)},
            {"model": modules.Described({**square, "bias": (2,)}, modules.incomplete)},
            {"model": modules.Described(square, modules.unknown_axis)},
            {"model": modules.Described(square, modules.unknown_object)},
        ]
        messages = []
        for state in states:
            with pytest.raises(BytecheckpointError) as error:
                bcp.save(path, state)
            messages.append(str(error.value))
        assert not Path(path).exists()
        return messages


def test_what_is_not_supported_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    (messages,) = pool.run(_refused, str(tmp_path / "checkpoint"), world_size=1)
    expected = [
        "belongs to no model",
        "no regular grid",
        "a copy or a part",
        "does not contain bias",
        "prepends 1 axes",
    ]
    for message, part in zip(messages, [*expected, "not extra state"], strict=True):
        assert part in message


def _unusual(rank: int, world_size: int, path: str) -> None:
    with training(Layout(world=1), Recipe(), seed=1):
        import mcore_modules as modules

        def experts() -> Any:
            return modules.Described({"weight": (6, 4)}, modules.experts_copied)

        source, target = experts(), experts()
        bcp.save(f"{path}/experts", {"model": source})
        with torch.no_grad():
            target.weight.zero_()
        bcp.load(f"{path}/experts", {"model": target})
        assert torch.equal(source.weight, target.weight)
        for number, expert in enumerate(source.weight.detach().view(2, 3, 4)):
            assert torch.equal(bcp.open(f"{path}/experts")[f"model.experts.{number}.weight"][:], expert.T)

        for kind, value in modules.EXTRA.items():
            module = modules.Described({"weight": (2, 2)}, modules.with_extra_state)
            module.extra["get"] = value
            bcp.save(f"{path}/{kind}", {"model": module})
            bcp.load(f"{path}/{kind}", {"model": module})
            loaded = module.extra["set"]
            assert type(loaded) is type(value)
            for state in (value, loaded):
                if kind == "stream":
                    state.seek(0)
            read = {"tensor": torch.Tensor.tolist, "stream": io.BytesIO.read, "plain": dict}[kind]
            assert read(loaded) == read(value)


def _quantized(rank: int, world_size: int, path: str) -> None:
    with training(Layout(world=1), Recipe(), seed=1):
        import mcore_modules as modules

        source, target = modules.quantized([[1, -2], [3, 100]]), modules.quantized([[0, 0], [0, 0]])
        bcp.save(path, {"model": source})
        stored = bcp.open(path)["model.weight"]
        assert stored[:].tolist() == [[0.5, -1.0], [1.5, 50.0]]
        bcp.load(path, {"model": target})
        assert torch.equal(source.weight.codes, target.weight.codes)


def test_quantized_parameters_are_stored_in_the_precision_of_the_computation(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_quantized, str(tmp_path / "checkpoint"), world_size=1)


def test_copying_factories_and_extra_state(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_unusual, str(tmp_path), world_size=1)
