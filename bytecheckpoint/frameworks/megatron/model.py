"""The adapter for models of Megatron-core, with any of its parallel layouts."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ...errors import StateError, UnsupportedTensorError
from ...tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from ..base import Adapter, Context
from ..dtensor import is_dtensor
from ..layout import ParamLayout
from ..module import ENGINE_COUNTERS
from ..module_tree import EXTRA_STATE, modules_of
from ..optimizer_wrappers import as_list
from ..tensors import dense_view, has_no_dense_memory
from .fsdp import as_raw_parameters, model_part, update_master_weights
from .shards import ExtraState, ModelShards, ModelTensor, is_a, read_shards

LOW_PRECISION = (torch.bfloat16, torch.float16)
_WRAPPERS = ("distributed.data_parallel_base._BaseDataParallel", "transformer.module.Float16Module")


class MegatronModelAdapter(Adapter):
    """A ``MegatronModule``, or a list of the chunks of one pipeline rank, with or without DDP and ``Float16Module``.

    Names are Megatron's own keys with global numbers of layers and experts. A tensor has these names and its global
    shape in every layout, so a checkpoint loads into any other.

    A vocabulary that is padded to other lengths loads in their common part, and the padding becomes zero. If the model
    has an attribute ``unpadded_vocab_size``, the padding is not stored at all.

    Raises ``StateError`` for a module that does not describe all of its parameters, and ``UnsupportedTensorError`` for
    a tensor whose elements have no fixed place in a global tensor.
    """

    name: ClassVar[str] = "megatron"
    priority: ClassVar[int] = 20

    def recognizes(self, obj: object) -> bool:
        modules = modules_of(obj)
        return bool(modules) and all(
            is_a(module, "megatron.core.transformer.module.MegatronModule") for module in modules
        )

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        return {key: found.layout for key, found in _shards_of(obj).tensors.items()}

    def capture(self, obj: Any, context: Context) -> SectionSource:
        source = SectionSource()
        shards = _shards_of(obj)
        held: set[tuple[str, Any]] = set()
        for found in shards.tensors.values():
            tensor = found.tensor
            where = next(iter(found.layout.fqns), "")
            if context.trainable_only and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                source.left_out.update((fqn,) for fqn in found.layout.fqns)
                continue
            if tensor.is_meta:
                raise UnsupportedTensorError(
                    f"{context.section}: {where} is on the meta device and has no values; load or initialize it first"
                )
            layout, memory = _held(where, found)
            metas, described = layout.describe(memory, str)
            # A copy of a tied embedding may be on the same rank.
            source.add(metas, [shard for shard in described if (shard.fqn, shard.box) not in held])
            held.update((shard.fqn, shard.box) for shard in described)
            if not isinstance(tensor, nn.Parameter):
                source.pinned.update(metas)
            elif context.world_size > 1 and layout.one_whole is not None:
                source.mark_replicas(metas, layout.replica_ranks)
        source.values.update({_extra_path(extra): _plain(extra) for extra in shards.extra})
        return source

    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        target = SectionTarget()
        shards = _shards_of(obj)
        fsdps = [fsdp for module in modules_of(obj) if (fsdp := _unwrapped(module)[2]) is not None]
        steps: list[Callable[[], Any]] = []
        for found in shards.tensors.values():
            where = next(iter(found.layout.fqns), "")
            if found.tensor.is_meta:
                raise StateError(
                    f"{context.section}: {where} is on the meta device; materialize the model before the load"
                )
            layout, memory = _held(where, found)
            metas, described = layout.describe(memory, str)
            target.add(metas, described)
            if has_no_dense_memory(found.tensor):
                steps.append(partial(found.tensor.copy_, memory))  # quantizes again
            if layout.ends_with_padding:
                for fqn in metas:
                    target.resizable[fqn] = 0
                    if fqn in stored.metas:
                        steps.append(partial(zero_padding, memory, layout, stored.metas[fqn].shape[0]))
        is_alone = not _has_optimizer(context)
        for fsdp in fsdps:
            if is_alone:
                steps.append(partial(update_master_weights, fsdp))
            steps.append(fsdp.synchronize_param_gather)  # forgets gathered parameters
        if is_alone and not fsdps and any(found.tensor.dtype in LOW_PRECISION for found in shards.tensors.values()):
            context.notes.append(
                f"{context.section}: loaded without an optimizer. If one exists already, its master weights keep their "
                "old values, with which the next step would overwrite what was loaded; call its reload_model_params()"
            )
        paths = {_extra_path(extra): extra for extra in shards.extra}
        target.requested_values.update(paths)
        target.optional.update(paths)
        target.ignorable.update(path for path in stored.values if path[:1] in ((EXTRA_STATE,), (ENGINE_COUNTERS,)))
        target.ignorable.difference_update(paths)

        def apply(values: Mapping[Path, Any]) -> None:
            with torch.no_grad():
                for step in steps:
                    step()
            _restore_extra(paths, values)

        target.apply = apply
        return target


def _has_optimizer(context: Context) -> bool:
    items = (item for value in context.state.values() for item in as_list(value))
    return any(is_a(item, "megatron.core.optimizer.optimizer.MegatronOptimizer") for item in items)


# ------------------------------------------------------------------------------------------------------------- chunks


def _shards_of(obj: Any) -> ModelShards:
    unwrapped = [_unwrapped(module) for module in modules_of(obj)]
    with contextlib.ExitStack() as stack:
        for _, _, fsdp in unwrapped:
            if fsdp is not None:
                stack.enter_context(as_raw_parameters(fsdp))
        for chunk, _, _ in unwrapped:
            _require_plain(chunk)
        shards = read_shards([chunk for chunk, _, _ in unwrapped])
        for chunk, ddp, fsdp in unwrapped:
            if ddp is not None:
                _declare_replicas(chunk, ddp, shards)
            if fsdp is not None:
                _divide(chunk, fsdp, shards)
    return shards


def _unwrapped(module: Any) -> tuple[nn.Module, Any, Any]:
    """The model inside Megatron's wrappers, and its DDP and Megatron-FSDP wrappers if there are such."""
    ddp = fsdp = None
    while any(is_a(module, f"megatron.core.{wrapper}") for wrapper in _WRAPPERS):
        if is_a(module, "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"):
            ddp = module
        if is_a(module, "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel"):
            fsdp = module = module.module
        module = module.module
    return module, ddp, fsdp


