"""Measure planning, committing and opening a checkpoint of a simulated job, with the library's own protocol code.

The messages of all ranks are built but not sent: rank 0 receives them, requests tables, plans and answers as in a save.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import torch

from benchmarks.scale_world import PLAIN, STEP, World
from benchmarks.scale_worlds import make_world, parameters
from bytecheckpoint.checkpoint.attempts import new_attempt_id
from bytecheckpoint.engine.checksums import chunk_size_for
from bytecheckpoint.format.checksums import CHECKSUM_BYTES
from bytecheckpoint.format.manifest.envelope import decode, encode
from bytecheckpoint.format.values.files import decode_path
from bytecheckpoint.planners.balance import Assignment
from bytecheckpoint.planners.contents import ContentChecks
from bytecheckpoint.planners.load_plan import plan_load
from bytecheckpoint.planners.local_plan import OWN_BOXES, WHOLE, pack_boxes
from bytecheckpoint.planners.save_plan import SavePlan
from bytecheckpoint.runtime.gc_pause import paused
from bytecheckpoint.saving.agreement import RankSummary, pack_parts, unpack_parts
from bytecheckpoint.saving.local_state import LocalState
from bytecheckpoint.saving.options import SaveRequest
from bytecheckpoint.saving.planning import PlanNegotiation
from bytecheckpoint.saving.record import Confirmations, build_manifest
from bytecheckpoint.saving.replicas import DeclaredReplicas
from bytecheckpoint.tensors.mesh_layout import MeshPlace
from bytecheckpoint.tensors.shards import IrregularShard, MeshShard, SectionSource, Shard, torch_dtype
from bytecheckpoint.tensors.tables import BoxTable
from bytecheckpoint.version import VERSION

__all__ = ["measure_job"]

_ARGUMENTS = {
    "path": "s3://bucket/runs/1t/step-00012000",
    "step": "12000",
    "sections": "model, optimizer, rng",
    "chunk size": "None",
    "layout": "shards",
    "library version": VERSION,
}


class _Clock:
    """CPU seconds of this single-threaded process, by activity, without the garbage collector, as in a save."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        began = time.process_time()
        with paused():
            yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - began

    def rounded(self, *what: str) -> float:
        return round(sum(self.seconds[name] for name in what), 3)


