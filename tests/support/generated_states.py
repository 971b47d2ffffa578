"""Draw states (modules, optimizers, schedulers, trees), train them, and compare them exactly."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

__all__ = ["StateSpec", "assert_equal", "build", "load_with_torch", "specs", "state_of", "train"]

WIDTH = 4  # features of every layer's input and output


class Scaled(nn.Module):
    """Extra state, a persistent buffer, and one that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(WIDTH), persistent=False)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.scale = 1.0 + float(self.steps) / 8
        return x * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "history": torch.full((2,), self.scale)}

    def set_extra_state(self, state: Any) -> None:
        self.scale = float(state["scale"])


class OwnFormat(nn.Module):
    """State that only the module's own methods store."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.packed = torch.randn(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.packed.sum()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed_params"] = self.packed * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "packed_params" in state_dict:
            self.packed = state_dict.pop(prefix + "packed_params") / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Linear):
    """A hook that renames an entry of the state dict, and one that restores the name."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._restore)

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    @staticmethod
    def _restore(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "kernel")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Shared(nn.Module):
    """One module under two names, and a parameter in a list, in a dictionary, and with a name like a path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(11)])
        self.named = nn.ParameterDict({"weight": nn.Parameter(torch.randn(WIDTH)), "10": nn.Parameter(torch.randn(()))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x)) + self.listed[10] + self.named["weight"] * self.named["10"]


class Frozen(nn.Linear):
    """Parameters without gradients, one of them empty and one transposed."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t(), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def _spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def _checkpointed() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped: nn.Module = checkpoint_wrapper(nn.Linear(WIDTH, WIDTH))
    return wrapped


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "double": lambda: nn.Linear(WIDTH, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "relu": nn.ReLU,
    "scaled": Scaled,
    "own format": OwnFormat,
    "hooked": Hooked,
    "tied": Tied,
    "shared": Shared,
    "frozen": Frozen,
    "weight norm": _weight_norm,
    "spectral norm": _spectral_norm,
    "checkpointed": _checkpointed,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "capturable": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-3), foreach=False, fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-3),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "chained": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[1],
    ),
}


class Average:
    """Averaged weights that are matched by position, so that the order of keys decides which is which.

    It is empty until the first update.
    """

    def __init__(self, names: list[int | str]) -> None:
        self._names = names
        self.shadow: OrderedDict[int | str, torch.Tensor] = OrderedDict()

    def update(self, model: nn.Module) -> None:
        if not self.shadow:
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
            names = [*self._names, *(f"p{n}" for n in range(len(self._names), len(parameters)))]
            self.shadow = OrderedDict(zip(names, parameters))
        for shadow, parameter in zip(self.shadow.values(), model.parameters()):
            shadow.lerp_(parameter.detach().to(shadow.dtype), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "count": len(self.shadow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shadow = OrderedDict((key, value.clone()) for key, value in state["shadow"].items())


@dataclass(frozen=True)
class StateSpec:
    """What to build. Equal specs and seeds give equal states."""

    layers: tuple[str, ...]
    depth: int
    optimizer: str
    groups: int
    empty_group: bool
    scheduler: str | None
    average: bool
    steps: int
    used_target: bool
    empty_tree: bool
    tree: Any


_KEYS = st.one_of(st.sampled_from(["a", "b", "weight", "0", "1", "x.y", "_", "ü"]), st.integers(-2, 12))
_NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.booleans())
_TENSORS = st.builds(
    lambda shape, dtype, seed: ("tensor", shape, dtype, seed),
    st.sampled_from([(), (0,), (3,), (2, 3), (2, 0, 2)]),
    st.sampled_from(["float32", "float64", "bfloat16", "int64", "uint8", "bool", "complex64", "float16"]),
    st.integers(0, 99),
)
_ARRAYS = st.builds(
    lambda shape, dtype: ("array", shape, dtype), st.sampled_from([(), (2,), (2, 2)]), st.sampled_from(["f4", "i8"])
)
_LEAVES = st.one_of(_NUMBERS, st.none(), st.text(max_size=5), st.binary(max_size=5), _TENSORS, _ARRAYS)
_TREES = st.dictionaries(
    _KEYS,
    st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            st.builds(lambda items: ("list", items), st.lists(inner, max_size=3)),
            st.builds(lambda items: ("tuple", items), st.lists(inner, max_size=3)),
            st.builds(lambda items: ("dict", items), st.lists(st.tuples(_KEYS, inner), max_size=3)),
            st.builds(lambda items: ("ordered", items), st.lists(st.tuples(_KEYS, inner), max_size=3)),
        ),
        max_leaves=6,
    ),
    max_size=5,
)


