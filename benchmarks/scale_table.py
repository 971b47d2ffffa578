"""Tables of the results of ``scale_planning``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Grid

__all__ = ["job_grids"]


def job_grids(rows: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return tables of planning and of manifests, without the rows of the planner alone."""
    jobs = [row for row in rows if "manifest" in row]
    planning: list[tuple[str, ...]] = [
        (
            _name(row),
            f"{row['tensors']:,}",
            f"{row['shards']:,}",
            f"{row['first_save']['root_plan_s']:.2f} s",
            f"{1000 * row['first_save']['rank_plan_s']:.0f} ms",
            f"{row['first_save']['rank_sends'][0]:,} / {row['first_save']['rank_gets'][0]:,}",
            f"{row['first_save']['root_gets'] / 1e6:.1f} / {row['first_save']['root_sends'] / 1e6:.1f} MB",
            f"{1000 * row['second_save']['root_check_s']:.0f} ms",
            f"{row['second_save']['rank_sends']} / {row['second_save']['rank_gets']}",
        )
        for row in jobs
    ]
    manifests: list[tuple[str, ...]] = [
        (
            _name(row),
            f"{row['manifest']['bytes'] / 1e6:.1f} MB",
            f"{row['manifest']['checksums']:,}",
            f"{row['manifest']['record_s'] + row['manifest']['encode_s']:.2f} s",
            f"{row['manifest']['open_s']:.2f} s",
            f"{1000 * row['manifest']['load_plan_s']:.0f} ms",
        )
        for row in jobs
    ]
    heads = ("job", "tensors", "shards", "first save: rank 0 plans", "another rank", "it sends / gets, bytes")
    return [
        Grid(
            "Planning", (*heads, "rank 0 gets / sends", "second save: rank 0", "a rank sends / gets, bytes"), planning
        ),
        Grid("The manifest", ("job", "size", "checksums", "record and encode", "open", "plan a load"), manifests),
    ]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['case']}, {row['ranks']:,} ranks"
