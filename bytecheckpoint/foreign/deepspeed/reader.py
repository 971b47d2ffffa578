"""Read checkpoints of DeepSpeed in place, as the adapters of live engines would have stored them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoint.index import Index
from ..building import IndexBuilder, StoredLeaf
from ..naming import EXTRA_SECTION
from ..source_path import SourcePath
from ..torch_values import TorchValues
from ..training_files import TrainingFiles
from .folder import DeepSpeedFiles, find_folder
from .model import ModelWriter
from .optimizer import FlatGroupWriter, add_scaler
from .partitions import FlatGroup, flat_groups
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
        writer = FlatGroupWriter(builder, values)
        masters: dict[str, StoredLeaf] = {}
        for group in groups:
            for member in group.members:
                weights = writer.weights(group, member)
                if not model.is_complete(member.fqn, weights):
                    masters[member.fqn] = weights
            writer.add(group)
        writer.add_masters(masters)
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
