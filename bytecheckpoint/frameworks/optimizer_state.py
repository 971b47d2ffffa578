"""Describe optimizer state in global boxes, and read what a checkpoint stores of it.

An entry of ``optimizer.state[param]`` with the shape of the local parameter has the parameter's layout. A 0-d tensor
(``step``) is the same on every rank. A tensor of another shape must belong to a parameter that is complete on this
rank, since the part of a sharded parameter that it describes would be unknown. Numbers are values. Lists and dicts are
values in which a ``Container("tensor")`` replaces each tensor, which is stored under its path. A tensor that consists
of others (``wrapper_tensors``) is stored like a dict of them, with a record of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..errors import StateError, UnserializableError, UnsupportedTensorError
from ..format.values.types import Container
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, SectionSource, SectionTensors, Shard, StoredSection
from .dtensor import is_dtensor
from .layout import ParamLayout
from .optimizer_class import needed_keys
from .optimizer_params import NamedParam
from .tensors import TensorKind, dense_view, describe_plain, tensor_kind, tensor_shards
from .wrapper_tensors import WRAPPER, HeldWrapper, held_wrapper

MASTER = "master"
"""The key of a master weight, which is stored with a parameter's state."""

MASTERS_OF: Path = ("masters_of",)
"""The path of the model's section to which the master weights belong; an empty text if their names begin with it."""

TENSOR_LEAF = Container("tensor")
_PREFIX = "state."
_NO_STATE: Mapping[str, Any] = {}  # one object, which a save encodes once for all parameters without state


def state_name(fqn: str, key: str) -> str:
    """The name of the tensor ``key`` in the state of the parameter ``fqn``."""
    return f"{_PREFIX}{fqn}.{key}"


def state_path(fqn: str, key: str) -> Path:
    """The path of the value ``key`` in the state of the parameter ``fqn``."""
    return ("state", fqn, key)


def empty_state_path(fqn: str) -> Path:
    """The path of the empty dict that marks a parameter without state."""
    return ("state", fqn)


def is_whole(layout: ParamLayout) -> bool:
    """Whether this rank holds one complete parameter, so that state of any shape is complete, too."""
    return (
        len(layout.fqns) == 1 and len(layout.parts) == 1 and layout.parts[0].box == Box.whole(layout.parts[0].shape)
    ) or all(0 in shape for shape in layout.fqns.values())


def lay_out(
    named: NamedParam, key: str, tensor: torch.Tensor, kind: TensorKind | None = None
) -> tuple[dict[str, BasicMeta], list[Shard]]:
    """Describe a state tensor as shards of its memory, under every name of the parameter.

    Pass the ``kind`` of the tensor if it is known. Raises ``UnsupportedTensorError`` if the shape does not determine
    which part of a sharded parameter it describes.
    """
    kind = kind or tensor_kind(tensor)
    if kind.is_distributed and named.is_divided:
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
        kind = tensor_kind(tensor)
    whole = named.names[0] if kind.is_distributed else None
    layout = None
    if whole is None:
        # A 0-d tensor has the layout of a 0-d parameter only; for others it is a step count.
        layout = named.local_layout if tensor.ndim or not named.param.ndim else None
        if named.entry_layouts:
            layout = named.entry_layouts.get(key, layout)
        if layout is not None and tensor.shape == layout.local_shape:
            whole = layout.one_whole
            if whole is None:
                dense = dense_view(state_name(named.names[0], key), tensor)
                return layout.describe(dense, lambda fqn: state_name(fqn, key))
    if whole is not None:
        return tensor_shards(state_name(whole, key), tensor, kind)
    if named.is_remote:
        return {}, []
    if tensor.ndim and layout is not None and not is_whole(layout):
        raise UnsupportedTensorError(
            f"{state_name(named.names[0], key)}: a state tensor of shape {tuple(tensor.shape)} for a parameter of "
            f"which this rank holds {layout.local_shape} of {next(iter(layout.fqns.values()))}. The part that it "
            "describes is unknown, and storing one rank's tensor would lose those of other ranks. Make it a DTensor, "
            "or 0-d if it is the same on every rank"
        )
    found = SectionTensors()
    for fqn in named.names:
        found.add(*tensor_shards(state_name(fqn, key), tensor, kind))
    return found.metas, found.shards


def lay_out_wrapper(named: NamedParam, key: str, tensor: torch.Tensor) -> HeldWrapper:
    """Describe a state tensor that consists of other tensors. Raises ``UnsupportedTensorError``."""
    name = state_name(named.names[0], key)
    if not is_dtensor(tensor) and not is_whole(named.layout):
        raise UnsupportedTensorError(
            f"{name}: a {type(tensor).__name__} for a parameter of which this rank holds a flat part; which elements "
            "its blocks describe in other layouts is unknown. Shard the parameter with FSDP-2 (fully_shard) instead"
        )
    return held_wrapper(name, tensor)


