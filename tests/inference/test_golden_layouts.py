"""Replay recorded layouts of vLLM without it, and compare them with the rules of parallelism."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from golden_layouts import ENGINES, GOLDEN, MODELS, file_of
from parallel_rules import Piece, Rules, covers
from sampling import sample

from benchmarks.hub_shapes import hub_shapes
from benchmarks.layout_files import digest, unpack
from benchmarks.target_layout import LayoutTensor, TargetLayout
from bytecheckpoint.inference.layouts.parts import box_of
from bytecheckpoint.tensors.geometry import Box, find_overlap
from bytecheckpoint.tensors.shards import basic_meta

_box_of = lru_cache(maxsize=1 << 14)(box_of)  # layers repeat
INDEX = json.loads((GOLDEN / "index.json").read_text())
_LARGE = ("qwen3-235b-a22b", "deepseek-v3", "kimi-k2")
CASES = [
    pytest.param(model, engine, id=file_of(model, engine).stem)
    for model in MODELS
    for engine in ENGINES[model]
    if model not in _LARGE
]
LARGE_CASES = [
    pytest.param(model, engine, id=file_of(model, engine).stem, marks=pytest.mark.slow)
    for model in _LARGE
    for engine in ENGINES[model]
]

# Predictors of further tokens: an engine without speculation does not load them.
_UNUSED = {"deepseek-v3": "model.layers.61.", "glm-4.5-air": "model.layers.46."}


def test_tables_of_stored_tensors_are_those_of_the_hub() -> None:
    """Numbers and sizes are those of the models' indices on the hub."""
    expected = {
        "llama-3-70b": (723, 141_107_412_992),
        "qwen3-235b-a22b": (36_945, 470_187_269_120),
        "deepseek-v3": (91_991, 688_574_839_360),
    }
    for model, (count, nbytes) in expected.items():
        tensors = hub_shapes(MODELS[model])
        assert len(tensors) == len({name for name, _, _ in tensors}) == count
        assert sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors) == nbytes


def test_the_files_are_those_of_the_index() -> None:
    assert {path.name for path in GOLDEN.glob("*.layouts")} == set(INDEX)
    assert {file_of(model, engine).name for model in MODELS for engine in ENGINES[model]} == set(INDEX)
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 2 << 20


@pytest.mark.parametrize(("model", "engine"), [*CASES, *sample(LARGE_CASES, 1)])
@pytest.mark.sampled(4)
def test_layouts_follow_the_rules(model: str, engine: dict[str, Any]) -> None:
    """For large models, check the first and the last rank in full, and the union of all ranks for some layers."""
    path = file_of(model, engine)
    packed = msgpack.unpackb(path.read_bytes())
    assert len(packed) == engine["tp"] * engine["pp"]
    table = tuple(
        LayoutTensor(name, shape, basic_meta(dtype, shape).dtype) for name, shape, dtype in hub_shapes(MODELS[model])
    )
    small = len(table) < 1000
    followed = {number for number, tensor in enumerate(table) if small or _is_followed(tensor.name)}
    union: dict[int, set[Box]] = {number: set() for number in followed}
    stages: dict[int, tuple[int, int]] = {}
    ends = (0, len(packed) - 1)
    for rank, data in enumerate(packed):
        if model == "kimi-k2" and rank not in ends:  # DeepSeek's layers again, with more experts
            continue
        layout = unpack(data)
        rules = Rules(MODELS[model], **engine, rank=rank)
        expected = INDEX[path.name]["ranks"][rank]
        assert layout.stored == table
        if small or rank in ends:
            assert digest(layout) == expected["digest"]
            assert asdict(layout.sizes()) == {name: value for name, value in expected.items() if name != "digest"}
            _check_pieces(layout, rules)
            _check_coverage(layout, rules)
        stage = rank // engine["tp"]
        if stage not in stages:
            stages[stage] = _bytes(table, rules)
        _check_bytes(expected, *stages[stage], rules.tp)
        for placement in layout.placements:
            if placement.stored in followed:
                view = _box_of(table[placement.stored].shape, placement.view)
                assert view is not None
                union[placement.stored].add(view.box)
    for number, boxes in union.items() if model != "kimi-k2" else ():
        if table[number].name.startswith(_UNUSED.get(model, "nothing")):
            assert not boxes
        else:
            assert covers(boxes, table[number].shape), table[number].name


