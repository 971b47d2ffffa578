"""Where the elements of each parameter lie in the flat tensors that DeepSpeed's optimizers step.

ZeRO-1 and 2 (``deepspeed/runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``) concatenate the parameters of a group
and divide the result among the ranks. ZeRO-3 (``stage3.py``) divides each parameter among the ranks, and each rank
concatenates its parts of the parameters of a sub-group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...errors import CheckpointError, FormatError
from ...frameworks.module_tree import clean_name
from ..pickles.records import TensorRef
from .folder import DeepSpeedFiles, items_of

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,18})(\..*)")


class FlatSpan(NamedTuple):
    """``length`` elements of a parameter from ``first`` on, at element ``start`` of the flat tensor of ``rank``."""

    rank: int
    first: int
    start: int
    length: int


class Member(NamedTuple):
    """A parameter of a group, and where its elements are. An empty parameter has no spans."""

    fqn: str
    shape: tuple[int, ...]
    spans: Sequence[FlatSpan]


@dataclass(frozen=True)
class FlatPartition:
    """What one rank holds of a group.

    Attributes:
        where: The file, for messages.
        weights: The tensor that the optimizer steps: a flat one, or a whole parameter.
        sizes: The numbers of elements that state with the same layout has, with and without padding at its end.
        state: The optimizer's state of the flat tensor.
    """

    where: str
    weights: TensorRef
    sizes: frozenset[int]
    state: Mapping[str, Any]

    def is_like_weights(self, tensor: TensorRef) -> bool:
        """Whether a tensor of the state has the layout of the weights, possibly with other padding."""
        return tensor.shape == self.weights.shape or (len(tensor.shape) == 1 and tensor.numel in self.sizes)


@dataclass(frozen=True)
class FlatGroup:
    """Parameters that are in one flat tensor on each rank, and their hyper-parameters if these are stored.

    With ``has_whole_momenta``, Muon's momentum on each rank is that of all parameters of which it has elements.
    """

    members: Sequence[Member]
    flats: Mapping[int, FlatPartition]
    options: Mapping[str, Any] | None
    has_whole_momenta: bool = False


def flat_groups(files: DeepSpeedFiles) -> tuple[list[FlatGroup], Any]:
    """Return the groups of a ZeRO checkpoint, and the loss scaler.

    Raises ``FormatError`` for files that contradict each other, and ``CorruptionError`` for missing ones.
    """
    documents = files.optimizers()
    where = files.where(files.model[0])
    shapes = [shapes_of(group, where) for group in items_of(files.first.get("param_shapes"), "param_shapes", where)]
    if "fp32_flat_groups" in documents[0]:
        groups = list(_zero_3(files, documents, [item for group in shapes for item in group.items()]))
    elif "single_partition_of_fp32_groups" in documents[0]:
        groups = list(_zero_1_and_2(files, documents, shapes))
    else:
        raise FormatError(
            f"{files.where(files.optimizer[0])}: it has no partitions like those of ZeRO in DeepSpeed 0.3.17 and later"
        )
    return groups, documents[0].get("loss_scaler")


# ------------------------------------------------------------------------------------------------------- ZeRO-1 and 2


def _zero_1_and_2(
    files: DeepSpeedFiles, documents: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> Iterator[FlatGroup]:
    where = files.where(files.optimizer[0])
    local_experts = _local_experts(name for group in shapes for name in group)
    for number, group in enumerate(shapes):
        flats = {
            rank: _flat(document, "single_partition_of_fp32_groups", number, files.where(files.optimizer[rank]))
            for rank, document in enumerate(documents)
        }
        count = _count(documents[0].get("partition_count"), number, len(flats))
        paddings = documents[0].get("param_alignment_paddings")
        between = [0] * len(group) if paddings is None else _paddings(paddings, number, where)
        for first in range(len(flats) // count):  # more than one only for experts, of which each has others
            ranks = range(first, len(flats), len(flats) // count)
            members = list(_consecutive(group, between, [flats[rank] for rank in ranks], ranks))
            if len(ranks) < len(flats):
                members = [one._replace(fqn=_numbered(one.fqn, first, local_experts)) for one in members]
            options = options_of_param(documents[0], number)
            # BF16_Optimizer, which does not store its stage, divides momenta like weights.
            is_whole = "zero_stage" in documents[0] and bool((options or {}).get("use_muon"))
            yield FlatGroup(members, {rank: flats[rank] for rank in ranks}, options, is_whole)


def _consecutive(
    shapes: Mapping[str, tuple[int, ...]], between: Sequence[int], flats: Sequence[FlatPartition], ranks: Sequence[int]
) -> Iterator[Member]:
    """Divide the concatenation of parameters, with ``between`` elements of padding after each, into equal parts."""
    size = max(flats[0].sizes)
    if any(max(flat.sizes) != size for flat in flats) or len(between) != len(shapes):
        raise FormatError(f"{flats[-1].where}: its partitions have other sizes than those in {flats[0].where}")
    begin = 0
    for (fqn, shape), padding in zip(shapes.items(), between, strict=True):
        end, spans, at = begin + prod(shape), [], begin
        while at < end:
            part, start = divmod(at, size) if size else (len(ranks), 0)
            length = min(end - at, size - start)
            if part >= len(ranks) or start + length > flats[part].weights.numel:
                raise FormatError(
                    f"{flats[min(part, len(flats) - 1)].where}: its partition ends before {fqn!r:.200}; does the model "
                    f"file belong to it?"
                )
            spans.append(FlatSpan(ranks[part], at - begin, start, length))
            at += length
        yield Member(fqn, shape, spans)
        begin = end + padding


def _count(found: Any, number: int, world_size: int) -> int:
    """The number of ranks among which a group is divided."""
    count = found[number] if type(found) in (list, tuple) and number < len(found) else found
    if count is None:
        return world_size
    if type(count) is not int or count < 1 or world_size % count:
        raise CheckpointError(f"a group is divided among {count!r:.80} of {world_size} ranks, which is not supported")
    return count


def _local_experts(names: Iterator[str]) -> dict[str, int]:
    """The number of experts of each MoE layer that one rank holds, by what their names begin with."""
    found: dict[str, int] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _numbered(fqn: str, position: int, local_experts: Mapping[str, int]) -> str:
    """The name with the expert's number among all. ``position`` is that of the rank in its expert-parallel group."""
    match = _EXPERT.fullmatch(fqn)
    if match is None:
        raise CheckpointError(f"{fqn!r:.200} is divided among fewer ranks than others, which is supported for experts")
    return f"{match[1]}{position * local_experts[match[1]] + int(match[2])}{match[3]}"


