"""Stop and resume a training run: the losses are those of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import LAYOUTS, Job, fingerprint

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

BEFORE, AFTER = 5, 5


def _uninterrupted(rank: int, world_size: int, layout: str, path: str, options: dict[str, bool | float]) -> tuple:
    """Train ten steps with an asynchronous save in the middle, and return all losses and the final state."""
    job = Job(layout, seed=1, **options)
    losses = [job.step() for _ in range(BEFORE)]
    handle = bcp.save(path, job.state(), step=BEFORE, async_save=True)
    losses += [job.step() for _ in range(AFTER)]
    handle.result(time_limit(60))
    return losses, dict(fingerprint(job))


def _resumed(rank: int, world_size: int, layout: str, path: str, options: dict[str, bool | float]) -> tuple:
    """Train the second half, in processes that start from other values."""
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
    """Run in new processes, without state from earlier calls."""
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
@pytest.mark.sampled(2)
def test_the_same_layout_resumes_bit_equal(
    layout: str, options: dict[str, bool], pool: RankPool, tmp_path: Path
) -> None:
    whole = _run(pool, _uninterrupted, layout, tmp_path / "checkpoint", dropout=0.25, **options)
    rest = _run(pool, _resumed, layout, tmp_path / "checkpoint", dropout=0.25, **options)
    for rank, ((losses, last), (resumed, found)) in enumerate(zip(whole, rest)):
        assert resumed == losses[BEFORE:], f"rank {rank}"
        assert [name for name in last if found[name] != last[name]] == [], f"rank {rank}"
        assert found.keys() == last.keys()


def _mean(results: list[tuple], layout: str) -> list[float]:
    """Return the loss of the global batch."""
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
@pytest.mark.sampled(1)
def test_another_layout_resumes_within_rounding(chain: tuple[str, str, str], pool: RankPool, tmp_path: Path) -> None:
    first, *others = chain
    whole = _mean(_run(pool, _uninterrupted, first, tmp_path / "checkpoint", dropout=0.0), first)
    assert whole[-1] < whole[0] - 0.1, "the model learned nothing, so the test would not detect an error"
    for layout in others:
        rest = _mean(_run(pool, _resumed, layout, tmp_path / "checkpoint", dropout=0.0), layout)
        assert rest == pytest.approx(whole[BEFORE:], rel=1e-4), layout
