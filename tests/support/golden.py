"""The golden checkpoints: the state saved in each, and the expected result of a load.

The expectation of every case is computed without the library, from plain objects: an unsharded model or the tree.
``describe`` converts a value to JSON types and preserves types and bits.
"""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from made_manifests import make_manifest
from sorted_arguments import saving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint as bcp
from bytecheckpoint.format.manifest.document import Manifest
from bytecheckpoint.format.manifest.envelope import decode, encode
from bytecheckpoint.saving import planning as save_planning
from bytecheckpoint.tensors.dtypes import DTYPES, find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.testing.ranks import RankPool

ROOT = Path(__file__).parents[1] / "golden" / "v1"
EXAMPLE = ROOT / "example.msgpack"
CHUNK_SIZE = 64  # small, so that shards have several checksums
STEP = 12
TORCH = torch.__version__.rpartition(".")[0]  # hyper-parameters of optimizers change between versions
CREATED = "2025-01-31T00:00:00.000000Z"
METADATA = {"run": "golden", "lr": 0.1, "nested": {"list": [1, None, True]}}


def describe(value: Any) -> Any:
    """Convert a plain value, a tensor or a tree to JSON types; two results are equal if types and bits are equal."""
    kind = type(value).__name__
    if value is None or type(value) in (bool, str):
        return value if not isinstance(value, str) or value.isprintable() else [kind, ascii(value)]
    if type(value) is int:
        return [kind, str(value)]
    if type(value) is float:
        return [kind, struct.pack(">d", value).hex()]
    if type(value) is complex:
        return [kind, struct.pack(">dd", value.real, value.imag).hex()]
    if isinstance(value, torch.Tensor):
        return ["tensor", *describe_tensor(value)]
    if isinstance(value, (np.ndarray, np.generic)):
        return [
            kind if isinstance(value, np.ndarray) else "numpy",
            value.dtype.str,
            list(value.shape),
            value.tobytes().hex(),
        ]
    if isinstance(value, (bytes, bytearray)):
        return [kind, value.hex()]
    if isinstance(value, Mapping):
        return [kind, [[describe(key), describe(item)] for key, item in value.items()]]
    if type(value) is deque:
        return [kind, value.maxlen, [describe(item) for item in value]]
    if type(value) in (set, frozenset):
        return [kind, sorted((describe(item) for item in value), key=repr)]
    if isinstance(value, (list, tuple)):
        return [kind, [describe(item) for item in value]]
    if isinstance(value, (range, slice)):
        return [kind, [value.start, value.stop, value.step]]
    return [kind, str(value)]


