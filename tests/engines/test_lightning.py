"""The strategies for Lightning: a training is killed, resumes, and equals an uninterrupted one."""

from __future__ import annotations

import logging
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

pytest.importorskip("lightning")

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_OVERRIDDEN = (
    "lightning_module_state_dict",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "optimizer_state",
    "remove_checkpoint",
    "restore_checkpoint_after_setup",
    "save_checkpoint",
    "teardown",
    "training_step",
)
"""The methods of ``Strategy`` that the library overrides."""
_USED = ("_data_fetcher",)
"""The attributes of ``fit_loop`` that it uses; if one is missing, a save fails."""


def _train(rank: int, world_size: int, root: Path, kind: str, arguments: dict[str, Any]) -> Any:
    from lightning_training import train  # it takes seconds, which only the ranks need

    return train(rank, world_size, root, kind, **arguments)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _alone(pool: RankPool, root: Path, kind: str = "single", **arguments: Any) -> Any:
    return pool.run(_train, root, kind, arguments, world_size=1)[0]


def _assert_continues(whole: Any, resumed: Any, step: int) -> None:
    for name in ("losses", "rates"):
        before, after = getattr(whole, name), getattr(resumed, name)
        assert after == {number: one for number, one in before.items() if number > step}
    assert resumed.sums == whole.sums


def test_a_killed_training_resumes_bit_equal(pool: RankPool, tmp_path: Path) -> None:
    whole = _alone(pool, tmp_path / "whole", steps=16)
    killed = {"steps": 16, "killed_in_save": 6}
    pool.run(_train, tmp_path / "killed", "single", killed, world_size=1, expect_death={0: signal.SIGKILL})
    step = bcp.latest(tmp_path / "killed").step
    assert step in (3, 6)
    _assert_continues(whole, _alone(pool, tmp_path / "killed", steps=16), step)


@pytest.mark.parametrize("kind", ["ddp", "model-parallel"])
def test_two_ranks_die_in_a_save_and_resume(pool: RankPool, tmp_path: Path, kind: str) -> None:
    whole = pool.run(_train, tmp_path / "whole", kind, {})
    with pytest.raises(RanksFailed, match="rank 1"):
        pool.run(_train, tmp_path / "killed", kind, {"killed_in_save": 6})
    assert bcp.latest(tmp_path / "killed").step == 3
    resumed = pool.run(_train, tmp_path / "killed", kind, {})
    for before, after in zip(whole, resumed, strict=True):
        _assert_continues(before, after, 3)
    with pytest.raises(RanksFailed, match="MismatchError"):
        _alone(pool, tmp_path / "killed", steps=12)
    continued = _alone(pool, tmp_path / "killed", steps=12, checkpoints={"dataloader_on_resize": "skip"})
    assert continued.losses.keys() == {10, 11, 12}


@pytest.mark.s3
def test_a_store_with_a_tier(pool: RankPool, tmp_path: Path, s3: dict[str, Any], bucket: str) -> None:
    root, tier = f"s3://{bucket}/run", bcp.Tier(tmp_path / "tier")
    given = {"steps": 9, "save_top_k": 1, "monitor": "step", "mode": "max"}
    stored = {**given, "checkpoints": {"tier": tier, "storage_options": s3}}
    whole = _alone(pool, tmp_path / "whole", **given)
    pool.run(_train, root, "single", {**stored, "killed_in_save": 6}, world_size=1, expect_death={0: signal.SIGKILL})
    step = bcp.latest(bcp.Location(root, tier=tier, storage_options=s3)).step
    assert step in (3, 6)
    _assert_continues(whole, _alone(pool, root, **stored), step)
    names = [one.rstrip("/") for one in bcp.Location(root, storage_options=s3).open().list_children("")]
    assert [bcp.open(f"{root}/{name}", storage_options=s3).step for name in names] == [9]
    assert [one.parent.name for one in (tmp_path / "tier").rglob("manifest.msgpack")] == names


def test_model_checkpoint_decides_what_stays(pool: RankPool, tmp_path: Path) -> None:
    best = {"monitor": "loss", "save_top_k": 2, "save_last": "link", "every_n_train_steps": 1, "filename": "{step}"}
    trained = _alone(pool, tmp_path, steps=9, **best)
    names = {one.name for one in tmp_path.iterdir() if not one.is_symlink()}
    lowest = sorted(trained.losses, key=lambda step: trained.losses[step])[:2]
    assert names == {f"step={step}.ckpt" for step in lowest} == {*trained.callback}
    assert trained.best == f"step={lowest[0]}.ckpt"
    assert all(bcp.open(tmp_path / name).verify().ok for name in names)
    again = _alone(pool, tmp_path, steps=9, resume=str(tmp_path / "last.ckpt"), **best)
    assert again.callback == trained.callback, "its own state is restored"


