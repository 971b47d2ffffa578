"""Quantization of boxes on any number of senders gives the same bits as that of the entire tensor on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from toy_blocks import reference

from bytecheckpoint.errors import PlanError
from bytecheckpoint.inference.layouts.hub_names import scale_name
from bytecheckpoint.inference.layouts.parts import TensorBox, torch_dtype_of
from bytecheckpoint.inference.push.block_quantization import (
    QUANTIZED,
    SCALE,
    Blocks,
    Scratch,
    cut_blocks,
    grid_of,
    maxima_of,
    quantize,
    scales_of,
)
from bytecheckpoint.inference.push.layout import Holding
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.plan import plan_push
from bytecheckpoint.inference.push.quantizer import Quantizer, holdings_of_blocks, pack_task, plan_exchange
from bytecheckpoint.inference.push.sources import PushSource
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta

WIDE = (torch.bfloat16, torch.float32, torch.float16)


class _Sender(PushSource):
    """Holds boxes of one tensor, and records which elements are fetched."""

    def __init__(self, tensor: torch.Tensor, boxes: Sequence[Box]) -> None:
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        self.table = Table((("w", BasicMeta(dtype, tuple(tensor.shape))),))
        self.held = [("w", box) for box in boxes]
        self._tensor = tensor

    def fetch(self, requested: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        for _, box in requested:
            if not any(own.contains(box) for _, own in self.held):
                raise PlanError(f"{box} is not held")
        return [self._tensor[box.slices()] for _, box in requested]


@st.composite
def _tensors(draw: Any, blocks: Blocks) -> torch.Tensor:
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 1)))]
    shape += [draw(st.integers(1, 3 * size + 1)) for size in blocks]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    tensor = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-7, 4))
    if draw(st.booleans()):
        tensor *= torch.rand(shape, generator=generator) > 0.9
    return tensor.to(draw(st.sampled_from(WIDE)))


@st.composite
def _box(draw: Any, inside: Box) -> Box:
    offsets, lengths = [], []
    for offset, size in zip(inside.offsets, inside.lengths, strict=True):
        begin = draw(st.integers(0, size - 1))
        offsets.append(offset + begin)
        lengths.append(draw(st.integers(1, size - begin)))
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def _tiling(draw: Any, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that are the whole together: cut along one dimension, and some pieces again along another."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[d]))
        head, tail = list(box.lengths), list(box.lengths)
        head[d], tail[d] = at, box.lengths[d] - at
        begin = list(box.offsets)
        begin[d] += at
        boxes += [Box(box.offsets, tuple(head)), Box(tuple(begin), tuple(tail))]
    return [box for box in boxes if box.numel]


@st.composite
def _cases(draw: Any) -> tuple[torch.Tensor, Blocks, list[list[Box]], list[list[Box]], int]:
    """A tensor, blocks, the boxes of each sender, the boxes that each worker requests, and the chunk size."""
    blocks = draw(st.sampled_from([(1, 1), (2, 3), (4, 4), (5, 2), (16, 8)]))
    tensor = draw(_tensors(blocks))
    shape = tuple(tensor.shape)
    senders: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 4)))]
    some = st.sets(st.integers(0, len(senders) - 1), min_size=1)
    for box in draw(_tiling(shape)):
        for sender in draw(some):
            senders[sender].append(box)
    for _ in range(draw(st.integers(0, 2))):  # replicas that overlap, some of all
        box = draw(st.one_of(_box(Box.whole(shape)), st.just(Box.whole(shape))))
        for sender in draw(some):
            senders[sender].append(box)
    requested = [draw(_tiling(shape)) for _ in range(draw(st.integers(1, 2)))]
    return (
        tensor,
        blocks,
        [list(dict.fromkeys(boxes)) for boxes in senders],
        requested,
        draw(st.sampled_from([1, 9, 64, 4096])),
    )


@settings(max_examples=examples(400), deadline=None)
@given(_cases())
def test_any_sharding_gives_the_same_bits_as_one_process(
    case: tuple[torch.Tensor, Blocks, list[list[Box]], list[list[Box]], int],
) -> None:
    tensor, blocks, boxes, requested, chunk_bytes = case
    shape, by_name = tuple(tensor.shape), {"w": blocks}
    senders = [_Sender(tensor, of_sender) for of_sender in boxes]
    held: dict[Box, list[int]] = {}
    for number, of_sender in enumerate(boxes):
        for box in of_sender:
            held.setdefault(box, []).append(number)
    holdings = {"w": [Holding(box, tuple(numbers)) for box, numbers in held.items()]}
    grid = grid_of(shape, blocks)
    scales = TensorBox(scale_name("w"), grid, Box.whole(grid), SCALE)
    parts = [[*(TensorBox("w", shape, box, QUANTIZED) for box in of_worker), scales] for of_worker in requested]
    owned = holdings_of_blocks(holdings, by_name, len(senders))
    exchange = plan_exchange(owned, senders[0].table, by_name, len(senders))
    plan = plan_push(parts, owned, len(senders), chunk_bytes=chunk_bytes)

    quantizers = [Quantizer(s, pack_task(by_name, exchange, number)) for number, s in enumerate(senders)]
    received = [one.partial_maxima() for one in quantizers]
    if exchange.split:
        received = exchange.merge(received)
    made = torch.zeros(shape, dtype=torch.uint8), torch.full(grid, -1.0)
    for one, merged, writes in zip(quantizers, received, plan.writes, strict=True):
        one.set_maxima(merged)
        for batch in (writes[: len(writes) // 2], writes[len(writes) // 2 :]):
            for write, elements in zip(batch, one.fetch(batch), strict=True):
                out = torch.empty(write.box.lengths, dtype=torch_dtype_of(write.dtype))
                one.fill(out, elements, write)
                target = made[write.name != "w"][write.box.slices()]
                target.copy_(out.view(target.dtype))
    quantized, expected = reference(tensor, blocks)
    assert torch.equal(made[0], quantized.view(torch.uint8))
    assert torch.equal(made[1], expected)
    if all(of_sender == [Box.whole(shape)] for of_sender in boxes):
        assert not exchange.split


def test_who_finds_which_maxima() -> None:
    """384 rows on two senders, split at row 200, which is inside of a block; and 256 rows, split between blocks."""
    table = Table((("w", BasicMeta(DTYPES["bfloat16"], (384, 512))), ("v", BasicMeta(DTYPES["bfloat16"], (256, 512)))))
    held = {
        "w": [Holding(Box((0, 0), (200, 512)), (0,)), Holding(Box((200, 0), (184, 512)), (1,))],
        "v": [Holding(Box((0, 0), (128, 512)), (0,)), Holding(Box((128, 0), (128, 512)), (1,))],
    }
    exchange = plan_exchange(held, table, {"w": (128, 128), "v": (128, 128)}, 2)
    assert exchange.split == {"w"}
    assert [[(name, grid) for name, grid, _ in of_sender] for of_sender in exchange.boxes] == [
        [("w", Box((0, 0), (2, 4))), ("v", Box((0, 0), (1, 4)))],
        [("w", Box((1, 0), (2, 4))), ("v", Box((1, 0), (1, 4)))],
    ]
    assert not plan_exchange(held, table, {"v": (128, 128)}, 2).split


def test_maxima_are_found_in_runs_of_complete_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytecheckpoint.inference.push.quantizer._RUN_ELEMENTS", 200 * 384)
    tensor, blocks = torch.randn(1000, 384), (128, 128)
    sender = _Sender(tensor, [Box.whole((1000, 384))])
    exchange = plan_exchange({"w": [Holding(Box.whole((1000, 384)), (0,))]}, sender.table, {"w": blocks}, 1)
    assert [box.lengths[0] for _, _, box in exchange.boxes[0]] == [*[128] * 7, 104]
    found = Quantizer(sender, pack_task({"w": blocks}, exchange, 0)).partial_maxima()
    expected = maxima_of(tensor, Box.whole((1000, 384)), blocks, Scratch())
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32), expected.view(-1))


def test_rounding_matches_the_formula() -> None:
    """Values halfway between two 8-bit numbers, where the last bit of the factor decides."""
    eights = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for largest in (0.3, 1.7, 2.9, 77.0):
        tensor = ((eights[1:] + eights[:-1]) / 2 * (torch.tensor(largest) / 448)).reshape(-1, 7).contiguous()
        tensor[0, 0] = largest
        box, blocks = Box.whole(tuple(tensor.shape)), (128, 128)
        out = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        quantize(out, tensor, box, maxima_of(tensor, box, blocks, Scratch()), blocks, Scratch())
        assert torch.equal(out.view(torch.uint8), reference(tensor, blocks)[0].view(torch.uint8))


def test_nan_stays_nan() -> None:
    tensor = torch.ones(4, 6)
    tensor[0, 0], tensor[3, 5] = float("nan"), float("inf")
    box, blocks = Box.whole((4, 6)), (2, 3)
    maxima = maxima_of(tensor, box, blocks, Scratch())
    out = torch.empty(4, 6, dtype=torch.float8_e4m3fn)
    quantize(out, tensor, box, maxima, blocks, Scratch())
    assert torch.equal(out.float().isnan(), reference(tensor, blocks)[0].float().isnan())
    assert torch.equal(scales_of(maxima).isfinite(), torch.tensor([[False, True], [True, False]]))
    assert out[0, 0].isnan()
    assert out[3, 5].isnan()
    assert (out.float()[0:2, 3:] == 448).all()


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 300), st.integers(1, 700), st.integers(1, 500), st.integers(1, 1 << 16))
def test_rows_are_cut_between_blocks(begin: int, rows: int, columns: int, limit: int) -> None:
    box = Box((begin, 3), (rows, columns))
    pieces = list(cut_blocks(box, (128, 128), limit))
    assert [piece.offsets[0] for piece in pieces[1:]] == [piece.stops[0] for piece in pieces[:-1]]
    assert sum(piece.numel for piece in pieces) == box.numel
    assert all(piece.offsets[0] % 128 == 0 for piece in pieces[1:])
    assert all(piece.numel <= limit or piece.lengths[0] <= 128 for piece in pieces)


def test_a_task_without_quantized_tensors_is_empty() -> None:
    sender = _Sender(torch.ones(2, 2), [Box.whole((2, 2))])
    one = Quantizer(sender, b"")
    assert not one.exchanges
    assert one.partial_maxima() == b""
    assert msgpack.unpackb(pack_task({}, plan_exchange({}, sender.table, {}, 1), 0)) == [{}, False, []]
