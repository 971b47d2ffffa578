"""Save and load the kinds of objects in a training state."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler, swa_utils

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.base import Adapter, Context
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import SectionSource, SectionTarget, Shard, StoredSection, basic_meta
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(15, of=__name__)


class Net(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


NAMES = {"model.up.weight", "model.up.bias", "model.down.weight", "model.down.bias"}


def values_of(model: nn.Module) -> set[float]:
    return {float(v) for parameter in model.parameters() for v in parameter.detach().flatten()}


# -- modules and what is wrapped around them ----------------------------------------------------------------------


def compiled(module: nn.Module) -> nn.Module:
    """A compiled module that never runs, so that no compiler is needed."""
    return torch.compile(module, backend="eager")


def _wrap_parts(model: Net) -> nn.Module:
    model.up = checkpoint_wrapper(model.up)
    model.down = compiled(model.down)
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "compiled": compiled,
    "activation checkpoint": checkpoint_wrapper,
    "parts": _wrap_parts,
    "both": lambda model: compiled(checkpoint_wrapper(model)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_do_not_contain_wrappers(kind: str, tmp_path: Path) -> None:
    model = WRAPPERS[kind](Net(2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(tmp_path / "wrapped", {"model": model, "optimizer": optimizer})
    names = {f"optimizer.state.{name.removeprefix('model.')}.momentum_buffer" for name in NAMES}
    assert set(bcp.open(tmp_path / "wrapped")) == NAMES | names
    plain = Net()
    bcp.load(tmp_path / "wrapped", {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), momentum=0.9)})
    assert values_of(plain) == values_of(model)
    bcp.save(tmp_path / "plain", {"model": Net(3.0)})
    bcp.load(tmp_path / "plain", {"model": model})
    assert values_of(model) == {3.0}


def _ddp(rank: int, world_size: int, path: str) -> None:
    model = nn.parallel.DistributedDataParallel(compiled(Net(2.0)))
    bcp.save(path, {"model": model})
    assert set(bcp.open(path)) == NAMES


def test_names_do_not_contain_ddp(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(_ddp, str(tmp_path / "checkpoint"), world_size=2)
    plain = Net()
    bcp.load(tmp_path / "checkpoint", {"model": plain})
    assert values_of(plain) == {2.0}


def test_a_list_of_modules_is_one_model(tmp_path: Path) -> None:
    whole = Net(2.0)
    first, second = nn.Module(), nn.Module()
    first.up, second.down = nn.Linear(3, 5), nn.Linear(5, 3)
    bcp.save(tmp_path / "checkpoint", {"model": whole})
    bcp.load(tmp_path / "checkpoint", {"model": [first, second]})
    assert values_of(first) == values_of(second) == {2.0}
    bcp.save(tmp_path / "parts", {"model": [first, second]})
    assert set(bcp.open(tmp_path / "parts")) == NAMES
    other = nn.Module()
    other.up = nn.Linear(3, 5)
    with pytest.raises(errors.NameCollisionError, match=r"up\.weight"):
        bcp.save(tmp_path / "collision", {"model": [first, other]})


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: dict[str, Any] = {"calls": 0, "history": []}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state_of_modules(tmp_path: Path) -> None:
    source, target = Counting(), Counting()
    source.extra = {"calls": 3, "history": [1, (2, 3)], "scale": torch.tensor([0.5])}
    bcp.save(tmp_path / "checkpoint", {"model": source})
    bcp.load(tmp_path / "checkpoint", {"model": target})
    assert target.extra.pop("scale").tolist() == [0.5]
    assert target.extra == {"calls": 3, "history": [1, (2, 3)]}


# -- averages ------------------------------------------------------------------------------------------------------


def test_an_averaged_model(tmp_path: Path) -> None:
    model = Net(4.0)
    averaged = swa_utils.AveragedModel(Net(2.0), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    bcp.save(tmp_path / "checkpoint", {"model": model, "ema": averaged})
    other = swa_utils.AveragedModel(Net(), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    bcp.load(tmp_path / "checkpoint", {"ema": other})
    assert int(other.n_averaged) == 2
    assert values_of(other) == values_of(averaged)
    # An average is a model with the names of its wrapper.
    alone = Net()
    bcp.load(
        tmp_path / "checkpoint", {"ema": alone}, rename=lambda name: name.replace("ema.module.", "ema."), strict=False
    )
    assert values_of(alone) == values_of(averaged)


def test_an_average_kept_in_a_dict(tmp_path: Path) -> None:
    average = {"decay": 0.5, "shadow": {name: p.detach() + 1 for name, p in Net(1.0).named_parameters()}}
    bcp.save(tmp_path / "checkpoint", {"ema": average})
    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"ema": fresh})
    assert fresh["decay"] == 0.5
    assert fresh["shadow"].keys() == average["shadow"].keys()
    kept = {"decay": 0.1, "shadow": {name: torch.zeros_like(t) for name, t in average["shadow"].items()}}
    tensors = dict(kept["shadow"])
    bcp.load(tmp_path / "checkpoint", {"ema": kept})
    for tree in (fresh, kept):
        assert all(torch.equal(tree["shadow"][name], t) for name, t in average["shadow"].items())
    assert all(kept["shadow"][name] is tensors[name] for name in tensors)


# -- schedulers, scaler, data --------------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, 3, cycle_momentum=False),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=8),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "averaging": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def _rates(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> Iterator[float]:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        yield optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_continue(kind: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    source, target = build(), build()
    list(_rates(*source, 4))
    bcp.save(tmp_path / "checkpoint", dict(zip(("model", "optimizer", "scheduler"), source)))
    bcp.load(tmp_path / "checkpoint", dict(zip(("model", "optimizer", "scheduler"), target)))
    assert target[1].param_groups[0]["lr"] == source[1].param_groups[0]["lr"]
    assert list(_rates(*target, 6)) == list(_rates(*source, 6))


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_scaler(enabled: bool, tmp_path: Path) -> None:
    source = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=64.0, growth_interval=2)
    model = Net(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        source.scale(model(torch.ones(1, 3)).sum()).backward()
        source.step(optimizer)
        source.update()
    bcp.save(tmp_path / "checkpoint", {"scaler": source})
    target = torch.amp.GradScaler("cpu", enabled=enabled)
    bcp.load(tmp_path / "checkpoint", {"scaler": target})
    assert target.state_dict() == source.state_dict()
    assert bool(target.state_dict()) == enabled


class Loader:
    """A stateful data loader, whose state grows and shrinks."""

    def __init__(self) -> None:
        self.position = 0
        self.buffer: list[torch.Tensor] = []
        self.workers: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer, "workers": self.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer, self.workers = state["position"], list(state["buffer"]), state["workers"]


def test_a_stateful_loader(tmp_path: Path) -> None:
    source, target = Loader(), Loader()
    source.position, source.buffer = 17, [torch.tensor([1, 2]), torch.tensor([3])]
    source.workers = {"0": {"seen": [1, 2], "rng": torch.tensor([9], dtype=torch.uint8)}}
    target.buffer = [torch.zeros(7)]
    bcp.save(tmp_path / "checkpoint", {"loader": source, "extra_state": {"nested": source}})
    nested = Loader()
    bcp.load(tmp_path / "checkpoint", {"loader": target, "extra_state": {"nested": nested}})
    for loaded in (target, nested):
        assert loaded.position == 17
        assert [item.tolist() for item in loaded.buffer] == [[1, 2], [3]]
        assert loaded.workers["0"]["rng"].tolist() == [9]
    # Restore the state without buffered items.
    bcp.save(tmp_path / "empty", {"loader": Loader()})
    bcp.load(tmp_path / "empty", {"loader": target})
    assert (target.position, target.buffer, target.workers) == (0, [], {})


def test_an_ordered_dict_keeps_its_order(tmp_path: Path) -> None:
    tree = {"order": OrderedDict([("z", 1), ("a", OrderedDict([("y", [2, {"q": 3}]), ("b", 4)])), ("m", {"k": 5})])}
    bcp.save(tmp_path / "checkpoint", {"extra_state": tree})
    for target in ({}, {"order": OrderedDict()}, {"order": OrderedDict(z=0, a=OrderedDict(), m={})}):
        bcp.load(tmp_path / "checkpoint", {"extra_state": target})
        assert target == tree
        assert list(target["order"]) == ["z", "a", "m"]
        assert list(target["order"]["a"]) == ["y", "b"]


class _Average:
    """Keeps averages in the order of the parameters, as common EMA classes do."""

    def __init__(self, shadow: dict[Any, Any]) -> None:
        self.shadow = shadow

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


_SHADOWS: list[dict[Any, Any]] = [
    {"z": torch.tensor(1), "a": torch.tensor(2), "m": torch.tensor(3)},
    {i: torch.tensor(i) for i in (0, 1, 10, 11, 2)},
    {"z": 1, "b": torch.tensor(2), "a": 3, 7: torch.tensor(4), "c": {"y": 1, "x": [{"q": 1, "p": 2}]}},
    OrderedDict([("z", {"b": torch.tensor(1), "a": 2}), ("a", torch.tensor(3)), ("y", 4)]),
]


def _keys(node: Any) -> Any:
    if isinstance(node, dict):
        return [type(node), *((key, _keys(item)) for key, item in node.items())]
    return [_keys(item) for item in node] if isinstance(node, list) else None


@pytest.mark.parametrize("shadow", _SHADOWS)
def test_rebuilt_mappings_keep_the_order_of_their_keys(tmp_path: Path, shadow: dict[Any, Any]) -> None:
    average = _Average({})
    bcp.save(tmp_path / "checkpoint", {"ema": _Average(shadow), "tree": {"below": shadow}, "root": dict(shadow)})
    state: dict[str, Any] = {"ema": average, "tree": {"below": {}}, "root": {}}
    bcp.load(tmp_path / "checkpoint", state)
    assert _keys(average.shadow) == _keys(shadow)
    assert _keys(state["tree"]["below"])[1:] == _keys(shadow)[1:]
    assert _keys(state["root"]) == _keys(dict(shadow))


def _ordered_by_rank(rank: int, world_size: int, path: str) -> None:
    keys = ["b", "a", "c"] if rank == 0 else ["a", "c", "b", "d"]
    tree = {"t": {key: torch.tensor(1) for key in keys}, "v": dict.fromkeys(keys, 1)}
    bcp.save(path, {"extra_state": tree})


def test_ranks_with_different_orders_share_one(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_ordered_by_rank, str(tmp_path / "checkpoint"), world_size=2)
    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"extra_state": fresh})  # at another world size
    for mapping in fresh.values():
        assert list(mapping) in (["b", "a", "c", "d"], ["a", "c", "b", "d"])


class _Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class _Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class _Options:
    mode: _Mode
    folder: Path
    pair: _Pair


class _Text(str):
    pass


def _options(mode: _Mode, text: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "modes": [mode, mode],
        "options": _Options(mode, Path(text), _Pair(mode, 1)),
        "text": _Text(text),
        "tensors": _Pair(torch.full((2,), float(len(text))), {"mode": mode}),
        "counts": defaultdict(int, {text: 3}),
        "when": datetime.timedelta(len(text)),
    }


def test_values_take_the_types_of_the_target(tmp_path: Path) -> None:
    saved, target = _options(_Mode.FAST, "abc"), _options(_Mode.SLOW, "x")
    counts, tensor = target["counts"], target["tensors"].left
    del counts["x"]
    bcp.save(tmp_path / "checkpoint", {"extra_state": saved})
    bcp.load(tmp_path / "checkpoint", {"extra_state": target})
    for name in ("mode", "modes", "options", "text", "counts", "when"):
        assert target[name] == saved[name]
        assert type(target[name]) is type(saved[name])
    assert target["options"].pair == saved["options"].pair
    assert type(target["options"].pair) is _Pair
    assert target["counts"] is counts
    assert counts["new"] == 0
    assert type(target["tensors"]) is _Pair
    assert target["tensors"].left is tensor
    assert tensor.tolist() == [3, 3]
    assert target["tensors"].right == {"mode": _Mode.FAST}
    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"extra_state": fresh})
    assert fresh["mode"] == "fast"
    assert fresh["options"] == {"mode": "fast", "folder": Path("abc"), "pair": ("fast", 1)}
    assert (type(fresh["text"]), type(fresh["counts"]), type(fresh["tensors"])) == (str, dict, tuple)


def test_values_that_do_not_fit_the_type_of_the_target(tmp_path: Path) -> None:
    for stored, target, message in (
        ("middle", _Mode.FAST, "no member of _Mode"),
        (_Pair(1, 2)[:1], _Pair(0, 0), "stored with 1 fields, but _Pair has 2"),
        ({"mode": 1}, _Options(_Mode.FAST, Path(), _Pair(0, 0)), r"fields \['mode'\], but _Options"),
    ):
        path = tmp_path / type(target).__name__
        value = stored if not isinstance(stored, dict) else dataclasses.make_dataclass("Other", ["mode"])(1)
        bcp.save(path, {"extra_state": {"a": 1, "b": value}})
        state = {"a": 0, "b": target}
        with pytest.raises(errors.MismatchError, match=rf"extra_state\.b: .*{message}"):
            bcp.load(path, {"extra_state": state})
        assert state == {"a": 0, "b": target}


def test_tuples_in_the_metadata_are_read_as_lists(tmp_path: Path) -> None:
    bcp.save(tmp_path / "checkpoint", {"extra_state": {"a": 1}}, metadata={"betas": (0.9, (1, "a"))})
    assert bcp.open(tmp_path / "checkpoint").metadata == {"betas": [0.9, [1, "a"]]}


def test_two_containers_of_one_dotted_name(tmp_path: Path) -> None:
    tree = {"a": {"b": {"x": torch.tensor(1)}}, "a.b": {"y": torch.tensor(2), "z": {"w": torch.tensor(3)}}}
    bcp.save(tmp_path / "checkpoint", {"extra_state": tree})
    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"extra_state": fresh})
    assert fresh == tree


# -- random numbers ------------------------------------------------------------------------------------------------


def _draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def _random_numbers(rank: int, world_size: int, path: str) -> tuple[Any, Any]:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    _draw()
    states = random.getstate(), copy.deepcopy(np.random.get_state()), torch.get_rng_state()
    bcp.save(path, {"rng": bcp.RNGState()})
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    assert torch.equal(torch.get_rng_state(), states[2])
    expected = _draw()
    _draw()
    bcp.load(path, {"rng": bcp.RNGState()})
    return expected, _draw()


def _drawn_after_load(rank: int, world_size: int, path: str) -> tuple[Any, ...]:
    bcp.load(path, {"rng": bcp.RNGState()})
    return _draw()


def test_every_rank_restores_its_random_numbers(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    results = rank_pool.run(_random_numbers, path, world_size=2)
    assert [found for _, found in results] == [expected for expected, _ in results]
    assert results[0] != results[1]
    # At another world size the streams are new, all different, and reproducible.
    more = rank_pool.run(_drawn_after_load, path, world_size=3)
    assert len({draw[0] for draw in more}) == 3
    assert rank_pool.run(_drawn_after_load, path, world_size=3) == more


# -- taking a checkpoint changes nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
def test_saving_changes_nothing(steps: int, tmp_path: Path) -> None:
    model = Net(1.0)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.step()
    ids = [id(t) for t in model.parameters()]
    versions = [t._version for t in model.parameters()]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradient = model.up.weight.grad.clone()
    states = random.getstate(), torch.get_rng_state()
    handle = bcp.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer}, async_save=True)
    handle.result(time_limit(60))
    after = (model.state_dict(), optimizer.state_dict())
    assert repr(after) == repr(before)
    assert list(optimizer.state) == (list(model.parameters())[:1] if steps else [])
    assert torch.equal(model.up.weight.grad, gradient)
    assert model.up.bias.grad is None
    assert ids == [id(t) for t in model.parameters()]
    assert versions == [t._version for t in model.parameters()]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


# -- adapters ------------------------------------------------------------------------------------------------------


def test_framework_selects_an_adapter(tmp_path: Path) -> None:
    for name in ("module", "torch", "ddp", "fsdp2"):
        bcp.save(tmp_path / name, {"model": Net(2.0), "extra_state": {"n": 1}}, options=bcp.SaveOptions(framework=name))
        target = Net()
        bcp.load(tmp_path / name, {"model": target}, options=bcp.LoadOptions(framework=name))
        assert values_of(target) == {2.0}


def test_a_wrong_or_unknown_framework_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(
        errors.UnknownObjectError, match=r"framework='megatron2' names no adapter; the known ones are: .*fsdp1"
    ):
        bcp.save(path, {"model": Net()}, options=bcp.SaveOptions(framework="megatron2"))
    with pytest.raises(errors.UnknownObjectError, match=r"'model'.*Net is not supported by framework='fsdp1'"):
        bcp.save(path, {"model": Net()}, options=bcp.SaveOptions(framework="fsdp1"))
    with pytest.raises(errors.UnknownObjectError, match=r"no adapter supports .*register_adapter"):
        bcp.save(path, {"model": Net(), "thing": object()})
    assert not path.exists()


class Grid:
    """A kind of object that the library does not support natively: separately stored rows of one matrix."""

    def __init__(self, rows: int, value: float) -> None:
        self.rows = [torch.full((3,), value + row) for row in range(rows)]
        self.label = f"grid of {value}"


class GridAdapter(Adapter):
    name: ClassVar[str] = "test-grid"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, Grid)

    def _shards(self, grid: Grid) -> SectionTarget:
        meta = basic_meta(torch.float32, (len(grid.rows), 3))
        shards = [Shard("matrix", meta, Box((i, 0), (1, 3)), row.unsqueeze(0)) for i, row in enumerate(grid.rows)]
        return SectionTarget({"matrix": meta}, shards)

    def capture(self, obj: Any, context: Context) -> SectionSource:
        described = self._shards(obj)
        return SectionSource(described.metas, described.shards, {("label",): obj.label})

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        target = self._shards(obj)
        target.requested_values.add(("label",))
        target.apply = lambda values: setattr(obj, "label", values["label",])
        return target


@pytest.fixture
def grid_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    bcp.register_adapter(GridAdapter())


@pytest.mark.usefixtures("grid_adapter")
@pytest.mark.parametrize("framework", [None, "test-grid"])
def test_a_registered_adapter(framework: str | None, tmp_path: Path) -> None:
    bcp.save(tmp_path / "checkpoint", {"grid": Grid(4, 2.0), "model": Net(5.0)})
    checkpoint = bcp.open(tmp_path / "checkpoint")
    assert checkpoint["grid.matrix"].load()[:, 0].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert len(checkpoint["grid.matrix"].shards) == 4
    target, model = Grid(4, 0.0), Net()
    rows = list(target.rows)
    bcp.load(tmp_path / "checkpoint", {"grid": target}, options=bcp.LoadOptions(framework=framework))
    assert target.label == "grid of 2.0"
    assert [row.tolist() for row in rows] == [[value] * 3 for value in (2.0, 3.0, 4.0, 5.0)]
    bcp.load(tmp_path / "checkpoint", {"grid": target, "model": model})
    assert values_of(model) == {5.0}
    with pytest.raises(errors.MismatchError, match=r"grid\.matrix.*stored \[4, 3\], requested \[5, 3\]"):
        bcp.load(tmp_path / "checkpoint", {"grid": Grid(5, 0.0)})
    # The stored rows form an ordinary tensor.
    tree = {"matrix": torch.zeros(4, 3), "label": ""}
    bcp.load(tmp_path / "checkpoint", {"grid": tree})
    assert tree["matrix"][:, 0].tolist() == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.usefixtures("grid_adapter")
def test_adapter_names_are_unique() -> None:
    with pytest.raises(errors.UsageError, match="exists already"):
        bcp.register_adapter(GridAdapter())
