"""What a data loader's state accepts and refuses, and what the report of a load says about it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sorted_arguments import loading
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import bytecheckpoint as bcp
from bytecheckpoint.data import ElasticDataset, ElasticSampler
from bytecheckpoint.errors import MismatchError, StateError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


class Counter:
    """The smallest loader: yields the numbers of its rank."""

    def __init__(self, left: Sequence[int] = (), **more: Any) -> None:
        self.left, self.more = list(left), more

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left), **self.more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = list(state["left"])


class Deal:
    """``merge`` and ``split`` outside of a loader."""

    def merge(self, states: Sequence[Mapping[str, Any]]) -> list[int]:
        return sorted(number for state in states for number in state["left"])

    def split(self, whole: list[int], rank: int, world_size: int) -> dict[str, Any]:
        return {"left": whole[rank::world_size]}


def _stateful_loader(dataset: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital.*", UserWarning)
        return module.StatefulDataLoader(dataset, **options)


def _save(rank: int, world_size: int, path: str, model_parallel: int, diverged: bool) -> None:
    dp_rank = rank // model_parallel
    loader = Counter([10 * dp_rank, 10 * dp_rank + 1], seed=rank if diverged else 0)
    state = bcp.DataLoaderState(loader, dp_rank=dp_rank, dp_size=world_size // model_parallel)
    bcp.save(
        path, {"extra_state": {"step": 1}, "dataloader": state}, options=bcp.SaveOptions(deadline_s=time_limit(30))
    )


def _load(
    rank: int,
    world_size: int,
    path: str,
    policy: Any,
    model_parallel: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Any:
    loader = Counter([-1], seed=0)
    state = {
        "extra_state": {"step": 0},
        "dataloader": bcp.DataLoaderState(
            loader, policy, dp_rank=rank // model_parallel, dp_size=world_size // model_parallel
        ),
    }
    try:
        report = bcp.load(path, state, **loading(deadline_s=time_limit(30), **(options or {})))
    except (MismatchError, StateError) as error:
        assert loader.left == [-1]
        assert state["extra_state"] == {"step": 0}
        return str(error)
    assert not report.missing
    assert not report.unexpected
    return loader.left, report.resumed


def test_each_policy_at_another_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path), 1, False, world_size=3)
    for message in pool.run(_load, str(tmp_path), "error", world_size=2):
        assert "dataloader was saved by 3 data-parallel rank(s), loaded by 2" in message
        assert "on_resize=...) with 'skip'" in message
        assert "merge(states) and split(whole, rank, world_size)" in message
    assert (
        pool.run(_load, str(tmp_path), "skip", world_size=2)
        == [([-1], {"dataloader": ("unchanged", "saved by 3 data-parallel rank(s), loaded by 2")})] * 2
    )
    divided = {"dataloader": ("divided", "saved by 3 data-parallel rank(s), loaded by 2")}
    assert pool.run(_load, str(tmp_path), Deal(), world_size=2) == [([0, 10, 20], divided), ([1, 11, 21], divided)]
    for policy in ("error", "skip", Deal()):
        for rank, found in enumerate(pool.run(_load, str(tmp_path), policy, world_size=3)):
            continued = {"dataloader": ("continued", f"data-parallel rank {rank} of 3")}
            assert found == ([10 * rank, 10 * rank + 1], continued)


def test_replicas_that_differ_are_not_loaded_by_others(pool: RankPool, tmp_path: Path) -> None:
    """Two ranks of one data-parallel rank had loaders with different seeds."""
    pool.run(_save, str(tmp_path), 2, True, world_size=4)
    assert pool.run(_load, str(tmp_path), "error", 2, world_size=4)[2][0] == [10, 11]
    messages = [
        *pool.run(_load, str(tmp_path), "error", world_size=2),
        *pool.run(_load, str(tmp_path), Deal(), world_size=4),
        *pool.run(_load, str(tmp_path), Deal(), 1, {"per_rank": "lowest"}, world_size=3),
    ]
    for message in messages:
        assert "is not complete" in message
        assert "saved different states" in message


def _save_without_loader(rank: int, world_size: int, path: str) -> None:
    """A pipeline, whose second stage reads no data."""
    state = bcp.DataLoaderState(Counter([5]) if rank == 0 else None, dp_rank=0, dp_size=1)
    bcp.save(path, {"dataloader": state}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    loader = Counter()
    state = bcp.DataLoaderState(loader if rank == 0 else None, dp_rank=0, dp_size=1)
    report = bcp.load(path, {"dataloader": state}, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    assert loader.left == ([5] if rank == 0 else [])
    assert bool(report.resumed) == (rank == 0)


def test_ranks_that_read_no_data(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_without_loader, str(tmp_path), world_size=2)


def _groups(rank: int, world_size: int) -> list[Any]:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = Counter()
    found: list[Any] = [bcp.DataLoaderState(loader, group=group) for group in (mesh["dp"], mesh.get_group("dp"), None)]
    other = torch.distributed.new_group([0])
    errors = []
    for group in (mesh, other):
        try:
            bcp.DataLoaderState(loader, group=group)
        except UsageError as error:
            errors.append(str(error))
    return [[(one.dp_rank, one.dp_size) for one in found], errors]


def test_the_data_parallel_ranks_of_a_group(pool: RankPool) -> None:
    results = pool.run(_groups, world_size=4)
    assert [places for places, _ in results] == [[(rank // 2, 2), (rank // 2, 2), (rank, 4)] for rank in range(4)]
    assert ["2 dimensions" in results[0][1][0], len(results[0][1])] == [True, 1]
    assert "does not belong to group" in results[1][1][1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bcp.DataLoaderState([1, 2]), "list has no state_dict"),
        (lambda: bcp.DataLoaderState(DataLoader([1])), "use torchdata.stateful_dataloader.StatefulDataLoader"),
        (lambda: bcp.DataLoaderState(Counter(), "lowest"), "on_resize='lowest' is no policy"),
        (lambda: bcp.DataLoaderState(Counter(), Deal), "on_resize=<class .*Deal'> is no policy"),
        (
            lambda: bcp.DataLoaderState(Counter(), Counter()),
            "on_resize=Counter is no policy and has no",
        ),
        (lambda: bcp.DataLoaderState(Counter(), dp_rank=1), "dp_rank and dp_size together"),
        (lambda: bcp.DataLoaderState(Counter(), dp_rank=2, dp_size=2), "from 0 to dp_size - 1"),
        (lambda: bcp.DataLoaderState(Counter(), group=object(), dp_rank=0, dp_size=1), "either group, or"),
        (
            lambda: bcp.DataLoaderState(Counter(), ElasticSampler(9, rank=1, world_size=2)),
            "made for rank 1 of 2, but the loader's data-parallel rank is 0 of 1",
        ),
    ],
)
def test_wrong_use_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_a_loader_of_accelerate_is_refused() -> None:
    kind = type("DataLoaderShard", (Counter,), {"__module__": "accelerate.data_loader"})
    with pytest.raises(UsageError, match=r"accelerate's DataLoaderShard .*3938"):
        bcp.DataLoaderState(kind())


def test_a_loader_saved_without_its_state_object(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"dataloader": Counter([1])})
    with pytest.raises(MismatchError, match="was not saved as a DataLoaderState; load it into the loader itself"):
        bcp.load(tmp_path, {"dataloader": bcp.DataLoaderState(Counter())})
    bcp.save(tmp_path, {"extra_state": {"step": 1}})
    with pytest.raises(MismatchError, match="dataloader"):
        bcp.load(tmp_path, {"dataloader": bcp.DataLoaderState(Counter())}, strict=True)
    bcp.save(tmp_path, {"extra_state": {"step": 1}})
    with pytest.raises(MismatchError, match=r"extra_state\.loader\.dp_size"):
        bcp.load(tmp_path, {"extra_state": {"step": 0, "loader": bcp.DataLoaderState(Counter())}})


class Broken(Deal):
    def merge(self, states: Sequence[Mapping[str, Any]]) -> list[int]:
        raise KeyError("left")


def test_an_error_of_merge_names_the_loader(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"dataloader": bcp.DataLoaderState(Counter([1]))})
    state = {"dataloader": bcp.DataLoaderState(Counter(), Broken(), dp_rank=0, dp_size=2)}
    with pytest.raises(StateError, match=r"^dataloader \(.*loaded by 2\): merge or split of Broken raised KeyError"):
        bcp.load(tmp_path, state)


def test_state_dicts_of_all_ranks_load_without_a_checkpoint() -> None:
    saved = [bcp.DataLoaderState(Counter([rank]), dp_rank=rank, dp_size=2).state_dict() for rank in range(2)]
    union = {"dp_size": 2, "ranks": {**saved[0]["ranks"], **saved[1]["ranks"]}}
    loader = Counter()
    state = bcp.DataLoaderState(loader, Deal())
    state.load_state_dict(union)
    assert loader.left == [0, 1]
    assert state.resumed == {"": ("divided", "saved by 2 data-parallel rank(s), loaded by 1")}


def _divide(saving: Any, loading: Any, part: Any, batches: int = 1) -> None:
    """Take batches of a loader, and load its state as two ranks with another one."""
    iterator = iter(saving)
    for _ in range(batches):
        next(iterator)
    state = copy.deepcopy(bcp.DataLoaderState(saving).state_dict())
    bcp.DataLoaderState(loading, part, dp_rank=0, dp_size=2).load_state_dict(state)


class Remembering(torch.utils.data.Dataset[int]):
    """A map-style dataset with a state."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_loaders_that_may_hold_samples_back_are_refused() -> None:
    half = ElasticSampler(8, rank=0, world_size=2)
    whole = ElasticSampler(8)
    with pytest.raises(StateError, match="the dataset has a state, which cannot be divided"):
        _divide(_stateful_loader(Remembering(), sampler=whole), _stateful_loader(Remembering(), sampler=half), half)
    with pytest.raises(StateError, match="not the state of an ElasticSampler"):
        _divide(_stateful_loader(range(8), shuffle=True), _stateful_loader(range(8), sampler=half), half)
    loader = _stateful_loader(range(8), batch_sampler=torch.utils.data.BatchSampler(half, 2, False))
    with pytest.raises(UsageError, match=r"neither the sampler nor the dataset .*not inside of a batch_sampler"):
        bcp.DataLoaderState(loader, half, dp_rank=0, dp_size=2)
    with pytest.raises(UsageError, match="position in a map-style dataset is in the sampler"):
        bcp.DataLoaderState(_stateful_loader(dataset := _Divisible(), sampler=half), dataset)
    plain = _stateful_loader(range(8), sampler=DistributedSampler(range(8), 1, 0))
    with pytest.raises(MismatchError, match="the order of DistributedSampler depends on the number of ranks"):
        _divide(plain, plain, "error")


