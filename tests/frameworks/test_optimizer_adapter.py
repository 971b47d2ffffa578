"""The optimizer adapter: after a load into another optimizer, the next steps are bitwise equal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import MismatchError, NameCollisionError, StateError, UnsupportedTensorError
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.encoding import encode_value
from bytecheckpoint.frameworks.base import Context
from bytecheckpoint.frameworks.optimizer import OptimizerAdapter
from bytecheckpoint.frameworks.registry import parameter_layouts
from bytecheckpoint.tensors.shards import SectionSource, SectionTarget, StoredSection

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
ADAPTER = OptimizerAdapter()


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 3)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        optimizer.step(loss)


def capture(optimizer: Any, state: Mapping[str, Any]) -> SectionSource:
    return ADAPTER.capture(
        optimizer, Context("optimizer", {**state, "optimizer": optimizer}, layouts_of=parameter_layouts)
    )


def stored_of(source: SectionSource) -> StoredSection:
    return StoredSection(dict(source.metas), dict(source.values), dict(source.aliases))


def fill(target: SectionTarget, source: SectionSource) -> set[Any]:
    """Load as the library does: copy boxes, report missing names, apply. Returns the names that could be missing."""
    lenient: set[Any] = set()
    for shard in target.shards:
        if shard.fqn not in source.metas:
            assert shard.fqn in target.optional, f"missing {shard.fqn}"
            lenient.add(shard.fqn)
            continue
        assert source.metas[shard.fqn] == shard.meta, shard.fqn
        filled = 0
        for other in source.shards:
            common = shard.box.intersect(other.box) if other.fqn == shard.fqn else None
            if common is not None:
                into = shard.tensor[common.relative_to(shard.box).slices()]
                into.copy_(other.tensor[common.relative_to(other.box).slices()])
                filled += common.numel
        assert filled == shard.box.numel, shard.fqn
    for path in target.requested_values - source.values.keys():
        assert path in target.optional, f"missing {path}"
        lenient.add(path)
    requested = {shard.fqn for shard in target.shards} | target.metas.keys() | target.requested_values
    unexpected = (source.metas.keys() | source.values.keys()) - requested - target.ignorable
    assert not unexpected, unexpected
    with torch.no_grad():
        target.apply(source.values)
    return lenient


def load(optimizer: Any, state: Mapping[str, Any], source: SectionSource) -> SectionTarget:
    target = ADAPTER.target(
        optimizer,
        Context("optimizer", {**state, "optimizer": optimizer}, layouts_of=parameter_layouts),
        stored_of(source),
    )
    target.lenient = fill(target, source)  # type: ignore[attr-defined]
    return target


def frozen_copy(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def same_params(left: nn.Module, right: nn.Module) -> bool:
    return same(dict(left.named_parameters()), dict(right.named_parameters()))


MAKERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95)),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_next_steps_are_bitwise_equal(name: str, warm: bool) -> None:
    model, other = Net(), Net(seed=7)
    optimizer, restored = MAKERS[name](model.parameters()), MAKERS[name](other.parameters())
    train(model, optimizer, 3)
    if warm:
        train(other, restored, 1, seed=9)
    before = frozen_copy(optimizer)
    identities = {(i, k): id(v) for i, (p, s) in enumerate(optimizer.state.items()) for k, v in s.items()}

    source = capture(optimizer, {"model": model})
    assert same(frozen_copy(optimizer), before)
    assert identities == {(i, k): id(v) for i, (p, s) in enumerate(optimizer.state.items()) for k, v in s.items()}

    other.load_state_dict(model.state_dict())
    load(restored, {"model": other}, source)
    assert same(frozen_copy(restored), before)
    train(model, optimizer, 5, seed=3)
    train(other, restored, 5, seed=3)
    assert same_params(model, other)
    assert same(frozen_copy(restored), frozen_copy(optimizer))


def test_existing_state_is_filled_in_place() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 2)
    train(other, restored, 1)
    tensors = {id(value) for state in restored.state.values() for value in state.values()}
    load(restored, {"model": other}, capture(optimizer, {"model": model}))
    assert {id(value) for state in restored.state.values() for value in state.values()} == tensors


def test_target_changes_the_optimizer_in_apply_only() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 2)
    before = frozen_copy(restored)
    source = capture(optimizer, {"model": model})
    ADAPTER.target(restored, Context("optimizer", {"model": other}, layouts_of=parameter_layouts), stored_of(source))
    assert same(frozen_copy(restored), before)


@pytest.mark.parametrize(
    ("saved", "loaded"), list(itertools.permutations([{"foreach": True}, {"fused": True}, {"capturable": True}], 2))
)
def test_a_load_keeps_the_implementation_flags_of_the_target(saved: dict[str, bool], loaded: dict[str, bool]) -> None:
    model, other = Net(), Net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, 2)
    optimizer.param_groups[0].update(saved)
    restored = torch.optim.AdamW(other.parameters(), lr=0.1, **loaded)  # type: ignore[arg-type]
    load(restored, {"model": other}, capture(optimizer, {"model": model}))
    group = restored.param_groups[0]
    assert group["lr"] == 0.5
    assert {key: group[key] for key in loaded} == loaded
    assert all(not group[key] for key in saved)


def test_groups_may_be_reordered_split_and_merged() -> None:
    model, other = Net(), Net(1)
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.first.parameters(), model.scale], "lr": 0.1},
            {"params": list(model.second.parameters()), "lr": 0.2, "weight_decay": 0.0},
        ]
    )
    train(model, optimizer, 2)
    restored = torch.optim.AdamW(
        [
            {"params": [other.second.bias]},
            {"params": [other.first.weight]},
            {"params": [other.second.weight]},
            {"params": [other.scale, other.first.bias]},
        ]
    )
    source = capture(optimizer, {"model": model})
    load(restored, {"model": other}, source)
    assert [group["lr"] for group in restored.param_groups] == [0.2, 0.1, 0.2, 0.1]
    assert [group["weight_decay"] for group in restored.param_groups] == [0.0, 0.01, 0.0, 0.01]
    moments = dict(zip(dict(other.named_parameters()), other.parameters()))
    for name, param in model.named_parameters():
        if name != "unused":
            assert same(dict(optimizer.state[param]), dict(restored.state[moments[name]]))

    merged = torch.optim.AdamW([p for n, p in other.named_parameters() if n != "unused"])
    with pytest.raises(MismatchError, match=r"second\.weight: lr = 0\.2, but first\.weight has 0\.1|scale") as caught:
        load(merged, {"model": other}, source)
    assert {kind for kind, _, _ in caught.value.faults} == {"value"}


def test_a_parameter_without_a_gradient_has_options_and_no_state() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 2)
    source = capture(optimizer, {"model": model})
    assert ("param_groups", "unused") in source.values
    assert not any(name.startswith("state.unused") for name in source.metas)
    other.unused.grad = torch.ones(4)
    restored.step()
    load(restored, {"model": other}, source)
    assert other.unused not in restored.state
    assert other.scale in restored.state


def test_a_load_without_state_leaves_state_alone() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 2)
    train(other, restored, 1)
    before = copy.deepcopy(restored.state_dict()["state"])
    source = capture(optimizer, {"model": model})
    excluded = SectionSource(values={path: value for path, value in source.values.items() if path[0] != "state"})
    load(restored, {"model": other}, excluded)
    assert same(restored.state_dict()["state"], before)


def test_frozen_now_is_ignorable_and_new_is_optional() -> None:
    model, other = Net(), Net(1)
    model.second.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 2)
    other.first.requires_grad_(False)
    restored = torch.optim.Adam([p for p in other.parameters() if p.requires_grad], lr=0.3)
    target = load(restored, {"model": other}, capture(optimizer, {"model": model}))
    assert {"state.first.weight.exp_avg", ("param_groups", "first.weight")} <= target.ignorable
    assert ("param_groups", "second.weight") in target.optional
    assert other.second.weight not in restored.state
    assert restored.param_groups[0]["lr"] == 0.001


def test_state_of_a_new_parameter_is_kept() -> None:
    model, other = Net(), Net(1)
    optimizer = torch.optim.Adam(model.first.parameters())
    train(model, optimizer, 1)
    restored = torch.optim.Adam(other.parameters())
    train(other, restored, 1)
    kept = copy.deepcopy(restored.state[other.scale])
    target = load(restored, {"model": other}, capture(optimizer, {"model": model}))
    assert {"state.scale.exp_avg", "state.scale.step"} <= target.lenient  # type: ignore[attr-defined]
    assert same(dict(kept), dict(restored.state[other.scale]))


def test_no_common_name_is_an_error() -> None:
    model, other = Net(), nn.Sequential(nn.Linear(3, 2))
    optimizer = MAKERS["adam"](model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(MismatchError, match="so the names differ"):
        load(MAKERS["adam"](other.parameters()), {"model": other}, capture(optimizer, {"model": model}))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_incomplete_state_is_missing(warm: bool) -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 1)
    if warm:
        train(other, restored, 1)
    source = capture(optimizer, {"model": model})
    del source.metas["state.first.weight.exp_avg_sq"]
    with pytest.raises(AssertionError, match=r"missing state\.first\.weight\.exp_avg_sq"):
        load(restored, {"model": other}, source)


def test_steps_as_numbers_and_as_tensors() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 3)
    train(other, restored, 1)
    source = capture(optimizer, {"model": model})
    for state in restored.state.values():
        state["step"] = 1
    load(restored, {"model": other}, source)
    assert {repr(state["step"]) for state in restored.state.values()} == {"3"}

    source = capture(restored, {"model": other})
    assert source.values["state", "scale", "step"] == 3
    train(model, optimizer, 1)
    load(optimizer, {"model": model}, source)
    assert all(torch.equal(state["step"], torch.tensor(3.0)) for state in optimizer.state.values())

    source.values["state", "scale", "step"] = 2**24 + 1
    with pytest.raises(MismatchError, match=r"16777217 does not fit into torch\.float32"):
        load(optimizer, {"model": model}, source)


def test_a_tensor_lr_stays_the_same_tensor() -> None:
    model, other = Net(), Net(1)
    lr = torch.tensor(0.5)
    optimizer = MAKERS["adam"](model.parameters())
    restored = torch.optim.Adam(other.parameters(), lr=lr)
    source = capture(optimizer, {"model": model})
    assert source.values["param_groups", "scale"]["lr"] == 0.01
    load(restored, {"model": other}, source)
    assert restored.param_groups[0]["lr"] is lr
    assert torch.equal(lr, torch.tensor(0.01))


class Nested(torch.optim.Optimizer):
    """Grows a list and keeps a dict with int keys, as second-order optimizers do."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "options": {"warm": (1, None)}})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("history", []).append(param.grad.clone())
                state["factors"] = {0: (torch.eye(2) * len(state["history"]), None), "name": "kronecker", 1: []}
                param.data.sub_(sum(state["history"]) * group["lr"])


