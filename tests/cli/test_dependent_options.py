"""Invalid usage: options that would have no effect, and values that no command accepts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import CommandResult

Run = Callable[..., CommandResult]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("latest {} --mode max", "--mode applies only with --best"),
        ("latest {} --best loss --milestone a", "--milestone does not apply with --best"),
        ("latest {} --best loss --allow-fresh", "--allow-fresh does not apply with --best"),
        ("inspect {} --no-tensors --tensor model.*", "--tensor does not apply with --no-tensors"),
        ("inspect {} --define heads=4", "--define applies only with --rules"),
        ("diff {} {} --no-values --rtol 1", "--rtol does not apply with --no-values"),
        ("reshard {} out -n 1 --average mean", "--average applies only with --rules"),
        ("export {} out --expect names.json --partial", "--partial does not apply with --expect"),
        ("export {} out --adapter a", "--adapter applies only with --lora"),
        ("export {} out --format torch --max-file-size 5GB", "--max-file-size does not apply to --format torch"),
        ("clean {} --dry-run --yes", "--yes does not apply with --dry-run"),
        ("push {} --to http://a --watch-timeout 3", "--watch-timeout applies only with --watch"),
        ("push --resume http://a --partial", "--resume does not apply with --partial"),
        ("push {} --to http://a --device x", "--device applies only with --protocol"),
        ("verify {} -o anon=true", "--storage-option applies to URLs"),
    ],
)
def test_an_option_without_effect(bcp_command: Run, one: Path, arguments: str, message: str) -> None:
    result = bcp_command(*arguments.replace("{}", str(one)).split())
    assert result.code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("diff none none --rtol -1", "--rtol"),
        ("diff none none --rtol nan", "--rtol"),
        ("diff none none --atol inf", "--atol"),
        ("export none out --cast nosuch", "--cast"),
        ("export none out --section ''", "--section"),
        ("export none out --expect ''", "--expect"),
        ("export none out --lora merge --lora-alpha nan", "--lora-alpha"),
        ("export {} out --section nosuch", "nosuch"),
        ("export {} out --lora merge --adapter-config nosuch", "--adapter-config"),
        ("export {} out --lora merge", "lora"),
        ("average {} {} --output out --section nosuch", "nosuch"),
        ("import none out --step -1", "--step"),
        ("copy none out --rate-limit nan", "--rate-limit"),
        ("latest none --best ''", "--best"),
        ("ls ''", "ROOT"),
        ("clean none --older-than nan", "--older-than"),
        ("push none --to http://a --deadline nan", "--deadline"),
        ("push --watch none --to http://a --watch-timeout -1", "--watch-timeout"),
        ("push none --to ''", "--to"),
    ],
)
def test_an_invalid_value(bcp_command: Run, one: Path, arguments: str, option: str) -> None:
    """It is found before anything is read: there is nothing at ``none``."""
    result = bcp_command(*shlex.split(arguments.replace("{}", str(one))))
    assert result.code == 2
    assert option in result.stderr
    assert not Path("out").exists()
