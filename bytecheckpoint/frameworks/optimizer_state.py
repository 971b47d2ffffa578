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
from functools import partial
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


StateEntry = tuple[NamedParam, str, torch.Tensor]
"""A tensor of a parameter's state, and its key."""


def add_together(
    entries: Sequence[StateEntry], section: SectionTensors
) -> tuple[list[StateEntry], list[Shard], Sequence[StateEntry]]:
    """Add plain state tensors to a section, in a third of the time that ``lay_out`` takes.

    Returns these, their shards, and the other entries.
    """
    plain = [entry for entry in entries if entry[0].whole_name is not None]
    names = [f"{_PREFIX}{named.whole_name}.{key}" for named, key, _ in plain]
    shards = describe_plain(names, [tensor for _, _, tensor in plain])
    if shards is None or not section.metas.keys().isdisjoint(names):
        return [], [], entries
    section.add({shard.fqn: shard.meta for shard in shards}, shards)
    return plain, shards, [entry for entry in entries if entry[0].whole_name is None]


def capture_states(params: Iterable[NamedParam], source: SectionSource, *, compare: bool) -> None:
    """Add the state of parameters to ``source``. Raises ``StateError`` for an entry that cannot be stored.

    With ``compare``, scalars such as ``step`` get digests: ranks that stepped an expert different numbers of times
    have different values for one parameter, and each rank stores its value. Scalars on an accelerator are assumed to be
    equal, because reading them one by one would stall it.
    """
    entries: list[StateEntry] = []
    for named in params:
        _capture_values(named, source, entries)
    plain, shards, rest = add_together(entries, source)
    for (named, _, tensor), shard in zip(plain, shards, strict=True) if compare else ():
        _mark(named, tensor, (shard.fqn,), source)
    for named, key, tensor in rest:
        kind = tensor_kind(tensor)
        metas, shards = lay_out(named, key, tensor, kind)
        if not source.metas.keys().isdisjoint(metas):
            raise StateError(f"{_PREFIX}{named.names[0]}: two state tensors are named {key!r}; rename one of them")
        source.add(metas, shards)
        if compare and not kind.is_distributed and not (tensor.ndim and any(type(one) is not Shard for one in shards)):
            _mark(named, tensor, metas, source)


def _mark(named: NamedParam, tensor: torch.Tensor, names: Collection[str], source: SectionSource) -> None:
    """State how ranks find out whether a tensor that they hold completely is the same."""
    if tensor.ndim:
        # ZeRO leaves the state on one of the ranks that hold the parameter.
        source.mark_replicas(names, None if named.holder.held is not None else named.layout.replica_ranks)
    elif tensor.is_cpu:
        raw = tensor.detach().reshape(1).view(torch.uint8).numpy().tobytes()
        source.digests.update(dict.fromkeys(names, raw))


def _capture_values(named: NamedParam, source: SectionSource, entries: list[StateEntry]) -> None:
    """Add what is not a tensor of one parameter's state to ``source``, and the tensors to ``entries``."""
    state = named.state
    if not state and not named.is_remote:
        source.values.update({empty_state_path(fqn): _NO_STATE for fqn in named.names})
    if named.master is not None:
        entries.append((named, MASTER, named.master))
    for key, value in state.items():
        if not isinstance(key, str):
            raise UnserializableError(f"{_PREFIX}{named.names[0]}: state key {key!r} is not a str")
        if type(value) is torch.Tensor:  # almost all entries
            entries.append((named, key, value))
            continue
        kind = tensor_kind(value)
        if kind.is_wrapper:
            held = lay_out_wrapper(named, key, value)
            source.add(held.metas, held.shards)
            source.values[state_path(named.names[0], key)] = wrapper_entry(held)
        elif isinstance(value, torch.Tensor):
            if not kind.is_dtensor or not _may_differ(named, value):
                entries.append((named, key, value))
        else:
            plain = map_leaves(value, partial(_note, named, entries), key, _PREFIX + named.names[0])
            if not named.is_remote:
                source.values.update({state_path(fqn, key): plain for fqn in named.names})


def _note(named: NamedParam, entries: list[StateEntry], key: str, leaf: Any) -> Any:
    """Add a tensor in a list or dict to ``entries``; return what is stored in its place."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    entries.append((named, key, leaf))
    return TENSOR_LEAF


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

    @property
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
                    self._at(str(fqn)).values[str(key)] = value
                case ("state", fqn) if type(value) is not Container:
                    self._at(str(fqn)).is_stateless = True
                case ("param_groups" | "class", fqn):
                    pass
                case _:
                    continue
            self._at(str(fqn)).paths.append(path)
        known = self.keys() | {name for named in params for name in named.names}
        for name, meta in section.metas.items():
            fqn, key = split_entry(name.removeprefix(_PREFIX), known)
            if fqn and name.startswith(_PREFIX):
                self._at(fqn).tensors[key] = meta
        for named in params:
            for fqn in named.names:
                # A class of the user's may keep state of its own under this key.
                if MASTER in self[fqn].tensors and (named.master is not None or _is_of_torch(named, "torch.")):
                    self[fqn].has_master = True
        self._expect(params)

    def __missing__(self, fqn: str) -> StoredParam:
        return StoredParam()

    def _at(self, fqn: str) -> StoredParam:
        found = self.get(fqn)
        if found is None:
            found = self[fqn] = StoredParam()
        return found

    def _expect(self, params: Iterable[NamedParam]) -> None:
        """Expect state of a parameter, because the step needs it or similar parameters in the checkpoint have it.

        Only torch's optimizers are considered, which give the same entries to all parameters of one group and one kind
        (matrix or not). Other optimizers may differ on purpose.
        """
        templates: dict[tuple[int, bool], dict[str, tuple[BasicMeta | None, tuple[int, ...]]]] = {}
        members: list[tuple[tuple[int, bool], StoredParam, list[str], tuple[int, ...]]] = []
        for named in params:
            if _is_of_torch(named, "torch.optim"):
                for fqn, shape in named.layout.fqns.items():
                    stored = self[fqn]
                    keys = stored.keys
                    if keys:
                        kind = (id(named.group), len(shape) > 1)
                        members.append((kind, stored, keys, shape))
                        if kind not in templates:
                            templates[kind] = dict.fromkeys(needed_keys(named.holder.optimizer), (None, shape))
                        templates[kind].update({key: (stored.tensors.get(key), shape) for key in keys})
        for kind, stored, keys, shape in members:
            for key in templates[kind].keys() - keys:
                meta, peer_shape = templates[kind][key]
                if meta is not None and meta.shape == peer_shape:
                    meta = BasicMeta(meta.dtype, shape)
                stored.expected[key] = meta


def _is_of_torch(named: NamedParam, package: str) -> bool:
    return type(named.holder.optimizer).__module__.startswith(package)


def split_entry(entry: str, known: Collection[str]) -> tuple[str, str]:
    """Split ``<fqn>.<key>`` after the longest known name; two empty texts if it begins with none."""
    end = len(entry)
    while (end := entry.rfind(".", 0, end)) > 0:
        if entry[:end] in known:
            return entry[:end], entry[end + 1 :]
    return "", ""
