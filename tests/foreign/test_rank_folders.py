"""Open a custom trainer's folder, in which each rank wrote its own files, with rules that describe them.

The expected tensors are the global ones, which the ranks' files are cut from by plain slicing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rule_cases import Trainer, random_trainer
from safetensors.torch import save_file
from sampling import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptionError, RuleError, UsageError
from bytecheckpoint.rules import Averaged, Flat, Ignored, Replicated, Rules, Sharded, Unique
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(18, of=__name__)

TP, DP = 2, 2
HEADS, KV_HEADS, SIZE, HIDDEN, WIDTH, VOCABULARY = 8, 4, 3, 6, 10, 13
QKV = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}

RULES = f"""
files = "rank{{tp}}-{{dp}}.pt"

[[rule]]
match    = "layers.{{l}}.qkv.weight"
kind     = "sharded"
rename   = "layers.{{l}}.{{part}}.weight"
axis     = "tp"
parts    = {{ q = {HEADS}, k = {KV_HEADS}, v = {KV_HEADS} }}
unit     = {SIZE}
groups   = {KV_HEADS}
replicas = "dp"

[[rule]]
match    = "layers.{{l}}.mlp.weight"
kind     = "sharded"
rename   = "layers.{{l}}.{{part}}.weight"
axis     = "tp"
parts    = ["gate", "up"]
replicas = "dp"

[[rule]]
match    = "layers.{{l}}.down.weight"
kind     = "sharded"
dim      = 1
axis     = "tp"
replicas = "dp"

[[rule]]
match       = "embed.weight"
kind        = "sharded"
axis        = "tp"
padded_from = {VOCABULARY}
replicas    = "dp"

[[rule]]
match   = "{{name:path}}.norm.weight"
kind    = "replicated"
compare = true

[[rule]]
match   = "optimizer.{{key}}"
kind    = "flat"
rename  = "optimizer.state.{{member}}.{{key}}"
members = "optimizer.shapes"
axis    = "dp"
padding = 4
"""


class Model(nn.Module):
    """The parameters of a small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{part: nn.Linear(HIDDEN, rows, bias=False) for part, rows in QKV.items()},
                    **{part: nn.Linear(HIDDEN, WIDTH, bias=False) for part in ("gate", "up")},
                    "down": nn.Linear(WIDTH, HIDDEN, bias=False),
                    "norm": nn.RMSNorm(HIDDEN),
                }
            )
            for _ in range(2)
        )


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(param.shape, generator=generator) for name, param in sorted(Model().state_dict().items())}