@pytest.mark.parametrize(("saved", "before"), [((0.9, 0.95), (0.5, 0.6, 0.7)), ((0.9, 0.95, 0.99), (0.5, 0.6))])
def test_a_sequence_of_another_length_is_replaced(saved: tuple[float, ...], before: tuple[float, ...]) -> None:
    model = Net()
    optimizer, target = (
        torch.optim.SGD([{"params": [*model.parameters()], "betas": betas}], lr=0.1) for betas in (saved, before)
    )
    load(target, {"model": model}, capture(optimizer, {"model": model}))
    assert target.param_groups[0]["betas"] == saved


def test_nested_state_keeps_its_structure() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, restored = Nested(model.parameters()), Nested(other.parameters())
    for net, opt, steps in ((model, optimizer, 3), (other, restored, 1)):
        for _ in range(steps):
            net(torch.ones(1, 3)).sum().backward()
            opt.step()
            opt.state["calls"] = steps
    first = restored.state[other.weight]["history"][0]
    source = capture(optimizer, {"model": model})
    assert "state.weight.factors.0.0" in source.metas
    for path, value in source.values.items():
        source.values[path] = decode_value(encode_value(value, ""))
    load(restored, {"model": other}, source)
    for param, twin in zip(model.parameters(), other.parameters()):
        assert same(dict(optimizer.state[param]), dict(restored.state[twin]))
    assert restored.state["calls"] == 3
    assert restored.state[other.weight]["history"][0] is first