class _Divisible(Remembering, Deal):  # type: ignore[misc]
    pass


def test_a_snapshot_that_is_too_old_is_refused() -> None:
    state = {"_snapshot": {}, "_steps_since_snapshot": 1, "_iterator_finished": False}
    half = ElasticSampler(8, rank=0, world_size=2)
    loader = bcp.DataLoaderState(_stateful_loader(range(8), sampler=half), half, dp_rank=0, dp_size=2)
    with pytest.raises(StateError, match="snapshot_every_n_steps=1"):
        loader.load_state_dict({"dp_size": 1, "ranks": {"0": {"leaves": 3, "state": state}}})


def test_nodes_that_hold_samples_back_are_refused() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def loader(sampler: ElasticSampler, wrap: Callable[[Any], Any]) -> Any:
        return nodes.Loader(wrap(nodes.SamplerWrapper(sampler)), restart_on_stop_iteration=False)

    for wrap, text in [
        (lambda node: nodes.Unbatcher(nodes.Batcher(node, 2)), r"stores \['batch_idx', 'source'\]"),
        (lambda node: nodes.Prefetcher(node, 2, snapshot_frequency=4), "snapshot_frequency=1"),
    ]:
        half = ElasticSampler(8, rank=0, world_size=2)
        with pytest.raises(StateError, match=text):
            _divide(loader(ElasticSampler(8), wrap), loader(half, wrap), half)


