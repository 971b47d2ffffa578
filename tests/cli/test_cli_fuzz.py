"""Random command lines: every command ends with an exit code of the documented table, and changes no source."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import sampling
from cli_checkpoints import CommandResult, save_one

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.cli.options import EXIT_CODES

DOCUMENTED = {int(line.split()[0]) for line in EXIT_CODES.splitlines() if line.strip()[:1].isdigit()}
CONTEXT = click.Context(cli)
COMMANDS_BY_NAME = {name: cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)}
COMMANDS = sorted(
    set(COMMANDS_BY_NAME) - {"push"}
)  # push needs engines; its arguments are fuzzed in test_push_arguments
WORDS = [
    "",
    "x",
    "-1",
    "0",
    "1",
    "2.5",
    "nan",
    "1e999",
    "5GB",
    "model",
    "model.*",
    "[",
    "a=b",
    "=",
    "\u00fc",
    "../x",
    "--",
    "-",
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a root, a damaged, an unsupported and an uncommitted checkpoint, files and an empty folder."""
    root = tmp_path_factory.mktemp("fuzz")
    save_one(root / "good" / "step-5")
    for name in ("damaged", "cut", "uncommitted"):
        shutil.copytree(root / "good" / "step-5", root / name)
    (root / "damaged" / "manifest.msgpack").write_bytes(b"damaged")
    (root / "uncommitted" / "manifest.msgpack").unlink()
    data = next((root / "cut").glob("attempt-*/model-*"))
    data.write_bytes(data.read_bytes()[:-1])
    (root / "empty").mkdir()
    (root / "file.txt").write_text("text")
    (root / "names.json").write_text(json.dumps(["embed.weight"]))
    return root


def _contents(places: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(places.rglob("*")) if path.is_file()}


def _words(choose: random.Random, places: Path, scratch: Path) -> list[str]:
    inside = [places / name for name in ("good/step-5", "good", "damaged", "cut", "uncommitted", "empty", "file.txt")]
    paths = [*map(str, inside), str(places / "names.json"), str(scratch / "new"), str(scratch / "missing" / "a")]
    return [
        *paths,
        f"FILE://{places}/good/step-5",
        "s3:/slip",
        "nothing://x",
        "memory://fuzz",
        choose.choice(WORDS),
    ]


def _command_line(choose: random.Random, command: click.Command, places: Path, scratch: Path) -> list[str]:
    """Arguments that often make sense: each argument of the command, some of its options, and rarely one too many."""
    words: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            if choose.random() < 0.95:
                # A command that writes gets a target outside the fixture.
                is_target = parameter.name == "target"
                words.append(
                    str(scratch / choose.choice(["new", "old"])) if is_target else _word(choose, places, scratch)
                )
        elif choose.random() < (0.9 if parameter.required else 0.2):
            words.append(choose.choice(parameter.opts))
            if not (isinstance(parameter, click.Option) and parameter.is_flag):
                words.append(_value(choose, parameter, places, scratch))
    if choose.random() < 0.05:
        words.append(choose.choice(WORDS))
    return words


def _word(choose: random.Random, places: Path, scratch: Path) -> str:
    return str(places / "good" / "step-5") if choose.random() < 0.5 else choose.choice(_words(choose, places, scratch))


def _value(choose: random.Random, parameter: click.Parameter, places: Path, scratch: Path) -> str:
    if parameter.name == "output":
        return str(scratch / "out.json")
    if parameter.name == "rate_limit":
        return choose.choice(["", "x", "-1", "0", "nan", "1e999", "5GB", "100MiB"])  # a low rate takes hours
    if isinstance(parameter.type, click.Choice) and choose.random() < 0.7:
        return str(choose.choice(list(parameter.type.choices)))
    return choose.choice(["1", "2", *WORDS, str(places / "names.json"), "endpoint_url=x"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_line_ends_as_documented(
    command: str,
    places: Path,
    tmp_path: Path,
    bcp_command: Callable[..., CommandResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where bcp report writes by default
    choose = random.Random(f"{sampling.seed()} {command}")
    before = _contents(places)
    for number in range(200 if sampling.is_full() else 40):
        scratch = tmp_path / str(number)
        words = _command_line(choose, COMMANDS_BY_NAME[command], places, scratch)
        if command == "rm":
            words = [word if word.startswith("-") else word.replace(str(places), str(scratch)) for word in words]
            shutil.copytree(places, scratch)
        result = bcp_command(command, *words, input="")
        shown = f"bcp {command} {words!r}: {result}"
        assert result.code in DOCUMENTED, shown
        assert "bcp: unexpected" not in result.stderr, shown
        assert "Traceback" not in result.stderr or "--debug" in words, shown
        if result.code in (0, 1) and "--json" in words and "--help" not in words and result.stdout:
            json.loads(result.stdout)
        if result.code > 1:
            assert result.stderr.strip() or command == "ls", shown
        assert _contents(places) == before, shown
        shutil.rmtree(scratch, ignore_errors=True)


def test_the_table_of_exit_codes_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    table = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert table == DOCUMENTED == {0, 1, 2, 3, 4, 5, 6, 130, 141}


def test_latest_prints_the_bare_path(tmp_path: Path, bcp_command: Callable[..., CommandResult]) -> None:
    assert bcp_command("latest", tmp_path).code == 3
    for step in (3, 20):
        save_one(tmp_path / f"step-{step}", step=step)
    result = bcp_command("latest", tmp_path)
    assert (result.code, result.stdout, result.stderr) == (0, f"{tmp_path}/step-20\n", "")
    assert bcp_command("latest", tmp_path, "--json").json["step"] == 20
    assert bcp_command("latest", tmp_path / "step-3").code == 2
    for path in tmp_path.glob("*/manifest.msgpack"):
        path.unlink()
    assert bcp_command("latest", tmp_path).code == 4
    assert bcp_command("latest", tmp_path, "--allow-fresh").code == 3


def test_best_and_milestone(tmp_path: Path, bcp_command: Callable[..., CommandResult]) -> None:
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        metadata = {"metrics": {"loss": loss}, "milestone": f"stage {step}"}
        bcp.save(tmp_path / f"step-{step}", {"x": {"a": 1}}, step=step, metadata=metadata)
    for options, step in (
        (("--best", "loss"), 2), (("--best", "loss", "--mode", "max"), 3), (("--milestone", "stage 1"), 1),
    ):  # fmt: skip
        assert bcp_command("latest", tmp_path, *options).stdout == f"{tmp_path}/step-{step}\n"
    assert bcp_command("latest", tmp_path, "--best", "accuracy").code == 3
    assert bcp_command("latest", tmp_path, "--milestone", "nothing").code == 3
    assert bcp_command("latest", tmp_path, "--milestone", "a", "--best", "b").code == 2


def test_trace_takes_no_storage_options(tmp_path: Path, bcp_command: Callable[..., CommandResult]) -> None:
    result = bcp_command("trace", tmp_path, "-o", "a=b")
    assert result.code == 2
    assert "No such option" in result.stderr
