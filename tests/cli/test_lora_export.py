"""LoRA adapters in exports; the formula on torch is the oracle. ``tests/engines`` compares with PEFT itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bytecheckpoint as bcp
from bytecheckpoint.convert.export import Lora, export_safetensors
from bytecheckpoint.convert.rewriter import PIECE_BYTES
from bytecheckpoint.errors import (
    BytecheckpointError,
    MismatchError,
    NameNotFoundError,
    UnsupportedTensorError,
    UsageError,
)

_PREFIX = "base_model.model."


def _state(dtype: torch.dtype = torch.float32, adapter: str = "default") -> dict[str, torch.Tensor]:
    """As the state dict of a PEFT model: a matrix, a matrix of Conv1D (turned), an embedding, and a whole module."""
    torch.manual_seed(2)
    state = {
        "q.base_layer.weight": torch.randn(6, 4, dtype=dtype),
        "q.base_layer.bias": torch.randn(6, dtype=dtype),
        f"q.lora_A.{adapter}.weight": torch.randn(2, 4),
        f"q.lora_B.{adapter}.weight": torch.randn(6, 2),
        "conv.base_layer.weight": torch.randn(4, 10, dtype=dtype),
        f"conv.lora_A.{adapter}.weight": torch.randn(3, 4),
        f"conv.lora_B.{adapter}.weight": torch.randn(10, 3),
        "embed.base_layer.weight": torch.randn(9, 4, dtype=dtype),
        f"embed.lora_embedding_A.{adapter}": torch.randn(2, 9),
        f"embed.lora_embedding_B.{adapter}": torch.randn(4, 2),
        "head.original_module.weight": torch.randn(3, 4, dtype=dtype),
        f"head.modules_to_save.{adapter}.weight": torch.randn(3, 4, dtype=dtype),
        "norm.weight": torch.randn(4, dtype=dtype),
    }
    return {_PREFIX + name: tensor for name, tensor in state.items()}


def _merged(state: dict[str, torch.Tensor], scales: dict[str, float], adapter: str = "default") -> dict[str, Any]:
    def product(path: str, kind: str = "lora_", end: str = ".weight") -> torch.Tensor:
        down, up = (state[f"{_PREFIX}{path}.{kind}{one}.{adapter}{end}"].float() for one in "AB")
        return scales[path] * (up @ down)

    def base(path: str) -> torch.Tensor:
        return state[f"{_PREFIX}{path}.base_layer.weight"]

    added = {
        "q": product("q"),
        "conv": product("conv").T,
        "embed": product("embed", "lora_embedding_", "").T,
    }
    found = {f"{path}.weight": (base(path).float() + value).to(base(path).dtype) for path, value in added.items()}
    return found | {
        "q.bias": state[f"{_PREFIX}q.base_layer.bias"],
        "head.weight": state[f"{_PREFIX}head.modules_to_save.{adapter}.weight"],
        "norm.weight": state[f"{_PREFIX}norm.weight"],
    }


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    state = _state(dtype)
    bcp.save(tmp_path / "c", {"model": state})
    config = {"lora_alpha": 8, "alpha_pattern": {"conv": 3}}
    export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / "out"), lora=Lora("merge", config))
    expected = _merged(state, {"q": 4.0, "conv": 1.0, "embed": 4.0})
    _assert_close(load_file(tmp_path / "out/model.safetensors"), expected)
    config["use_rslora"] = True
    checkpoint = bcp.open(tmp_path / "c")
    export_safetensors(
        checkpoint, str(tmp_path / "rs"), lora=Lora("merge", config, alpha=2), exclude=["norm.*"], cast="float32"
    )
    expected = _merged(
        {name: tensor.float() for name, tensor in state.items()},
        {"q": 2 / math.sqrt(2), "conv": 2 / math.sqrt(3), "embed": 2 / math.sqrt(2)},
    )
    del expected["norm.weight"]
    _assert_close(load_file(tmp_path / "rs/model.safetensors"), expected)


def test_square_matrices_follow_the_configuration(tmp_path: Path) -> None:
    state = {
        "x.weight": torch.randn(4, 4),
        "x.lora_A.default.weight": torch.randn(2, 4),
        "x.lora_B.default.weight": torch.randn(4, 2),
    }
    bcp.save(tmp_path / "c", {"model": state})
    product = state["x.lora_B.default.weight"] @ state["x.lora_A.default.weight"]
    for turned, added in ((False, product), (True, product.T)):
        lora = Lora("merge", {"lora_alpha": 2, "fan_in_fan_out": turned})
        export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / str(turned)), lora=lora)
        found = load_file(tmp_path / str(turned) / "model.safetensors")
        torch.testing.assert_close(found, {"x.weight": state["x.weight"] + added})


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_larger_than_a_piece(tmp_path: Path, turned: bool) -> None:
    """A block ends inside a row, too."""
    columns = PIECE_BYTES // 4 + 1001
    shape = (columns, 2) if turned else (2, columns)
    state = {"x.weight": torch.randn(shape), "x.lora_A.weight": torch.randn(2, columns)}
    state["x.lora_B.weight"] = torch.randn(2, 2)
    if turned:
        state["x.lora_A.weight"], state["x.lora_B.weight"] = torch.randn(2, 2), torch.randn(2, 2)
        state["x.weight"] = torch.randn(2, 2)
        state |= {"y.weight": torch.randn(columns, 2), "y.lora_embedding_A": torch.randn(2, columns)}
        state["y.lora_embedding_B"] = torch.randn(2, 2)
    bcp.save(tmp_path / "c", {"model": state})
    export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / "out"), lora=Lora("merge", alpha=2))
    found = load_file(tmp_path / "out/model.safetensors")
    torch.testing.assert_close(
        found["x.weight"], state["x.weight"] + state["x.lora_B.weight"] @ state["x.lora_A.weight"]
    )
    if turned:
        added = (state["y.lora_embedding_B"] @ state["y.lora_embedding_A"]).T
        torch.testing.assert_close(found["y.weight"], state["y.weight"] + added)


def test_an_adapter_alone(tmp_path: Path, bcp_command) -> None:
    state = _state()
    bcp.save(tmp_path / "c", {"model": state})
    ran = bcp_command("export", tmp_path / "c", tmp_path / "out", "--lora", "peft", "--lora-alpha", "8")
    assert ran.code == 0
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    expected = {
        name.replace(".modules_to_save.default", "").replace(".default", ""): tensor
        for name, tensor in state.items()
        if ".lora_" in name or ".modules_to_save." in name
    }
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"], config["lora_alpha"]) == (3, {"q": 2, "embed": 2}, 8)
    assert (config["target_modules"], config["modules_to_save"]) == (["conv", "embed", "q"], ["head"])
    (tmp_path / "own.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    ran = bcp_command(
        "export", tmp_path / "c", tmp_path / "b", "--lora", "peft", "--adapter-config", tmp_path / "own.json"
    )
    assert ran.code == 0
    assert json.loads((tmp_path / "b/adapter_config.json").read_text())["lora_alpha"] == 8
    # The exported folder has what a merge of the adapter alone lacks.
    ran = bcp_command("export", tmp_path / "out", tmp_path / "no", "--lora", "merge")
    assert ran.code == 1
    assert "base_layer.weight is missing" in ran.stderr
    assert bcp_command("export", tmp_path / "c", tmp_path / "no", "--lora-alpha", "8").code == 2


def _without(state: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.removeprefix(_PREFIX) not in names}


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda s: s, {}, UsageError, "scaling of the adapter is not stored"),
        (lambda s: {"a": torch.ones(2)}, {"alpha": 1}, NameNotFoundError, "no LoRA factors"),
        (
            lambda s: _without(s, "q.lora_B.default.weight"),
            {"alpha": 1},
            MismatchError,
            r"1 LoRA factor\(s\) are missing: base_model\.model\.q\.lora_B",
        ),
        (
            lambda s: _without(s, "q.base_layer.weight"),
            {"alpha": 1},
            MismatchError,
            r"q\.base_layer\.weight is missing",
        ),
        (
            lambda s: s | {f"{_PREFIX}q.base_layer.weight": torch.ones(6, 5)},
            {"alpha": 1},
            MismatchError,
            r"factors of base_model\.model\.q do not fit its weight: float32\[6, 5\]",
        ),
        (
            lambda s: s | {f"{_PREFIX}q.lora_magnitude_vector.default.weight": torch.ones(6)},
            {"alpha": 1},
            UnsupportedTensorError,
            "lora_magnitude_vector",
        ),
        (lambda s: s, {"config": {"lora_alpha": 1, "use_dora": True}}, UnsupportedTensorError, "use_dora"),
        (lambda s: s, {"config": {"lora_alpha": 1, "peft_type": "LOHA"}}, UnsupportedTensorError, "LOHA"),
        (
            lambda s: s | _state(adapter="other"),
            {"alpha": 1},
            UsageError,
            "has the adapters default, other; choose one of them",
        ),
        (lambda s: s, {"alpha": 1, "adapter": "third"}, UsageError, "choose one of them, not third"),
    ],
)
def test_refused(tmp_path: Path, change: Any, options: Any, error: type[BytecheckpointError], message: str) -> None:
    bcp.save(tmp_path / "c", {"model": change(_state())})
    with pytest.raises(error, match=message):
        export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / "out"), lora=Lora("merge", **options))
    assert not (tmp_path / "out").exists()


def test_one_of_several_adapters(tmp_path: Path) -> None:
    first, second = _state(), {name: 2 * tensor for name, tensor in _state(adapter="other").items()}
    state = second | first
    bcp.save(tmp_path / "c", {"model": state})
    for adapter in ("default", "other"):
        lora = Lora("merge", {"lora_alpha": 6}, adapter=adapter)
        export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / adapter), lora=lora)
        expected = _merged(state, {"q": 3.0, "conv": 2.0, "embed": 3.0}, adapter)
        _assert_close(load_file(tmp_path / adapter / "model.safetensors"), expected)