def _is_followed(name: str) -> bool:
    found = re.match(r"model\.layers\.(\d+)", name)
    return found is None or int(found[1]) in (0, 3, 45, 46, 60, 61, 93)


def _check_pieces(layout: TargetLayout, rules: Rules) -> None:
    """Check that each stored tensor goes exactly where the rule of its kind requires."""
    found = defaultdict(list)
    for placement in layout.placements:
        stored, parameter = layout.stored[placement.stored], layout.parameters[placement.parameter]
        box, target = _box_of(stored.shape, placement.view), _box_of(parameter.shape, placement.target)
        assert box is not None, stored.name
        assert target is not None, parameter.name
        found[stored.name].append(Piece(box.box, parameter.name, target.box))
        assert rules.dtype_of(stored) == parameter.dtype, stored.name
    assert layout.seen == ()
    for tensor in layout.stored:
        assert found[tensor.name] == rules.pieces(tensor), tensor.name


def _check_coverage(layout: TargetLayout, rules: Rules) -> None:
    """Check that every element of every parameter has one source, and only padding has none."""
    boxes = defaultdict(list)
    for placement in layout.placements:
        target = _box_of(layout.parameters[placement.parameter].shape, placement.target)
        assert target is not None
        boxes[placement.parameter].append(target.box)
    padding = rules.padding()
    for number, parameter in enumerate(layout.parameters):
        expected = math.prod(parameter.shape) - padding.pop(parameter.name, 0)
        assert sum(box.numel for box in boxes[number]) == expected, parameter.name
        if parameter.shape[0] * len(boxes[number]) < 4096 and math.prod(parameter.shape) < 1 << 20:
            count = np.zeros(parameter.shape, np.int8)
            for box in boxes[number]:
                count[box.slices()] += 1
            assert count.max() == 1, parameter.name
        else:
            offsets = np.array([box.offsets for box in boxes[number]])
            lengths = np.array([box.lengths for box in boxes[number]])
            assert find_overlap(offsets, lengths) is None, parameter.name
    assert padding == {}


def _check_bytes(figures: dict[str, int], sharded: int, replicated: int, tp: int) -> None:
    """Check that one of t ranks requests at most 1/t of the sharded tensors, and all of the others."""
    assert figures["requested"] == figures["fast"]
    assert figures["requested"] <= sharded / tp + replicated
    # Nearly all tensors of a model are sharded.
    assert sharded + replicated < 1 << 30 or replicated < sharded / 40


def _bytes(table: tuple[LayoutTensor, ...], rules: Rules) -> tuple[int, int]:
    sharded = replicated = 0
    for tensor in table:
        if rules.is_here(tensor):
            rows = tensor.shape[0] + rules.padded_rows(tensor)
            nbytes = rows * math.prod(tensor.shape[1:]) * rules.dtype_of(tensor).itemsize
            if rules.is_sharded(tensor.name):
                sharded += nbytes
            else:
                replicated += nbytes
    return sharded, replicated


@pytest.mark.parametrize("rank", range(4))
def test_elements_arrive_where_the_rules_say(rank: int) -> None:
    """Follow every element of a small model, with numbers instead of boxes."""
    engine = {"tp": 4, "pp": 1, "ep": False}
    layout = unpack(msgpack.unpackb(file_of("small-moe", engine).read_bytes())[rank])
    rules = Rules(MODELS["small-moe"], **engine, rank=rank)
    found = {tensor.name: torch.full(tensor.shape, -1.0) for tensor in layout.parameters}
    expected = {name: tensor.clone() for name, tensor in found.items()}
    for number, tensor in enumerate(layout.stored):
        values = torch.arange(math.prod(tensor.shape), dtype=torch.float32).reshape(tensor.shape) + number
        for placement in layout.placements:
            if placement.stored == number:
                target = found[layout.parameters[placement.parameter].name]
                view, to = placement.view, placement.target
                piece = values.as_strided(view.shape, view.strides, view.offset)
                target.as_strided(to.shape, to.strides, to.offset).copy_(piece)
        for piece in rules.pieces(tensor):
            part = values[piece.box.slices()]
            expected[piece.parameter][piece.target.slices()] = part.reshape(piece.target.lengths)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert int((tensor < 0).sum()) == rules.padding().get(name, 0)
