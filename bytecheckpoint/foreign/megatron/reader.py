"""Read checkpoints of Megatron-core in place, as the adapters of live models and optimizers would have stored them.

Global tensors of stacked layers and experts are presented per layer and per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Any

from ...checkpoint.index import Index
from ...errors import FormatError, UnsupportedTensorError
from ...format.values.types import UnreadObject
from ...frameworks.megatron.shards import HALVES, numbered, prepended_axes
from ...frameworks.module_tree import EXTRA_STATE
from ...frameworks.optimizer_state import MASTER
from ...tensors.geometry import Box, row_major_strides
from ...tensors.metadata import BasicMeta
from ...tensors.shards import Path
from ..building import IndexBuilder, StoredBox, StoredLeaf
from ..naming import EXTRA_SECTION, MODEL_SECTION, OPTIMIZER_SECTION
from ..pickles.records import TensorRef
from ..source_path import SourcePath, read_all
from ..torch_values import TorchValues, read_small
from .buckets import StoredBuckets
from .folder import Contents, ShardedObject, find_folder, read_contents
from .optimizer import (
    ParamOptions,
    add_optimizer_state,
    add_scaler,
    has_remainders,
    is_of_optimizer,
    optimizers_of,
    split_state,
)

_OPTIMIZER, _SCHEDULER, _STEP, _ARGS = "optimizer", "opt_param_scheduler", "iteration", "args"
_MODULE_STATE = "._extra_state"
_ADVICE = "load it with Megatron in the layout that wrote it, and save it with bytecheckpoint"
_REMAINDERS = f"an optimizer with store_param_remainders, whose master weights are not complete numbers ({_ADVICE})"


def read_megatron(source: SourcePath) -> Index | None:
    """Return the index of a folder of ``dist_checkpointing``, or of the one saved last; None if the path is none.

    ``model`` has the tensors per layer and per expert, ``optimizer`` the state, the hyper-parameters and the master
    weights by name, ``opt_param_scheduler`` the scheduler, and ``extra_state`` everything else.

    Raises ``CorruptionError`` for missing files, ``FormatError`` for damaged ones, and ``CheckpointError`` for
    Megatron's other formats.
    """
    folder = find_folder(source)
    if folder is None:
        return None
    builder = IndexBuilder(source.backend, "Megatron-core")
    contents = read_contents(folder, builder)
    model = {key: leaf for key, leaf in contents.tensors.items() if not is_of_optimizer(key)}
    prefix = _PREFIX if all(key.startswith(_PREFIX) for key in model) else ""

    def named(tensors: Mapping[str, StoredLeaf]) -> dict[str, StoredLeaf]:
        return per_layer({key.removeprefix(prefix): leaf for key, leaf in tensors.items()}, folder.url)

    tensors = named(model)
    builder.add_section(MODEL_SECTION, "module")
    for fqn, leaf in tensors.items():
        builder.add_tensor(MODEL_SECTION, fqn, leaf)
    for path, value in _module_states(builder, contents.objects, prefix):
        builder.add_value(MODEL_SECTION, path, value)
    state = {key: named(part) for key, part in split_state(contents.tensors).items()}
    _add_optimizer(builder, folder.url, contents, tensors, state)
    _add_the_rest(builder, contents)
    step = contents.common.get(_STEP)
    return builder.build(
        step=step if type(step) is int and 0 <= step < 1 << 63 else None, world_size=contents.world_size
    )


def _add_optimizer(
    builder: IndexBuilder,
    where: str,
    contents: Contents,
    model: Mapping[str, StoredLeaf],
    state: Mapping[str, Mapping[str, StoredLeaf]],
) -> None:
    optimizers = optimizers_of(contents.common.get(_OPTIMIZER))
    buckets = StoredBuckets.of(contents)
    unread = None
    if state:
        unread = _unread_state(builder, model, state)
    elif buckets.tensors:
        unread = _REMAINDERS if buckets.have_remainders else None
    elif any(is_of_optimizer(key) for key in (*contents.tensors, *(one.key for one in contents.objects))):
        forms = {form for one in optimizers if type(form := one.get("param_state_sharding_type")) is str}
        unread = (
            f"Megatron's distributed optimizer in a form ({', '.join(sorted(forms))}) whose buckets do not state where "
            f"the parameters are ({_ADVICE} or as fully_reshardable)"
        )
    if unread is not None:
        builder.add_section(OPTIMIZER_SECTION, "optimizer")
        builder.add_value(OPTIMIZER_SECTION, (), UnreadObject(unread))
    elif state:
        add_optimizer_state(builder, model, state, ParamOptions(builder, optimizers, contents.common.get(_ARGS)))
        add_scaler(builder, optimizers)
    elif buckets.tensors:
        buckets.add_to(builder, where)
        add_scaler(builder, buckets.optimizers.values())


def _unread_state(
    builder: IndexBuilder, model: Mapping[str, StoredLeaf], state: Mapping[str, Mapping[str, StoredLeaf]]
) -> str | None:
    """Why the state cannot be read; None if it can."""
    for key, tensors in state.items():
        for fqn, leaf in tensors.items():
            if fqn not in model or leaf.meta.shape != model[fqn].meta.shape:  # such as flattened shards before 0.14
                return f"an optimizer whose {key} of {fqn!r:.200} is {leaf.meta}, unlike any parameter ({_ADVICE})"
    if has_remainders(builder, model, state.get(MASTER, {})):
        return _REMAINDERS
    return None


def _module_states(builder: IndexBuilder, objects: Iterable[ShardedObject], prefix: str) -> list[tuple[Path, Any]]:
    """The extra state of modules, such as that of Transformer Engine, without those that are empty."""
    found = [one for one in objects if _is_module_state(one)]
    values = read_all(lambda one: _content(builder, one.value), found)
    return [
        ((EXTRA_STATE, numbered(one.key.removeprefix(prefix), one.offset).rpartition(".")[0]), value)
        for one, value in zip(found, values, strict=True)
        if value is not None and not (type(value) is bytes and not value)
    ]


def _is_module_state(found: ShardedObject) -> bool:
    return _MODULE_STATE in found.key and not is_of_optimizer(found.key)


def _content(builder: IndexBuilder, value: Any) -> Any:
    if type(value) is not TensorRef:
        return TorchValues(builder).tree(value)
    try:
        return read_small(builder.backend, value).numpy() if value.numel else None
    except UnsupportedTensorError as error:
        return UnreadObject(str(error))


def _add_the_rest(builder: IndexBuilder, contents: Contents) -> None:
    """Add the scheduler, and the counters, arguments and random number states as ``extra_state``."""
    values = TorchValues(builder)
    if _SCHEDULER in contents.common:
        builder.add_tree(_SCHEDULER, values.tree(contents.common[_SCHEDULER]))
    extra = {key: value for key, value in contents.common.items() if key not in (_OPTIMIZER, _SCHEDULER)}
    grids: dict[str, dict[str, Any]] = {}
    for one in contents.objects:
        if _is_module_state(one) or is_of_optimizer(one.key):
            continue
        if one.offset:
            grids.setdefault(one.key, {})[".".join(map(str, one.offset))] = one.value
        else:
            extra[one.key] = one.value
    builder.add_tree(EXTRA_SECTION, values.tree({**extra, **grids}))


_PREFIX = "module."  # of a model that was saved inside a wrapper, such as NeMo's
_MAX_ROWS = 1 << 20  # layers times experts


def per_layer(tensors: Mapping[str, StoredLeaf], where: str) -> dict[str, StoredLeaf]:
    """Return tensors by name: a stack of layers or experts as one tensor for each, and the halves of a gate as one.

    Raises ``FormatError`` if a stack is no tensor for each layer and expert.
    """
    found: dict[str, StoredLeaf] = {}
    for key, leaf in tensors.items():
        axes = prepended_axes(key)
        parts = {(): leaf} if not axes else _unstacked(key, leaf, axes, where)
        for index, part in parts.items():
            name = numbered(key, index)
            if name in found:
                raise FormatError(f"{where}: {name!r:.200} is stored alone and in a stack of layers or experts")
            found[name] = part
    return _joined(found)


def _unstacked(key: str, leaf: StoredLeaf, axes: int, where: str) -> dict[tuple[int, ...], StoredLeaf]:
    shape, itemsize = leaf.meta.shape, leaf.meta.dtype.itemsize
    if len(shape) < axes:
        raise FormatError(f"{where}: {key!r:.200} of shape {list(shape)} is no stack of layers or experts")
    found: dict[tuple[int, ...], list[StoredBox]] = {}
    if max(prod(shape[:axes]), sum(prod(stored_box.box.lengths[:axes]) for stored_box in leaf.boxes)) > _MAX_ROWS:
        raise FormatError(f"{where}: {key!r:.200} is a stack of {list(shape[:axes])} layers or experts")
    for stored_box in leaf.boxes:
        offsets, lengths = stored_box.box.offsets, stored_box.box.lengths
        strides = row_major_strides(lengths) if stored_box.strides is None else stored_box.strides
        inner = None if stored_box.strides is None else strides[axes:]
        for at in product(*map(range, lengths[:axes])):
            start = sum(position * stride for position, stride in zip(at, strides, strict=False))
            row = StoredBox(
                Box(offsets[axes:], lengths[axes:]), stored_box.file, stored_box.offset + start * itemsize, inner
            )
            found.setdefault(tuple(map(sum, zip(offsets, at, strict=False))), []).append(row)
    missing = [index for index in product(*map(range, shape[:axes])) if index not in found]
    if missing:
        raise FormatError(f"{where}: {key!r:.200} of shape {list(shape)} has nothing at {list(missing[0])}")
    return {index: StoredLeaf(BasicMeta(leaf.meta.dtype, shape[axes:]), pieces) for index, pieces in found.items()}


def _joined(tensors: Mapping[str, StoredLeaf]) -> dict[str, StoredLeaf]:
    found: dict[str, StoredLeaf] = {}
    for name, leaf in tensors.items():
        stem = name[:-2]
        halves = [tensors[stem + suffix] for suffix in HALVES if stem + suffix in tensors]
        is_half = name.endswith(HALVES) and stem not in tensors and len(halves) == len(HALVES)
        if not (is_half and leaf.meta.shape and all(half.meta == leaf.meta for half in halves)):
            found[name] = leaf
        elif stem not in found:
            rows, *rest = leaf.meta.shape
            pieces = [
                stored_box._replace(box=stored_box.box.shift([first, *(0 for _ in rest)]))
                for first, half in zip((0, rows), halves, strict=True)
                for stored_box in half.boxes
            ]
            found[stem] = StoredLeaf(BasicMeta(leaf.meta.dtype, (2 * rows, *rest)), pieces)
    return found
