"""Read checkpoints of DeepSpeed in place, as the adapters of live engines would have stored them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...checkpoint.index import Index
from ...errors import FormatError
from ...format.values.types import UnreadObject
from ...frameworks.deepspeed.optimizer import SCALER_KEYS
from ...frameworks.optimizer import LOSS_SCALER
from ...frameworks.optimizer_groups import options_of
from ...frameworks.tree_paths import find_all
from ...tensors.geometry import Box, decompose
from ...tensors.metadata import BasicMeta
from ..building import IndexBuilder, StoredBox, StoredLeaf
from ..naming import EXTRA_SECTION, OPTIMIZER_SECTION, OptimizerWriter
from ..pickles.records import Instance, TensorRef
from ..source_path import SourcePath
from ..torch_values import TorchValues
from ..training_files import TrainingFiles
from .folder import DeepSpeedFiles, find_folder
from .model import ModelWriter
from .partitions import FlatGroup, Member, flat_groups
from .unpartitioned import add_numbered_optimizer, replicated_groups, universal_groups

_LIGHTNING = "lr_schedulers"  # Lightning's, in the client state
_SECTIONS = ("lr_scheduler", "data_sampler", "random_ltd")

# What DeepSpeed itself puts into a model file. Everything else is the caller's ``client_state``.
_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("csr_tensor_module_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "num_experts", "ds_autoep_layers", "autoep_layers", "universal_checkpoint_info", "folding"),
    }
)


def read_deepspeed(source: SourcePath) -> Index | None:
    """Return the index of a folder of ``engine.save_checkpoint``, or of one tag in it; None if the path is none.

    ``model`` has the tensors in the precision of the computations. ZeRO-3 and universal checkpoints do not store them
    in that form, so it has the master weights there. ``optimizer`` has the state, the hyper-parameters and the master
    weights by name. ``lr_scheduler`` has the scheduler, ``extra_state`` the counters and the client state.

    Raises ``CorruptionError`` for missing files, ``FormatError`` for damaged ones, and ``CheckpointError`` for pipeline
    and tensor parallelism.
    """
    folder = None if source.name else find_folder(source)
    if folder is None:
        return None
    files = DeepSpeedFiles.of(folder)
    builder = IndexBuilder(source.backend, "DeepSpeed")
    values = TorchValues(builder)
    model = ModelWriter(builder, values, files)
    _add_optimizer(files, builder, values, model)
    model.add()
    _add_the_rest(files.first, builder, values)
    TrainingFiles(source, builder)  # of a Trainer or of accelerate
    step = files.first.get("global_steps")
    version = files.first.get("ds_version")
    return builder.build(
        step=step if type(step) is int and step >= 0 else None,
        world_size=files.world_size,
        metadata={"ds_version": version} if type(version) is str else None,
    )


def _add_optimizer(files: DeepSpeedFiles, builder: IndexBuilder, values: TorchValues, model: ModelWriter) -> None:
    groups: Sequence[FlatGroup]
    if files.universal:
        groups, scaler = universal_groups(files)
    elif files.optimizer:
        groups, scaler = flat_groups(files)
    else:
        scaler = files.first.get("optimizer")
        groups = replicated_groups(files, scaler, model.trained)
    if groups:
        writer = OptimizerWriter(builder)
        for group in groups:
            options = None if group.options is None else _options(values, group.options)
            for member in group.members:
                weights = _leaf(values, group, member, {rank: flat.weights for rank, flat in group.flats.items()})
                master = None if model.is_complete(member.fqn, weights) else weights
                writer.add(member.fqn, _state(values, group, member), options, master)
    elif not add_numbered_optimizer(builder, values, scaler):
        return
    add_scaler(builder, scaler)


def _add_the_rest(first: Mapping[str, Any], builder: IndexBuilder, values: TorchValues) -> None:
    """Add the schedulers, and the counters and the client state as ``extra_state``."""
    for section in _SECTIONS:
        if isinstance(first.get(section), dict):
            builder.add_tree(section, values.tree(first[section]))
    extra = {key: value for key, value in first.items() if type(key) is str and key not in _OWN_KEYS}
    if not builder.has_section("lr_scheduler") and isinstance(schedulers := extra.pop(_LIGHTNING, None), list):
        builder.add_tree("lr_scheduler", values.tree(schedulers[0] if len(schedulers) == 1 else schedulers))
    builder.add_tree(EXTRA_SECTION, values.tree(extra))


_MUON_KEY = "momentum_buffer"


def _options(values: TorchValues, found: Mapping[str, Any]) -> dict[str, Any]:
    tree = values.tree({key: value for key, value in found.items() if key != "params"})
    plain = {key: UnreadObject("a tensor") if find_all(value, StoredLeaf) else value for key, value in tree.items()}
    return options_of(plain, f"{OPTIMIZER_SECTION}.param_groups")


def _state(values: TorchValues, group: FlatGroup, member: Member) -> dict[str, Any]:
    """The state of a parameter: ``StoredLeaf``s and plain values."""
    ranks = [span.rank for span in member.spans] or [next(iter(group.flats))]
    first = group.flats[ranks[0]]
    state = dict(first.state)
    if state and "step" not in state and "step" in (group.options or {}):
        state["step"] = (group.options or {})["step"]  # apex and old versions of DeepSpeed count in the group
    for key, value in state.items():
        if type(key) is not str:
            raise FormatError(f"{first.where}: the optimizer's state has the key {key!r:.80}")
        if type(value) is not TensorRef:
            tree = values.tree(value)
            state[key] = UnreadObject("nested tensors for a flat tensor") if find_all(tree, StoredLeaf) else tree
        elif not value.shape:
            state[key] = values.leaf(value)
        elif group.has_whole_momenta and key == _MUON_KEY:
            state[key] = _whole(values, group, member, ranks[0], value)
        elif first.is_like_weights(value):
            state[key] = _leaf(values, group, member, {rank: _part(group, rank, key) for rank in ranks})
        else:
            state[key] = UnreadObject(
                f"a tensor of shape {list(value.shape)} for weights of shape {list(first.weights.shape)}"
            )
    return state


def _whole(values: TorchValues, group: FlatGroup, member: Member, rank: int, tensor: TensorRef) -> StoredLeaf:
    """Muon's momentum at ZeRO-1 and 2: that of the complete parameters of which the rank has an element."""
    held = [one for one in group.members if any(span.rank == rank for span in one.spans)]
    sizes = [prod(one.shape) for one in held]
    if tensor.numel != sum(sizes) or not tensor.is_contiguous:
        raise FormatError(f"{group.flats[rank].where}: the {_MUON_KEY} does not fit the partition's parameters")
    start = sum(sizes[: held.index(member)]) if member in held else 0
    places = values.flat_part(tensor, start, [Box.whole(member.shape)])
    return StoredLeaf(BasicMeta(tensor.dtype, member.shape), list(places))


