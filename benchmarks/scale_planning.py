"""Measure planning, committing and opening checkpoints of up to 16,384 ranks, simulated in one process.

    python -m benchmarks.scale_planning [--ranks 16384] [--case moe] [--json benchmarks/results/scale_planning.json]

*Jobs* have 1T parameters, and use the library's own protocol code and every rank's messages (see ``scale_worlds``).
Figures: CPU seconds that rank 0 and another rank take to plan, bytes that they exchange in the first and the second
save, size of the manifest, and time to open it and plan one rank's load in a job with half as many ranks. Pure FSDP is
measured on at most 1,024 ranks: over 16,384 ranks, the shards of such a model would be rows of 100 kB.

*Columns* measure the planner alone, on many boxes. Four layouts have ``--tensors`` tensors each (or on every rank):

* ``sharded``: every tensor split along its first axis over all ranks (ranks x tensors boxes);
* ``replicated``: tensor parallel 8 x pipeline 16, the rest data parallel replicas of the same boxes, so that one
  rank of each group of replicas must be chosen (ranks x tensors boxes);
* ``hybrid``: every tensor split along its last axis over half the ranks and held twice, as HSDP does: a choice for
  each of ranks / 2 x tensors boxes, none of them contiguous;
* ``flat``: every rank holds one range of the flattened concatenation of all tensors, in three optimizer states and
  decomposed into boxes, as ZeRO-1 does.

Creating the input is not timed. Each case runs in a separate process, which isolates its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.scale_jobs import measure_job
from benchmarks.scale_worlds import WORLDS
from bytecheckpoint.planners.save_plan import SavePlan, plan_columns
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import decompose
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, Int64, TensorTable

Case = tuple[TensorTable, BoxTable, Int64, Int64]

_BF16, _FP32 = DTYPES["bfloat16"], DTYPES["float32"]
_TENSOR_PARALLEL, _STAGES = 8, 16
_FSDP_RANKS = 1024


def _table(section: str, count: int, meta: BasicMeta) -> TensorTable:
    digits = len(str(count))
    return TensorTable.build((section, f"layers.{row:0{digits}d}.weight", meta) for row in range(count))


def _local_rows(rank: Int64, ranks: int) -> Int64:
    """Return row numbers within each rank, for rows in the order of ranks."""
    counts = np.bincount(rank, minlength=ranks)
    return np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)


def sharded(ranks: int, tensors: int) -> Case:
    """Return 1-D tensors split evenly over all ranks."""
    piece = 1024
    table = _table("model", tensors, BasicMeta(_BF16, (ranks * piece,)))
    rank = np.repeat(np.arange(ranks), tensors)
    boxes = BoxTable.from_columns(
        table, np.tile(np.arange(tensors), ranks), rank * piece, np.full(len(rank), piece, np.int64)
    )
    return table, boxes, rank, _local_rows(rank, ranks)


def replicated(ranks: int, tensors: int) -> Case:
    """Return ``tensors`` 2-D tensors on each of 16 stages, split over 8 ranks along either axis."""
    stages = min(_STAGES, max(1, ranks // _TENSOR_PARALLEL))
    width = 512
    table = _table("model", tensors * stages, BasicMeta(_BF16, (_TENSOR_PARALLEL * width, _TENSOR_PARALLEL * width)))
    rank = np.repeat(np.arange(ranks), tensors)
    part, stage = rank % _TENSOR_PARALLEL, rank // _TENSOR_PARALLEL % stages
    tensor = stage * tensors + np.tile(np.arange(tensors), ranks)
    offsets = np.zeros((len(rank), 2), np.int64)
    lengths = np.full((len(rank), 2), _TENSOR_PARALLEL * width, np.int64)
    axis = tensor % 2
    offsets[np.arange(len(rank)), axis] = part * width
    lengths[np.arange(len(rank)), axis] = width
    boxes = BoxTable.from_columns(table, tensor, offsets.reshape(-1), lengths.reshape(-1))
    return table, boxes, rank, _local_rows(rank, ranks)


def hybrid(ranks: int, tensors: int) -> Case:
    """Return 2-D tensors split along the last axis over half the ranks; two ranks hold each box."""
    half, piece = max(1, ranks // 2), 16
    table = _table("model", tensors, BasicMeta(_BF16, (64, half * piece)))
    rank = np.repeat(np.arange(half * 2), tensors)
    offsets = np.stack((np.zeros(len(rank), np.int64), rank % half * piece), axis=1)
    lengths = np.broadcast_to(np.array([64, piece], np.int64), offsets.shape)
    boxes = BoxTable.from_columns(
        table, np.tile(np.arange(tensors), half * 2), offsets.reshape(-1), lengths.reshape(-1)
    )
    return table, boxes, rank, _local_rows(rank, ranks)


def flat(ranks: int, tensors: int) -> Case:
    """Return unaligned flat ranges of the concatenated tensors, for three states."""
    shape = (4096 + 3, 1024 + 7)
    size = shape[0] * shape[1]
    states = ("exp_avg", "exp_avg_sq", "master")
    digits = len(str(tensors))
    meta = BasicMeta(_FP32, shape)
    names = [f"state.{row:0{digits}d}.{state}" for row in range(tensors) for state in states]
    table = TensorTable.build(("optimizer", name, meta) for name in names)
    bounds = [size * tensors * rank // ranks for rank in range(ranks + 1)]
    rows: list[tuple[int, ...]] = []
    for rank in range(ranks):
        at = bounds[rank]
        while at < bounds[rank + 1]:
            tensor, start = divmod(at, size)
            length = min(size - start, bounds[rank + 1] - at)
            for box in decompose(start, length, shape):
                rows.extend((rank, tensor * 3 + state, *box.offsets, *box.lengths) for state in range(3))
            at += length
    columns = np.array(rows, np.int64)
    boxes = BoxTable.from_columns(table, columns[:, 1], columns[:, 2:4].reshape(-1), columns[:, 4:6].reshape(-1))
    return table, boxes, columns[:, 0], _local_rows(columns[:, 0], ranks)


CASES: dict[str, Callable[[int, int], Case]] = {
    "sharded": sharded,
    "replicated": replicated,
    "hybrid": hybrid,
    "flat": flat,
}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def _max_over_mean(plan: SavePlan, ranks: int) -> float:
    loads = np.zeros(ranks)
    for file in plan.files:
        loads[file.rank] += file.data_size
    return float(loads.max() / loads.mean())


def measure(name: str, ranks: int, tensors: int) -> dict[str, object]:
    """Plan one case in this process."""
    table, boxes, rank, source = CASES[name](ranks, tensors)
    made = _peak()
    began = time.perf_counter()
    plan = plan_columns(table, boxes, rank, source, world_size=ranks)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    sent = sum(len(plan.assignment_bytes(one)) for one in range(ranks))
    return {
        "case": name,
        "ranks": ranks,
        "tensors": len(table),
        "boxes_in": len(boxes),
        "boxes_out": len(plan.shards),
        "plan_seconds": round(seconds, 2),
        "assign_seconds": round(time.perf_counter() - began, 2),
        "assign_bytes_per_rank": sent // ranks,
        "max_over_mean": round(_max_over_mean(plan, ranks), 4),
        "input_peak_gib": round(made, 2),
        "peak_gib": round(_peak(), 2),
    }


def _jobs(ranks: int) -> list[tuple[str, int]]:
    """Return the jobs to run and their numbers of ranks."""
    sizes = {"fsdp": [min(ranks, _FSDP_RANKS)], "megatron": [ranks // 4]}
    return [(name, size) for name in WORLDS for size in sizes.get(name, sorted({max(ranks // 16, 256), ranks}))]


def _run(case: str, ranks: int, tensors: int) -> dict[str, object]:
    """Run one case in a separate process."""
    command = [sys.executable, "-m", "benchmarks.scale_planning", "--in-process", "--case", case]
    command += ["--ranks", str(ranks), "--tensors", str(tensors)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=one_thread)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--case", choices=[*WORLDS, *CASES, "all", "jobs"], default="all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        job = args.case in WORLDS
        found = measure_job(args.case, args.ranks) if job else measure(args.case, args.ranks, args.tensors)
        print(json.dumps({**found, "peak_gib": round(_peak(), 2)}))
        return
    chosen = _jobs(args.ranks) if args.case in ("all", "jobs") else []
    chosen += [(name, args.ranks) for name in CASES if args.case == "all"]
    rows = []
    for name, ranks in chosen or [(args.case, args.ranks)]:
        rows.append(_run(name, ranks, args.tensors))
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
