"""Requests of engines whose models have 8-bit parameters, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import MismatchError
from bytecheckpoint.inference.push.engine_model import EngineModel
from bytecheckpoint.inference.push.engines.base import Budget, Engine
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.inference.push.requests import TensorRequest, blocks_by_name, request_tensors
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.shards import basic_meta

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
Loader = Callable[[nn.Module, str, torch.Tensor], None]


class _Model(EngineModel):
    """An ``EngineModel`` with parameters of these dtypes and shapes."""

    def __init__(
        self,
        parameters: dict[str, tuple[torch.dtype, tuple[int, ...]]],
        load: Loader | None = None,
        blocks: tuple[int, int] | None = (4, 4),
        quantized: bool = False,
    ) -> None:
        self.blocks, self.quantized, self._parameters = blocks, quantized, parameters
        self._load = load or (lambda model, name, tensor: model.get_parameter(name).data.copy_(tensor))

    def make(self) -> nn.Module:
        made = nn.Module()
        for name, (dtype, shape) in self._parameters.items():
            made.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False))
        return made

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._load(model, name, tensor)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError

    def restore(self) -> bool:
        raise AssertionError

    def clear_caches(self) -> None:
        """Does nothing: there are no caches."""


class _Engine(Engine):
    def __init__(self, *models: _Model) -> None:
        self.name = "engine"
        self._receivers = [Receiver(model) for model in models]

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [receiver.answer(request) for receiver in self._receivers]

    def pause(self, timeout_s: float) -> None:
        raise AssertionError

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        raise AssertionError


def _request(engine: Engine, strict: bool = True, **tensors: tuple[torch.dtype, tuple[int, ...]]) -> TensorRequest:
    rows: list[tuple[str, BasicMeta]] = [(name, basic_meta(dtype, shape)) for name, (dtype, shape) in tensors.items()]
    return request_tensors(engine, Table(tuple(rows)), Budget(10), strict=strict)


SCALED = {"w": (FP8, (6, 8)), "w_scale_inv": (F32, (2, 2)), "norm": (BF16, (8,))}


def test_quantized_weights_and_scales_replace_wide_tensors() -> None:
    request = _request(_Engine(_Model(SCALED)), norm=(F32, (8,)), w=(BF16, (6, 8)))
    assert request.blocks == {"w": (4, 4)}
    assert [(name, str(meta)) for name, meta in request.table.rows] == [
        ("norm", "float32[8]"),
        ("w", "float8_e4m3fn[6, 8]"),
        ("w_scale_inv", "float32[2, 2]"),
    ]
    assert [str(part.dtype) for part in request.parts[0]] == ["bfloat16", "float8_e4m3fn", "float32"]


def test_tensors_with_scales_are_unchanged() -> None:
    request = _request(_Engine(_Model(SCALED)), w=SCALED["w"], w_scale_inv=SCALED["w_scale_inv"], norm=SCALED["norm"])
    assert not request.blocks


def test_parameters_that_are_wide_in_the_engine_are_unchanged() -> None:
    request = _request(_Engine(_Model({"w": (BF16, (6, 8))})), w=(F32, (6, 8)))
    assert not request.blocks


@pytest.mark.parametrize(
    ("model", "tensors", "text"),
    [
        (_Model({"w": (FP8, (6, 8))}, blocks=None), {"w": (BF16, (6, 8))}, "w: bfloat16[6, 8] is sent for float8"),
        (_Model({"w": (torch.float8_e5m2, (6, 8))}), {"w": (BF16, (6, 8))}, "to which bytecheckpoint cannot quantize"),
        (_Model({"w": (FP8, (8,))}), {"w": (BF16, (8,))}, "has no blocks"),
        (
            _Model(SCALED | {"w_scale_inv": (torch.float8_e8m0fnu, (2, 2))}),
            {"w": (BF16, (6, 8)), "norm": (BF16, (8,))},
            "w_scale_inv: float32[2, 2] is sent for float8_e8m0fnu",
        ),
        (
            _Model(SCALED),
            {"w": (BF16, (6, 8)), "w_scale_inv": (F32, (2, 2)), "norm": (BF16, (8,))},
            "the senders have w_scale_inv as well",
        ),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_quantized(
    model: _Model, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], text: str
) -> None:
    with pytest.raises(MismatchError) as raised:
        _request(_Engine(model), **tensors)
    assert text in str(raised.value)
    assert re.search("nothing was sent|no weight was changed", str(raised.value))
    assert raised.value.faults


def test_a_loader_that_computes_with_values() -> None:
    def load(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        tensor.abs()
        model.get_parameter(name).data.copy_(tensor)

    with pytest.raises(MismatchError, match="computes with its values"):
        _request(_Engine(_Model(SCALED, load)), w=(BF16, (6, 8)))


def test_a_loader_that_does_not_request_scales() -> None:
    def load(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "w":
            model.get_parameter(name).data.copy_(tensor)

    with pytest.raises(MismatchError, match="w_scale_inv: its loader does not request it"):
        _request(_Engine(_Model(SCALED, load, quantized=True)), w=(BF16, (6, 8)))


def test_scales_without_a_tensor() -> None:
    """The second request finds the same missing scales as the first one."""
    with pytest.raises(MismatchError, match="norm: 8 of 8 elements"):
        _request(_Engine(_Model(SCALED)), w=(BF16, (6, 8)))
    assert _request(_Engine(_Model(SCALED)), strict=False, w=(BF16, (6, 8))).blocks


def test_workers_that_request_a_tensor_both_quantized_and_wide() -> None:
    engine = _Engine(_Model(SCALED), _Model(SCALED | {"w": (BF16, (6, 8))}, quantized=True))
    with pytest.raises(MismatchError, match="w: it is requested as float8_e4m3fn and as bfloat16"):
        _request(engine, w=(BF16, (6, 8)), norm=(BF16, (8,)))


def test_engines_that_request_different_blocks() -> None:
    tensors = {"w": (BF16, (6, 8)), "norm": (BF16, (8,))}
    one = _request(_Engine(_Model(SCALED)), **tensors)
    other = _request(_Engine(_Model(SCALED | {"w_scale_inv": (F32, (3, 1))}, blocks=(2, 8))), **tensors)
    assert blocks_by_name([one, one]) == {"w": (4, 4)}
    with pytest.raises(MismatchError, match="w in blocks of 4x4, and others in blocks of 2x8"):
        blocks_by_name([one, other])