def _require_plain(chunk: nn.Module) -> None:
    """Refuse DTensors: they belong to FSDP, and Megatron's keys describe only what tensor parallelism makes of them."""
    for name, param in chunk.named_parameters():
        if is_dtensor(param):
            raise UnsupportedTensorError(
                f"{name}: a DTensor in a {type(chunk).__name__}. FSDP-2 is not supported; use Megatron's "
                "DistributedDataParallel with its distributed optimizer, or Megatron-FSDP"
            )


def _divide(chunk: nn.Module, fsdp: Any, shards: ModelShards) -> None:
    """Note the ranges of parameters that Megatron-FSDP leaves on this rank."""
    for name, param in chunk.named_parameters():
        found = shards.tensors.get(id(param))
        part = model_part(fsdp, name, param) if found is not None else None
        if found is not None and part is not None:
            memory, start, stop = part
            found.part = found.layout.narrowed(start, stop - start), memory


def _declare_replicas(chunk: nn.Module, ddp: Any, shards: ModelShards) -> None:
    """DDP keeps the parameters of its process groups equal, those of experts in another group."""
    ranks: dict[bool, tuple[int, ...]] = {}
    for param in chunk.parameters():
        found = shards.tensors.get(id(param))
        if found is not None and found.layout.one_whole is not None:
            dense = bool(getattr(param, "allreduce", True))
            if dense not in ranks:
                group = ddp.dp_cp_group if dense else ddp.expt_dp_group
                ranks[dense] = tuple(dist.get_process_group_ranks(group))
            found.layout = found.layout._replace(replica_ranks=ranks[dense])


# ------------------------------------------------------------------------------------------------------------ tensors


def _held(fqn: str, found: ModelTensor) -> tuple[ParamLayout, torch.Tensor]:
    """The memory on this rank, and what it holds."""
    return found.part or (found.layout, _memory(fqn, found.tensor))


def _memory(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The dense memory of a tensor; a copy in high precision for a quantized one, which has no such memory."""
    if not has_no_dense_memory(tensor):
        return dense_view(fqn, tensor)
    dequantize = getattr(tensor, "dequantize", None)
    if dequantize is None:
        raise UnsupportedTensorError(
            f"{fqn}: a {type(tensor).__module__}.{type(tensor).__qualname__} has no dense memory and no dequantize()"
        )
    dense: torch.Tensor = dequantize()
    return dense.detach()


def zero_padding(memory: torch.Tensor, layout: ParamLayout, rows: int) -> None:
    """Fill what follows the first ``rows`` rows of the global tensor with zeros. ``memory`` has the layout."""
    flat = memory.view(-1)
    end = 0
    for part in layout.parts:  # consecutive, since padding is at the end of a row-major tensor
        size, held = part.box.lengths[0], max(0, rows - part.box.offsets[0])
        if held < size:
            part.view(flat).narrow(0, held, size - held).zero_()
        end = part.start + part.box.numel
    flat[end:].zero_()


# -------------------------------------------------------------------------------------------------------- extra state


def _extra_path(extra: ExtraState) -> Path:
    return (EXTRA_STATE, extra.fqn)


def _plain(extra: ExtraState) -> Any:
    """Transformer Engine packs extra state in a tensor of bytes, or in a stream."""
    if isinstance(extra.value, io.BytesIO):
        return extra.value.getvalue()
    if isinstance(extra.value, torch.Tensor):
        return extra.value.detach().cpu().numpy()
    return extra.value


def _restore_extra(paths: Mapping[Path, ExtraState], values: Mapping[Path, Any]) -> None:
    by_module: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for path, extra in paths.items():
        if path in values:
            value = values[path]
            if isinstance(extra.value, io.BytesIO):
                value = io.BytesIO(value)
            elif isinstance(extra.value, torch.Tensor):
                value = torch.from_numpy(value).to(extra.value.device)
            by_module.setdefault(id(extra.module), (extra.module, {}))[1][extra.key] = value
    for module, state in by_module.values():
        # Not set_extra_state: modules of several experts combine the entries in a hook.
        module.load_state_dict(state, strict=False)