def of_tp_rank(tensors: dict[str, torch.Tensor], tp: int) -> dict[str, torch.Tensor]:
    """What one tensor-parallel rank holds, under the names of its own model."""
    padded = torch.cat([tensors["embed.weight"], torch.full((16 - VOCABULARY, HIDDEN), torch.nan)])
    found = {"embed.weight": padded[8 * tp : 8 * tp + 8].clone()}
    groups = range(tp * KV_HEADS // TP, (tp + 1) * KV_HEADS // TP)
    for layer in range(2):
        one = {name: tensors[f"layers.{layer}.{name}.weight"] for name in (*QKV, "gate", "up", "down", "norm")}
        heads = {part: one[part].view(KV_HEADS, -1, HIDDEN) for part in QKV}
        fused = torch.cat([heads[part][group] for group in groups for part in QKV])
        rows = slice(tp * WIDTH // TP, (tp + 1) * WIDTH // TP)
        found[f"layers.{layer}.qkv.weight"] = fused
        found[f"layers.{layer}.mlp.weight"] = torch.cat([one["gate"][rows], one["up"][rows]])
        found[f"layers.{layer}.down.weight"] = one["down"][:, rows].clone()
        found[f"layers.{layer}.norm.weight"] = one["norm"].clone()
    return found


def flat_of(local: dict[str, torch.Tensor], dp: int) -> torch.Tensor:
    """The share of one data-parallel rank of all tensors of a tensor-parallel one."""
    flat = torch.cat([tensor.flatten() for tensor in local.values()])
    share = -(-len(flat) // DP)
    share += -share % 4
    return torch.cat([flat, torch.zeros(share * DP - len(flat))])[dp * share :][:share].clone()


MODEL, MOMENTS = whole_tensors(0), whole_tensors(1)


def write(folder: Path) -> Path:
    for tp in range(TP):
        local, moments = of_tp_rank(MODEL, tp), of_tp_rank(MOMENTS, tp)
        for dp in range(DP):
            optimizer = {"exp_avg": flat_of(moments, dp), "shapes": {n: t.shape for n, t in local.items()}, "step": 7}
            state = {"model": local, "optimizer": optimizer, "lr": 0.1, "seed": tp * DP + dp}
            torch.save(state, folder / f"rank{tp}-{dp}.pt")
    (folder / "notes.txt").write_text("no file of a rank")
    (folder / "rules.toml").write_text(RULES)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_one_process_loads_the_folder(folder: Path) -> None:
    files = sorted(folder.iterdir())
    model, moments = Model(), {name: torch.zeros_like(tensor) for name, tensor in MOMENTS.items()}
    optimizer: dict[str, Any] = {"state": {name: {"exp_avg": one} for name, one in moments.items()}, "step": 0}
    extra = {"lr": 0.0}
    report = bcp.load(
        folder,
        {"model": model, "optimizer": optimizer, "extra_state": extra},
        exclude=["extra_state.seed"],
        options=bcp.LoadOptions(rules=folder / "rules.toml"),
    )
    assert_equal(model.state_dict(), MODEL)
    assert_equal(moments, MOMENTS)
    assert (optimizer["step"], extra) == (7, {"lr": 0.1})
    assert report.bytes_read < 1.1 * report.bytes_requested + 4096
    assert sorted(folder.iterdir()) == files


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        one = found[name]
        assert torch.equal(one.full_tensor() if isinstance(one, DTensor) else one, tensor), name


def _load_sharded(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = Model()
    fully_shard(model, mesh=mesh)
    moments = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(tensor.ndim - 1)])
        for name, tensor in MOMENTS.items()
    }
    optimizer = {"state": {name: {"exp_avg": one} for name, one in moments.items()}, "step": 0}
    for share in ("never", "always"):
        for tensor in (*model.state_dict().values(), *moments.values()):
            tensor.zero_()
        bcp.load(
            path,
            {"model": model, "optimizer": optimizer},
            options=bcp.LoadOptions(rules=f"{path}/rules.toml", share_reads=share),
        )
        assert_equal(model.state_dict(), MODEL)
        assert_equal(moments, MOMENTS)


def test_two_ranks_load_the_folder(folder: Path, pool: RankPool) -> None:
    pool.run(_load_sharded, str(folder))


def _refused(rank: int, world_size: int, path: str) -> list[tuple[str, str, str]]:
    rules = Rules([*Rules.from_toml(RULES), Unique(match="absent")], files="rank{tp}-{dp}.pt")
    model = Model()
    with pytest.raises(RuleError, match=r"'absent'\) matches no tensor") as error:
        bcp.load(path, {"model": model}, options=bcp.LoadOptions(rules=rules))
    with pytest.raises(bcp.errors.DisagreementError, match="rules"):
        bcp.load(path, {"model": model}, options=bcp.LoadOptions(rules=rules if rank else f"{path}/rules.toml"))
    return error.value.faults


def test_all_ranks_raise_the_same_rule_error(folder: Path, pool: RankPool) -> None:
    one, other = pool.run(_refused, str(folder))
    assert one == other
    assert one[0][0] == "unused"


def test_slices_read_what_they_need_and_damage_is_found(tmp_path: Path) -> None:
    rules = Rules.from_toml(RULES)
    found = bcp.open(write(tmp_path), options=bcp.LoadOptions(rules=rules))
    assert sorted(found.sections) == ["extra_state", "model", "optimizer"]
    assert found.world_size == TP * DP
    assert torch.equal(found["model.layers.1.k.weight"][5:7, 2:4], MODEL["layers.1.k.weight"][5:7, 2:4])
    read = found.stats.read
    assert torch.equal(found["model.layers.1.k.weight"][5:7], MODEL["layers.1.k.weight"][5:7])
    assert found.stats.read - read == 2 * HIDDEN * 4
    assert {value.name: value.decode() for value in found.index.values()} == {
        "optimizer.step": 7, "extra_state.lr": 0.1, **{f"extra_state.seed@{rank}": rank for rank in range(4)}
    }  # fmt: skip
    assert found.verify().ok
    file = tmp_path / "rank1-0.pt"
    damaged = file.read_bytes().replace(
        MODEL["layers.0.down.weight"][:, WIDTH // 2 :].contiguous().numpy().tobytes(), bytes(120)
    )
    file.write_bytes(damaged)
    with pytest.raises(CorruptionError, match=re.escape("files.rank1-0.pt:model.layers.0.down.weight")):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=rules))["model.layers.0.down.weight"].load()


