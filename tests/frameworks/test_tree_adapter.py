"""Trees and stateful objects: save and load one section in memory, with encoded values."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from bytecheckpoint.errors import (
    MismatchError,
    NameCollisionError,
    StateError,
    UnserializableError,
    UnsupportedTensorError,
    UsageError,
)
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.encoding import encode_value
from bytecheckpoint.format.values.types import Container, path_name
from bytecheckpoint.frameworks.base import Adapter, Context
from bytecheckpoint.frameworks.per_rank import PerRank, choose_rank
from bytecheckpoint.frameworks.registry import find_adapter
from bytecheckpoint.frameworks.rng import RNGState
from bytecheckpoint.frameworks.tree import StatefulAdapter, TreeAdapter
from bytecheckpoint.frameworks.tree_paths import is_stateful
from bytecheckpoint.tensors.shards import Path, SectionSource, StoredSection


@dataclass
class Saved:
    """One rank's part of one section."""

    source: SectionSource
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, bytes] = field(default_factory=dict)


def adapter_of(obj: Any) -> Adapter:
    return StatefulAdapter() if is_stateful(obj) else TreeAdapter()


def save(obj: Any, *, rank: int = 0, world_size: int = 1, section: str = "extra", allow_pickle: bool = False) -> Saved:
    source = adapter_of(obj).capture(
        obj, Context(section, {section: obj}, rank=rank, world_size=world_size, allow_pickle=allow_pickle)
    )
    saved = Saved(source)
    for fqn, meta in source.metas.items():
        saved.tensors[fqn] = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype.name))
    for shard in source.shards:
        saved.tensors[shard.fqn][shard.box.slices()] = shard.tensor.cpu()
    for path, value in source.values.items():
        where = f"{section}.{path_name(path)}"
        saved.values[path] = encode_value(value, where, allow_pickle=allow_pickle)
    return saved


def load(
    saved: Saved | list[Saved], obj: Any, *, rank: int = 0, world_size: int = 1, section: str = "extra"
) -> tuple[Any, list[tuple[str, str]]]:
    """The section after the load, and the faults that a strict load would raise (then nothing is applied)."""
    everyone = saved if isinstance(saved, list) else [saved]
    adapter = adapter_of(obj)
    state = {section: obj}
    context = Context(section, state, rank=rank, world_size=world_size)
    policies = adapter.per_rank_policies(obj)

    def source_rank(path: Path) -> int | None:
        near = [policies[path[:n]] for n in range(len(path), -1, -1) if path[:n] in policies]
        return choose_rank(len(everyone), rank, world_size, near[0] if near else "error")

    values: dict[Path, Any] = {}
    skipped: set[Any] = set()
    for path, raw in everyone[0].values.items():
        chosen = source_rank(path) if path in everyone[0].source.per_rank else 0
        if chosen is None:
            skipped.add(path)
        else:
            values[path] = decode_value(everyone[chosen].values.get(path, raw))
    first = everyone[0].source
    tensors: dict[str, torch.Tensor] = {}
    for fqn in first.metas:
        chosen = source_rank(tuple(fqn.split("."))) if fqn in first.per_rank else 0
        if chosen is None:
            skipped.add(fqn)
        else:
            tensors[fqn] = everyone[chosen].tensors[fqn]
    tensors |= {alias: tensors[name] for alias, name in first.aliases.items()}
    metas = {fqn: first.metas[first.aliases.get(fqn, fqn)] for fqn in tensors}
    target = adapter.target(obj, context, StoredSection(metas, values, first.aliases))

    requested: set[Any] = target.requested_values | set(target.metas)
    stored: set[Any] = set(values) | set(tensors)
    claimed = requested | set(target.aliases) | target.ignorable
    faults = [("missing", str(name)) for name in requested - stored - target.optional - skipped]
    faults += [("unexpected", str(name)) for name in stored - claimed]
    faults += [("shape", fqn) for fqn, meta in target.metas.items() if fqn in metas and metas[fqn].shape != meta.shape]
    if faults:
        return state[section], sorted(faults)
    for shard in target.shards:
        if shard.fqn in tensors:
            shard.tensor.copy_(tensors[shard.fqn][shard.box.slices()])
    target.apply(values)
    return state[section], []


def reload(obj: Any, into: Any) -> Any:
    result, faults = load(save(obj), into)
    assert faults == []
    return result


# ------------------------------------------------------------------------------------------------------------- trees


