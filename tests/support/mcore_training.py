"""Tiny GPT models of Megatron-core in any layout, their training, and their full state as an oracle.

Nothing here uses the library. ``Training.full_state`` assembles the global tensors from the attributes that Megatron
sets on its parameters, not from its checkpointing code, which the library uses.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from mcore_cpu import megatron_on_cpu, scaled_adam, two_places

from bytecheckpoint.testing import RankPool

SEQUENCE, BATCH, VOCABULARY = 8, 8, 60
_OPTIONS = ("lr", "step", "weight_decay")


# What the modules of this model are called, and what Megatron's checkpoints call them.
_STORED_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "local_experts.": "experts.",
}


def stored_name(name: str) -> str:
    """The name of a parameter in Megatron's checkpoints."""
    for part, stored in _STORED_NAMES.items():
        name = name.replace(part, stored)
    return name


@dataclass(frozen=True)
class Layout:
    """How the ranks share a model; what remains of the world is data parallel.

    Context parallel ranks have their process groups, but each computes the whole sequence.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    world: int = 4

    def __str__(self) -> str:
        return "-".join(f"{name}{n}" for name, n in vars(self).items() if n > 1 or name == "world")


@dataclass(frozen=True)
class Recipe:
    """The model and its optimizer."""

    bf16: bool = True
    distributed: bool = True
    experts: int = 0
    mla: bool = False
    query_groups: int = 2
    tied: bool = True
    mtp: int = 0  # layers that predict further tokens
    padded_vocabulary: int = 64
    unpadded: int = 0
    layer_wise: bool = False
    scaled: Literal["", "fp16", "fp8", "remainders"] = ""
    offloaded: float = 0  # the fraction of the optimizer's tensors in host memory
    fsdp: str = ""  # a data_parallel_sharding_strategy of Megatron-FSDP
    instances: int = 1  # of the distributed optimizer, each on a part of the data parallel ranks (HSDP)
    outer: str = "no_shard"  # an outer_dp_sharding_strategy of Megatron-FSDP
    top: int = 2  # experts of a token
    lr: float = 1e-2
    clip: float = 1.0
    fp16: bool = False  # instead of bf16, with a dynamic loss scale
    bucket: int = 0  # elements of a bucket of gradients; 0 for one bucket

    @property
    def dtype(self) -> torch.dtype:
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def is_mixed(self) -> bool:
        return self.dtype != torch.float32


class Training:
    """A model, its optimizer and its data on this rank."""

    def __init__(self, layout: Layout, recipe: Recipe, seed: int) -> None:
        from megatron.core import parallel_state

        self.layout, self.recipe, self.steps = layout, recipe, 0
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vp if layout.vp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp if recipe.experts else None,
            num_distributed_optimizer_instances=recipe.instances,
        )
        torch.manual_seed(seed)
        self.chunks = [self._chunk(stage) for stage in range(layout.vp)]
        if recipe.experts and layout.tp > 1:
            for chunk in self.chunks:
                chunk.eval()  # otherwise Megatron demands sequence parallelism, whose norms need CUDA
        self.optimizer = self._make_optimizer()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.chunks if self.layout.vp > 1 else self.chunks[0], "optimizer": self.optimizer}

    def _config(self) -> Any:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        recipe, layout = self.recipe, self.layout
        options: dict[str, Any] = {}
        if recipe.experts:
            options.update(
                num_moe_experts=recipe.experts, moe_router_topk=recipe.top, moe_token_dispatcher_type="allgather"
            )
            options.update(expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp)
            options.update(moe_router_load_balancing_type="none")
        if recipe.mla:
            options.update(q_lora_rank=8, kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=4)
            options.update(rope_type="rope", multi_latent_attention=True, apply_rope_fusion=False)
        else:
            options.update(num_query_groups=recipe.query_groups)
        return (MLATransformerConfig if recipe.mla else TransformerConfig)(
            num_layers=4,
            hidden_size=16,
            ffn_hidden_size=24,
            num_attention_heads=4,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            bf16=recipe.dtype == torch.bfloat16,
            fp16=recipe.fp16,
            params_dtype=recipe.dtype,
            pipeline_dtype=recipe.dtype,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            attention_softmax_in_fp32=True,
            mtp_num_layers=recipe.mtp or None,
            **options,
        )

    def _chunk(self, vp_stage: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.module import Float16Module

        config, recipe = self._config(), self.recipe
        stage = {"ignore_virtual": False, "vp_stage": vp_stage if self.layout.vp > 1 else None}
        is_last = parallel_state.is_pipeline_last_stage(**stage)
        model = GPTModel(
            config,
            _layer_spec(recipe),
            recipe.padded_vocabulary,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=is_last,
            share_embeddings_and_output_weights=recipe.tied,
            position_embedding_type="rope",
            vp_stage=stage["vp_stage"],
            mtp_block_spec=_further_tokens(config, recipe) if is_last else None,
        )
        if recipe.is_mixed:
            model = Float16Module(config, model)
        if recipe.unpadded:
            getattr(model, "module", model).unpadded_vocab_size = recipe.unpadded
        if recipe.fsdp:
            from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                use_megatron_fsdp=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                bucket_size=recipe.bucket or None,
                data_parallel_sharding_strategy=recipe.fsdp,
                outer_dp_sharding_strategy=recipe.outer,
                num_distributed_optimizer_instances=recipe.instances,
            )
            return FullyShardedDataParallel(config, ddp, model, device=torch.device("cpu"))
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=recipe.distributed,
            bucket_size=recipe.bucket or None,
            overlap_grad_reduce=bool(recipe.bucket),  # without it, Megatron makes one bucket
            num_distributed_optimizer_instances=recipe.instances,
        )
        return DistributedDataParallel(config, ddp, model, disable_bucketing=vp_stage > 0)

    def _make_optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        if self.recipe.scaled:
            moments = {"fp16": torch.float16, "fp8": torch.uint8, "remainders": torch.float32}
            with scaled_adam():
                config = OptimizerConfig(
                    optimizer="adam",
                    lr=1e-2,
                    min_lr=0.0,
                    weight_decay=0.1,
                    bf16=True,
                    params_dtype=torch.bfloat16,
                    use_distributed_optimizer=True,
                    use_precision_aware_optimizer=True,
                    exp_avg_dtype=moments[self.recipe.scaled],
                    exp_avg_sq_dtype=torch.float16 if self.recipe.scaled == "fp8" else torch.float32,
                    store_param_remainders=self.recipe.scaled == "remainders",
                    clip_grad=1.0,
                )
                return get_megatron_optimizer(config, self.chunks)

        offload: dict[str, Any] = {}
        if self.recipe.offloaded:
            offload.update(optimizer_cpu_offload=True, optimizer_offload_fraction=self.recipe.offloaded)
            offload.update(use_precision_aware_optimizer=True, overlap_cpu_optimizer_d2h_h2d=True)
        with self._places():
            config = OptimizerConfig(
                **offload,
                optimizer="adam",
                lr=self.recipe.lr,
                min_lr=0.0,
                weight_decay=0.1,
                bf16=self.recipe.dtype == torch.bfloat16,
                fp16=self.recipe.fp16,
                initial_loss_scale=2.0**8,
                params_dtype=self.recipe.dtype,
                use_distributed_optimizer=self.recipe.distributed,
                clip_grad=self.recipe.clip,
            )
        if not self.recipe.layer_wise:
            with self._places():
                return get_megatron_optimizer(config, self.chunks)
        with mock.patch.object(config, "bf16", new=False):  # the layer-wise optimizer makes the masters
            whole = get_megatron_optimizer(config, self.chunks)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        optimizer = LayerWiseDistributedOptimizer(whole.chained_optimizers, config, groups, [lambda *args: None])
        optimizer.allgather_params = optimizer.broadcast_params  # gloo gathers only equal sizes
        return optimizer

    def _places(self) -> contextlib.AbstractContextManager[None]:
        return two_places() if self.recipe.offloaded else contextlib.nullcontext()

    def train(self, steps: int) -> list[float]:
        """Train, and return the mean loss of each step on every rank."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        micro_batches = BATCH // dp // 2
        losses = []
        for _ in range(steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            own = global_batch(self.steps).chunk(dp)[dp_rank].split(2)
            for chunk in self.chunks:
                chunk.config.finalize_model_grads_func = finalize_model_grads
                chunk.config.grad_scale_func = self.optimizer.scale_loss
                if chunk.ddp_config.overlap_grad_reduce:  # as in Megatron's trainer; else some gradients stay local
                    no_syncs = [chunk.no_sync for chunk in self.chunks]
                    chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
            found = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(own) for _ in self.chunks] if len(self.chunks) > 1 else iter(own),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=micro_batches,
                seq_length=SEQUENCE,
                micro_batch_size=2,
                forward_only=False,
            )
            with self._places():
                ok, *_ = self.optimizer.step()
            assert ok
            self.steps += 1
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, [entry["loss"] for entry in found])
            flat = [loss for entries in everywhere for loss in entries]
            losses.append(sum(flat) / len(flat))
        return losses

    def embeddings(self) -> list[torch.Tensor]:
        """The local rows of the embedding, and of its master weights where this rank holds all of them."""
        (module,) = (chunk.module.module for chunk in self.chunks)
        weight = module.embedding.word_embeddings.weight
        held = [weight, weight.main_param] if not self.recipe.scaled else [weight]
        return [tensor.detach().view(weight.shape) for tensor in held]

    # ---------------------------------------------------------------------------------------------------- the oracle

    def full_state(self) -> dict[str, Any]:
        """Every global tensor of the model and the optimizer (masters and moments in fp32), on every rank.

        Names are those of the modules with global numbers of layers and experts. Padding of the vocabulary is removed.
        """
        pieces: dict[str, Any] = self._fsdp_pieces() if self.recipe.fsdp else {}
        for chunk in self.chunks if not self.recipe.fsdp else ():
            module = chunk.module.module if self.recipe.is_mixed else chunk.module
            for name, param in module.named_parameters():
                key = self._global_name(module, name)
                if key == "output_layer.weight" and self.recipe.tied:
                    key = "embedding.word_embeddings.weight"
                pieces.setdefault(key, (self._place(name, param), {}))[1]["model"] = (param.detach().float(), None)
                pieces[key][1].update(self._optimizer_entries(param))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, pieces)
        result: dict[str, Any] = {}
        for held in everywhere:
            for key, (place, entries) in held.items():
                for kind, (values, span) in entries.items():
                    result.setdefault(f"{key}/{kind}", {}).setdefault(place, []).append((values, span))
        return {key: _assembled(key, places) for key, places in sorted(result.items())}

    def _fsdp_pieces(self) -> dict[str, Any]:
        """What Megatron-FSDP keeps on this rank, at the offsets that it computes for its own checkpoints."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

        pieces: dict[str, Any] = {}
        (chunk,) = self.chunks
        buffers, module = chunk.param_and_grad_buffer, chunk.module.module
        module, prefix = (module.module, "module.") if self.recipe.is_mixed else (module, "")
        for name, stepped in buffers.optimizer_named_parameters:
            param = stepped.orig_param
            start = gather_and_compute_chunk_metadata(stepped).offsets[0] % len(param) * prod(param.shape[1:])
            span = (start, start + stepped._local_tensor.numel())
            group = buffers.parameter_groups[buffers.param_to_param_group[param]]
            wbuf = group.model_weight_buffer
            if wbuf is not None:  # what others step is only here after a gather
                model = (wbuf.get_item(wbuf.param_idx[param], only_shard=True).float().clone(), span)
            else:
                model = (param.detach().float(), None)
            name = name.removeprefix(prefix)
            entries = {"model": model, "master": (stepped._local_tensor.detach().clone(), span)}
            (inner,) = (part.optimizer for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]))
            for key, value in inner.state[stepped].items():
                entries[key] = (value._local_tensor.clone(), span)
            for options in inner.param_groups:
                if any(stepped is other for other in options["params"]):
                    # An optimizer that has never stepped an element on this rank counts no steps.
                    known = [key for key in _OPTIONS if key in options]
                    entries.update({key: (torch.tensor(float(options[key])), None) for key in known})
            pieces[self._global_name(module, name)] = (self._place(name, param), entries)
        return pieces

    @staticmethod
    def _global_name(module: Any, name: str) -> str:
        from megatron.core import parallel_state

        found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if found is None:
            return name
        rest = found[2]
        if expert := re.match(r"(mlp\.experts\.local_experts\.)(\d+)\.(.*)", rest):
            count = len(module.decoder.layers[int(found[1])].mlp.experts.local_experts)
            number = int(expert[2]) + count * parallel_state.get_expert_model_parallel_rank()
            rest = f"{expert[1]}{number}.{expert[3]}"
        return f"decoder.layers.{module.decoder.layers[int(found[1])].layer_number - 1}.{rest}"

    @staticmethod
    def _place(name: str, param: Any) -> tuple[Any, ...]:
        """The shape, the partitioned dimension, the rank in it, and whether halves are interleaved with ranks."""
        from megatron.core import parallel_state

        rank = parallel_state.get_tensor_model_parallel_rank()
        if ".local_experts." in name:
            rank = parallel_state.get_expert_tensor_parallel_rank()
        dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
        return tuple(param.shape), dim, rank if dim is not None else 0, "linear_fc1" in name

    def _optimizer_entries(self, param: Any) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for part in self.optimizer.chained_optimizers:
            span = None
            if self.recipe.distributed:
                if param not in part.model_param_gbuf_map:
                    continue
                found = part._get_model_param_range_map(param)["param"]
                span = (found.start, found.end)
            if self.recipe.scaled:
                group, index = part.model_param_group_index_map[param]
                inner = part.optimizer.param_groups[group]["params"][index]
                for key in part.optimizer.state[inner]:
                    name = "master" if key == "master_param" else key
                    entries[name] = (part.optimizer.fp32(inner, key), span)
                options = part.optimizer.param_groups[group]
                entries.update({key: (torch.tensor(float(options[key])), None) for key in _OPTIONS})
                continue
            if self.recipe.offloaded:
                group, index = part.model_param_group_index_map[param]
                outer = part.optimizer
                stepped = outer.param_to_inner_param[outer.param_groups[group]["params"][index]]
                entries["master"] = (stepped.detach().float(), span)
                for inner in outer.sub_optimizers:
                    for key, value in inner.state.get(stepped, {}).items():
                        if key != "master_param":
                            number = torch.as_tensor(value).float()
                            entries[key] = (number, span if number.ndim else None)
                    for options in inner.param_groups:
                        if any(stepped is other for other in options["params"]):
                            entries.update(
                                {key: (torch.tensor(float(options[key])), None) for key in _OPTIONS if key in options}
                            )
                continue
            stepped = getattr(param, "main_param", None)
            if stepped is None:
                if self.recipe.distributed and not self.recipe.is_mixed:
                    group, index = part.model_param_group_index_map[param]
                    stepped = part.optimizer.param_groups[group]["params"][index]
                else:
                    stepped = param
            for group in part.optimizer.param_groups:
                if any(stepped is other for other in group["params"]):
                    entries["master"] = (stepped.detach().float(), span)
                    for key, value in part.optimizer.state[stepped].items():
                        entries[key] = (torch.as_tensor(value).float(), span if torch.as_tensor(value).ndim else None)
                    for key in _OPTIONS:
                        if key in group:
                            entries[key] = (torch.tensor(float(group[key])), None)
        return entries


def global_batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _layer_spec(recipe: Recipe) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        """Takes the sizes of the heads from its input, so that it also serves multi-latent attention."""

        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
            super().__init__(*args, **options)

    spec = get_gpt_layer_local_spec(num_experts=recipe.experts or None, multi_latent_attention=recipe.mla)
    spec.submodules.self_attention.submodules.core_attention = Attention
    return spec


def _further_tokens(config: Any, recipe: Recipe) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(config, _layer_spec(recipe), use_transformer_engine=False) if recipe.mtp else None


def _forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, partial(_loss)


def _loss(output: torch.Tensor) -> Any:
    from megatron.core import parallel_state

    loss = output.float().mean()
    # Megatron takes the loss for that of a part of the sequence.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.item()}


def _assembled(key: str, places: dict[Any, list[Any]]) -> torch.Tensor:
    parts = {rank: _whole(shape, pieces) for (shape, _, rank, _), pieces in places.items()}
    _, dim, _, halves = next(iter(places))
    ordered = [parts[rank] for rank in sorted(parts)]
    if dim is None or not ordered[0].ndim:
        whole = ordered[0]
    elif halves and dim == 0:
        split = [part.chunk(2) for part in ordered]
        whole = torch.cat([*(gate for gate, _ in split), *(up for _, up in split)])
    else:
        whole = torch.cat(ordered, dim)
    return whole[:VOCABULARY] if ("word_embeddings" in key or "output_layer" in key) and whole.ndim else whole


def _whole(shape: tuple[int, ...], pieces: list[Any]) -> torch.Tensor:
    if not any(values.ndim for values, _ in pieces):
        assert len({values.item() for values, _ in pieces}) == 1
        return pieces[0][0]
    whole = torch.full(shape, float("nan"))
    for values, span in pieces:
        held = whole.view(-1)[slice(*span)] if span else whole.view(-1)
        known = ~held.isnan()
        assert torch.equal(held[known], values.reshape(-1)[known]), "replicas differ"
        held.copy_(values.reshape(-1))
    assert not whole.isnan().any(), "elements are missing"
    return whole


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The names of tensors that are missing or differ in any bit."""
    bad = sorted(left.keys() ^ right.keys())
    return bad + [key for key in left.keys() & right.keys() if not torch.equal(left[key], right[key])]


@contextlib.contextmanager
def training(layout: Layout, recipe: Recipe, seed: int) -> Iterator[Training]:
    with megatron_on_cpu():
        from megatron.core import parallel_state

        # Megatron's state dicts are cycles that hold process groups. Each has threads of gloo that poll while it lives.
        gc.collect()
        try:
            yield Training(layout, recipe, seed)
        finally:
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def renewed_pools(size: int, tests: int) -> Iterator[Callable[[], RankPool]]:
    """Yield a function that returns a pool of ranks for a test: after some tests, another one.

    Some jobs of Megatron are never released, and each has about 17 threads of gloo that poll as long as they live.
    """
    with contextlib.ExitStack() as stack:
        pools: list[RankPool] = []
        counter = itertools.count()

        def pool() -> RankPool:
            if next(counter) % tests == 0:
                stack.pop_all().close()
                pools[:] = [stack.enter_context(RankPool(size))]
            return pools[0]

        yield pool
