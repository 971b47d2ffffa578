"""A run that is stopped and resumed goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import LAYOUTS, Job, fingerprint

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

BEFORE, AFTER = 5, 5


def _uninterrupted(rank: int, world_size: int, layout: str, path: str, options: dict[str, bool | float]) -> tuple:
    """Ten steps; in their middle a checkpoint is taken while training goes on. All losses and the last state."""
    job = Job(layout, seed=1, **options)
    losses = [job.step() for _ in range(BEFORE)]
    handle = bcp.save(path, job.state(), step=BEFORE, async_save=True)
    losses += [job.step() for _ in range(AFTER)]
    handle.result(60)
    return losses, dict(fingerprint(job))


def _resumed(rank: int, world_size: int, layout: str, path: str, options: dict[str, bool | float]) -> tuple:
    """The second half, by processes that start from other values."""
    job = Job(layout, seed=2, **options)
    report = bcp.load(path, job.state())
    assert not report.missing
    assert not report.unexpected
    assert job.data == {"position": report.step}
    return [job.step() for _ in range(AFTER)], dict(fingerprint(job))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _run(pool: RankPool, fn, layout: str, path: Path, **options: bool | float) -> list[tuple]:
    """In processes of their own, which know nothing of any other call."""
    pool.close()
    return pool.run(fn, layout, str(path), options, world_size=LAYOUTS[layout][0], timeout_s=120)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        *((layout, {}) for layout in LAYOUTS),
        ("plain", {"scaler": True, "averaged": True}),
        ("ddp-2", {"scaler": True, "averaged": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "dropout",
)
def test_same_layout_goes_on_bit_by_bit(layout: str, options: dict[str, bool], pool: RankPool, tmp_path: Path) -> None:
    whole = _run(pool, _uninterrupted, layout, tmp_path / "checkpoint", dropout=0.25, **options)
    rest = _run(pool, _resumed, layout, tmp_path / "checkpoint", dropout=0.25, **options)
    for rank, ((losses, last), (resumed, found)) in enumerate(zip(whole, rest)):
        assert resumed == losses[BEFORE:], f"rank {rank}"
        assert [name for name in last if found[name] != last[name]] == [], f"rank {rank}"
        assert found.keys() == last.keys()


def _mean(results: list[tuple], layout: str) -> list[float]:
    """The loss of the global batch."""
    losses = [result[0] for result in results]
    if layout.startswith("pp"):
        return losses[-1]
    return [sum(step) / len(losses) for step in zip(*losses)]


CHAINS = [
    ("fsdp2-4", "tp-2", "plain"),
    ("fsdp1-flat-2", "fsdp2-4", "pp-2"),
    ("ddp-2", "fsdp2-2", "fsdp1-orig-2"),
    ("fsdp2-tp-4", "hsdp-4", "ddp-2"),
    ("pp-2", "fsdp2-tp-4", "fsdp1-flat-2"),
    ("plain", "fsdp1-orig-2", "tp-2"),
]


@pytest.mark.parametrize("chain", CHAINS, ids="->".join)
def test_another_layout_goes_on_within_rounding(chain: tuple[str, str, str], pool: RankPool, tmp_path: Path) -> None:
    first, *others = chain
    whole = _mean(_run(pool, _uninterrupted, first, tmp_path / "checkpoint", dropout=0.0), first)
    assert whole[-1] < whole[0] - 0.1, "nothing was learnt, so nothing would be seen to go wrong"
    for layout in others:
        rest = _mean(_run(pool, _resumed, layout, tmp_path / "checkpoint", dropout=0.0), layout)
        assert rest == pytest.approx(whole[BEFORE:], rel=1e-4), layout
