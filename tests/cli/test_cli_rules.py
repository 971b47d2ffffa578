"""Commands that read stored tensors as rules describe them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from renamed_models import HIDDEN, HUB, SIZES, WIDTH, assert_equal, save
from safetensors.torch import load_file

import bytecheckpoint as bcp

Command = Callable[..., Any]


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    path = tmp_path / "hub.toml"
    path.write_text(HUB.to_toml())
    return path


def test_commands_take_rules(tmp_path: Path, rules_file: Path, bcp_command: Command) -> None:
    hub = save(tmp_path / "ours")
    sizes = [text for name, size in SIZES.items() for text in ("--define", f"{name}={size}")]
    shipped = ["--rules", "hf-decoder", "--rules", "hf-mlp", *sizes]
    assert bcp_command("export", tmp_path / "ours", tmp_path / "hub", *shipped).code == 0
    assert_equal(load_file(tmp_path / "hub" / "model.safetensors"), hub)
    assert bcp_command("import", tmp_path / "ours", tmp_path / "new", "--rules", rules_file).code == 0
    assert bcp_command("reshard", tmp_path / "ours", tmp_path / "few", "-n", 2, "--rules", rules_file).code == 0
    for name in ("new", "few"):
        found = bcp.open(tmp_path / name)
        assert found.verify().ok
        assert_equal(found.state_dict(), hub)
        assert found.tree("extra_state") == {"step": 3}
    result = bcp_command("inspect", tmp_path / "ours", "--rules", rules_file, "--json")
    rules = {one["stored"]: one for one in result.json["rules"]}
    fused = rules["decoder.layers.0.mlp.linear_fc1.weight"]
    assert (fused["kind"], fused["match"]) == ("unique", "decoder.layers.{l:int}.mlp.linear_fc1.weight")
    assert fused["boxes"] == [
        {"tensor": f"model.layers.0.mlp.{part}_proj.weight", "offsets": [0, 0], "lengths": [WIDTH, HIDDEN]}
        for part in ("gate", "up")
    ]
    table = bcp_command("inspect", tmp_path / "ours", "--rules", rules_file).stdout
    assert re.search(r"output_layer\.weight +\[11, 6\] +- +unique output_layer\.weight +lm_head\.weight", table)


def test_commands_report_faults_of_rules(tmp_path: Path, rules_file: Path, bcp_command: Command) -> None:
    save(tmp_path / "ours")
    rules_file.write_text('[[rule]]\nmatch = "a"\nkind = "unike"\n')
    result = bcp_command("inspect", tmp_path / "ours", "--rules", rules_file)
    assert result.code == 2
    assert "rule 1 (line 1): has the unknown kind 'unike'" in result.stderr
    result = bcp_command("export", tmp_path / "ours", tmp_path / "hub", "--rules", "hf-decoder", "--define", "heads=x")
    assert result.code == 2
    assert "--define must be NAME=NUMBER" in result.stderr
    assert not (tmp_path / "hub").exists()