# --------------------------------------------------------------------------------------------------------------- ZeRO-3


def _zero_3(
    files: DeepSpeedFiles, documents: Sequence[Mapping[str, Any]], shapes: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[FlatGroup]:
    world_size = len(documents)
    if _count(documents[0].get("partition_count"), 0, world_size) != world_size:
        raise CheckpointError(f"{files.folder.url}: its parameters are divided among some ranks only (MiCS)")
    count = len(items_of(documents[0]["fp32_flat_groups"], "fp32_flat_groups", files.where(files.optimizer[0])))
    left = list(reversed(shapes))
    for number in range(count):
        flats = {
            rank: _flat(document, "fp32_flat_groups", number, files.where(files.optimizer[rank]))
            for rank, document in enumerate(documents)
        }
        size, start, members = flats[0].weights.numel, 0, []
        if any(flat.weights.numel != size for flat in flats.values()):
            raise FormatError(f"{flats[world_size - 1].where}: its partitions have other sizes than those of rank 0")
        while left and (start < size or not prod(left[-1][1])):
            fqn, shape = left.pop()
            numel = prod(shape)
            width = -(-numel // world_size)
            if start + width > size:
                raise FormatError(f"{flats[0].where}: its partition ends inside {fqn!r:.200}; is the model file of it?")
            ends = [min((rank + 1) * width, numel) - rank * width for rank in range(world_size)]
            spans = [FlatSpan(rank, rank * width, start, length) for rank, length in enumerate(ends) if length > 0]
            members.append(Member(fqn, shape, spans))
            start += width
        yield FlatGroup(members, flats, options_of_param(documents[0], number))
    if left:
        raise FormatError(f"{files.where(files.optimizer[0])}: it does not contain {left[-1][0]!r:.200}")


# ---------------------------------------------------------------------------------------------------------------- parts


def shapes_of(found: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a group's parameters by name, in the group's order. Raises ``FormatError``."""
    if not isinstance(found, dict):
        raise FormatError(f"{where}: a group of param_shapes is {found!r:.80}")
    for name, shape in found.items():
        is_shape = type(shape) is tuple and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
        if type(name) is not str or not is_shape:
            raise FormatError(f"{where}: param_shapes has {name!r:.200} of shape {shape!r:.80}")
    return {clean_name(name): shape for name, shape in found.items()}


def _paddings(found: Any, number: int, where: str) -> Sequence[int]:
    groups = items_of(found, "param_alignment_paddings", where)
    between = items_of(groups[number] if number < len(groups) else None, "param_alignment_paddings", where)
    if not all(type(padding) is int and padding >= 0 for padding in between):
        raise FormatError(f"{where}: param_alignment_paddings[{number}] is {between!r:.80}")
    return between


def _flat(document: Mapping[str, Any], key: str, number: int, where: str) -> FlatPartition:
    groups = items_of(document.get(key), key, where)
    weights = groups[number] if number < len(groups) else None
    if type(weights) is not TensorRef or not weights.is_contiguous or len(weights.shape) != 1:
        raise FormatError(f"{where}: {key}[{number}] is no flat tensor")
    padding = 0
    if "zero_stage" in document and "group_paddings" in document:  # those of BF16_Optimizer still have it
        paddings = items_of(document["group_paddings"], "group_paddings", where)
        padding = paddings[number] if number < len(paddings) else -1
    if type(padding) is not int or padding < 0:
        raise FormatError(f"{where}: group_paddings[{number}] is {padding!r:.80}")
    return FlatPartition(
        where, weights, frozenset((weights.numel, weights.numel + padding)), _state(document, number, where)
    )


def _state(document: Mapping[str, Any], number: int, where: str) -> Mapping[str, Any]:
    """The optimizer's state of a flat tensor."""
    base = document.get("base_optimizer_state", document.get("optimizer_state_dict"))
    if type(base) is list:  # an "elastic" checkpoint
        found = base[number] if number < len(base) else None
    else:
        states = base.get("state") if type(base) is dict else None
        found = states.get(number, {}) if type(states) is dict else None
    if not isinstance(found, dict):
        raise FormatError(f"{where}: the optimizer's state of group {number} is {found!r:.80}")
    return found


def options_of_param(document: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """Return the hyper-parameters of the parameter with this number; None if they are not stored."""
    base = document.get("base_optimizer_state", document.get("optimizer_state_dict", document))
    groups = base.get("param_groups") if type(base) is dict else None
    for group in groups if type(groups) is list else ():
        if type(group) is dict and type(params := group.get("params")) is list and number in params:
            return group
    return None
