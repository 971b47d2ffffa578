"""Compare what rules compute with what random trainers stored by plain slicing."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from rule_cases import Array, Trainer, random_trainer

from bytecheckpoint.rules import Region, Resolution, Rules
from bytecheckpoint.tensors.geometry import row_major_strides

pytestmark = pytest.mark.sampled(2, of=__name__)

TRAINERS = 8_500  # with more than 20,000 rules
CHUNKS = 10


def read(region: Region, stored: Array) -> Array:
    """The elements of a region, by its strides and by its view, which must agree."""
    lengths = region.box.lengths
    steps = [step for step, n in zip(row_major_strides(region.shape), region.within.lengths, strict=True) if n != 1]
    strides = [0 if n == 1 else steps.pop(0) for n in lengths]
    flat = stored.reshape(-1)[region.position :]
    assert sum((n - 1) * step for n, step in zip(lengths, strides)) < flat.size
    by_strides = np.ndarray(lengths, flat.dtype, flat, strides=[step * flat.itemsize for step in strides])
    if (region.shape, region.start) == (stored.shape, 0):
        assert np.array_equal(by_strides, stored[region.within.slices()].reshape(region.box.lengths))
    return by_strides


def rebuild(resolution: Resolution, trainer: Trainer) -> dict[str, Array]:
    """The global tensors, in which elements that no region holds are NaN."""
    found = {}
    for name, tensor in resolution.tensors.items():
        array = found[name] = np.full(tensor.meta.shape, np.nan)
        for region in tensor.regions:
            values = read(region, trainer.stored[region.source].array)
            held = array[region.box.slices()]
            assert np.all(np.isnan(held) | (held == values))  # copies are equal
            array[region.box.slices()] = values
    return found


def check(trainer: Trainer) -> None:
    resolution = Rules(trainer.rules).resolve(trainer.sources(), trainer.mesh)
    found = rebuild(resolution, trainer)
    assert found.keys() == trainer.expected.keys()
    for name, array in trainer.expected.items():
        assert found[name].shape == array.shape, name
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.sampled(3)
def test_random_trainers_are_put_together_exactly(chunk: int) -> None:
    rules = 0
    for number in range(chunk, TRAINERS, CHUNKS):
        trainer = random_trainer(number)
        rules += len(trainer.rules) - 1  # one describes what every rank stores
        try:
            check(trainer)
        except Exception as error:
            raise AssertionError(f"trainer {number}: {error}\n{Rules(trainer.rules).to_toml()}") from error
    assert rules >= 19_000 / CHUNKS


def test_order_of_rules_and_sources_has_no_effect() -> None:
    for number in range(300):
        trainer = random_trainer(number)
        one = Rules(trainer.rules).resolve(trainer.sources(), trainer.mesh)
        other = Rules(trainer.rules[::-1]).resolve(trainer.sources(), trainer.mesh)
        assert one == other


def test_regions_are_cut_to_stored_and_requested_boxes() -> None:
    for number in range(500):
        trainer = random_trainer(number)
        resolution = Rules(trainer.rules).resolve(trainer.sources(), trainer.mesh)
        for tensor in resolution.tensors.values():
            for region in tensor.regions:
                stored = trainer.stored[region.source].array
                whole = read(region, stored)
                for axis, length in enumerate(region.box.lengths):
                    half = region.box.narrow(axis, length // 2, length)
                    cut = region.needed_for(half)
                    assert cut is not None
                    assert cut.box == half
                    assert np.array_equal(read(cut, stored), whole[half.relative_to(region.box).slices()])
                    assert cut == region.held_in(cut.within)
                assert prod(region.within.lengths) == region.box.numel
