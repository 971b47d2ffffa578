"""The textbook rules of tensor, pipeline and expert parallelism, by the names of tensors.

The rules map boxes of stored tensors to boxes of one rank's parameters. They are written from the models' descriptions,
independently of the recorded layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.target_layout import LayoutTensor
from bytecheckpoint.tensors.dtypes import DTYPES, DType
from bytecheckpoint.tensors.geometry import Box

_PADDING = 64  # vLLM pads vocabularies to a multiple of this
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Models whose embedding, last norm and head vLLM builds on every pipeline stage.
_ON_EVERY_STAGE = frozenset({"Qwen3MoeForCausalLM"})
_EXACT_ROUTERS = frozenset({"Glm4MoeForCausalLM"})
_EXPERT = re.compile(r"(mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|weight_scale_inv)")


class Piece(NamedTuple):
    box: Box
    parameter: str
    target: Box


@dataclass(frozen=True)
class Rules:
    """The rules for one rank of an engine that runs the model of ``config``."""

    config: dict[str, Any]
    tp: int
    pp: int
    ep: bool
    rank: int

    @property
    def place(self) -> int:
        return self.rank % self.tp

    def pieces(self, tensor: LayoutTensor) -> list[Piece]:
        """Return no pieces for tensors of other stages, experts of other ranks, and multi-token predictors."""
        name, shape = tensor.name, tensor.shape
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self._vocabulary(name, shape) if self._has(name) else []
        if name == "model.norm.weight":
            return [_whole(name, shape)] if self._has(name) else []
        found = _LAYER.fullmatch(name)
        assert found is not None, name
        layer, rest = int(found[1]), found[2]
        if layer not in self.layers(self.rank // self.tp):
            return []
        return self._in_layer(f"model.layers.{layer}.", rest, shape)

    def layers(self, stage: int) -> range:
        """Distribute the layers evenly; the stages just before the last one get the remainder."""
        each, more = divmod(int(self.config["num_hidden_layers"]), self.pp)
        counts = [each] * self.pp
        for back in range(more):
            counts[-2 - back] += 1
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def padding(self) -> dict[str, int]:
        """Return the number of padding elements by parameter."""
        found = {}
        rows, padded = int(self.config["vocab_size"]), self._padded()
        first, last = self.place * padded // self.tp, (self.place + 1) * padded // self.tp
        missing = max(0, last - max(first, rows)) * int(self.config["hidden_size"])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if missing and self._has(name):
                found[name] = missing
        return found

    def _has(self, name: str) -> bool:
        """Whether the rank's stage has this tensor, which belongs to no layer."""
        if self.config["architectures"][0] in _ON_EVERY_STAGE:
            return True
        return self.rank // self.tp == (0 if name == "model.embed_tokens.weight" else self.pp - 1)

    def is_here(self, tensor: LayoutTensor) -> bool:
        """Whether the rank's stage has the tensor."""
        found = _LAYER.fullmatch(tensor.name)
        return self._has(tensor.name) if found is None else int(found[1]) in self.layers(self.rank // self.tp)

    def padded_rows(self, tensor: LayoutTensor) -> int:
        outside = tensor.name in ("model.embed_tokens.weight", "lm_head.weight")
        return self._padded() - tensor.shape[0] if outside else 0

    def dtype_of(self, tensor: LayoutTensor) -> DType:
        """Return the parameter's dtype: float32 for routers that are computed exactly, otherwise the stored dtype."""
        exact = self.config["architectures"][0] in _EXACT_ROUTERS and tensor.name.endswith("mlp.gate.weight")
        return DTYPES["float32"] if exact else tensor.dtype

    def is_sharded(self, name: str) -> bool:
        """Whether the ranks of a stage have disjoint parts."""
        if re.search(r"[kv]_proj\.(weight|bias)$", name):
            return int(self.config["num_key_value_heads"]) >= self.tp
        rows = r"(q|q_b|kv_b|o|gate|up|down)_proj\.(weight|weight_scale_inv|bias)$"
        return bool(re.search(rows, name)) or name in ("model.embed_tokens.weight", "lm_head.weight")

    def _padded(self) -> int:
        return -(-int(self.config["vocab_size"]) // _PADDING) * _PADDING

    def _vocabulary(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        rows = self._padded() // self.tp
        first = self.place * rows
        count = min(first + rows, shape[0]) - first
        if count <= 0:
            return []
        return [Piece(_rows(shape, first, count), name, Box((0, 0), (count, shape[1])))]

    def _in_layer(self, prefix: str, rest: str, shape: tuple[int, ...]) -> list[Piece]:
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            return self._expert(prefix, int(expert[2]), expert[3], expert[4], shape)
        module, _, kind = rest.rpartition(".")
        owner, _, which = module.rpartition(".")
        at = self.place
        if which in ("q_proj", "k_proj", "v_proj"):
            first, count, to = self._heads(which[0])
            return [Piece(_rows(shape, first, count), f"{prefix}{owner}.qkv_proj.{kind}", _rows(shape, to, count))]
        if which in ("q_a_proj", "kv_a_proj_with_mqa"):
            to = 0 if which == "q_a_proj" else int(self.config["q_lora_rank"])
            to = to // 128 if kind == "weight_scale_inv" else to
            return [Piece(Box.whole(shape), f"{prefix}{owner}.fused_qkv_a_proj.{kind}", _rows(shape, to, shape[0]))]
        if which in ("gate_proj", "up_proj"):
            part = shape[0] // self.tp
            to = 0 if which == "gate_proj" else part
            return [
                Piece(_rows(shape, at * part, part), f"{prefix}{owner}.gate_up_proj.{kind}", _rows(shape, to, part))
            ]
        if which in ("q_b_proj", "kv_b_proj"):
            part = shape[0] // self.tp
            return [Piece(_rows(shape, at * part, part), prefix + rest, _rows(shape, 0, part))]
        if which in ("o_proj", "down_proj"):
            part = shape[1] // self.tp
            return [Piece(_columns(shape, at * part, part), prefix + rest, _columns(shape, 0, part))]
        assert "norm" in rest or ".gate." in rest, rest
        return [_whole(prefix + rest, shape)]

    def _heads(self, which: str) -> tuple[int, int, int]:
        """Return the first row, the number of rows, and the first row in the fused parameter."""
        config = self.config
        heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // heads)
        queries, keys = heads // self.tp * size, max(kv_heads // self.tp, 1) * size
        if which == "q":
            return self.place * queries, queries, 0
        copies = max(self.tp // kv_heads, 1)  # copies of each key-value head
        return self.place // copies * keys, keys, queries + (keys if which == "v" else 0)

    def _expert(self, prefix: str, number: int, which: str, kind: str, shape: tuple[int, ...]) -> list[Piece]:
        part = self.place
        parts = self.tp
        if self.ep:
            each = self._experts() // self.tp
            if number // each != self.place:
                return []
            number, part, parts = number % each, 0, 1
        split = 1 if which == "down" else 0
        width = shape[split] // parts
        cut = _columns if which == "down" else _rows
        to = cut(shape, width if which == "up" else 0, width)
        parameter = f"{prefix}mlp.experts.routed_experts.{'w2' if which == 'down' else 'w13'}_{kind}"
        target = Box((number, *to.offsets), (1, *to.lengths))
        return [Piece(cut(shape, part * width, width), parameter, target)]

    def _experts(self) -> int:
        return int(self.config.get("n_routed_experts") or self.config["num_experts"])


def covers(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes, which are split along one dimension and may repeat, cover a tensor."""
    distinct = sorted(set(boxes))
    return sum(box.numel for box in distinct) == math.prod(shape) and all(
        one.intersect(other) is None for one, other in pairwise(distinct)
    )


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(Box.whole(shape), name, Box.whole(shape))


def _rows(shape: tuple[int, ...], first: int, count: int) -> Box:
    return Box((first, *[0] * (len(shape) - 1)), (count, *shape[1:]))


def _columns(shape: tuple[int, ...], first: int, count: int) -> Box:
    return Box((0, first), (shape[0], count))
