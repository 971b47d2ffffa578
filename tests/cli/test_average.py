"""``bcp average``; torch is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cli_checkpoints as kit
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.convert.average import average
from bytecheckpoint.convert.rewriter import PIECE_BYTES
from bytecheckpoint.errors import (
    BytecheckpointError,
    CorruptionError,
    KeyExistsError,
    MismatchError,
    NameNotFoundError,
    UsageError,
)

_SHAPES = {"w": (4, 3), "scalar": (), "empty": (0, 3), "big": (PIECE_BYTES // 4 + 77, 2)}


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    kinds = {"f4": torch.float32, "f8": torch.float64, "b2": torch.bfloat16, "h2": torch.float16}
    state: dict[str, Any] = {
        f"{name}.{kind}": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in _SHAPES.items()
        for kind, dtype in kinds.items()
        if name != "big" or kind == "b2"
    }
    state["c16"] = torch.randn(3, generator=generator, dtype=torch.complex64)
    state |= {"count": torch.arange(5), "flag": torch.tensor(True), "byte": torch.ones(3).to(torch.float8_e4m3fn)}
    return state


def _expected(states: list[dict[str, Any]], weights: list[float]) -> dict[str, torch.Tensor]:
    """The averages in float64, and unchanged what is not averaged."""
    expected = {}
    for name, tensor in states[0].items():
        if name in ("count", "flag", "byte"):
            expected[name] = tensor
        else:
            wide = torch.promote_types(tensor.dtype, torch.float64)
            parts = [state[name].to(wide) * weight for state, weight in zip(states, weights)]
            expected[name] = torch.stack(parts).sum(0) / sum(weights)
    return expected


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("average")
    for seed in range(3):
        bcp.save(folder / str(seed), {"model": _state(seed), "extra_state": {"seed": seed}}, step=seed)
    return [folder / str(seed) for seed in range(3)]


@pytest.mark.parametrize("weights", [None, [0.5, 3.0, -1.25]])
def test_as_torch_computes_it(three: list[Path], tmp_path: Path, weights: list[float] | None) -> None:
    report = average([bcp.open(path) for path in three], str(tmp_path / "out"), weights=weights, step=9)
    found = bcp.open(tmp_path / "out")
    assert (found.step, found.sections, report.copied) == (9, ["model"], 3)
    assert found.verify().ok
    expected = _expected([_state(seed) for seed in range(3)], weights or [1.0, 1.0, 1.0])
    assert {name.removeprefix("model.") for name in found} == set(expected)
    for name, tensor in expected.items():
        one, stored = found[f"model.{name}"].load(), _state(0)[name]
        assert one.dtype == stored.dtype, name
        if name in ("count", "flag", "byte"):
            assert torch.equal(one, tensor), name
        elif tensor.dtype == one.dtype:
            torch.testing.assert_close(one, tensor, rtol=1e-15, atol=1e-14, msg=name)
        else:  # rounded once: at most half a unit in the last place, and what the sum in float32 loses
            half, lost = torch.finfo(one.dtype).eps / 2 * 1.02, 1e-6 if one.dtype.itemsize == 2 else 1e-14
            torch.testing.assert_close(one.to(tensor.dtype), tensor, rtol=half, atol=lost, msg=name)
    assert found.metadata["averaged"] == [str(path) for path in three]


def test_equal_weights_of_equal_models_change_nothing(three: list[Path], tmp_path: Path, bcp_command) -> None:
    ran = bcp_command("average", three[0], three[0], "--output", tmp_path / "out", "--json")
    assert (ran.code, ran.json["weights"], ran.json["copied"]) == (0, [0.5, 0.5], 3)
    kit.assert_same_tensors(
        {name: one.load() for name, one in bcp.open(tmp_path / "out").items()},
        {f"model.{name}": tensor for name, tensor in _state(0).items()},
    )


def test_other_sections_layouts_and_systems(one: Path, four: Path, tmp_path: Path) -> None:
    """A safetensors folder with its configuration, and a checkpoint with an optimizer and tied names."""
    model = kit.Tied(seed=0)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"x": 1}')
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "hf/model.safetensors")
    both = [bcp.open(tmp_path / "hf"), bcp.open(one)]
    average(both, str(tmp_path / "out"), weights=[1, 3])
    found = bcp.open(tmp_path / "out")
    stored = kit.tensors_of(one)
    for name, tensor in tensors.items():
        expected = tensor.double() * 0.25 + stored[f"model.{name}"].double() * 0.75
        torch.testing.assert_close(found[f"model.{name}"].load().double(), expected, rtol=1e-2, atol=1e-3)
    assert next((tmp_path / "out").glob("*/config.json")).read_text() == '{"x": 1}'
    average([both[1], both[1]], str(tmp_path / "all"), sections=["model", "optimizer", "extra"])
    again = kit.Tied(seed=4)
    optimizer = torch.optim.Adam(again.parameters(), lr=1.0)
    bcp.load(tmp_path / "all", {"model": again, "optimizer": optimizer})
    assert again.head.weight is again.embed.weight
    assert optimizer.param_groups[0]["lr"] == 0.25
    sharded = bcp.open(four)
    average([sharded, sharded], str(tmp_path / "four"))
    kit.assert_same_tensors(
        kit.tensors_of(tmp_path / "four"),
        {name: tensor for name, tensor in kit.tensors_of(four).items() if name.startswith("model.")},
    )


def test_all_differences_are_listed_at_once(three: list[Path], tmp_path: Path, bcp_command) -> None:
    other = _state(1)
    del other["w.f4"]
    other |= {"ghost": torch.ones(1), "w.f8": torch.ones(3, 4), "scalar.b2": torch.ones(())}
    bcp.save(tmp_path / "other", {"model": other})
    ran = bcp_command("average", three[0], tmp_path / "other", "--output", tmp_path / "out")
    assert ran.code == 1
    assert "4 fault(s)" in ran.stderr
    for text in (
        "model.w.f4: not in",
        "model.ghost: not in",
        "model.w.f8: float64[4, 3]",
        "model.scalar.b2: bfloat16[]",
    ):
        assert text in ran.stderr
    values = {"model": {**_state(1), "depth": 3}}
    bcp.save(tmp_path / "value", values)
    bcp.save(tmp_path / "value2", {"model": {**_state(1), "depth": 4}})
    ran = bcp_command("average", tmp_path / "value", tmp_path / "value2", "--output", tmp_path / "out")
    assert (ran.code, "model.depth" in ran.stderr) == (1, True)
    ints = _state(2) | {"count": torch.arange(5) + 1, "flag": torch.tensor(False)}
    bcp.save(tmp_path / "ints", {"model": ints})
    ran = bcp_command("average", three[0], three[1], tmp_path / "ints", "--output", tmp_path / "out")
    assert ran.code == 1
    assert "integer: 2" in ran.stderr
    assert not (tmp_path / "out").exists()
    options = ("--exclude", "model.count", "--exclude", "model.flag", "--weights", "1,2,1")
    assert (
        bcp_command("average", three[0], three[1], tmp_path / "ints", "--output", tmp_path / "out", *options).code == 0
    )
    assert "model.count" not in bcp.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("paths", "options", "error", "message"),
    [
        ([0], {}, UsageError, "at least two"),
        ([0, 1], {"weights": [1]}, UsageError, "1 weights for 2 checkpoints"),
        ([0, 1], {"weights": [1, -1]}, UsageError, "positive sum"),
        ([0, 1], {"weights": [1, float("nan")]}, UsageError, "finite"),
        ([0, 1], {"sections": ["ema"]}, NameNotFoundError, "has no section 'ema'; it has extra_state, model"),
        ([0, 1], {"sections": ["extra_state"]}, MismatchError, r"extra_state\.seed"),
        ([0, 1], {"step": -1}, UsageError, "step must be a whole number"),
    ],
)
def test_refused(
    three: list[Path], tmp_path: Path, paths: list[int], options: Any, error: type[BytecheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        average([bcp.open(three[number]) for number in paths], str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_damage_and_existing_targets(tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        bcp.save(tmp_path / str(seed), {"model": nn.Linear(300, 40)})
    both = [bcp.open(tmp_path / "0"), bcp.open(tmp_path / "1")]
    with pytest.raises(KeyExistsError):
        average(both, str(tmp_path / "0"))
    file = next((tmp_path / "1").glob("*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=file.name):
        average(both, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.safetensors"))
