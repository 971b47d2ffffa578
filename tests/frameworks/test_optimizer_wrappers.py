"""Optimizers that keep their state elsewhere, or state of unusual kinds, are stored completely or refused by name."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, StateError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's module uses torch.jit.script
    import torch.distributed.optim as dist_optim
    from torch.distributed.optim.named_optimizer import _NamedOptimizer


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()


def weights(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.detach().flatten().tolist() for name, tensor in model.named_parameters()}


Make = Callable[[Net], Any]


def check_round_trip(make: Make, load_into: Make, path: Path, load: Callable[[Any], Any] = lambda o: o) -> None:
    """Three steps, save, three more; and a load into an untouched optimizer with the same three more."""
    model, other = Net(), Net(seed=7)
    optimizer, restored = make(model), load_into(other)
    train(model, optimizer, range(3))
    bcp.save(path, {"model": model, "optimizer": optimizer})
    report = bcp.load(path, {"model": other, "optimizer": restored}, strict="exact")
    assert not report.lazy
    train(model, optimizer, range(3, 6))
    train(other, restored, range(3, 6))
    assert weights(other) == weights(model)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


class Averager:
    """What ``PostLocalSGDOptimizer`` needs of a model averager."""

    def __init__(self) -> None:
        self.step = 0

    def average_parameters(self, params: Any) -> None:
        self.step += 1


def test_post_local_sgd_keeps_the_step_of_its_averager(tmp_path: Path) -> None:
    def make(model: Net) -> Any:
        return dist_optim.PostLocalSGDOptimizer(adam(model), Averager())  # type: ignore[arg-type]

    check_round_trip(make, make, tmp_path / "c")
    model = Net()
    optimizer = make(model)
    bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert optimizer.averager.step == 3
    # Another kind of optimizer has no place for it.
    with pytest.raises(MismatchError, match="unexpected"):
        bcp.load(tmp_path / "c", {"model": model, "optimizer": adam(model)})


def test_named_optimizer(tmp_path: Path) -> None:
    def make(model: Net) -> Any:
        return _NamedOptimizer(dict(model.named_parameters()), torch.optim.Adam, lr=0.1)  # type: ignore[arg-type]

    check_round_trip(make, make, tmp_path / "a")
    check_round_trip(make, adam, tmp_path / "b")
    check_round_trip(adam, make, tmp_path / "c")


def test_optimizers_in_the_backward_pass(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Net, list[Any]]:
        model = Net(seed)
        dist_optim._apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
        return model, dist_optim._get_in_backward_optimizers(model)

    model, optimizers = make(0)
    train(model, None, range(3))
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizers})
    other, targets = make(7)
    bcp.load(tmp_path / "c", {"model": other, "optimizer": targets}, strict="exact")
    train(model, None, range(3, 6))
    train(other, None, range(3, 6))
    assert weights(other) == weights(model)
    # A plain optimizer loads them as well.
    third = Net(seed=8)
    one = adam(third)
    bcp.load(tmp_path / "c", {"model": third, "optimizer": one})
    train(third, one, range(3, 6))
    assert weights(third) == weights(model)
    # An optimizer section without them would lose their state. The model alone is a different matter.
    with pytest.raises(StateError, match=r"updated in the backward pass by a torch\.optim\.adam\.Adam"):
        bcp.save(tmp_path / "d", {"model": model, "optimizer": optimizers[1:]})
    bcp.save(tmp_path / "d", {"model": model})


class Delegating(torch.optim.Optimizer):
    """Like Accelerate's: everything is that of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Empty(Delegating):
    """Shares the groups, and has a state that it never uses."""

    state = property(lambda self: defaultdict(dict))  # type: ignore[assignment]


class Chained:
    """Several optimizers as one, like Megatron's: groups and state are computed from theirs."""

    def __init__(self, model: Net) -> None:
        self.chained = [adam(model.second), torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.chained for group in part.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        return {key: value for part in self.chained for key, value in part.state.items()}

    def step(self) -> None:
        for part in self.chained:
            part.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Delegating(adam(model)),
        lambda model: Delegating(Delegating(adam(model))),
        lambda model: Empty(adam(model)),
        Chained,
    ],
    ids=["delegating", "nested", "empty state", "chained"],
)
def test_wrappers_without_anything_of_their_own(make: Make, tmp_path: Path) -> None:
    check_round_trip(make, make, tmp_path / "c")


class Hiding(torch.optim.Optimizer):
    """Has its own groups, like ``ZeroRedundancyOptimizer``, fairscale's OSS and containers of optimizers."""

    def __init__(self, model: Net) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.optimizers = [adam(model.first), adam(model.second)]

    def step(self, closure: Any = None) -> None:
        for part in self.optimizers:
            part.step()


class Lookahead(torch.optim.Optimizer):
    """Shares the groups, and keeps slow weights in a separate state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base = inner
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()


class MixedPrecision(Delegating):
    """Like apex: the optimizer updates master weights, which only ``state_dict`` shows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.masters = [param.detach().float().clone() for param in inner.param_groups[0]["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fp32_from_fp16": [self.masters], "loss_scaler": 1.0}


class Elsewhere(torch.optim.Optimizer):
    """Keeps its state in an attribute, which only ``state_dict`` shows."""

    def __init__(self, model: Net) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.moments = {0: {"exp_avg": torch.zeros(5, 3)}}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.moments, "param_groups": []}

    def step(self, closure: Any = None) -> None: ...


