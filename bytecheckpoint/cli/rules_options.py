"""The options ``--rules`` and ``--define`` of several commands."""

from __future__ import annotations

import functools
from typing import Any

import click

from ..loading.options import read_rules
from ..rules import Rules
from .options import Run


def rules_options(function: Run) -> Run:
    """Add ``--rules`` and ``--define`` to a command, whose function gets the rules of all of them, or None."""

    @functools.wraps(function)
    def run(*args: Any, rules: tuple[str, ...], define: tuple[str, ...], **arguments: Any) -> None:
        if define and not rules:
            raise click.UsageError("--define applies only with --rules")
        variables = dict(map(_variable, define))
        found = [read_rules(source, variables) for source in rules]
        files = [text for one in found for text in one.files]
        function(*args, rules=Rules((rule for one in found for rule in one), files) if found else None, **arguments)

    run = click.option(
        "--define",
        multiple=True,
        metavar="NAME=NUMBER",
        help="The value of a number that the rules state as a name, such as heads=32. Repeatable.",
    )(run)
    return click.option(
        "--rules",
        multiple=True,
        metavar="FILE|SET",
        help="Rules that describe the stored tensors (docs/rules.md): a TOML file, or a set that bcp contains. "
        "Repeatable; all rules apply.",
    )(run)


def _variable(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isascii() or not number.isdecimal():
        raise click.UsageError(f"--define must be NAME=NUMBER, not {text!r}")
    return name, int(number)
