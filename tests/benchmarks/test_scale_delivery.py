"""Check the simulation of deliveries against arithmetic by hand, and the committed figures against the simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scale_delivery
from benchmarks.delivery_links import AGREEMENT_S, BUCKET, PER_BUCKET_S, Composition, Machine, broadcast, slices
from benchmarks.scale_delivery import bytes_per_gpu, grids, simulate, with_tables
from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box

RESULTS = Path(scale_delivery.__file__).parent / "results" / "scale_delivery.json"
PAGE = Path(scale_delivery.__file__).parents[1] / "docs" / "inference-layouts.md"
BYTE = DTYPES["uint8"]

# Round numbers, and no efficiency losses.
_GB = 10**9
_MACHINE = Machine("round", 50 * _GB, 400 * _GB, 40 * _GB, 1000 * _GB, 500 * _GB, 1.0, 1.0, 1.0, 1.0)


def _part(name: str, shape: tuple[int, ...], box: Box) -> TensorBox:
    return TensorBox(name, shape, box, BYTE)


def test_parts_are_classified() -> None:
    parts = [
        _part("rows", (16, 10), Box((4, 0), (4, 10))),
        _part("columns", (16, 40), Box((0, 10), (16, 10))),
        _part("norm", (12,), Box((0,), (12,))),
        _part("one head of two", (8, 5), Box((4, 0), (4, 5))),
    ]
    found = Composition.of(parts, ranks=4)
    assert found == Composition(4, plain=40, columns=160, shared=12 + 20, share=12 / 4 + 20 / 2)
    assert found.needed == sum(part.nbytes for part in parts)


def test_one_engine_on_one_host() -> None:
    """Eight ranks read everything from their own host."""
    of_rank = Composition(8, plain=60.0 * _GB, columns=32.0 * _GB, shared=8.0 * _GB, share=1.0 * _GB)
    found = slices(of_rank, 8, _MACHINE)
    taken = 60 + 32 + 1
    assert found.stages == pytest.approx(
        {
            "host link": taken / 50,
            "host memory": 8 * taken / 500,
            "network": 0,
            "GPU link": taken / 50,
            "NVLink": (32 * 7 / 8 + 8 - 1) / 400,
            "device memory": 4 * 100 / 1000,
            "after": 2 * 100 / 1000,
        }
    )
    assert found.floor == pytest.approx(100 / 50)
    # The slowest stage in full, the others for one bucket, the stages afterwards, and the start-up cost.
    buckets = 100 * _GB / BUCKET
    slowest = taken / 50
    others = taken / 50 + 8 * taken / 500 + (32 * 7 / 8 + 7) / 400 + 0.4
    assert found.seconds == pytest.approx(AGREEMENT_S + slowest + others / buckets + buckets * PER_BUCKET_S + 0.2)


def test_engines_over_several_hosts() -> None:
    """Four engines of two hosts each: each host stores one eighth of the model."""
    of_rank = Composition(16, plain=60.0 * _GB, columns=32.0 * _GB, shared=16.0 * _GB, share=1.0 * _GB)
    found = slices(of_rank, 64, _MACHINE)
    taken, between = 93, 32 * 8 / 16 + 1  # columns for the ranks of the other host, and one share from it
    assert found.stages["network"] == pytest.approx((taken * 7 / 8 + between) / 40)
    assert found.stages["GPU link"] == pytest.approx((taken + between) / 50)
    assert found.stages["host link"] == pytest.approx(taken / 50)
    assert found.stages["NVLink"] == pytest.approx((32 * 7 / 16 + 16 - 1 - 1) / 400)
    assert found.floor == pytest.approx(108 * 7 / 8 / 40)


def test_a_broadcast_sends_the_model_to_every_gpu() -> None:
    of_rank = Composition(16, plain=60.0 * _GB, columns=0, shared=0, share=0)
    alone, many = (broadcast(960.0 * _GB, of_rank, gpus, _MACHINE) for gpus in (8, 64))
    assert alone.stages["host link"] == pytest.approx(960 / 8 / 50)
    assert many.stages["host link"] == pytest.approx(960 / 64 / 50)
    assert alone.stages["NVLink"] == many.stages["NVLink"] == pytest.approx(960 / 400)
    assert (alone.stages["network"], many.stages["network"]) == (0, pytest.approx(960 / 8 / 40))
    assert many.seconds > many.stages["host link"] + many.stages["network"]


@pytest.mark.full
def test_the_committed_figures_are_reproduced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = json.loads(RESULTS.read_text())
    assert committed["bytes"] == bytes_per_gpu()
    times = simulate()
    assert json.loads(json.dumps(times)) == committed["times"]
    for row in times:
        # Not faster than the links allow; published times are longer than the simulation.
        assert row["slices"]["floor"] < row["slices"]["seconds"] < row["broadcast"]["seconds"]
        assert row["composition"]["needed"] < 1.1 * row["bytes"] / row["composition"]["ranks"]
        assert row["published"] is None or row["published"] > row["broadcast"]["seconds"]
    for machine in committed["machines"].values():
        assert set(machine) - {"name"} <= set(committed["sources"])
    assert len(grids(committed)) == 2
    page = PAGE.read_text()
    assert with_tables(page, committed) == page
    monkeypatch.setattr(scale_delivery, "simulate", lambda: times)
    monkeypatch.setattr(sys, "argv", ["scale_delivery"])
    scale_delivery.main()
    printed = capsys.readouterr().out
    assert "Bytes to each GPU" in printed
    assert "Seconds, simulated" in printed