class Gathering(Elsewhere):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("gather the state first")


REFUSED: dict[str, tuple[Make, str]] = {
    "own groups": (Hiding, r"Hiding wraps torch\.optim\.adam\.Adam and has .*Pass optimizer\.optimizers as"),
    "own state": (lambda model: Lookahead(adam(model)), r"Lookahead wraps .*Pass optimizer\.base as"),
    "more in state_dict": (
        lambda model: MixedPrecision(adam(model)),
        r"state_dict\(\) of .*MixedPrecision also has fp32_from_fp16, loss_scaler.*Pass the optimizer inside it",
    ),
    "state in an attribute": (Elsewhere, r"Elsewhere has state of 1 parameters, but its attribute 'state' has .* 0"),
    "state_dict raises": (Gathering, r"Gathering raised RuntimeError \(gather the state first\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_wrappers_that_add_something_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, message = REFUSED[kind]
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(1))
    with pytest.raises(StateError, match=message):
        bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    plain = adam(model)
    train(model, plain, range(1))
    bcp.save(tmp_path / "c", {"model": model, "optimizer": plain})
    with pytest.raises(StateError, match=message):
        bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer})


def test_master_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = Net().to(torch.bfloat16)
    masters = [(name, param.detach().float().requires_grad_()) for name, param in model.named_parameters()]
    named = torch.optim.Adam(masters)
    with pytest.raises(StateError, match=r"updates a torch\.float32 copy of first\.weight, which is torch\.bfloat16"):
        bcp.save(tmp_path / "c", {"model": model, "optimizer": named})
    unnamed = torch.optim.Adam([param for _, param in masters])
    with pytest.raises(StateError, match="If it is a wrapper's own copy of a parameter"):
        bcp.save(tmp_path / "c", {"model": model, "optimizer": unnamed})


def test_state_of_a_replaced_parameter_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(
        StateError, match=r"has state for a tensor of shape \(5, 3\) that is in none of its param groups"
    ):
        bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                moment = state.setdefault("exp_avg", torch.zeros_like(param))
                update = moment * group["betas"][0] + param.grad * (1 - group["betas"][0])
                param.data.add_(update.sign(), alpha=-group["lr"])
                moment.mul_(group["betas"][1]).add_(param.grad, alpha=1 - group["betas"][1])


class Soap(torch.optim.Optimizer):
    """Lists of matrices that grow and are empty or None at first, tensors of the parameter's shape, and numbers."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "precondition_frequency": 2})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                grad, state = param.grad, self.state[param]
                if not state:
                    sizes = param.shape if param.ndim > 1 else ()
                    state.update(
                        step=0, Q=None, GG=[torch.eye(n) for n in sizes] or [[]], exp_avg=torch.zeros_like(param)
                    )
                state["step"] += 1
                if param.ndim > 1:
                    state["GG"][0].lerp_(grad @ grad.T, 0.1)
                    state["GG"][1].lerp_(grad.T @ grad, 0.1)
                    if state["Q"] is None or state["step"] % group["precondition_frequency"] == 0:
                        state["Q"] = [torch.linalg.qr(matrix)[0] for matrix in state["GG"]]
                    grad = state["Q"][0] @ grad @ state["Q"][1]
                state["exp_avg"].lerp_(grad, 0.1)
                param.data.sub_(state["exp_avg"], alpha=group["lr"])


class EightBit(torch.optim.Optimizer):
    """Like bitsandbytes: quantized moments with maps and block scales of other shapes; the maps are shared."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "block_wise": True})
        self.map = torch.linspace(-1, 1, 256)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        step=0,
                        state1=torch.full_like(param, 128, dtype=torch.uint8),
                        qmap1=self.map,
                        absmax1=torch.zeros(-(-param.numel() // 4)),
                    )
                state["step"] += 1
                scale = state["absmax1"].repeat_interleave(4)[: param.numel()].view(param.shape)
                moment = state["qmap1"][state["state1"].long()] * scale * 0.9 + param.grad * 0.1
                blocks = torch.nn.functional.pad(moment.flatten(), (0, -param.numel() % 4)).view(-1, 4)
                state["absmax1"].copy_(blocks.abs().amax(1))
                scaled = (blocks / state["absmax1"].clamp(min=1e-9)[:, None]).flatten()[: param.numel()]
                state["state1"].copy_(torch.bucketize(scaled, state["qmap1"]).clamp(max=255).view(param.shape))
                param.data.sub_(moment, alpha=group["lr"])


def muon(model: Net) -> list[torch.optim.Optimizer]:
    class Pair(list[torch.optim.Optimizer]):
        def step(self) -> None:
            for part in self:
                part.step()

    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim != 2]
    return Pair([torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=0.01)])


STATES: dict[str, Make] = {
    "lion": lambda model: Lion(model.parameters()),
    "soap": lambda model: Soap(model.parameters()),
    "eight bits": lambda model: EightBit(model.parameters()),
}
if hasattr(torch.optim, "Muon"):
    STATES["muon and adamw"] = muon


@pytest.mark.parametrize("kind", STATES)
def test_unusual_kinds_of_state(kind: str, tmp_path: Path) -> None:
    check_round_trip(STATES[kind], STATES[kind], tmp_path / "c")