def wrapper_entry(held: HeldWrapper) -> dict[str, Any]:
    """The value that is stored for a state tensor that consists of other tensors."""
    return {WRAPPER: held.record, **dict.fromkeys(held.names, TENSOR_LEAF)}


def _may_differ(named: NamedParam, tensor: Any) -> bool:
    """Whether other ranks may hold quantized parts of a DTensor, and this rank an empty part that is not quantized."""
    if tensor._local_tensor.numel() or not tensor.numel():
        return False
    return type(named.holder.optimizer).__module__.startswith("torchao.")


def map_leaves(value: Any, leaf: Callable[[str, Any], Any], key: str, where: str) -> Any:
    """A copy of nested dicts, lists and tuples in which ``leaf(dotted key, value)`` replaces every leaf."""
    if isinstance(value, Mapping):
        for part in value:
            if not isinstance(part, (str, int)):
                raise UnserializableError(f"{where}.{key}: key {part!r} is neither str nor int")
        return {part: map_leaves(item, leaf, f"{key}.{part}", where) for part, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, leaf, f"{key}.{i}", where) for i, item in enumerate(value))
    return leaf(key, value)


def capture_states(params: Iterable[NamedParam], source: SectionSource, *, compare: bool) -> None:
    """``capture_state`` of many parameters, in order."""
    plain: list[NamedParam] = []
    for named in params:
        if _has_plain_state(named):
            plain.append(named)
            continue
        _capture_plain(plain, source, compare=compare)
        plain.clear()
        capture_state(named, source, compare=compare)
    _capture_plain(plain, source, compare=compare)


def _has_plain_state(named: NamedParam) -> bool:
    """Whether ``lay_out`` stores each plain tensor of the state whole, under the only name of the parameter."""
    return (
        named.layout.one_whole is not None
        and named.master is None
        and named.holder.held is None
        and not named.entry_layouts
        and not is_dtensor(named.param)
    )


def _capture_plain(params: Sequence[NamedParam], source: SectionSource, *, compare: bool) -> None:
    """``capture_state`` of parameters with plain state, in a third of the time if that consists of plain tensors."""
    states = [(named, named.names[0], named.state) for named in params]
    names = [state_name(fqn, key) for _, fqn, state in states for key in state if isinstance(key, str)]
    tensors = [value for *_, state in states for value in state.values()]
    shards = describe_plain(names, tensors) if len(names) == len(tensors) else None
    if shards is None or not source.metas.keys().isdisjoint(names):
        for named in params:
            capture_state(named, source, compare=compare)
        return
    source.add({shard.fqn: shard.meta for shard in shards}, shards)
    source.values.update({empty_state_path(fqn): _NO_STATE for _, fqn, state in states if not state})
    if not compare:
        return
    for named, fqn, state in states:
        large = [state_name(fqn, key) for key, value in state.items() if value.ndim]
        source.mark_replicas(large, named.layout.replica_ranks)
    scalars = [shard for shard in shards if not shard.meta.shape and shard.tensor.is_cpu]
    source.digests.update((one.fqn, _raw_bytes(one.tensor)) for one in scalars)


def _raw_bytes(scalar: torch.Tensor) -> bytes:
    raw: bytes = scalar.detach().reshape(1).view(torch.uint8).numpy().tobytes()
    return raw


