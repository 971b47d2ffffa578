"""Saves of a state that was saved before are not planned again; of any other state, always."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from message_watch import counted_messages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

import bytecheckpoint as bcp
from bytecheckpoint.saving.agreement import PlanCache
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(6, of=__name__)

State = dict[str, Any]

FEW_BYTES = 64  # for each rank, before staging, when nothing is planned


def _tree(rank: int, value: float = 1.0) -> State:
    """Shared tensors and values, some that differ between ranks, and some that are each rank's own by nature."""
    return {
        "model": {"w": torch.full((4, 3), value), "b": torch.arange(5.0) + value, "none": torch.zeros(0, 2)},
        "extra_state": {
            "step": int(value),
            "name": "x",
            "drifted": {"value": rank, "tensor": torch.full((2,), rank)},
            "own": bcp.PerRank({"seed": torch.full((3,), rank), "count": 7}),
        },
    }


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    return bcp.PerRank(_blank(value.value)) if isinstance(value, bcp.PerRank) else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bcp.PerRank):
        return _same(a.value, b.value)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _save(saver: bcp.Checkpointer, world_size: int, path: str, state: State) -> bool:
    """Save, load what was saved and compare; whether an earlier plan was used, with few enough bytes."""
    with counted_messages() as watch:
        saver.save(path, state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    if not watch.has_new_plan:
        messages = world_size - 1 if "agree" in watch.received else 1
        assert watch.before_staging <= FEW_BYTES * messages, (watch.sent, watch.received)
    found = _blank(state)
    saver.load(path, found, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    assert _same(found, state), (found, state)
    return not watch.has_new_plan


def _again(rank: int, world_size: int, path: str) -> list[bool]:
    with bcp.Checkpointer() as saver:
        return [_save(saver, world_size, path, _tree(rank, float(value))) for value in range(4)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_the_first_save_is_planned(rank_pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Steps, weights and values change all the time; that takes no plan. Every save is a new attempt."""
    results = rank_pool.run(_again, str(tmp_path), world_size=world_size)
    assert results == [[False, True, True, True]] * world_size
    assert bcp.open(tmp_path).verify().ok


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)


def _trained() -> State:
    model = fully_shard(_Model(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": bcp.RNGState()}


def _train(rank: int, world_size: int, path: str) -> tuple[list[int], list[dict[str, int]]]:
    state = _trained()
    exchanged, sent = [], []
    with bcp.Checkpointer() as saver:
        for step in range(3):
            state["optimizer"].step()
            with counted_messages() as watch:
                saver.save(
                    f"{path}/{step}",
                    state,
                    step=step,
                    metadata={"tokens": step},
                    options=bcp.SaveOptions(deadline_s=time_limit(30)),
                )
            exchanged.append(watch.before_staging)
            sent.append(watch.sent)
    return exchanged, sent


def test_a_training_job_exchanges_few_bytes(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_train, str(tmp_path), world_size=2)
    for (first, *later), _ in results:
        assert first > FEW_BYTES
        assert all(0 < count <= FEW_BYTES for count in later), later
    # Both ranks hold the same but for their places in the mesh, so rank 1's plan need not travel even once.
    _, sent = results[1]
    assert sent[0].keys() == {"agree", "summary", "written"}
    assert sent[0]["summary"] < 400
    steps = [bcp.open(tmp_path / str(step))["optimizer.state.up.weight.step"][...].item() for step in range(3)]
    assert steps == [2.0, 3.0, 4.0]


class _Holder(dict[str, Any]):
    """The same tensors under the same names, from an object with a ``state_dict``."""

    def __init__(self, tensors: State) -> None:
        super().__init__(tensors)

    def state_dict(self) -> State:
        return dict(self)

    def load_state_dict(self, tensors: State) -> None:
        assert tensors.keys() == self.keys()


Change = Callable[[int, State], None]


def _put(section: str, name: str, value: Any) -> Change:
    return lambda rank, state: state[section].__setitem__(name, value)


def _tie(rank: int, state: State) -> None:
    state["model"]["tied"] = state["model"]["b"]


def _distribute(*placements: Any) -> Change:
    def change(rank: int, state: State) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state["model"]["w"] = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, placements)

    return change


def _only_on(which: int, change: Change) -> Change:
    return lambda rank, state: change(rank, state) if rank == which else None


CHANGES: dict[str, Change] = {
    "shape": _put("model", "w", torch.ones(3, 4)),
    "dtype": _put("model", "w", torch.ones(4, 3, dtype=torch.float64)),
    "a tensor more": _put("model", "c", torch.ones(2)),
    "a tensor more on one rank": _only_on(1, _put("model", "c", torch.ones(2))),
    "a tensor less": lambda rank, state: state["model"].pop("b"),
    "a tensor gets elements": _put("model", "none", torch.ones(1, 2)),
    "another name": lambda rank, state: state["model"].update(v=state["model"].pop("w")),
    "another order": lambda rank, state: state["model"].update(w=state["model"].pop("w")),
    "a value more": _put("extra_state", "late", 3),
    "a value more on rank 0": _only_on(0, _put("extra_state", "late", 3)),
    "a value less": lambda rank, state: state["extra_state"].pop("name"),
    "a value becomes a tensor": _put("extra_state", "step", torch.ones(())),
    "a value becomes a rank's own": _put("extra_state", "name", bcp.PerRank("y")),
    "tied names": _tie,
    "a section more": lambda rank, state: state.update(more={"x": 1}),
    "a section less": lambda rank, state: state.pop("extra_state"),
    "another adapter": lambda rank, state: state.update(model=_Holder(state["model"])),
    "sharded": _distribute(ShardPlacement(0)),
    "a value drifts": _only_on(1, _put("extra_state", "name", "y")),
    "a tensor drifts": _only_on(1, _put("model", "w", torch.zeros(4, 3))),
    "values meet": lambda rank, state: state["extra_state"]["drifted"].update(value=5),
    "tensors meet": lambda rank, state: state["extra_state"]["drifted"].update(tensor=torch.ones(2)),
}


def _changed(rank: int, world_size: int, path: str, names: list[str]) -> dict[str, list[bool]]:
    hits: dict[str, list[bool]] = {}
    for what in names:
        changed = _tree(rank)
        CHANGES[what](rank, changed)
        with bcp.Checkpointer() as saver:
            hits[what] = [
                _save(saver, world_size, f"{path}/{what}", state) for state in (_tree(rank), changed, changed)
            ]
    return hits


def test_every_change_is_planned_and_saved_right(rank_pool: RankPool, tmp_path: Path) -> None:
    for results in rank_pool.run(_changed, str(tmp_path), list(CHANGES), world_size=2):
        assert results == {what: [False, False, True] for what in CHANGES}
    assert all(bcp.open(tmp_path / what).verify().ok for what in CHANGES)


def _placed(rank: int, world_size: int, path: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(16.0).reshape(4, 4)
    hits = []
    with bcp.Checkpointer() as saver:
        for placement in (ShardPlacement(0), ShardPlacement(1), Replicate(), ShardPlacement(0)):
            with counted_messages() as watch:
                saver.save(
                    path,
                    {"model": {"w": distribute_tensor(full, mesh, [placement])}},
                    options=bcp.SaveOptions(deadline_s=time_limit(30)),
                )
            hits.append(not watch.has_new_plan)
            assert torch.equal(bcp.open(path)["model.w"][...], full)
    return hits


def test_another_placement_is_planned(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_placed, str(tmp_path), world_size=2) == [[False, False, False, True]] * 2


def test_what_drifts_apart_is_each_ranks_own_and_what_meets_is_shared(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(_changed, str(tmp_path), ["a value drifts", "values meet", "tensors meet"], world_size=2)
    drifted, met, tensors = (bcp.open(tmp_path / what) for what in ("a value drifts", "values meet", "tensors meet"))
    assert [drifted.section_values("extra_state", rank)[("name",)] for rank in range(2)] == ["x", "y"]
    assert met.section_values("extra_state")[("drifted", "value")] == 5
    assert "extra_state.drifted.tensor@1" in set(met)
    assert "extra_state.drifted.tensor" in set(tensors)


def _alternate(rank: int, world_size: int, path: str) -> list[bool]:
    def state(which: str, value: float) -> State:
        shape = {"policy": (4, 3), "critic": (3, 4)}[which]
        return {"model": {"w": torch.full(shape, value)}, "extra_state": {"drifted": rank, "step": int(value)}}

    with bcp.Checkpointer() as saver:
        return [
            _save(saver, world_size, f"{path}/{which}", state(which, float(value)))
            for value in range(3)
            for which in ("policy", "critic")
        ]


def test_two_models_in_turn(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(_alternate, str(tmp_path), world_size=2)
    assert results == [[False, False, True, True, True, True]] * 2


def _swap(rank: int, world_size: int, path: str) -> list[bool]:
    """Rank 1 saves another of two known states than rank 0: both know a plan, and not the same."""
    states = [{"model": {name: torch.full((3,), float(rank))}} for name in "ab"]
    with bcp.Checkpointer() as saver:
        hits = [_save(saver, world_size, path, state) for state in (*states, states[rank], states[rank])]
    return hits


def test_ranks_that_know_different_plans_make_a_new_one(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_swap, str(tmp_path), world_size=2) == [[False, False, False, True]] * 2


def _forget(rank: int, world_size: int, path: str, which: int) -> list[bool]:
    with bcp.Checkpointer() as saver:
        hits = [_save(saver, world_size, path, _tree(rank))]
        if rank == which:
            saver._session.engine.plans.clear()
        return hits + [_save(saver, world_size, path, _tree(rank)) for _ in range(2)]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_has_forgotten(rank_pool: RankPool, tmp_path: Path, which: int) -> None:
    assert rank_pool.run(_forget, str(tmp_path), which, world_size=2) == [[False, False, True]] * 2


_savers: list[bcp.Checkpointer] = []


def _elastic(rank: int, world_size: int, path: str, last: bool) -> bool:
    """One checkpointer for several worlds, as in a job that goes on with the ranks that are left."""
    if not _savers:
        _savers.append(bcp.Checkpointer())
    hit = _save(_savers[0], world_size, path, {"model": {"w": torch.ones(4)}, "extra_state": {"x": 1}})
    if last:
        _savers.pop().close()
    return hit


def test_another_world_is_planned_anew(tmp_path: Path) -> None:
    with RankPool(3) as pool:
        for world_size, hit in ((3, False), (2, False), (3, True), (2, True)):
            results = pool.run(_elastic, str(tmp_path), False, world_size=world_size)
            assert results == [hit] * world_size
        pool.run(_elastic, str(tmp_path), True, world_size=3)


def _fail_between(rank: int, world_size: int, path: str, where: str) -> list[bool]:
    def broken() -> State:
        state = _tree(rank)
        if where == "describe":
            state["extra_state"]["name"] = print if rank == 1 else "x"
        if where == "plan":
            state["model"] = nn.Linear(2 + rank, 2)
        return state

    with bcp.Checkpointer() as saver:
        hits = [_save(saver, world_size, path, _tree(rank))]
        with pytest.raises(bcp.errors.BytecheckpointError):
            saver.save(
                path,
                broken(),
                step=rank if where == "agree" else None,
                options=bcp.SaveOptions(deadline_s=time_limit(30)),
            )
        return [*hits, _save(saver, world_size, path, _tree(rank))]


@pytest.mark.parametrize("where", ["describe", "agree", "plan"])
def test_a_failed_save_between(rank_pool: RankPool, tmp_path: Path, where: str) -> None:
    assert rank_pool.run(_fail_between, str(tmp_path), where, world_size=2) == [[False, True]] * 2


def _disagree(rank: int, world_size: int, path: str, known: bool) -> str:
    with bcp.Checkpointer() as saver:
        if known:
            saver.save(f"{path}/first", _tree(rank), step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
        with pytest.raises(bcp.errors.DisagreementError) as caught:
            saver.save(
                f"{path}/second", _tree(rank), step=10 + rank, options=bcp.SaveOptions(deadline_s=time_limit(30))
            )
    return str(caught.value)


def test_a_known_plan_does_not_hide_that_ranks_disagree(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = (rank_pool.run(_disagree, str(tmp_path), known, world_size=2) for known in (False, True))
    assert first == second
    assert "step: '10' on rank 0; '11' on rank 1" in second[0]


def test_a_world_of_one(tmp_path: Path) -> None:
    with bcp.Checkpointer() as saver:
        assert len(saver._session.engine.plans) == 0
        for value in range(3):
            state = _tree(0, float(value))
            saver.save(tmp_path, state)
            found = _blank(state)
            saver.load(tmp_path, found)
            assert _same(found, state)
        assert len(saver._session.engine.plans) == 1
        saver.save(tmp_path, {"model": {"w": torch.ones(7)}})
        assert len(saver._session.engine.plans) == 2
        assert bcp.open(tmp_path).verify().ok


def test_no_tensor_is_kept_alive(tmp_path: Path) -> None:
    """What is remembered of a state is its structure."""
    import gc
    import weakref

    with bcp.Checkpointer() as saver:
        tensor = torch.ones(5)
        alive = weakref.ref(tensor)
        saver.save(tmp_path, {"model": {"w": tensor}})
        del tensor
        gc.collect()
        assert alive() is None


def test_the_plan_used_longest_ago_makes_room() -> None:
    cache, names = PlanCache(), [bytes([number]) for number in range(9)]
    plans: list[Any] = [object() for _ in names]
    for name, plan in zip(names[:8], plans, strict=False):
        cache.keep(name, plan)
    assert cache.find(names[0]) is plans[0]
    cache.keep(names[8], plans[8])
    assert cache.find(names[1]) is None
    assert [cache.find(name) is not None for name in names].count(True) == 8
    cache.keep(names[0], plans[1])
    assert cache.find(names[0]) is plans[1]
    assert len(cache) == 8