def measure_job(name: str, ranks: int) -> dict[str, Any]:
    """Simulate one save and one load of a job on its ranks."""
    world, clock, other = make_world(name, ranks), _Clock(), ranks // 2 + 3
    root = _local(_sources(world, 0), 0, ranks)
    sources = _sources(world, other)
    with clock.on("describe"):
        local = _local(sources, other, ranks)
    with clock.on("summary"):
        local_plan = local.build_plan()
        summary = pack_parts(RankSummary.of(local, local_plan, _ARGUMENTS))
    sent = _summaries(world)
    root_plan = root.build_plan()
    assert sent[0] == pack_parts(RankSummary.of(root, root_plan, _ARGUMENTS))
    assert sent[other] == summary
    # The garbage collector must not scan the simulated world during measurements.
    gc.collect()
    gc.freeze()
    with clock.on("root"):
        summaries = [RankSummary(*parts) for parts in unpack_parts(sent)]
        assert all(one.arguments == summaries[0].arguments for one in summaries)
        negotiation = PlanNegotiation(root, root_plan, summaries, new_attempt_id)
        requests = negotiation.messages()
    replies = [b""] * ranks
    if negotiation.plan is None:
        replies = [_reply(world, rank, *msgpack.unpackb(message)[1:]) for rank, message in enumerate(requests)]
        gc.freeze()
        with clock.on("root"):
            negotiation.receive(unpack_parts(replies), root_plan.table)
            shares = negotiation.messages()
    else:
        requests, shares = replies, requests
    plan, comparison = negotiation.plan, negotiation.comparison
    assert plan is not None
    assert comparison is not None
    with clock.on("share"):
        _, _, plan_id, _, share, _, packed_checks = msgpack.unpackb(shares[other])
        files = local.lay_out(Assignment.from_bytes(share), local_plan.order)
        checks = ContentChecks.from_bytes(packed_checks, other, ranks)
    everywhere = msgpack.packb([plan_id, sorted(_ARGUMENTS.items())])
    sources = _sources(world, other)
    with clock.on("second"):
        again = _local(sources, other, ranks)
        checks.summarize(again.contents, everywhere)
        again.images(files, Assignment.from_bytes(share), again.shards(local_plan.order), "attempt-1")
    assert again.fingerprint == local.fingerprint
    contents = _by_kind(world, world.contents)
    words = []
    for rank, one in enumerate(comparison.checks()):
        of_rank = ContentChecks.from_bytes(one, rank, ranks)
        words.append(of_rank.summarize(contents[rank], everywhere))
    with clock.on("root second"):
        assert comparison.is_unchanged(words)
    up = [len(a) + len(b) for a, b in zip(sent, replies)]
    down = [len(a) + len(b) for a, b in zip(requests, shares)]
    loads = np.bincount([file.rank for file in plan.files], [file.data_size for file in plan.files], ranks)
    return {
        "case": name,
        "ranks": ranks,
        "parameters": parameters(name),
        "tensors": len(plan.tensors),
        "shards": len(plan.shards),
        "files": len(plan.files),
        "tables": len({one.table_digest for one in summaries}),
        "max_over_mean": round(float(loads.max() / loads.mean()), 4),
        "first_save": {
            "root_plan_s": clock.rounded("root"),
            "rank_describe_s": clock.rounded("describe"),
            "rank_plan_s": clock.rounded("summary", "share"),
            "rank_sends": [int(np.mean(up)), max(up)],
            "rank_gets": [int(np.mean(down)), max(down)],
            "root_gets": sum(up),
            "root_sends": sum(down),
        },
        "second_save": {
            "root_check_s": clock.rounded("root second"),
            "rank_s": clock.rounded("second"),
            "rank_sends": 1 + max(map(len, words)),
            "rank_gets": 17,
        },
        "manifest": _manifest(plan, world, name),
    }


def _sources(world: World, rank: int) -> dict[str, SectionSource]:
    """Return what adapters would find on this rank, on the meta device."""
    plan = world.plan(rank)
    found = {name: SectionSource() for name, _ in plan.table.sections}
    names = []
    table = plan.table
    for row, full in enumerate(table.tensors.names):
        section, _, fqn = full.partition(".")
        names.append((section, fqn))
        source = found[section]
        source.metas[fqn] = table.tensors.meta_of(row)
        if table.own[row]:
            source.per_rank.add(fqn)
        if table.compared[row]:
            source.digests[fqn] = STEP
    for index, box in enumerate(plan.shards):
        row = int(plan.shards.tensor[index])
        section, fqn = names[row]
        meta = found[section].metas[fqn]
        tensor = torch.empty(box.lengths, dtype=torch_dtype(meta), device="meta")
        held = int(table.held[row])
        if held == OWN_BOXES:
            found[section].shards.append(IrregularShard.unchecked(fqn, meta, box, tensor))
            continue
        if held == WHOLE:
            found[section].shards.append(Shard.unchecked(fqn, meta, box, tensor))
            continue
        shard = MeshShard.unchecked(fqn, meta, box, tensor)
        shard.find_place = partial(MeshPlace, table.layouts[held - 1], plan.coordinates[held - 1], held)
        found[section].shards.append(shard)
    for (section, encoded), per_rank in zip(table.values.keys(), table.values.per_rank.tolist(), strict=True):
        path = decode_path(encoded)
        plain: Any = bytes(2500) if per_rank else PLAIN[str(path[0])]
        found[section].values[path] = plain
        if per_rank:
            found[section].per_rank.add(path)
    return found


def _local(sources: dict[str, SectionSource], rank: int, ranks: int) -> LocalState:
    kinds = {"model": "module", "optimizer": "optimizer", "rng": "stateful"}
    adapters = {name: SimpleNamespace(name=kinds[name], kind=kinds[name]) for name in sources}
    sections: Any = [SimpleNamespace(name=name, adapter=adapters[name]) for name in sources]
    return LocalState(sections, sources, rank=rank, world_size=ranks, options=SaveRequest())