def test_lbfgs_needs_its_parameters_in_order() -> None:
    model = Net()
    optimizer = MAKERS["lbfgs"](model.parameters())
    train(model, optimizer, 1)
    first, *rest = model.parameters()
    with pytest.raises(MismatchError, match="this order has changed"):
        load(MAKERS["lbfgs"]([first, *reversed(rest)]), {"model": model}, capture(optimizer, {"model": model}))


def test_several_optimizers_are_one_union() -> None:
    model, other = Net(), Net(1)
    pair = [torch.optim.Adam(model.first.parameters(), lr=0.2), torch.optim.Adam(model.second.parameters(), lr=0.3)]
    for optimizer in pair:
        train(model, optimizer, 1)
    source = capture(pair, {"model": model})
    swapped = [torch.optim.Adam(other.second.parameters()), torch.optim.Adam(other.first.parameters())]
    load(swapped, {"model": other}, source)
    assert [optimizer.param_groups[0]["lr"] for optimizer in swapped] == [0.3, 0.2]
    with pytest.raises(StateError, match=r"appears twice, as optimizer 0.* and as optimizer 1"):
        capture([pair[0], pair[0]], {"model": model})


def test_names_include_the_section_if_sections_share_an_optimizer() -> None:
    actor, critic = Net(), Net(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    source = capture(optimizer, {"actor": actor, "critic": critic})
    assert {("param_groups", "actor.scale"), ("param_groups", "critic.scale")} <= source.values.keys()
    alone = capture(torch.optim.Adam(critic.parameters()), {"actor": actor, "critic": critic})
    assert ("param_groups", "scale") in alone.values


def test_parameters_of_no_module() -> None:
    model = Net()
    with pytest.raises(StateError, match=r"group 0, parameter 0 of shape \(\) has no name\. Add the module"):
        capture(torch.optim.Adam(model.parameters()), {})
    named = torch.optim.Adam(model.named_parameters())
    train(model, named, 1)
    source = capture(named, {})
    assert "state.first.weight.exp_avg" in source.metas
    assert "param_names" not in source.values["param_groups", "scale"]
    other = Net(1)
    restored = MAKERS["adam"](other.parameters())
    load(restored, {"model": other}, source)
    assert same(dict(named.state[model.scale]), dict(restored.state[other.scale]))
    twice = [torch.optim.Adam(Net().named_parameters()), torch.optim.Adam(Net().named_parameters())]
    with pytest.raises(NameCollisionError, match="both named 'scale'"):
        capture(twice, {})


def test_wrappers_with_the_interface_of_optimizers_are_recognized() -> None:
    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            return self.inner.param_groups

        @property
        def state(self) -> Mapping[Any, Any]:
            return self.inner.state

    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["adam"](model.parameters()), MAKERS["adam"](other.parameters())
    train(model, optimizer, 1)
    assert ADAPTER.recognizes(Wrapper(optimizer))
    assert ADAPTER.recognizes([optimizer, Wrapper(restored)])
    assert not any(map(ADAPTER.recognizes, [[], model, {}, [optimizer, 3], torch.optim.Adam]))
    load(Wrapper(restored), {"model": other}, capture(Wrapper(optimizer), {"model": model}))
    assert same(frozen_copy(restored), frozen_copy(optimizer))


def test_a_scheduler_continues_from_the_saved_initial_lr() -> None:
    model, other = Net(), Net(1)
    optimizer, restored = MAKERS["sgd-momentum"](model.parameters()), MAKERS["sgd-momentum"](other.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 1)
    scheduler.step()
    source = capture(optimizer, {"model": model})
    group = restored.param_groups[0]
    load(restored, {"model": other}, source)
    assert restored.param_groups[0] is group
    assert (group["lr"], group["initial_lr"]) == (0.005, 0.01)


def test_sparse_state_is_refused_by_name() -> None:
    model = Net()
    optimizer = MAKERS["adam"](model.parameters())
    train(model, optimizer, 1)
    optimizer.state[model.scale]["odd"] = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedTensorError, match=r"state\.scale\.odd"):
        capture(optimizer, {"model": model})
