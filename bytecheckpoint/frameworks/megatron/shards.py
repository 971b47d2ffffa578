"""Read what a module of Megatron-core says about its shards, in one form of names.

``sharded_state_dict`` returns a ``ShardedTensor`` for each tensor that is one box, a ``ShardedTensorFactory`` for a
tensor of several boxes, and a ``ShardedObject`` for extra state. Layers and experts are axes of the global tensor in
one scheme of keys, and parts of the name in the other. Here they are always parts of the name, and the halves of a
gated linear unit are one tensor, with the gate first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...errors import StateError, UnsupportedTensorError
from ...runtime.messages import listed
from ...tensors.geometry import Box, row_major_strides
from ...tensors.mesh_layout import MeshLayout, MeshPlace
from ..dtensor import loaded_class
from ..layout import ParamLayout, ParamPart

# Per layer, and per expert: what Megatron's trainer asks for since 0.15. Modules of older versions ignore it.
_METADATA = {"singleton_local_shards": True, "non_homogeneous_layers": True}

_MAPPING = "megatron.core.dist_checkpointing.mapping"

HALVES = ("_w", "_v")
"""What Megatron appends to the names of the gate and the other half of a gated linear unit, per layer."""

# A module list whose number Megatron leaves out of the key if it is an axis of the global tensor, outermost first.
_LISTS = (re.compile(r"(?:^|\.)layers\.(?!\d)"), re.compile(r".*(?:^|\.)experts\.(?!\d|experts\.|local_experts\.)"))


@dataclass(eq=False)
class ModelTensor:
    """A parameter or buffer of the model, and the boxes that it holds.

    If only a part of it is on this rank, ``part`` is that memory and its layout.
    """

    tensor: torch.Tensor
    layout: ParamLayout
    part: tuple[ParamLayout, torch.Tensor] | None = None


@dataclass(eq=False)
class ExtraState:
    """Extra state of a module, which is the same on all ranks that hold the module."""

    fqn: str
    module: nn.Module
    key: str
    value: Any


@dataclass
class ModelShards:
    """Everything that a list of model chunks holds on this rank, by ``id`` of the parameter or buffer."""

    tensors: dict[int, ModelTensor] = field(default_factory=dict)
    extra: list[ExtraState] = field(default_factory=list)


def is_a(obj: Any, cls: str) -> bool:
    """Whether an object is an instance of a class, which is named with its module. Imports nothing."""
    module, _, name = cls.rpartition(".")
    return isinstance(obj, loaded_class(module, name))


def read_shards(chunks: Sequence[nn.Module]) -> ModelShards:
    """Ask unwrapped model chunks for their shards. Communicates with no rank and copies no tensor.

    Raises:
        StateError: A chunk does not describe one of its parameters.
        UnsupportedTensorError: The elements of a parameter are in no fixed place in the global tensors.
    """
    found = ModelShards()
    for chunk in chunks:
        reader = _Reader(chunk, found)
        for key, entry in _entries(_sharded_state_dict(chunk)):
            reader.add(key, entry)
        reader.require_complete()
    return found


def _sharded_state_dict(chunk: Any) -> Mapping[str, Any]:
    if (
        getattr(chunk, "mtp_process", False)
        and chunk.share_embeddings_and_output_weights
        and not chunk.pre_process
        and getattr(chunk.output_layer, "weight", None) is not None
    ):
        raise StateError(
            f"{type(chunk).__name__}: multi-token prediction with tied embeddings on several pipeline stages. Megatron "
            "creates an unused output_layer.weight there, which its own sharded_state_dict() rejects; untie the "
            "embeddings from the output, or use one stage"
        )
    # Megatron adds entries to the dict.
    state: Mapping[str, Any] = chunk.sharded_state_dict(metadata=dict(_METADATA))
    return state


def _entries(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, with the innermost string key."""
    if isinstance(node, Mapping):
        for name, item in node.items():
            yield from _entries(item, name if isinstance(name, str) else key)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _entries(item, key)
    else:
        yield key, node