def test_nodes_that_are_loaded_at_the_end_of_an_epoch() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    with pytest.raises(UsageError, match="restart_on_stop_iteration=False"):
        bcp.DataLoaderState(nodes.Loader(nodes.IterableWrapper(range(3))))

    def make() -> tuple[Any, bcp.DataLoaderState]:
        node = nodes.Batcher(nodes.SamplerWrapper(ElasticSampler(9), initial_epoch=2), 2, drop_last=False)
        loader = nodes.Loader(node, restart_on_stop_iteration=False)
        return loader, bcp.DataLoaderState(loader)

    first, state = make()
    epochs = [list(first), list(first)]
    assert epochs[0] != epochs[1]
    first, state = make()
    assert list(first) == epochs[0]
    second, resumed = make()
    resumed.load_state_dict(state.state_dict())
    assert list(second) == []
    iterator = iter(second)
    seen = [next(iterator), next(iterator)]
    third, again = make()
    again.load_state_dict(resumed.state_dict())
    assert seen + list(third) == epochs[1]


@pytest.mark.parametrize("iterable", [False, True])
def test_another_number_of_workers_is_like_another_number_of_ranks(tmp_path: Path, iterable: bool) -> None:
    def make(workers: int) -> tuple[Any, Any]:
        part = ElasticDataset([range(5), range(5, 8)]) if iterable else ElasticSampler(8)
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        if iterable:
            return _stateful_loader(part, batch_size=2, **options), part
        return _stateful_loader(range(8), batch_size=2, sampler=part, **options), part

    saving, part = make(0)
    seen = next(iter(saving)).tolist()
    bcp.save(tmp_path, {"dataloader": bcp.DataLoaderState(saving, part)})
    loading, part = make(1)
    with pytest.raises(MismatchError, match=r"saved with 0 worker\(s\), loaded with 1"):
        bcp.load(tmp_path, {"dataloader": bcp.DataLoaderState(loading)})
    assert bcp.load(tmp_path, {"dataloader": bcp.DataLoaderState(loading, part)}).resumed == {
        "dataloader": ("divided", "saved with 0 worker(s), loaded with 1"),
        "dataloader.workers": ("reseeded", "the random generators of the workers begin with new seeds"),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)
        assert sorted([*seen, *(number for batch in loading for number in batch.tolist())]) == list(range(8))
    assert (
        bcp.load(tmp_path, {"dataloader": bcp.DataLoaderState(loading, "skip")}).resumed["dataloader"][0] == "unchanged"
    )