def specs() -> st.SearchStrategy[StateSpec]:
    """Draw what to build."""
    return st.builds(
        StateSpec,
        layers=st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=5).map(tuple),
        depth=st.integers(0, 2),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        groups=st.integers(1, 3),
        empty_group=st.booleans(),
        scheduler=st.sampled_from([None, *SCHEDULERS]),
        average=st.booleans(),
        steps=st.integers(0, 3),
        used_target=st.booleans(),
        empty_tree=st.booleans(),
        tree=_TREES,
    )


@dataclass
class Built:
    """A state in memory."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    average: Average | None
    tree: dict[Any, Any]


def build(spec: StateSpec, seed: int) -> Built:
    """Build a state with weights that depend on ``seed``, and the values of the tree only if ``seed`` is 0."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in spec.layers))
    for level in range(spec.depth):
        model = nn.Sequential(OrderedDict([(f"level{level}", model), ("out", nn.Linear(WIDTH, WIDTH))]))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = math.ceil(len(parameters) / spec.groups)
    groups: list[dict[str, Any]] = [
        {"params": parameters[at : at + size], "weight_decay": at / 1000} for at in range(0, len(parameters), size)
    ]
    if spec.empty_group:
        groups.insert(1, {"params": [], "weight_decay": 0.125})
    optimizer = OPTIMIZERS[spec.optimizer](groups)
    scheduler = SCHEDULERS[spec.scheduler](optimizer) if spec.scheduler else None
    average = Average([0, 1, 10, 11, 2]) if spec.average else None
    tree = {key: _value(value, blank=seed != 0) for key, value in spec.tree.items()}
    if spec.empty_tree and seed:
        tree = {}
    return Built(model, optimizer, scheduler, average, tree)


def _value(spec: Any, *, blank: bool) -> Any:
    """The value that a spec describes; with ``blank``, another one of the same structure."""
    if not isinstance(spec, tuple):
        return None if blank else spec
    kind, *rest = spec
    if kind == "tensor":
        shape, dtype, seed = rest
        values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        return (torch.zeros(shape) if blank else values * (seed + 1)).to(getattr(torch, dtype))
    if kind == "array":
        shape, dtype = rest
        return np.zeros(shape, dtype) if blank else np.full(shape, 3, dtype)
    items = rest[0]
    if kind in ("list", "tuple"):
        made = [_value(item, blank=blank) for item in items]
        return made if kind == "list" else tuple(made)
    mapping = OrderedDict((key, _value(item, blank=blank)) for key, item in items)
    return mapping if kind == "ordered" else dict(mapping)


def state_of(built: Built) -> dict[str, Any]:
    """The state as a user passes it to a save or a load."""
    state = {"model": built.model, "optimizer": built.optimizer, "tree": built.tree}
    if built.scheduler is not None:
        state["scheduler"] = built.scheduler
    if built.average is not None:
        state["average"] = built.average
    return state


def train(built: Built, steps: int, seed: int = 0) -> None:
    """Make some training steps with the same data for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        built.optimizer.zero_grad()
        output = built.model(torch.randn(5, WIDTH, generator=generator))
        output.square().mean().backward()
        built.optimizer.step()
        if built.scheduler is not None:
            built.scheduler.step()
        if built.average is not None:
            built.average.update(built.model)


def load_with_torch(source: Built, target: Built, path: Any) -> None:
    """Do with torch.save, torch.load and ``load_state_dict`` what a save and a load must do."""
    state = {name: obj.state_dict() if hasattr(obj, "state_dict") else obj for name, obj in state_of(source).items()}
    torch.save(state, path)
    loaded = torch.load(path, weights_only=False)
    for name, obj in state_of(target).items():
        if hasattr(obj, "load_state_dict"):
            obj.load_state_dict(loaded[name])
    target.tree = loaded["tree"]


def assert_equal(a: Any, b: Any, where: str = "state") -> None:
    """Assert equal types, keys in the same order, and equal bits. ``where`` begins with the section."""
    assert type(a) is type(b) or (isinstance(a, Mapping) and isinstance(b, Mapping)), f"{where}: {type(a)}, {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        assert _bits(a) == _bits(b), f"{where}: {a} and {b}"
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), where
    elif isinstance(a, Mapping):
        # Optimizers look up the entries of a parameter's state by name.
        in_order = sorted if where.startswith("optimizer") and ".state." in where else list
        assert in_order(a) == in_order(b), f"{where}: keys {list(a)} and {list(b)}"
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)} items"
        for number, (one, other) in enumerate(zip(a, b)):
            assert_equal(one, other, f"{where}.{number}")
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