def _part(group: FlatGroup, rank: int, key: str) -> TensorRef:
    flat = group.flats[rank]
    found = flat.state.get(key)
    if type(found) is not TensorRef or not flat.is_like_weights(found):
        raise FormatError(f"{flat.where}: {key!r:.80} of the optimizer's state does not fit its partition")
    return found


def _leaf(values: TorchValues, group: FlatGroup, member: Member, tensors: Mapping[int, TensorRef]) -> StoredLeaf:
    """Where a parameter's elements are in flat tensors, which are those of the ranks of its spans."""
    any_rank = member.spans[0].rank if member.spans else next(iter(tensors))
    dtype = tensors[any_rank].dtype
    boxes: list[StoredBox] = []
    for span in member.spans:
        tensor = tensors[span.rank]
        if tensor.dtype != dtype or not tensor.is_contiguous or span.start + span.length > tensor.numel:
            raise FormatError(f"{group.flats[span.rank].where}: a tensor of {member.fqn!r:.200} does not fit")
        boxes += values.flat_part(tensor, span.start, decompose(span.first, span.length, member.shape))
    return StoredLeaf(BasicMeta(dtype, member.shape), boxes)


def add_scaler(builder: IndexBuilder, found: Any) -> None:
    """Add the state of the loss scaler, if it is dynamic. A static scale is part of the configuration."""
    attributes = found.attributes if type(found) is Instance else found if isinstance(found, dict) else {}
    if attributes.get("dynamic", attributes.get("dynamic_loss_scale")):
        scaler = {key: attributes[key] for key in SCALER_KEYS if type(attributes.get(key)) in (int, float)}
        builder.add_value(OPTIMIZER_SECTION, (LOSS_SCALER, 0), scaler)
