"""Rank 0 plans from a table of each section of each rank, and finds the plan that it finds from whole plans."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners import OWN_BOXES, WHOLE, LocalPlan, SectionPlans, ValueEntry, plan_save, stack_digests
from bytecheckpoint.save.agreement import RankSummary
from bytecheckpoint.save.local_state import Listing
from bytecheckpoint.save.planning import PlanNegotiation
from bytecheckpoint.save.replicas import DeclaredReplicas
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

TENSOR_PARALLEL, DATA_PARALLEL, STAGES = 2, 4, 2
WORLD = TENSOR_PARALLEL * DATA_PARALLEL * STAGES
ROWS, COLUMNS = MeshLayout((TENSOR_PARALLEL,), ((0,), ())), MeshLayout((TENSOR_PARALLEL,), ((), (0,)))


def rank_plan(rank: int) -> LocalPlan:
    """Extra tensors on some ranks, a model split by tensor parallelism, flat ranges of its optimizer, generators."""
    stage, rest = divmod(rank, TENSOR_PARALLEL * DATA_PARALLEL)
    data_rank, tensor_rank = divmod(rest, TENSOR_PARALLEL)
    rows: list[tuple[str, str, BasicMeta, int]] = []
    common: list[tuple[int, Box]] = []
    own: list[tuple[int, Box]] = []

    def add(section: str, name: str, shape: tuple[int, ...], held: int, *boxes: Box) -> None:
        (own if held == OWN_BOXES else common).extend((len(rows), box) for box in boxes)
        rows.append((section, name, BasicMeta(DTYPES["float32"], shape), held))

    if data_rank % 2:
        for number in range(1 + stage):
            add("extra", f"ema.{number}", (3,), WHOLE, Box((0,), (3,)))
    add("extra", f"seed@{rank}", (2,), OWN_BOXES, Box((0,), (2,)))
    layouts = [COLUMNS, ROWS] if stage else [ROWS, COLUMNS]
    for name, layout, box in (
        ("in", ROWS, Box((4 * tensor_rank, 0), (4, 6))),
        ("out", COLUMNS, Box((0, 3 * tensor_rank), (8, 3))),
    ):
        add("model", f"{stage}.{name}", (8, 6), 1 + layouts.index(layout), box)
    add("model", f"{stage}.norm", (6,), WHOLE, Box((0,), (6,)))
    part = Box((4 * tensor_rank + data_rank, 0), (1, 6))
    for state in ("exp_avg", "exp_avg_sq"):
        add("optimizer", f"{stage}.in.{state}", (8, 6), OWN_BOXES, part)
    if data_rank in (stage, 2):
        add("optimizer", f"{stage}.norm.exp_avg", (6,), WHOLE, Box((0,), (6,)))
    add("rng", f"state@{rank}", (5,), WHOLE, Box((0,), (5,)))
    values = [ValueEntry("extra", b"epoch", b"3", 1)] if data_rank % 2 else []
    values += [ValueEntry("optimizer", f"{stage}.lr.{number}".encode(), b"1", 1) for number in range(1 + data_rank)]
    values += [ValueEntry("optimizer", b"seen", bytes([rank]), 1), ValueEntry("rng", b"python", b"", 4, True)]
    names = [(section, name) for section, name, _, _ in rows]
    return LocalPlan(
        TensorTable.build((section, name, meta) for section, name, meta, _ in rows),
        BoxTable.build([*common, *own]),
        values,
        np.array([rank if name.endswith(f"@{rank}") else -1 for _, name in names]),
        [("model.tied", "model.0.in")] if stage == 0 else [],
        [(section, "tree") for section in ("extra", "model", "optimizer", "rng")],
        held=np.array([held for *_, held in rows]),
        layouts=layouts,
        coordinates=[(tensor_rank,)] * 2,
    )


def negotiated(plans: Sequence[LocalPlan]) -> PlanNegotiation:
    """Let rank 0 plan from the messages that ranks with these plans send."""
    locals_: list[Any] = [
        SimpleNamespace(
            contents=stack_digests([value.digest for value in plan.values if not value.per_rank]),
            unmatched=(),
            declared=DeclaredReplicas(rank, len(plans)),
            layout="shards",
        )
        for rank, plan in enumerate(plans)
    ]
    listings = [Listing(plan, None) for plan in plans]
    summaries = [RankSummary.of(local, listing, {}) for local, listing in zip(locals_, listings)]
    found = PlanNegotiation(locals_[0], listings[0], summaries, b"")
    requests = [msgpack.unpackb(message)[1:] for message in found.messages()]
    asked = [digest for (tables, _), one in zip(requests, summaries) for digest in [one.tables[at] for at in tables]]
    assert len(asked) == len(set(asked))
    replies = [
        [[listing.tables[at] for at in tables], local.contents.tobytes() if contents else b""]
        for (tables, contents), local, listing in zip(requests, locals_, listings)
    ]
    found.receive(replies, listings[0])
    found.messages()
    return found


def test_the_plan_is_that_of_whole_plans() -> None:
    plans = [rank_plan(rank) for rank in range(WORLD)]
    expected, plan = plan_save(plans), negotiated(plans).plan
    assert plan is not None
    assert plan.tensors.names == expected.tensors.names
    assert list(plan.shards) == list(expected.shards)
    for column in ("scope", "owner", "source", "file", "offset", "order"):
        assert getattr(plan, column).tolist() == getattr(expected, column).tolist(), column
    assert plan.files == expected.files
    assert plan.values.keys == expected.values.keys
    for column in ("rank", "index", "shared"):
        assert getattr(plan.values, column).tolist() == getattr(expected.values, column).tolist(), column
    assert (plan.aliases, plan.sections) == (expected.aliases, expected.sections)


def test_ranks_send_the_table_of_a_section_that_they_have_in_common_once() -> None:
    packed = [[table.to_bytes() for table in SectionPlans(rank_plan(rank)).tables()] for rank in range(WORLD)]
    kinds = [len(set(of_section)) for of_section in zip(*packed)]
    assert kinds == [3, STAGES, STAGES * DATA_PARALLEL, 1]


def test_what_is_not_in_the_order_of_sections_is_refused() -> None:
    meta = BasicMeta(DTYPES["float32"], (2,))
    tensors = TensorTable.build([("a", "x", meta), ("b", "y", meta), ("a", "z", meta)])
    with pytest.raises(PlanError, match="order of its sections"):
        SectionPlans(LocalPlan(tensors, BoxTable.build([])))
    tensors = TensorTable.build([("a", "x", meta), ("b", "y", meta)])
    boxes = BoxTable.build([(1, Box((0,), (2,))), (0, Box((0,), (2,)))])
    values = [ValueEntry("b", b"", b"", 0), ValueEntry("a", b"", b"", 0)]
    plan = SectionPlans(LocalPlan(tensors, boxes, values))
    with pytest.raises(PlanError, match="order of its sections"):
        plan.boxes()
    with pytest.raises(PlanError, match="order of its sections"):
        plan.tables()
