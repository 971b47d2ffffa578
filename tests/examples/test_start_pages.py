"""Run the pages of docs/start as a reader does: save the programs, type the commands, compare what they print."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

from bytecheckpoint.testing import time_limit

START = Path(__file__).resolve().parents[2] / "docs" / "start"
NOTEBOOK = START / "notebook.md"
PAGES = sorted({*START.glob("*.md")} - {NOTEBOOK})
CELL = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```)?", re.M | re.S)
# Each alternative is a program and its name, or a block of commands and their output.
BLOCK = re.compile(
    r"`(?P<name>\w+\.py)`:\n\n```python\n(?P<program>.*?)^```|```console\n(?P<session>.*?)^```", re.M | re.S
)
COMMANDS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "bcp": ["-c", "from bytecheckpoint.cli import main; main()"],
}


def full_if_it_starts_ranks(page: Path) -> Any:
    """Each process that torchrun starts imports torch."""
    marks = [pytest.mark.full] if "$ torchrun " in page.read_text() else []
    return pytest.param(page, marks=marks, id=page.stem)


@pytest.mark.parametrize("page", [*map(full_if_it_starts_ranks, PAGES)])
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    for found in BLOCK.finditer(page.read_text()):
        if found["name"]:
            (tmp_path / found["name"]).write_text(found["program"])
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", found["session"], re.M):
            printed = run(command, tmp_path)
            assert is_shown(shown, printed), f"{page.name} shows for `{command}`:\n{shown}\nIt prints:\n{printed}"


def run(command: str, folder: Path) -> str:
    words = [word.strip('"') for word in command.split()]
    crashes = words[0].startswith("CRASH_AT=")
    variables = dict([words.pop(0).split("=")]) if crashes else {}
    arguments = [*COMMANDS[words[0]], *words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    done = warm_python().run(arguments, timeout=time_limit(120), env=environment, cwd=folder)
    assert (done.returncode != 0) == crashes, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.replace(f"{folder}/", "")


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows this output: with other numbers and widths, and ``...`` in place of lines."""
    shown, printed = (
        re.sub(r"\d+(\.\d+)?", "0", re.sub(r"attempt-\w+-\w+", "attempt", text)) for text in (shown, printed)
    )
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def run_cell(code: str, names: dict[str, Any]) -> str:
    """Run a cell as a notebook does, and return what it prints and the value of a last line that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, NOTEBOOK.name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
            print(*(() if value is None else (repr(value),)), end="\n" if value is not None else "")
    return printed.getvalue()


def test_the_cells_of_the_notebook_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a running event loop, as in a kernel. The last cell continues when it is run again."""
    monkeypatch.chdir(tmp_path)
    cells = list(CELL.finditer(NOTEBOOK.read_text()))
    names: dict[str, Any] = {}

    async def run_all() -> None:
        for cell in cells:
            printed = run_cell(cell["code"], names)
            assert is_shown(cell["shown"] or "", printed), f"{cell['code']}\nprints:\n{printed}"
        assert run_cell(cells[-1]["code"], names) == "begin after step 500\n"

    asyncio.run(run_all())
    assert len(cells) >= 8


def test_every_block_of_the_pages_is_found() -> None:
    for page in PAGES:
        text = page.read_text()
        blocks = list(BLOCK.finditer(text))
        assert len(blocks) == len(re.findall("^ *```(?=[a-z])", text, re.M)), page.name
        assert any(found["session"] for found in blocks), page.name


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("step 100, loss 9.60\n", "step 200, loss 10.61\n", True),
        ("a\n...\nc\n", "a\nb\nc\n", True),
        ("*  step-1  13 s ago\n", "*  step-10   2 s ago\n", True),
        ("1 B in attempt-20261126T2Z-e75d\n", "2 B in attempt-20251126T2Z-ff\n", True),
        ("saved step 1\n", "stored step 1\n", False),
        ("saved step 1\n", "saved step 1\nsaved step 2\n", False),
        ("", "a warning\n", False),
    ],
)
def test_what_counts_as_the_output_that_a_page_shows(shown: str, printed: str, same: bool) -> None:
    assert is_shown(shown, printed) is same