class _Reader:
    """Adds the shards of one chunk to ``found``."""

    def __init__(self, chunk: nn.Module, found: ModelShards) -> None:
        self.chunk, self.found = chunk, found
        self.local = {id(tensor): tensor for _, tensor in _tensors(chunk)}

    def add(self, key: str, entry: Any) -> None:
        if is_a(entry, f"{_MAPPING}.ShardedTensor"):
            pieces = [self._piece(entry, 0, row_major_strides(entry.local_shape))]
            self._add_tensor(entry, pieces, is_padded=bool(entry.allow_shape_mismatch))
        elif is_a(entry, f"{_MAPPING}.ShardedTensorFactory"):
            self._add_tensor(entry, _merged(self._built(entry)), is_padded=False)
        elif is_a(entry, f"{_MAPPING}.ShardedObject"):
            self._add_object(key, entry)
        elif not is_a(entry, f"{_MAPPING}.LocalNonpersistentObject"):
            raise StateError(
                f"sharded_state_dict() of {type(self.chunk).__name__} has a {type(entry).__name__} as {key!r}, whose "
                "place in the global model is unknown; wrap it in a ShardedTensor or a ShardedObject"
            )

    def require_complete(self) -> None:
        missing = [
            name
            for name, param in self.chunk.named_parameters()
            if id(param) not in self.found.tensors and param.numel()
        ]
        if missing:
            raise StateError(
                f"sharded_state_dict() of {type(self.chunk).__name__} does not contain {listed(missing)}, which "
                "would be lost; implement sharded_state_dict() of the modules that own these parameters"
            )

    # ------------------------------------------------------------------------------------------------------ tensors

    def _add_tensor(self, entry: Any, pieces: Sequence[ParamPart], *, is_padded: bool) -> None:
        tensor = self.local.get(id(entry.data))
        if tensor is None:
            raise UnsupportedTensorError(
                f"{entry.key}: Megatron's sharded_state_dict() describes a {type(entry.data).__name__} that is neither "
                "a parameter nor a buffer of the model but a copy or a part of one, so a load could not fill it"
            )
        shapes = {piece.fqn: piece.shape for piece in pieces}
        rows = getattr(self.chunk, "unpadded_vocab_size", None)
        if is_padded and rows is not None:
            pieces, shapes = _without_padding(pieces[0], int(rows))
        parts = _joined(sorted(pieces, key=lambda piece: piece.start))
        shape = tuple(tensor.shape)
        whole = len(parts) == 1 and parts[0].box.lengths == parts[0].shape == shape
        place = None if whole else _grid_place(parts)
        layout = ParamLayout(shape, tuple(parts), shapes, is_replica=whole, ends_with_padding=is_padded, place=place)
        self.found.tensors[id(tensor)] = ModelTensor(tensor, layout)

    def _piece(self, entry: Any, start: int, strides: tuple[int, ...]) -> ParamPart:
        prepended = entry.prepend_axis_num
        offsets, shape = tuple(entry.global_offset), tuple(map(int, entry.global_shape))
        fqn = numbered(entry.key, offsets[:prepended])
        if len(entry.local_shape) != len(shape) - prepended:
            raise UnsupportedTensorError(f"{entry.key}: a local shape {entry.local_shape} in a tensor of shape {shape}")
        box = Box(tuple(map(int, offsets[prepended:])), tuple(map(int, entry.local_shape)))
        return ParamPart.strided(fqn, shape[prepended:], box, start, strides)

    def _built(self, factory: Any) -> list[ParamPart]:
        """The boxes of a factory, from the views that it makes of a tensor without memory."""
        shape = tuple(factory.data.shape)
        blank = torch.empty(shape, dtype=factory.data.dtype, device="meta")
        built = self._build(factory, blank)
        if all(entry.data.untyped_storage()._cdata == blank.untyped_storage()._cdata for entry in built):
            return [self._piece(entry, entry.data.storage_offset(), entry.data.stride()) for entry in built]
        # It copies, so find where each element comes from.
        numbers = torch.arange(factory.data.numel()).view(shape)
        return [self._piece(entry, *_traced(entry)) for entry in self._build(factory, numbers)]

    def _build(self, factory: Any, tensor: torch.Tensor) -> list[Any]:
        entries = [entry for _, entry in _entries(replace(factory, data=tensor).build())]
        built = [entry for entry in entries if not is_a(entry, f"{_MAPPING}.LocalNonpersistentObject")]
        for entry in built:
            if not is_a(entry, f"{_MAPPING}.ShardedTensor"):
                raise UnsupportedTensorError(f"{factory.key}: its factory makes a {type(entry).__name__}")
        if sum(entry.data.numel() for entry in built) != tensor.numel():
            raise UnsupportedTensorError(
                f"{factory.key}: its factory splits {tensor.numel()} elements into "
                f"{sum(entry.data.numel() for entry in built)}"
            )
        return built

    # -------------------------------------------------------------------------------------------------- extra state

    def _add_object(self, key: str, entry: Any) -> None:
        offsets = tuple(entry.global_offset) if tuple(entry.global_shape) != (1,) else ()
        module_name, _, attribute = key.rpartition(".")
        if not attribute.startswith("_extra_state"):
            raise StateError(
                f"{entry.key}: Megatron's sharded_state_dict() has an object that is not extra state of a module; "
                "store it as a section of the state"
            )
        if _is_empty(entry.data):
            return
        module = self.chunk.get_submodule(module_name)
        fqn = numbered(entry.key, offsets).rpartition(".")[0]
        self.found.extra.append(ExtraState(fqn, module, attribute, entry.data))


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters(remove_duplicate=False)
    yield from chunk.named_buffers(remove_duplicate=False)