def test_a_checkpoint_stays_if_the_save_after_it_fails(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="fails here"):
        _alone(pool, tmp_path, steps=9, save_top_k=1, fails_at=6)
    assert [one.step for one in map(bcp.open, tmp_path.iterdir())] == [3]


def test_the_model_alone(pool: RankPool, tmp_path: Path) -> None:
    _alone(
        pool, tmp_path, steps=3, save_weights_only=True, checkpoints={"save": {"codec": "zstd"}, "async_save": False}
    )
    found = bcp.latest(tmp_path)
    assert {*found.sections} == {"model", "lightning"}
    assert "zstd" in found.manifest.files.codec
    with pytest.raises(RanksFailed, match="checkpoint contains only the model"):
        _alone(pool, tmp_path, steps=6)


def test_what_lightning_wrote(pool: RankPool, tmp_path: Path) -> None:
    native = _alone(pool, tmp_path / "native", "native", steps=6)
    file = tmp_path / "native" / native.best
    resumed = _alone(pool, tmp_path / "native", steps=9, resume=str(file), save_top_k=1)
    assert resumed.losses.keys() == {7, 8, 9}
    assert {one.is_file() for one in (tmp_path / "native").iterdir()} == {True, False}
    folder = tmp_path / "folder"
    native = pool.run(_train, folder, "native-parallel", {"steps": 6})[0]
    resumed = pool.run(_train, folder, "model-parallel", {"steps": 6, "resume": str(folder / native.best)})[0]
    assert resumed.sums == native.sums


def test_the_fallback(pool: RankPool, tmp_path: Path) -> None:
    whole = _alone(pool, tmp_path / "whole", "native", steps=6, has_io=True, save_top_k=1)
    assert [one.step for one in map(bcp.open, (tmp_path / "whole").iterdir())] == [6]
    assert _alone(pool, tmp_path / "whole", "native", steps=6, has_io=True).sums == whole.sums
    assert _alone(pool, tmp_path / "whole", "native", steps=9, has_io=True).losses.keys() == {7, 8, 9}
    both = pool.run(_train, tmp_path / "both", "native", {"steps": 6, "has_io": True})
    assert {one.step for one in map(bcp.open, (tmp_path / "both").iterdir())} == {3, 6}
    assert pool.run(_train, tmp_path / "both", "native", {"steps": 6, "has_io": True}) == [
        replace(one, losses={}, rates={}) for one in both
    ]


def _train_on_a_stream(rank: int, world_size: int, root: Path) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytecheckpoint.integrations.lightning")
    logger.addHandler(handler)
    try:
        _train(rank, world_size, root, "single", {"steps": 3, "is_stream": True})
    finally:
        logger.removeHandler(handler)
    return messages


def test_a_batch_that_was_read_ahead_is_reported(pool: RankPool, tmp_path: Path) -> None:
    [[message]] = pool.run(_train_on_a_stream, tmp_path, world_size=1)
    assert "read a batch ahead" in message


def _names_gone(rank: int, world_size: int) -> list[str]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy

    from bytecheckpoint.integrations.lightning import BcpStrategyMixin

    own = {name for name in vars(BcpStrategyMixin) if not name.startswith("_")}
    assert own <= {*_OVERRIDDEN} | {"model", "optimizers", "lightning_module", "is_global_zero", "broadcast"}
    warnings.simplefilter("ignore")  # of the machine's job scheduler
    loop = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    return [name for name in _OVERRIDDEN if not hasattr(Strategy, name)] + [n for n in _USED if not hasattr(loop, n)]


def test_the_release_has_what_is_overridden(pool: RankPool) -> None:
    assert pool.run(_names_gone, world_size=1) == [[]]


def _run_example(rank: int, world_size: int, *arguments: str) -> None:
    script = Path(__file__).parents[2] / "examples" / "train_lightning.py"
    warnings.simplefilter("ignore")
    with mock.patch.object(sys, "argv", [script.name, *arguments]):
        runpy.run_path(str(script), run_name="__main__")


def test_the_example(pool: RankPool, tmp_path: Path) -> None:
    for steps in (6, 12):
        pool.run(_run_example, str(tmp_path), str(steps), world_size=1)
    assert {one.step for one in map(bcp.open, tmp_path.iterdir())} == {5, 10}