def test_values_are_replaced_and_tensors_filled_in_place() -> None:
    weight, inner = torch.zeros(2, 3), {"deep": [0]}
    extra = {
        "step": 0,
        "big": 0,
        "ema": {"layer.weight": weight, 3: torch.zeros(())},
        "inner": inner,
        "pair": (0, None),
    }
    saved_weight = torch.arange(6.0).reshape(2, 3)
    result = reload(
        {
            "step": 7,
            "big": 2**300,
            "ema": {"layer.weight": saved_weight, 3: torch.tensor(2.5)},
            "inner": {"deep": [1, 2, (3, float("nan"))]},
            "pair": (1, np.arange(3)),
        },
        extra,
    )
    assert result is extra
    assert extra["ema"]["layer.weight"] is weight
    assert torch.equal(weight, saved_weight)
    assert extra["ema"][3] == 2.5
    assert extra["inner"] is inner
    assert inner["deep"][:2] == [1, 2]
    assert math.isnan(inner["deep"][2][1])
    assert (extra["step"], extra["big"]) == (7, 2**300)
    assert extra["pair"][0] == 1
    assert extra["pair"][1].tolist() == [0, 1, 2]


def test_lists_and_tuples_with_tensors_are_flattened() -> None:
    kept = torch.zeros(2)
    obj = {"history": [kept, {"loss": 0.0}, (torch.zeros(1), "a")]}
    tuple_tensor = obj["history"][2][0]
    source = {"history": [torch.ones(2), {"loss": 1.5}, (torch.tensor([3.0]), "b")]}
    saved = save(source)
    assert sorted(saved.source.metas) == ["history.0", "history.2.0"]
    assert saved.source.values[("history",)] == Container("list", 3)
    result, faults = load(saved, obj)
    assert faults == []
    assert result["history"][0] is kept
    assert kept.tolist() == [1, 1]
    assert result["history"][1] == {"loss": 1.5}
    assert result["history"][2][0] is tuple_tensor
    assert result["history"][2] == (torch.tensor([3.0]), "b")


NASTY: dict[str, Any] = {
    "flat": {"a.b.c": torch.arange(3), "a": 1},
    "nested": {"a": {"b.c": torch.arange(2), "d": {"e": torch.ones(1)}}},
    "int keys": {0: {1: torch.ones(2), "x": 5}, 7: 3},
    "two readings": {"a": {"b.c": torch.zeros(1)}, "a.b": {"d": torch.ones(1)}},
    "lists": {"l": [[torch.ones(1)], (torch.zeros(2), {"k": [1, 2]}), "s"], "t": ({}, torch.ones(0))},
    "ordered": {"o": OrderedDict([("z", torch.ones(1)), ("a", 2)]), "p": OrderedDict(b=1, a=2)},
    "plain": {"e": {}, "n": None, "c": Counter("abca"), "d": deque([1], 3), "k": {(1, 2): 3, None: 4}},
    "digits in names": {"layers": {"0": torch.ones(1), "1": {"2": torch.zeros(1)}}},
    "root scalar names": {"": torch.ones(1), "x": {"": 2}},
    "dtypes": {str(d): torch.zeros(3).to(d) for d in (torch.bfloat16, torch.int8, torch.bool, torch.complex64)},
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("filled", [False, True])
def test_trees_round_trip(name: str, filled: bool) -> None:
    original = NASTY[name]
    into = zeroed(original) if filled else {}
    assert same_tree(reload(original, into), original)


@pytest.mark.parametrize("name", NASTY)
def test_trees_round_trip_into_an_empty_mapping(name: str) -> None:
    original = {"head": 1, "below": NASTY[name]}
    assert same_tree(reload(original, {"head": 0, "below": {}}), original)


def zeroed(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict) and not isinstance(node, Counter):
        return type(node)((k, zeroed(v)) for k, v in node.items())
    if isinstance(node, (list, tuple)):
        return type(node)(zeroed(v) for v in node)
    return 0


def same_tree(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_tree, a, b))
    return bool(a == b)


KEYS = st.sampled_from(["a", "b", "a.b", "0", "x.1", ""]) | st.integers(-1, 2)
LEAVES = st.none() | st.integers() | st.text(max_size=3) | st.integers(0, 3).map(lambda n: torch.arange(float(n)))
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


@given(TREES)
@settings(deadline=None, max_examples=examples(200))
def test_any_tree_is_rebuilt_or_refused_for_colliding_names(tree: Any) -> None:
    try:
        saved = save(tree)
    except NameCollisionError:
        return
    result, faults = load(saved, {})
    assert faults == []
    assert same_tree(result, tree)