def test_copies_are_compared_before_one_is_used(tmp_path: Path) -> None:
    write(tmp_path)
    state = torch.load(tmp_path / "rank1-1.pt", weights_only=False)
    state["model"]["layers.1.norm.weight"][3] += 1
    state["model"]["layers.1.down.weight"][3] += 1  # this rule does not compare
    torch.save(state, tmp_path / "rank1-1.pt")
    with pytest.raises(RuleError, match=r"the ranks tp=0, dp=0 and tp=1, dp=1 stored different values") as error:
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=tmp_path / "rules.toml"))
    assert [fault[:2] for fault in error.value.faults] == [("compare", "layers.1.norm.weight")]


def test_everything_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    state = torch.load(tmp_path / "rank0-1.pt", weights_only=False)
    state["model"]["extra.weight"] = torch.zeros(3)
    state["model"]["layers.1.mlp.weight"] = torch.zeros(9, HIDDEN)
    torch.save(state, tmp_path / "rank0-1.pt")
    # No byte of a tensor may be read: all of them are damaged.
    for file in tmp_path.glob("*.pt"):
        for tensor in torch.load(file, weights_only=False)["model"].values():
            raw = tensor.contiguous().numpy().tobytes()
            file.write_bytes(file.read_bytes().replace(raw, bytes(len(raw))))
    rules = [*Rules.from_toml(RULES), Averaged(match="absent", axis=("dp",))]
    with pytest.raises(RuleError) as error:
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules(rules, files="rank{tp}-{dp}.pt")))
    assert {kind for kind, _, _ in error.value.faults} == {"missing", "shape", "unused"}
    assert str(tmp_path) in str(error.value)


def test_files_that_the_patterns_do_not_explain(tmp_path: Path) -> None:
    write(tmp_path)
    rules = Rules.from_toml(RULES)
    with pytest.raises(
        RuleError, match=re.escape("files 'rank{tp}_{dp}.pt' matches no file; the folder has notes.txt,")
    ):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules(rules, files="rank{tp}_{dp}.pt")))
    with pytest.raises(
        RuleError, match=re.escape("rank0-0.pt and 1 like it: is matched by 'rank{tp}-{dp}.pt' and 'rank0-{dp}.pt'")
    ):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules(rules, files=["rank{tp}-{dp}.pt", "rank0-{dp}.pt"])))
    with pytest.raises(RuleError, match=re.escape("notes.txt is no safetensors file, and torch.save did not")):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules(rules, files=["rank{tp}-{dp}.pt", "notes.txt"])))
    (tmp_path / "rank1-01.pt").write_bytes((tmp_path / "rank1-1.pt").read_bytes())
    with pytest.raises(RuleError, match=re.escape("rank1-1.pt: has the same coordinates as 'rank1-01.pt'")):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=rules))
    (tmp_path / "rank1-01.pt").unlink()
    (tmp_path / "rank1-1.pt").unlink()
    with pytest.raises(RuleError, match="needs the buffer of rank 1 of dp, which no rank stored"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=rules))
    with pytest.raises(CheckpointNotFoundError):
        bcp.open(tmp_path / "absent", options=bcp.LoadOptions(rules=rules))
    with pytest.raises(UsageError, match="there is no file of rules"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=tmp_path / "absent.toml"))
    with pytest.raises(RuleError, match="there is no set of rules 'absent'"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules="absent"))
    with pytest.raises(UsageError, match="rules must be Rules, the path of a TOML file, or the name of a set"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=3))  # type: ignore[arg-type]


