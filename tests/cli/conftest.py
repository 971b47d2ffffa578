"""Checkpoints of one process and of four FSDP-2 ranks, and a runner that takes the command line as a shell would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoints import Ran, save_one, save_rank
from click.testing import CliRunner

from bytecheckpoint.cli import cli
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="session")
def bcp_command() -> Callable[..., Ran]:
    def run(*arguments: object, input: str | None = None) -> Ran:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="bcp", input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by one process. Not to be changed."""
    path = tmp_path_factory.mktemp("cli") / "runs" / "step-5"
    save_one(path)
    return path


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    """Saved by four FSDP-2 ranks. Not to be changed."""
    path = tmp_path_factory.mktemp("cli") / "step-7"
    rank_pool.run(save_rank, "fsdp2-4", str(path), world_size=4, timeout_s=120)
    return path
