"""The example of docs/rules.md runs as the page shows it, and its other rules are valid."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint.rules
from bytecheckpoint.rules import Rules
from bytecheckpoint.rules.kinds import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|toml)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, write), (second, rules), (third, read), *_ = BLOCKS
    assert (first, second, third) == ("python", "toml", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "ranks.toml").write_text(rules)
    names: dict[str, Any] = {}
    exec(compile(write, "docs/rules.md", "exec"), names)
    exec(compile(read, "docs/rules.md", "exec"), names)


def test_every_kind_has_an_example() -> None:
    examples = [Rules.from_toml(text) for language, text in BLOCKS if language == "toml"]
    assert {rule.kind for rules in examples[1:] for rule in rules} == KINDS.keys()


def test_every_set_of_rules_is_listed() -> None:
    folder = resources.files(bytecheckpoint.rules) / "sets"
    for name in (file.name.removesuffix(".toml") for file in folder.iterdir()):
        assert f"`{name}`" in PAGE, name
