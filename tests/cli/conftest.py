"""Checkpoints of one process and of four FSDP-2 ranks, and a runner for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import CommandResult, save_one, save_rank
from click.testing import CliRunner

from bytecheckpoint.cli import cli
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="session")
def bcp_command() -> Callable[..., CommandResult]:
    def run(*arguments: object, input: str | None = None) -> CommandResult:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="bcp", input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return CommandResult(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process. Tests must not change it."""
    path = tmp_path_factory.mktemp("cli") / "runs" / "step-5"
    save_one(path)
    return path


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    """A checkpoint of four FSDP-2 ranks. Tests must not change it."""
    path = tmp_path_factory.mktemp("cli") / "step-7"
    rank_pool.run(save_rank, "fsdp2-4", str(path), world_size=4, timeout_s=120)
    return path