def test_values_are_means_only_where_one_was_computed(tmp_path: Path) -> None:
    for dp in range(2):
        torch.save({"model": {"w": torch.full((3,), float(dp))}}, tmp_path / f"{dp}.pt")
    with pytest.raises(RuleError, match=r"has a value that is in no file.*bcp reshard") as error:
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules([Averaged(match="w", axis=("dp",))], files="{dp}.pt")))
    assert error.value.faults[0][0] == "average"


def test_reshard_computes_means(tmp_path: Path) -> None:
    values = {(tp, dp): torch.randn(3, 4).bfloat16() for tp in range(2) for dp in range(3)}
    (tmp_path / "in").mkdir()
    for (tp, dp), value in values.items():
        torch.save({"model": {"w": value, "n": torch.arange(3)}}, tmp_path / "in" / f"{tp}-{dp}.pt")
    averaged = Averaged(match="n", axis=("dp",), replicas=("tp",))
    rules = [Averaged(match="w", axis=("tp", "dp"), rename="v"), Replicated(match="n")]
    (tmp_path / "rules.toml").write_text(Rules(rules, files="{tp}-{dp}.pt").to_toml())
    command = ["reshard", str(tmp_path / "in"), str(tmp_path / "out"), "-n", "2", "--average", "mean"]
    result = CliRunner().invoke(cli, [*command, "--rules", str(tmp_path / "rules.toml")])
    assert result.exit_code == 0, result.output
    found = bcp.open(tmp_path / "out")
    mean = torch.stack([value.double() for value in values.values()]).mean(0)
    assert torch.equal(found["model.v"].load(), mean.bfloat16())
    assert torch.equal(found["model.n"].load(), torch.arange(3))
    (tmp_path / "rules.toml").write_text(Rules([rules[0], averaged], files="{tp}-{dp}.pt").to_toml())
    result = CliRunner().invoke(cli, [*command, "--rules", str(tmp_path / "rules.toml")])
    assert "n: has the dtype int64, which has no mean" in result.output
    assert "--average applies only with --rules" in CliRunner().invoke(cli, command).output


def test_members_of_a_flat_buffer_are_shapes(tmp_path: Path) -> None:
    flat = Flat(match="optimizer.m", rename="{member}", members="optimizer.shapes", axis=("dp",))
    torch.save({"optimizer": {"m": torch.zeros(4), "shapes": {"w": "2 x 2"}}}, tmp_path / "0.pt")
    with pytest.raises(RuleError, match=r"lists members, but that of 'w' is '2 x 2', which is no shape"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules([flat, Unique(match="w")], files="{dp}.pt")))
    torch.save({"optimizer": {"m": torch.zeros(4)}}, tmp_path / "0.pt")
    with pytest.raises(RuleError, match="which the file does not list"):
        bcp.open(
            tmp_path, options=bcp.LoadOptions(rules=Rules([flat, Unique(match="w", optional=True)], files="{dp}.pt"))
        )


def test_files_of_several_kinds(tmp_path: Path) -> None:
    """A file for each tensor-parallel rank, and in a folder one for each of its data-parallel ranks."""
    weight, moment = torch.randn(8, 5), torch.randn(8, 5)
    for tp in range(2):
        half = slice(4 * tp, 4 * tp + 4)
        save_file({"w": weight[half].clone(), "same": weight[0].clone()}, tmp_path / f"model-{tp:02}.safetensors")
        for dp in range(2):
            (tmp_path / f"state{dp}").mkdir(exist_ok=True)
            torch.save(
                {"m": {"w": moment[half].flatten().chunk(2)[dp].clone()}, "dp": dp, "tp": 1},
                tmp_path / f"state{dp}" / f"{tp}.bin",
            )
    rules = Rules(
        [
            Sharded(match="w", axis=("tp",)),
            Replicated(match="same"),
            Flat(match="m.{key}", axis=("dp",), order=("w",), rename="optimizer.{member}"),
        ],
        files=["model-{tp}.safetensors", "state{dp}/{tp}.bin"],
    )
    found = bcp.open(tmp_path, options=bcp.LoadOptions(rules=rules))
    assert sorted(found) == ["model.same", "model.w", "optimizer.w"]
    assert torch.equal(found["model.w"].load(), weight)
    assert torch.equal(found["optimizer.w"].load(), moment)
    assert {value.name: value.decode() for value in found.index.values()} == {
        "extra_state.tp": 1, **{f"extra_state.dp@{rank}": dp for rank, dp in enumerate([0, 0, 1, 1])}
    }  # fmt: skip