def test_empty_lists_get_the_stored_list() -> None:
    assert reload({"h": [{"a": 1}, {"b": 2}]}, {"h": []}) == {"h": [{"a": 1}, {"b": 2}]}
    assert reload({"h": [1, 2, 3]}, {"h": []}) == {"h": [1, 2, 3]}
    with pytest.raises(MismatchError, match=r"extra\.h: stored as a list"):
        load(save({"h": [{"a": 1}]}), {"h": 3})


def test_errors_name_entries_that_do_not_fit() -> None:
    saved = save({"a": 1, "b": torch.ones(2), "c": {"d": 2}})
    target = {"a": 0, "b": torch.zeros(2), "e": 5, "f": torch.zeros(1)}
    _, faults = load(saved, target)
    assert faults == [("missing", "('e',)"), ("missing", "f"), ("unexpected", "('c', 'd')")]
    assert target["a"] == 0
    _, faults = load(saved, {"a": 0, "b": torch.zeros(3), "c": {}})
    assert faults == [("shape", "b")]


def test_a_section_that_is_a_value_or_a_tensor() -> None:
    assert reload(5, 0) == 5
    assert reload((1, "a"), (0, "")) == (1, "a")
    assert reload([1, 2], []) == [1, 2]
    assert reload({}, {}) == {}
    into = torch.zeros(2)
    assert reload(torch.ones(2), into) is into
    assert into.tolist() == [1, 1]
    frozen = MappingProxyType({"extra": 0})
    context = Context("extra", frozen)
    with pytest.raises(StateError, match="a load must replace"):
        TreeAdapter().target(0, context, StoredSection({}, {(): 5}, {}))


def test_name_collisions_and_bad_trees() -> None:
    with pytest.raises(NameCollisionError, match=r"\('a', 'b'\) and \('a.b',\)"):
        save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(UnserializableError, match=r"^extra\.f is a builtins\.function"):
        save({"f": lambda: 1})
    with pytest.raises(UnserializableError, match=r"^extra\.x is a mapping of type collections.UserDict"):
        save({"x": UserDict()})
    with pytest.raises(UnserializableError, match="NaN key"):
        save({"x": {float("nan"): torch.ones(1)}})
    with pytest.raises(UnserializableError, match="tensor inside a plain value"):
        save({"x": {(1, 2): torch.ones(1)}})
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(UnserializableError, match="contains itself"):
        save(loop)
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnserializableError, match="contains itself"):
        save({"x": cycle})
    with pytest.raises(UnsupportedTensorError, match=r"x"):
        save({"x": torch.ones(2).to_sparse()})
    with pytest.raises(UnsupportedTensorError, match="meta device"):
        save({"x": torch.ones(2, device="meta")})
    with pytest.raises(UnserializableError, match="separate section"):
        save({"opt": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])})


def test_meta_tensors_are_replaced_in_their_container() -> None:
    into = {"a": torch.empty(2, device="meta"), "l": [torch.nn.Parameter(torch.empty(1, device="meta"))]}
    result = reload({"a": torch.ones(2), "l": [torch.full((1,), 3.0)]}, into)
    assert result["a"].tolist() == [1, 1]
    assert isinstance(result["l"][0], torch.nn.Parameter)
    assert result["l"][0].item() == 3


def test_tied_tensors_are_stored_once_and_filled_once() -> None:
    shared = torch.ones(3)
    saved = save({"a": shared, "b": shared, "c": shared[:2]})
    assert saved.source.aliases == {"b": "a"}
    assert len(saved.source.shards) == 2
    result, faults = load(saved, {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(2)})
    assert faults == []
    assert result["b"].tolist() == [1, 1, 1]
    tied = torch.zeros(3)
    result, faults = load(save({"a": torch.ones(3), "b": torch.ones(3)}), {"a": tied, "b": tied})
    assert faults == []
    assert tied.tolist() == [1, 1, 1]


def test_awkward_memory() -> None:
    column = torch.zeros(3, 2).t()
    reload({"x": torch.arange(6.0).reshape(2, 3)}, {"x": column})
    assert column.tolist() == [[0, 1, 2], [3, 4, 5]]


# --------------------------------------------------------------------------------------------------------- per rank


def test_plain_tensors_of_trees_carry_digests_when_there_are_more_ranks() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(0), "c": torch.ones((), dtype=torch.bfloat16)}
    digests = save(tensors, world_size=2).source.digests
    assert sorted(digests) == ["a", "b", "c"]
    assert save(tensors).source.digests == {}
    again = save({"a": torch.arange(8.0)[::2] / 2, "b": torch.zeros(0, 1), "c": tensors["c"]}, world_size=2).source
    assert again.digests["a"] == digests["a"]
    assert again.digests["b"] != digests["b"]
    own = save({"a": PerRank(torch.ones(1))}, world_size=2).source
    assert (own.digests, own.per_rank) == ({}, {"a"})