def _by_kind(world: World, make: Any) -> list[Any]:
    """Yield ``make``'s result for each rank, computed once for ranks of the same kind."""
    made: dict[Hashable, Any] = {}
    found = []
    for rank in range(world.ranks):
        kind = world.kind(rank)
        if kind not in made:
            made[kind] = make(rank)
        found.append(made[kind])
    return found


def _summaries(world: World) -> list[bytes]:
    """Yield the summary that each rank sends to rank 0."""
    digests = _by_kind(world, lambda rank: _shared_part(world, rank))
    words = []
    for rank, shared in enumerate(digests):
        plan = world.plan(rank)
        boxes = pack_boxes(plan.own_boxes(), plan.table.tensors)
        words.append(pack_parts([*shared[:3], plan.flat_coordinates().astype("<i4").tobytes(), boxes, *shared[3:]]))
    return words


def _shared_part(world: World, rank: int) -> tuple[bytes, ...]:
    """Return the fields of a summary that ranks of the same kind share, without its places and boxes."""
    local: Any = SimpleNamespace(
        contents=world.contents(rank), unmatched=(), declared=DeclaredReplicas(rank, world.ranks)
    )
    summary = RankSummary.of(local, world.plan(rank), _ARGUMENTS)
    return tuple(part for name, part in summary._asdict().items() if name not in ("places", "boxes"))


def _reply(world: World, rank: int, needs_table: bool, needs_contents: bool) -> bytes:
    table = world.plan(rank).packed_table if needs_table else b""
    return pack_parts([table, world.contents(rank).tobytes() if needs_contents else b""])


def _manifest(plan: SavePlan, world: World, name: str) -> dict[str, Any]:
    clock = _Clock()
    random = np.random.default_rng(0)
    packed = []
    chunk_size = chunk_size_for(int(plan.shards.nbytes(plan.tensors).sum()))
    counts = Confirmations(plan, attempt="attempt-1", chunk_size=chunk_size).chunk_counts
    for rank in range(world.ranks):
        files = plan.files_of(rank)
        words = len(files) + sum(0 if row is None else int(counts[row]) for _, _, row in files)
        packed.append(msgpack.packb([[4096] * len(files), random.bytes(CHECKSUM_BYTES * words), [None] * len(files)]))
    with clock.on("record"):
        confirmed = Confirmations(plan, attempt="attempt-20300101T000000Z-0123456789abcdef", chunk_size=chunk_size)
        everyone = [confirmed.unpack(rank, one) for rank, one in enumerate(packed)]
        manifest = build_manifest(
            plan,
            everyone,
            attempt="attempt-20300101T000000Z-0123456789abcdef",
            step=12000,
            metadata={},
            library_version=VERSION,
        )
    with clock.on("encode"):
        data = encode(manifest)
    checksums = len(manifest.checksums)
    del manifest, everyone, confirmed
    with clock.on("open"):
        found = decode(data)
    half = make_world(name, world.ranks // 2)
    requested = half.plan(half.ranks // 2 + 3)
    with clock.on("load plan"):
        rows = [found.tensor_row(name) for name in requested.table.tensors.names[:-1]]
        kept = np.flatnonzero(requested.shards.tensor < len(rows))
        shards = requested.shards.take(kept)
        tensor = np.array(rows, np.int64)[shards.tensor]
        load = plan_load(found.tensors, found.shards, BoxTable(tensor, shards.offsets, shards.lengths, shards.starts))
    return {
        "chunk_size": chunk_size,
        "bytes": len(data),
        "checksums": checksums,
        "confirm_bytes": sum(map(len, packed)),
        "record_s": clock.rounded("record"),
        "encode_s": clock.rounded("encode"),
        "open_s": clock.rounded("open"),
        "load_plan_s": clock.rounded("load plan"),
        "load_pieces": len(load),
    }