def test_ranks_that_share_a_group_hold_more_than_copies(tmp_path: Path) -> None:
    """Four ranks share two groups of heads, so that their boxes overlap in part."""
    q, k = torch.randn(2, 4, 3), torch.randn(2, 1, 3)
    for tp in range(4):
        group, half = divmod(tp, 2)
        torch.save({"qk": torch.cat([q[group, 2 * half : 2 * half + 2], k[group]])}, tmp_path / f"{tp}.pt")
    parts = {"q": 8, "k": 2}
    rule = Sharded(match="qk", axis=("tp",), parts=parts, groups=2, shared=("k",))
    found = bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules([rule], files="{tp}.pt")))
    assert torch.equal(found["model.qk"].load(), torch.cat([torch.cat([q[g], k[g]]) for g in range(2)]))


def test_tied_and_strided_tensors_of_a_file(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    torch.save({"a": base, "b": base, "turned": base.t(), "old": torch.zeros(2)}, tmp_path / "0.pt")
    rules = Rules(
        [Unique(match="a", rename="x"), Unique(match="b", rename="y"), Unique(match="turned")], files="{r}.pt"
    )
    with pytest.raises(RuleError, match="old: has no rule"):
        bcp.open(tmp_path, options=bcp.LoadOptions(rules=rules))
    found = bcp.open(tmp_path, options=bcp.LoadOptions(rules=Rules([*rules, Ignored(match="old")], files="{r}.pt")))
    assert found.aliases == {"model.y": "model.x"}
    assert sorted(found) == ["model.turned", "model.x", "model.y"]
    for name, expected in (("x", base), ("y", base), ("turned", base.t())):
        assert torch.equal(found[f"model.{name}"].load(), expected), name


def _write_trainer(trainer: Trainer, folder: Path) -> Rules:
    """Write what each place of a random trainer holds to a file; returns the rules with the patterns of these files."""
    files: dict[str, dict[str, Any]] = {}
    patterns = set()
    for one in trainer.stored:
        axes = sorted(one.place)
        patterns.add("-".join(["file", *(f"{axis}{{{axis}}}" for axis in axes)]) + ".pt")
        key = "-".join(["file", *(f"{axis}{one.place[axis]}" for axis in axes)]) + ".pt"
        state = files.setdefault(key, {"model": {}, "lists": {}})
        state["model"][one.name] = torch.from_numpy(one.array)
        if one.members is not None:
            state["lists"]["members"] = {name: list(shape) for name, shape in one.members}
    for key, state in files.items():
        torch.save(state, folder / key)
    rules = [
        Flat(**{**vars(rule), "members": "lists.members"}) if isinstance(rule, Flat) else rule for rule in trainer.rules
    ]
    return Rules(rules, files=sorted(patterns))


@pytest.mark.parametrize("number", sample(range(400), 40))
def test_folders_of_random_trainers(tmp_path: Path, number: int) -> None:
    trainer = random_trainer(number)
    found = bcp.open(tmp_path, options=bcp.LoadOptions(rules=_write_trainer(trainer, tmp_path)))
    assert {name.removeprefix("model.") for name in found} == trainer.expected.keys()
    rng = random.Random(number)
    for name, array in trainer.expected.items():
        stored = found[f"model.{name}"]
        assert np.array_equal(stored.load().numpy(), array), name
        index = tuple(slice(low := rng.randint(0, n), rng.randint(low, n)) for n in array.shape)
        assert np.array_equal(stored[index].numpy(), array[index]), (name, index)
