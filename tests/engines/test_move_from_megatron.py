"""Run the script of ``docs/moving-from-megatron.md``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_scripts import run_script

pytestmark = pytest.mark.megatron


def _run(folder: Path, processes: int, *options: str) -> dict[int, float]:
    """The losses by step."""
    printed = run_script(folder, "move_from_megatron.py", processes, *options, "--old", "old")
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([0-9.]+)", printed)}


def test_continue_at_other_sizes_and_without_megatron(tmp_path: Path) -> None:
    written = _run(tmp_path, 4, "write", "--tp", "2", "--pp", "2")
    assert sorted(written) == [1, 2, 3, 4]
    continued = _run(tmp_path, 2, "continue", "--tp", "2", "--new", "new")
    assert sorted(continued) == [5, 6, 7, 8]
    assert continued[8] < written[1]
    _run(tmp_path, 2, "continue", "--fsdp", "--new", "fsdp")
    old, plain = bcp.open(tmp_path / "old"), bcp.open(tmp_path / "fsdp/step-4")
    masters = [name for name in old if name.endswith(".master")]
    assert len(masters) == 35
    for name in masters:
        fqn = name.removeprefix("optimizer.state.").removesuffix(".master")
        assert torch.equal(plain[f"model.{fqn}"].load(), old[name].load())
        assert torch.equal(plain[f"optimizer.state.{fqn}.exp_avg"].load(), old[f"optimizer.state.{fqn}.exp_avg"].load())
    values = {one.path: one.decode() for one in plain.index.values(section="optimizer")}
    assert values["param_groups", "decoder.final_layernorm.weight"]["weight_decay"] == 0
    assert values["param_groups", "embedding.word_embeddings.weight"]["lr"] == pytest.approx(2.9e-3, rel=0.1)