def test_per_rank_includes_tied_names() -> None:
    shared = torch.ones(2)
    source = save({"a": shared, "b": shared}, world_size=2).source
    source.make_per_rank("a")
    assert source.per_rank == {"a", "b"}
    assert source.aliases == {}
    assert sorted(shard.fqn for shard in source.shards) == ["a", "b"]


def test_per_rank_values_and_policies() -> None:
    everyone = [
        save({"p": PerRank({"n": rank, "t": torch.tensor([float(rank)])}), "s": 1}, rank=rank, world_size=3)
        for rank in range(3)
    ]
    assert everyone[0].source.per_rank == {("p",), ("p", "n"), "p.t"}

    def at(rank: int, world: int, policy: Any) -> tuple[Any, Any]:
        into = {"p": PerRank({"n": -1, "t": torch.tensor([-1.0])}, policy), "s": 0}
        result, faults = load(everyone, into, rank=rank, world_size=world)
        assert faults == []
        assert result["s"] == 1
        return result["p"].value["n"], result["p"].value["t"].item()

    for policy in ("error", "lowest", "modulo", "skip"):
        assert at(2, 3, policy) == (2, 2.0)
    assert at(4, 5, "lowest") == (0, 0.0)
    assert at(4, 5, "modulo") == (1, 1.0)
    assert at(1, 2, "modulo") == (1, 1.0)
    assert at(4, 5, "skip") == (-1, -1.0)
    assert choose_rank(3, 1, 2, "error") is None
    with pytest.raises(UsageError, match="the per-rank policy must be"):
        choose_rank(1, 0, 1, "nonsense")
    with pytest.raises(UsageError, match="on_resize"):
        PerRank(1, "reseed")  # type: ignore[arg-type]


def test_policies_are_found_by_path() -> None:
    tree = {"a": PerRank(1, "lowest"), "l": [PerRank(torch.ones(1), "skip"), 2], "x.y": {"rng": RNGState()}, "n": 0}
    assert TreeAdapter().per_rank_policies(tree) == {
        ("a",): "lowest",
        ("l", 0): "skip",
        ("l", "0"): "skip",
        ("x.y", "rng"): "reseed",
        ("x", "y", "rng"): "reseed",
    }
    assert StatefulAdapter().per_rank_policies(RNGState("error")) == {(): "error"}


@pytest.mark.parametrize("nested", [False, True])
def test_rng_state_on_the_same_and_on_another_world(nested: bool) -> None:
    def wrap(state: RNGState) -> Any:
        return {"rng": state} if nested else state

    everyone, drawn = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        everyone.append(save(wrap(RNGState(rank=rank, world_size=2)), rank=rank, world_size=2))
        drawn.append(torch.rand(3))
    assert all(path in everyone[0].source.per_rank for path in everyone[0].values)
    for rank in range(2):
        _, faults = load(everyone, wrap(RNGState(rank=rank, world_size=2)), rank=rank, world_size=2)
        assert faults == []
        assert torch.equal(torch.rand(3), drawn[rank])
    for rank in range(3):
        _, faults = load(everyone, wrap(RNGState(rank=rank, world_size=3)), rank=rank, world_size=3)
        assert faults == []
        drawn.append(torch.rand(3))
    assert len({tuple(d.tolist()) for d in drawn}) == 5


# --------------------------------------------------------------------------------------------------------- stateful


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def sequential(opt: torch.optim.Optimizer) -> Any:
    return lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=3), lrs.CosineAnnealingLR(opt, 10)], milestones=[3]
    )


class Warmup:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda opt: lrs.StepLR(opt, 2),
    "multi step": lambda opt: lrs.MultiStepLR(opt, [2, 5, 5]),
    "cosine": lambda opt: lrs.CosineAnnealingLR(opt, 10),
    "warm restarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 3),
    "one cycle": lambda opt: lrs.OneCycleLR(opt, 0.5, total_steps=20),
    "cyclic": lambda opt: lrs.CyclicLR(opt, 0.1, 0.5, step_size_up=3),
    "sequential": sequential,
    "chained": lambda opt: lrs.ChainedScheduler([lrs.ConstantLR(opt), lrs.ExponentialLR(opt, 0.9)]),
    "plateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=1),
    "lambda": lambda opt: lrs.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "callable": lambda opt: lrs.LambdaLR(opt, Warmup(4)),
    "swa": lambda opt: SWALR(opt, 0.05, anneal_epochs=4),
}