def capture_state(named: NamedParam, source: SectionSource, *, compare: bool) -> None:
    """Add one parameter's state to ``source``. Raises ``StateError`` for an entry that cannot be stored.

    With ``compare``, scalars such as ``step`` get digests: ranks that stepped an expert different numbers of times
    have different values for one parameter, and each rank stores its value. Scalars on an accelerator are assumed to be
    equal, because reading them one by one would stall it.
    """
    where = _PREFIX + named.names[0]
    state = named.state
    if not state and not named.is_remote:
        source.values.update({empty_state_path(fqn): _NO_STATE for fqn in named.names})

    def add(key: str, value: torch.Tensor, kind: TensorKind) -> None:
        metas, shards = lay_out(named, key, value, kind)
        if not source.metas.keys().isdisjoint(metas):
            raise StateError(f"{where}: two state tensors are named {key!r}; rename one of them")
        source.add(metas, shards)
        if not compare or kind.is_distributed:
            return
        if value.ndim and all(type(shard) is Shard for shard in shards):
            # ZeRO leaves the state on one of the ranks that hold the parameter.
            source.mark_replicas(metas, None if named.holder.held is not None else named.layout.replica_ranks)
        if value.ndim == 0 and value.device.type == "cpu":
            source.digests.update(dict.fromkeys(metas, _raw_bytes(value)))

    def leaf(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        add(key, value, tensor_kind(value))
        return TENSOR_LEAF

    if named.master is not None:
        leaf(MASTER, named.master)
    for key, value in state.items():
        if not isinstance(key, str):
            raise UnserializableError(f"{where}: state key {key!r} is not a str")
        if isinstance(value, torch.Tensor):
            kind = tensor_kind(value)
            if kind.is_wrapper:
                held = lay_out_wrapper(named, key, value)
                source.add(held.metas, held.shards)
                source.values[state_path(named.names[0], key)] = wrapper_entry(held)
            elif not kind.is_dtensor or not _may_differ(named, value):
                add(key, value, kind)
            continue
        plain = map_leaves(value, leaf, key, where)
        if not named.is_remote:
            source.values.update({state_path(fqn, key): plain for fqn in named.names})


@dataclass
class StoredParam:
    """What a checkpoint stores of one parameter's state: metas of tensors and values, by key.

    ``paths`` are those of all its values and hyper-parameters. ``expected`` is state that the parameter must have,
    although it is not stored: the meta of each tensor, and None for each value. ``has_master``: the tensors include a
    master weight, which is not part of the state.
    """

    tensors: dict[str, BasicMeta] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    expected: dict[str, BasicMeta | None] = field(default_factory=dict)
    is_stateless: bool = False
    has_master: bool = False

    @cached_property
    def keys(self) -> list[str]:
        """The keys of ``optimizer.state[param]``, without those of tensors inside a nested entry."""
        nested = tuple(f"{key}." for key, value in self.values.items() if isinstance(value, (dict, list, tuple)))
        tensors = [key for key in self.tensors if not key.startswith(nested)]
        return [key for key in tensors if not (self.has_master and key == MASTER)] + list(self.values)


class StoredState(dict[str, StoredParam]):
    """What a checkpoint stores of every parameter, by name; an empty ``StoredParam`` for any other name."""

    def __init__(self, section: StoredSection, params: Iterable[NamedParam]) -> None:
        """``params`` are the target's; the names of the checkpoint come from its hyper-parameters and values."""
        super().__init__()
        for path, value in section.values.items():
            match path:
                case ("state", fqn, key):
                    self.setdefault(str(fqn), StoredParam()).values[str(key)] = value
                case ("state", fqn) if type(value) is not Container:
                    self.setdefault(str(fqn), StoredParam()).is_stateless = True
                case ("param_groups" | "class", fqn):
                    self.setdefault(str(fqn), StoredParam())
                case _:
                    continue
            self[str(fqn)].paths.append(path)
        known = self.keys() | {name for named in params for name in named.names}
        for name, meta in section.metas.items():
            fqn, key = split_entry(name.removeprefix(_PREFIX), known)
            if fqn and name.startswith(_PREFIX):
                self.setdefault(fqn, StoredParam()).tensors[key] = meta
        for named in params:
            # A class of the user's may keep state of its own under this key.
            if named.master is not None or type(named.holder.optimizer).__module__.startswith("torch."):
                for fqn in named.names:
                    self[fqn].has_master = MASTER in self[fqn].tensors
        self._expect(params)

    def __missing__(self, fqn: str) -> StoredParam:
        return StoredParam()

    def _expect(self, params: Iterable[NamedParam]) -> None:
        """Expect state of a parameter, because the step needs it or similar parameters in the checkpoint have it.

        Only torch's optimizers are considered, which give the same entries to all parameters of one group and one kind
        (matrix or not). Other optimizers may differ on purpose.
        """
        kinds: dict[tuple[int, bool], list[tuple[StoredParam, tuple[int, ...]]]] = {}
        for named in params:
            if type(named.holder.optimizer).__module__.startswith("torch.optim"):
                for fqn, shape in named.layout.fqns.items():
                    stored = self[fqn]
                    if stored.keys:
                        kinds.setdefault((id(named.group), len(shape) > 1), []).append((stored, shape))
                        missing = set(needed_keys(named.holder.optimizer)).difference(stored.keys)
                        stored.expected.update(dict.fromkeys(missing))
        for members in kinds.values():
            templates: dict[str, tuple[BasicMeta | None, tuple[int, ...]]] = {}
            for stored, shape in members:
                for key in stored.keys:
                    templates.setdefault(key, (stored.tensors.get(key), shape))
            for stored, shape in members:
                for key in templates.keys() - stored.keys:
                    meta, peer_shape = templates[key]
                    if meta is not None and meta.shape == peer_shape:
                        meta = BasicMeta(meta.dtype, shape)
                    stored.expected[key] = meta


def split_entry(entry: str, known: Collection[str]) -> tuple[str, str]:
    """Split ``<fqn>.<key>`` after the longest known name; two empty texts if it begins with none."""
    end = len(entry)
    while (end := entry.rfind(".", 0, end)) > 0:
        if entry[:end] in known:
            return entry[:end], entry[end + 1 :]
    return "", ""
