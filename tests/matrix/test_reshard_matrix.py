"""Load every saved layout into every other one, model and optimizer, and compare bit by bit."""

from __future__ import annotations

from pathlib import Path

import layouts
import pytest
import torch
from layouts import LAYOUTS, build, differences
from sampling import is_full, sample
from titan_layouts import TITAN_LAYOUTS, build_titan, gathered

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(3, of=__name__)


def _save(rank: int, world_size: int, name: str, path: str) -> None:
    bcp.save(path, build(name, seed=1, steps=2).state, step=2).result()


def _load_all(rank: int, world_size: int, name: str, paths: dict[str, str]) -> dict[str, list[str]]:
    """Load every saved layout into this one; return the faults by saved layout."""
    expected = build(name, seed=1, steps=2)
    further = build(name, seed=1, steps=3)
    wrong: dict[str, list[str]] = {}
    for number, (saved, path) in enumerate(paths.items()):
        # Alternate a fresh optimizer with one whose state must be overwritten.
        built = build(name, seed=2, steps=number % 2)
        report = bcp.load(path, built.state)
        bad = differences(built, expected)
        if report.missing or report.unexpected or report.cast:
            bad.append(str(report))
        if not bad and number % 3 == 0:
            built.step()
            bad = [f"after one more step: {name}" for name in differences(built, further)]
        if bad:
            wrong[saved] = bad
    return wrong


NAMES = sample(list(LAYOUTS), 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pools: dict[int, RankPool]) -> dict[str, str]:
    """Save a checkpoint of each layout."""
    root: Path = tmp_path_factory.mktemp("matrix")
    paths = {}
    for name in NAMES:
        paths[name] = str(root / name)
        pools[LAYOUTS[name].world_size].run(_save, name, paths[name], timeout_s=120)
    return paths


@pytest.fixture(scope="module")
def pools():
    """Provide ranks by world size, all from one pool of eight."""
    with RankPool(8) as pool:

        class Sized:
            def __init__(self, world_size: int) -> None:
                self.world_size = world_size

            def run(self, fn, *args, timeout_s):
                return pool.run(fn, *args, world_size=self.world_size, timeout_s=timeout_s)

        yield {n: Sized(n) for n in (1, 2, 3, 4, 8)}


@pytest.mark.parametrize("target", NAMES)
def test_every_layout_loads_bit_equal_from_every_other(target: str, saved: dict[str, str], pools) -> None:
    results = pools[LAYOUTS[target].world_size].run(_load_all, target, saved, timeout_s=280)
    wrong = {f"{source} on rank {rank}": bad for rank, result in enumerate(results) for source, bad in result.items()}
    assert not wrong


def test_the_reference_itself() -> None:
    """Seeds differ, and the values of the plain layout follow the formula."""
    one, two = build("plain-1", seed=1, steps=0), build("plain-1", seed=2, steps=0)
    assert differences(one, two)
    assert torch.equal(
        one.model.emb.weight[0, :2],
        torch.sin(torch.tensor([0.0, 0.7], dtype=torch.float64) + _number(one) + 10).float(),
    )


def _number(built: layouts.Built) -> int:
    names = sorted([n for n, _ in [*built.model.named_parameters(), *built.model.named_buffers()]])
    return names.index("emb.weight")


def _save_titan(rank: int, world_size: int, name: str, path: str) -> list[float]:
    """Train two steps and save; store the gathered tensors next to the checkpoint; return the losses of three more."""
    built = build_titan(name, seed=1)
    built.train(0, 2)
    bcp.save(path, built.state).result()
    torch.save(gathered(built), f"{path}.rank{rank}")
    return built.train(2, 3)


def _load_titan(
    rank: int, world_size: int, name: str, saved: dict[str, tuple[str, list[float]]]
) -> dict[str, list[str]]:
    """Load every saved checkpoint into this layout; return the faults by saved layout."""
    wrong: dict[str, list[str]] = {}
    for number, (source, (path, losses)) in enumerate(saved.items()):
        expected: dict[str, torch.Tensor] = {}
        for file in Path(path).parent.glob(f"{Path(path).name}.rank*"):
            for fqn, tensor in torch.load(file).items():
                assert fqn not in expected or torch.equal(tensor, expected[fqn]), fqn
                expected[fqn] = tensor
        built = build_titan(name, seed=2)
        built.train(7, number % 2)  # a fresh optimizer, or one whose state must be overwritten
        report = bcp.load(path, built.state)
        found = gathered(built)
        bad = [fqn for fqn, tensor in found.items() if not _same(tensor, expected.get(fqn))]
        if report.missing or report.unexpected or report.cast:
            bad.append(str(report))
        further = built.train(2, 3)
        if not torch.allclose(torch.tensor(further), torch.tensor(losses), rtol=1e-9, atol=0):
            bad.append(f"losses {further} instead of {losses}")
        if bad:
            wrong[source] = bad
    return wrong


def _same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


TITAN_NAMES = sample(list(TITAN_LAYOUTS), 2)


@pytest.fixture(scope="module")
def titans(tmp_path_factory: pytest.TempPathFactory, pools) -> dict[str, tuple[str, list[float]]]:
    """Save every layout of torchtitan; return the path and the next losses of each."""
    root: Path = tmp_path_factory.mktemp("titan")
    found = {}
    for name in TITAN_NAMES:
        losses = pools[TITAN_LAYOUTS[name].world_size].run(_save_titan, name, str(root / name), timeout_s=120)
        assert all(other == losses[0] for other in losses)
        found[name] = (str(root / name), losses[0])
    return found


@pytest.mark.parametrize("target", TITAN_NAMES)
@pytest.mark.sampled(1)
def test_experts_sharded_like_torchtitan_load_from_every_other_layout(target, titans, pools) -> None:
    position = TITAN_NAMES.index(target)
    names = TITAN_NAMES if is_full() else [TITAN_NAMES[position - shift] for shift in (1, 2)]
    saved = {name: titans[name] for name in names}
    results = pools[TITAN_LAYOUTS[target].world_size].run(_load_titan, target, saved, timeout_s=280)
    wrong = {f"{source} on rank {rank}": bad for rank, result in enumerate(results) for source, bad in result.items()}
    assert not wrong