def advance(scheduler: Any, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        opt.step()
        scheduler.step(*([1.0 + step % 2] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        rates.append(opt.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_continue(name: str, nested: bool) -> None:
    opt = optimizer()
    scheduler = SCHEDULERS[name](opt)
    advance(scheduler, opt, 4)
    saved = save({"all": [scheduler, 1]} if nested else scheduler)
    opt_state = copy.deepcopy(opt.state_dict())
    expected = advance(scheduler, opt, 6)

    fresh_opt = optimizer()
    fresh = SCHEDULERS[name](fresh_opt)
    result, faults = load(saved, {"all": [fresh, 0]} if nested else fresh)
    assert faults == []
    if nested:
        assert result["all"][0] is fresh
        assert result["all"][1] == 1
    fresh_opt.load_state_dict(opt_state)
    assert advance(fresh, fresh_opt, 6) == expected


def test_state_dicts_that_cannot_be_stored_are_named() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"pos": 3, "fn": {"hook": lambda: 1}}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(UnserializableError, match=r"^dataloader\.fn\.hook is a builtins\.function"):
        save(Loader(), section="dataloader")

    class Odd(Loader):
        def state_dict(self) -> Any:
            return [1]

    with pytest.raises(UnserializableError, match=r"^extra\.x: state_dict\(\) .*Odd returned a \w+ and not a mapping"):
        save({"x": Odd()})


def test_grad_scaler() -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device="cpu", init_scale=256.0)

    one, other = scaler(), scaler()
    one.update(1024.0) if one._scale is not None else one._lazy_init_scale_growth_tracker(torch.device("cpu"))
    one.update(1024.0)
    reload({"scaler": one}, {"scaler": other})
    assert other.state_dict() == one.state_dict()
    assert other.get_scale() == 1024


class Recorder:
    """A stateful object whose state grows and shrinks."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state
        self.loaded = 0

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state
        self.loaded += 1


def test_states_may_grow_and_shrink() -> None:
    full = {"a": 1, "b": {"t": torch.ones(2), "l": [torch.zeros(1), 3]}, 4: (1, 2)}
    for start in ({}, {"a": 0}, {"gone": 1, "b": {"t": torch.zeros(5)}}):
        recorder = Recorder(start)
        reload({"r": Recorder(full)}, {"r": recorder})
        assert recorder.loaded == 1
        assert same_tree(recorder.state, full)
    recorder = Recorder({"a": 1, "t": torch.ones(1)})
    reload(Recorder({}), recorder)
    assert recorder.state == {}
    _, faults = load(save({"x": 1}), {"x": 0, "r": Recorder({"a": 1, "t": torch.ones(1)})})
    assert faults == [("missing", "('r', 'a')"), ("missing", "r.t")]


def test_a_list_may_grow_while_another_object_is_loaded() -> None:
    class Log(Recorder):
        def load_state_dict(self, state: dict[Any, Any]) -> None:
            events.append({"resumed": 1})

    events = [{"step": 0}]
    reload({"a": Recorder({}), "b": [{"step": 1}]}, {"a": Log({}), "b": events})
    assert events == [{"step": 1}]


def test_tensors_of_a_state_dict_are_passed_to_load_state_dict() -> None:
    live = torch.zeros(2)
    recorder = Recorder({"lr": live})
    reload(Recorder({"lr": torch.ones(2)}), recorder)
    assert live.tolist() == [0, 0]
    assert recorder.state["lr"].tolist() == [1, 1]


def test_modules_inside_trees() -> None:
    def module() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    one, other = module(), module()
    weight = other[0].weight
    reload({"ema": {"model": one}}, {"ema": {"model": other}})
    assert other[0].weight is weight
    assert same_tree(dict(other.state_dict()), dict(one.state_dict()))
    plain = reload({"ema": {"model": one}}, {"ema": {}})
    assert same_tree(dict(plain["ema"]["model"]), dict(one.state_dict()))


def test_found_from_the_objects() -> None:
    for obj in ({}, [1], (torch.ones(1),), 5, "a", None, torch.ones(1), PerRank(1), np.ones(2), [RNGState()]):
        assert find_adapter(obj).name == "tree"
    for obj in (RNGState(), lrs.StepLR(optimizer(), 1), torch.amp.GradScaler(device="cpu")):
        assert type(find_adapter(obj)) is StatefulAdapter
    assert not TreeAdapter().recognizes(object())