def _is_empty(value: Any) -> bool:
    """Modules without state of their own return None, or an empty tensor or stream."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (hasattr(value, "getbuffer") and value.getbuffer().nbytes == 0)


def prepended_axes(key: str) -> int:
    """Return how many axes of a global tensor are numbers that Megatron leaves out of its key."""
    return sum(pattern.search(key) is not None for pattern in _LISTS)


def numbered(key: str, indices: Sequence[int]) -> str:
    """Return the key with the numbers of the prepended axes (layer, expert) as parts of the name.

    Raises ``UnsupportedTensorError`` if there are more numbers than such axes.
    """
    remaining = list(map(int, indices))
    for pattern in _LISTS:
        found = pattern.search(key)
        if remaining and found is not None:
            key = f"{key[: found.end()]}{remaining.pop(0)}.{key[found.end() :]}"
    if remaining:
        raise UnsupportedTensorError(
            f"{key}: Megatron prepends {len(indices)} axes to this tensor, but not all of them are layers or experts"
        )
    return key


def _merged(pieces: Sequence[ParamPart]) -> list[ParamPart]:
    """Join the tensors ``x_w`` and ``x_v``, the halves of a gated linear unit, to one tensor ``x``."""
    names = {piece.fqn for piece in pieces}
    result = []
    for piece in pieces:
        stem, half = piece.fqn[:-2], piece.fqn[-2:]
        if half in HALVES and {stem + half for half in HALVES} <= names:
            rows = piece.shape[0]
            box = piece.box.shift([rows * HALVES.index(half), *(0 for _ in piece.shape[1:])])
            piece = piece._replace(fqn=stem, shape=(2 * rows, *piece.shape[1:]), box=box)
        result.append(piece)
    return result


def _without_padding(piece: ParamPart, rows: int) -> tuple[list[ParamPart], dict[str, tuple[int, ...]]]:
    """The rows of a vocabulary that are not padding."""
    shape = (min(rows, piece.shape[0]), *piece.shape[1:])
    box = piece.box.intersect(Box.whole(shape))
    return [piece._replace(shape=shape, box=box)] if box is not None else [], {piece.fqn: shape}


def _joined(parts: Sequence[ParamPart]) -> list[ParamPart]:
    """Join parts that follow each other in memory and in the global tensor (both halves on one rank)."""
    result: list[ParamPart] = []
    for part in parts:
        last = result[-1] if result else None
        if (
            last is not None
            and last.fqn == part.fqn
            and last.strides is part.strides is None
            and last.start + last.box.numel == part.start
            and last.box.offsets[1:] == part.box.offsets[1:]
            and last.box.lengths[1:] == part.box.lengths[1:]
            and last.box.stops[0] == part.box.offsets[0]
        ):
            lengths = (last.box.lengths[0] + part.box.lengths[0], *last.box.lengths[1:])
            result[-1] = last._replace(box=Box(last.box.offsets, lengths))
        else:
            result.append(part)
    return result


def _grid_place(parts: Sequence[ParamPart]) -> MeshPlace | None:
    """How tensor parallelism splits a tensor into a regular grid, or each of several blocks of it; None if not so."""
    if not parts or len({(part.fqn, part.box.lengths) for part in parts}) > 1:
        return None
    shape, lengths, first = parts[0].shape, parts[0].box.lengths, parts[0].box.offsets
    blocks = tuple(len({part.box.offsets[d] for part in parts}) for d in range(len(shape)))
    mesh: list[int] = []
    coordinate: list[int] = []
    cuts: list[tuple[int, ...]] = []
    for size, length, offset, count in zip(shape, lengths, first, blocks, strict=True):
        pieces, rest = divmod(size, count * length) if length else (0, 1)
        if rest or offset % length:
            return None
        cuts.append((len(mesh),) if pieces > 1 else ())
        if pieces > 1:
            mesh.append(pieces)
            coordinate.append(offset // length)
    if not mesh:
        return None
    layout = MeshLayout(tuple(mesh), tuple(cuts), blocks if len(parts) > 1 else ())
    return MeshPlace(layout, tuple(coordinate), "grid")


def _traced(entry: Any) -> tuple[int, tuple[int, ...]]:
    """Where the elements come from, as first element and strides: the values are their numbers in the local tensor."""
    numbers = entry.data
    shape = tuple(numbers.shape)
    dense = row_major_strides(shape)
    if not numbers.numel():
        return 0, dense
    origin = (0,) * len(shape)
    start = int(numbers[origin])
    strides = tuple(
        int(numbers[tuple(int(d == axis) for axis in range(len(shape)))]) - start if n > 1 else dense[d]
        for d, n in enumerate(shape)
    )
    expected = torch.full(shape, start, dtype=torch.int64)
    for d, n in enumerate(shape):
        expected += (torch.arange(n) * strides[d]).view([n if axis == d else 1 for axis in range(len(shape))])
    if min(strides, default=0) < 0 or not torch.equal(expected, numbers):
        raise UnsupportedTensorError(
            f"{entry.key}: its factory rearranges elements so that they lie in no regular grid of the parameter"
        )
    return start, strides
