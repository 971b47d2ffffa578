"""Plan and run the reads of one rank: its part of the reads that ranks share, and the reads for itself alone.

A load negotiates together with its other messages (``make_offer``, ``answer_offers``) and calls ``plan_reads`` and
``run_reads``. An inference engine calls ``read_together``, which does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from functools import partial

import msgpack
import torch

from ...checkpoint.checkpoint import Checkpoint
from ...control.base import Operation
from ...engine.reading.reader import ReadPart, ShardReader
from ...engine.tensor_bytes import box_view
from ...errors import PlanError
from ...planners.load_plan import plan_load
from ...planners.request_classes import BoxRequest, RequestClass, find_rings, find_scatters
from ...planners.ring_plan import plan_ring
from ...runtime.arguments import check_choice
from ...runtime.threads import Threads
from ...tensors.geometry import Box
from ...tensors.tables import BoxTable
from .exchange import Exchange, ReadRequest, SharedBox, SharedBoxes
from .negotiation import Answer, ReadOffer, ShareReads, answer_offers, make_offer
from .ring import RingExchange
from .scatter import ScatterExchange

_READING_THREADS = 2  # so that the disk has work while one batch is hashed
# Bytes of a frame that are sent at once. Two batches of four packets each are in memory at a time, and at most eight
# times as much if few rows begin at a chunk boundary.
_FRAME_PACKET_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedReads:
    """One rank's reads. ``nbytes`` counts the requested bytes as they are stored."""

    reader: ShardReader
    shared: Sequence[Callable[[Operation, Executor], Exchange]]
    own: Sequence[ReadPart]
    nbytes: int


def plan_reads(
    reader: ShardReader, parts: Sequence[ReadRequest], offer: ReadOffer | None = None, answer: Answer | None = None
) -> PlannedReads:
    """Plan how this rank reads its parts, given rank 0's answer to its offer; without an offer, alone.

    Raises ``PlanError`` if the stored boxes do not cover a part.
    """
    manifest = reader.manifest
    try:
        plan = plan_load(manifest.tensors, manifest.shards, BoxTable.build([(tensor, box) for tensor, box, _ in parts]))
    except PlanError as error:
        raise PlanError(f"{reader.backend.url}: {error}") from error
    shared: set[int] = set()
    exchanges: list[Callable[[Operation, Executor], Exchange]] = []
    groups = {} if offer is None or answer is None else offer.groups(answer)
    rank, offered = (0, ()) if offer is None else (offer.rank, offer.classes)
    for ranks, classes in find_rings(rank, offered, groups).items():
        members = {part for one in classes for part in one.requests}
        stored = SharedBoxes(reader, parts, [SharedBox(*row) for row in plan.rows() if row[0] in members])
        name = f"read/{classes[0].summary.digest.hex()}"
        exchanges.append(partial(RingExchange, name, plan_ring(ranks, stored.shared_parts()), stored))
        shared |= members
    for ranks, classes in find_scatters(rank, offered, groups).items():
        framed = _boxes_of_frames(reader, parts, classes)
        if framed is not None:
            stored = SharedBoxes(reader, parts, framed)
            name = f"scatter/{classes[0].summary.digest.hex()}"
            shares = plan_ring(ranks, stored.shared_parts(), packet_bytes=_FRAME_PACKET_BYTES)
            exchanges.append(partial(ScatterExchange, name, shares, stored))
            shared.update(part for one in classes for part in one.requests)
    own = [
        ReadPart(shard, box, box_view(parts[part].memory, box, parts[part].box))
        for part, shard, box in plan.rows()
        if part not in shared
    ]
    return PlannedReads(reader, exchanges, own, int(plan.boxes.nbytes(manifest.tensors).sum()))


def _boxes_of_frames(
    reader: ShardReader, parts: Sequence[ReadRequest], classes: Sequence[RequestClass]
) -> list[SharedBox] | None:
    """The stored boxes of the frames of these classes; None, on all ranks, if the frames are not fully stored."""
    manifest = reader.manifest
    frames = [frame for one in classes for frame in zip(one.requests, one.stripes, strict=True)]
    boxes = BoxTable.build([(parts[part].tensor, stripe.frame) for part, stripe in frames])
    try:
        plan = plan_load(manifest.tensors, manifest.shards, boxes)
    except PlanError:
        return None
    return [SharedBox(frames[row][0], shard, box, frames[row][1]) for row, shard, box in plan.rows()]


def run_reads(op: Operation, planned: PlannedReads) -> int:
    """Fill the memory of every part; returns the bytes received from other ranks.

    Call it inside a phase, on all ranks. Raises what reading raises, ``CorruptionError`` if a box was damaged between
    ranks, and the same cause on all ranks that share reads with one that failed.
    """
    read_own = partial(planned.reader.read, planned.own)
    if not planned.shared:
        read_own()
        return 0
    with Threads(_READING_THREADS, thread_name_prefix="bcp-share-read") as readers:
        exchanges = [join(op, readers) for join in planned.shared]
        tasks = [task for exchange in exchanges for task in exchange.tasks()]
        with Threads(max(len(tasks), 1), thread_name_prefix="bcp-share") as links:
            futures: list[Future[None]] = []
            try:
                futures += [links.submit(task) for task in tasks]
                futures += [readers.submit(read) for exchange in exchanges for read in exchange.reads()]
                futures.append(readers.submit(read_own))
                for future in as_completed(futures):
                    future.result()
            except BaseException as error:
                # The report ends the waits for other ranks, in this process and in theirs.
                op.fail("read", error)
                for exchange in exchanges:
                    exchange.stop()
                for future in futures:
                    future.cancel()
                raise
    return sum(exchange.bytes_received for exchange in exchanges)


def read_together(
    op: Operation,
    checkpoint: Checkpoint,
    parts: Sequence[tuple[int, Box, torch.Tensor]],
    *,
    share_reads: ShareReads = "auto",
) -> int:
    """``Checkpoint.read`` on every rank of ``op`` at once, with reads shared as in ``bytecheckpoint.load``.

    All ranks pass the same checkpoint, and each its own parts. Returns the bytes received from other ranks. Raises what
    any rank raised.
    """
    reader, manifest = checkpoint.reader, checkpoint.manifest
    with op.phase("plan"):
        check_choice("share_reads", share_reads, ShareReads)
        requests = [BoxRequest(tensor, box, str(out.dtype)) for tensor, box, out in parts] if op.world_size > 1 else []
        offer = make_offer(manifest, requests, share_reads, verify=reader.verify, rank=op.rank)
    messages = op.gather("offers", msgpack.packb(offer.message))
    answer = None
    if messages is not None:
        with op.phase("plan"):
            received = [msgpack.unpackb(message) for message in messages]
            answer = msgpack.packb(answer_offers(checkpoint.index.data, manifest, received))
    agreed = msgpack.unpackb(op.broadcast("shares", answer), strict_map_key=False)
    with op.phase("read"):
        return run_reads(op, plan_reads(reader, [ReadRequest(*part) for part in parts], offer, agreed))