def describe_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return ``[dtype, shape, bytes]``."""
    data = tensor.detach().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw.hex()]


@dataclass
class Expected:
    """The result of a load into ``{}``: ``tensors`` and ``aliases`` by full name, ``trees`` by section and rank."""

    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    trees: dict[str, list[Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # hyper-parameters by parameter name
    stateless: list[str] = field(default_factory=list)  # parameters without optimizer state

    def to_plain(self) -> dict[str, Any]:
        return dict(sorted(vars(self).items()))

    def add_model(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in first:
                self.aliases[f"model.{name}"] = f"model.{first[id(tensor)]}"
            else:
                first[id(tensor)] = name
                self.tensors[f"model.{name}"] = describe_tensor(tensor)

    def add_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                self.options[name] = describe({key: value for key, value in group.items() if key != "params"})
                state = optimizer.state.get(parameter, {})
                if not state:
                    self.stateless.append(name)
                for key, tensor in state.items():
                    self.tensors[f"optimizer.state.{name}.{key}"] = describe_tensor(tensor)

    def add_trees(self, section: str, trees: list[Any]) -> None:
        """Add one tree per rank; tensors that are equal on all ranks are stored under their plain names."""
        self.trees[section] = [describe(tree) for tree in trees]
        by_rank = [dict(_tensors(tree, section)) for tree in trees]
        for name in by_rank[0]:
            found = [describe_tensor(tensors[name]) for tensors in by_rank]
            own = any(other != found[0] for other in found) or ".own" in name
            if own:
                self.tensors.update({f"{name}@{rank}": one for rank, one in enumerate(found)})
            else:
                self.tensors[name] = found[0]


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _tensors(item, f"{name}.{key}")
    elif type(tree) in (list, tuple):
        for index, item in enumerate(tree):
            yield from _tensors(item, f"{name}.{index}")


class Small(nn.Module):
    """Uneven dimensions, one dimension smaller than any world, and 0-d, empty, tied and transient tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 3)
        self.cube = nn.Parameter(torch.zeros(3, 5, 2))
        self.gain = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("coarse", torch.zeros(3, 2, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 7)
        self.head.weight = self.up.weight
        self.unused = nn.Parameter(torch.zeros(2, 2))


def filled(model: nn.Module, seed: float = 1.0) -> Any:
    """Fill the model with multiples of 1/16, which are the same on every machine."""
    with torch.no_grad():
        for number, (_, tensor) in enumerate(sorted([*model.named_parameters(), *model.named_buffers()])):
            ramp = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
            tensor.copy_((ramp * 7 + number * 5 + seed) % 32 - (15.5 if tensor.is_floating_point() else 0))
    return model


def steps(optimizer: torch.optim.Optimizer, frozen: tuple[torch.Tensor, ...] = ()) -> torch.optim.Optimizer:
    """Make two steps with gradients that are equal in every layout.

    The results are rounded, because the last bits of Adam's roots and quotients depend on the processor.
    """
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.numel() and not any(parameter is other for other in frozen):
                    parameter.grad = (parameter.detach() * 0.5 + 0.25).clone()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            for tensor in (parameter, *state.values()):
                tensor.copy_((tensor * 1024).round() / 1024)
    return optimizer


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5, amsgrad=True)


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    odd = [p for name, p in named.items() if name.endswith("bias")]
    even = [p for name, p in named.items() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": odd, "weight_decay": 0.0}, {"params": even, "lr": 0.5}], lr=0.25)


def _fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _fsdp1_flat(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(model, use_orig_params=False, device_id=torch.device("cpu"))


def _tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """``state`` creates this rank's state; ``expected`` runs in one process, without the library."""

    name: str
    world_size: int
    state: Callable[[], dict[str, Any]]
    expected: Callable[[], Expected]
    options: dict[str, Any] = field(default_factory=dict)


def _model_case(
    name: str, world_size: int, wrap: Callable[[nn.Module], nn.Module], optimizer: Optimizer, kind: type[nn.Module]
) -> Case:
    def state() -> dict[str, Any]:
        model = wrap(filled(kind()))
        return {"model": model, "optimizer": steps(optimizer(model), _frozen(model))}

    def expected() -> Expected:
        model = filled(kind())
        found = Expected()
        stepped = steps(optimizer(model), _frozen(model))
        found.add_model(model)
        found.add_optimizer(model, stepped)
        return found

    return Case(name, world_size, state, expected)


def _frozen(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return tuple(parameter for name, parameter in model.named_parameters() if name == "unused")


def _tree_case(name: str, trees: list[dict[str, Any]], mark: Callable[[dict[str, Any]], dict[str, Any]]) -> Case:
    def expected() -> Expected:
        found = Expected()
        for section in trees[0]:
            found.add_trees(section, [tree[section] for tree in trees])
        return found

    def state() -> dict[str, Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return {section: mark(tree) for section, tree in trees[rank].items()}

    return Case(name, len(trees), state, expected)


def plain_values() -> dict[str, Any]:
    """Return a value of every kind that the format supports."""
    return {
        "none": None, "true": True, "false": False, "int": -7, "int64": -(2**63), "uint64": 2**64 - 1,
        "big": 2**64, "bigger": -(3**200), "float": 0.1, "minus zero": -0.0, "nan": float("nan"), "inf": float("-inf"),
        "complex": complex(1.5, -0.0), "str": "Grüße, 世界", "surrogate": "a\ud800b", "empty str": "", "nul": "a\0b",
        "bytes": b"\x00\xff", "bytearray": bytearray(b"ab"), "tuple": (1, (2, "x"), ()), "list": [1, [2.5, None]],
        "set": {3, 1, 2}, "frozenset": frozenset({"a", (1, 2)}), "counter": Counter("abca"),
        "deque": deque([1, 2, 3], maxlen=3), "endless": deque(), "range": range(2, 20, 3), "slice": slice(None, 5, 2),
        "array": np.arange(6, dtype="<f4").reshape(2, 3), "empty array": np.zeros((0, 2), ">i2"),
        "scalar": np.float64(2.5), "flag": np.bool_(True), "dtype": torch.bfloat16, "device": torch.device("cuda", 1),
        "cpu": torch.device("cpu"), "size": torch.Size([2, 3]), "ordered": OrderedDict(z=1, a=OrderedDict(y=2)),
        "int keys": {1: "one", -2: "two"}, "odd keys": {(1, "a"): 1, 2.5: 2, None: 3, b"k": 4, True: 5},
        "empty dict": {}, "empty list": [], "nested": {"a": {"b": {"c": 1}}}, "dots.in.key": {"x.y": 1},
    }  # fmt: skip


def tensor_tree() -> dict[str, Any]:
    """Return tensors in containers of every kind, under keys that a dotted name does not determine."""
    one = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "list": [one + 1, {"x": one + 2, "n": 1}, "text"],
        "tuple": (one + 3, (one + 4, 5)),
        "ordered": OrderedDict(b=one + 5, a=OrderedDict(c=one + 6)),
        "dotted.key": {"a.b": one + 7, "a": {"c": one + 8}},
        "ints": {0: one + 9, 10: {"1": one + 10}},
        "tail": {"1": one + 11},
        "same": {"name": {"x": one + 12}},
        "same.name": {"y": one + 13},
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(3, 0, 2, dtype=torch.int16),
    }


def every_dtype() -> dict[str, Any]:
    """Return one tensor of each dtype of this torch, with distinct bytes, and tensors of unusual shapes."""
    known = {name: kind for name, kind in DTYPES.items() if isinstance(getattr(torch, name, None), torch.dtype)}
    tree: dict[str, Any] = {}
    for number, (name, kind) in enumerate(known.items()):
        raw = (torch.arange(6 * kind.itemsize, dtype=torch.int64) * 37 + number) % 251
        if name == "bool":
            raw = raw % 2
        tree[name] = raw.to(torch.uint8).view(getattr(torch, name)).reshape(2, 3)
    tree["zero-d"] = torch.tensor(1.5 + 2.5j, dtype=torch.complex128)
    tree["no element"] = torch.zeros(0, dtype=torch.complex128)
    return tree


def _per_rank_trees() -> list[dict[str, Any]]:
    return [
        {
            "extra_state": {
                "own": {"value": rank, "tensor": torch.full((3,), rank, dtype=torch.int32), "same": "on both"},
                "own tensor": torch.ones(2),
                "differing": torch.tensor([1.0, float(rank)]),
                "common": torch.tensor([1.0, 2.0]),
                "position": 100 * rank,
                "epoch": 3,
            }
        }
        for rank in range(2)
    ]


def _mark_own(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: bcp.PerRank(value) if key.startswith("own") else value for key, value in tree.items()}


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _model_case("single", 1, lambda model: model, _two_groups, Tied),
        _model_case("fsdp2-4", 4, _fsdp2, _sgd, Small),
        _model_case("fsdp1-flat-3", 3, _fsdp1_flat, _adamw, Small),
        _model_case("tp-2", 2, _tp, _sgd, Small),
        _tree_case("values", [{"extra_state": plain_values(), "tree": tensor_tree()}], dict),
        _tree_case("per-rank-2", _per_rank_trees(), _mark_own),
        _tree_case("dtypes", [{"dtypes": every_dtype()}], dict),
    )
}


def compressible(name: str) -> dict[str, Any]:
    """Return tensors whose chunks shrink in whole, in some planes, or not at all; ``name`` makes the plan a new one."""
    ramp = torch.arange(700, dtype=torch.float32)
    mixed = (torch.arange(600, dtype=torch.int64) * 2654435761) % 2**32
    return {
        "weight": (ramp / 64 - 5).reshape(7, 100),
        "half": (ramp[:333] / 256).bfloat16(),
        "noise": (mixed * 40503 >> 8 & 0xFF).to(torch.uint8),
        "mantissa": ((mixed & 0x7FFFFF) | 0x3F800000).to(torch.int32).view(torch.float32),
        "steps": torch.arange(301),
        "zeros": torch.zeros(3, 500),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        name: torch.ones(1),
    }


ENCODED_CASES: dict[str, Case] = {
    codec: replace(
        _tree_case(codec, [{"tree": compressible(codec), "extra_state": {"n": 1}}], dict),
        options={"codec": codec, "chunk_size": 1024},
    )
    for codec in ("zstd", "zstd-planes")
}


def example() -> Manifest:
    """Return the manifest of the example in docs/format.md: two tensors, one of them cut in two."""
    return make_manifest(
        [
            ("model", "w", BasicMeta(find_dtype("float32"), (4, 3)), [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]),
            ("model", "b", BasicMeta(find_dtype("bfloat16"), (3,)), [Box((0,), (3,))]),
        ],
        ranks=2,
        chunk_size=16,
        aliases=[("model.tied", "model.w")],
        metadata={"run": "a"},
    )


def plain_target(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an unsharded model and optimizer for a model case, with other values."""
    kind, optimizer = {"single": (Tied, _two_groups), "fsdp1-flat-3": (Small, _adamw)}.get(name, (Small, _sgd))
    model = filled(kind(), seed=9.0)
    return model, optimizer(model)


def save_case(rank: int, world_size: int, name: str, path: str) -> None:
    """Save one rank's part of one golden checkpoint."""
    with (
        mock.patch.object(save_planning, "attempt_name", return_value=f"attempt-golden-{name}"),
        mock.patch("platform.node", return_value="golden"),
    ):
        case = {**CASES, **ENCODED_CASES}[name]
        bcp.save(
            path, case.state(), step=STEP, metadata=METADATA, **saving(**{"chunk_size": CHUNK_SIZE, **case.options})
        )


INCREMENTAL = "incremental"
"""A folder of two checkpoints, of which the second refers to the first."""


def incremental_trees() -> list[dict[str, torch.Tensor]]:
    """Return the state of each save: of ``weight``, one chunk changes, and of ``half``, all of them."""
    second = {"weight": torch.arange(1000.0), "half": torch.arange(700).bfloat16(), "step": torch.tensor(1)}
    first = {"weight": second["weight"].clone(), "half": second["half"] + 1, "step": torch.tensor(0)}
    first["weight"][500] = -1
    return [first, second]


def write_incremental(folder: Path) -> None:
    """Generate the folder ``INCREMENTAL``."""
    target = folder / INCREMENTAL
    shutil.rmtree(target, ignore_errors=True)
    with mock.patch("platform.node", return_value="golden"), bcp.Checkpointer() as checkpointer:
        for number, tree in enumerate(incremental_trees(), 1):
            attempt = mock.patch.object(save_planning, "attempt_name", return_value=f"attempt-golden-{number}")
            path = target / f"step-{number}"
            with attempt:
                checkpointer.save(
                    path, {"tree": tree}, step=number, options=bcp.SaveOptions(base="auto", chunk_size=1024)
                ).result()
            manifest = decode((path / "manifest.msgpack").read_bytes())
            manifest.created = CREATED
            (path / "manifest.msgpack").write_bytes(encode(manifest))
            engine = checkpointer._session.engine
            engine.shared.last_commit = None
            engine.plans = type(engine.plans)()  # a new plan names its attempt


def write_case(pool: RankPool, name: str, folder: Path) -> None:
    """Generate a checkpoint and ``<name>.json`` with its expected contents.

    Attempt names, the time and the host name are fixed, so that doing it twice gives the same files.
    """
    case = {**CASES, **ENCODED_CASES}[name]
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    pool.run(save_case, name, str(target), world_size=case.world_size)
    manifest_file = target / "manifest.msgpack"
    manifest = decode(manifest_file.read_bytes())
    manifest.created = CREATED
    manifest_file.write_bytes(encode(manifest))
    (folder / f"{name}.json").write_text(_lines({"torch": TORCH, **case.expected().to_plain()}))


def _lines(expected: dict[str, Any]) -> str:
    """Return JSON with one name per line, so that differences are readable."""
    parts = []
    for key, value in expected.items():
        rows = value.items() if isinstance(value, dict) else ()
        lines = [f"{json.dumps(name)}: {json.dumps(item)}" for name, item in sorted(rows)]
        parts.append(f"{json.dumps(key)}: " + ("{\n" + ",\n".join(lines) + "\n}" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"
