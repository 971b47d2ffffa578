"""Parts of one checkpoint that all ranks of a job read at the same time: what several want is read once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgpack
import torch

from .checkpoint import Checkpoint
from .control.base import Operation
from .engine.reading.passing_on import pass_on
from .geometry import Box
from .planners import plan_load
from .read_sharing import ReadSharing, answer_offers
from .tables import BoxTable

__all__ = ["read_together"]


def read_together(
    op: Operation,
    checkpoint: Checkpoint,
    parts: Sequence[tuple[int, Box, torch.Tensor]],
    *,
    share_reads: str = "auto",
) -> int:
    """``Checkpoint.read`` on every rank of ``op`` at once, which all bring the same checkpoint and parts of their own.

    What several ranks want, or cut into stripes, is read by one of them and passed on where ``share_reads`` (as of
    ``bytecheckpoint.load``) has it so. Returns the bytes that came from other ranks. Raises what any rank raised.
    """
    reader = checkpoint.reader
    manifest = checkpoint.manifest
    sharing = ReadSharing(share_reads, reader.verify, op.rank)
    with op.phase("plan"):
        sharing.check()
        asked = [(row, box, out.dtype) for row, box, out in parts] if op.world_size > 1 else []
        offer = sharing.offer(manifest, asked)
    said = op.gather("offers", msgpack.packb(offer))
    answer = None
    if said is not None:
        with op.phase("plan"):
            answer = msgpack.packb(answer_offers(checkpoint.backend, manifest, [msgpack.unpackb(one) for one in said]))
    sharing.take_answer(msgpack.unpackb(op.broadcast("shares", answer), strict_map_key=False))
    with op.phase("read"):
        boxes = [box for _, box, _ in parts]
        plan = plan_load(manifest.tensors, manifest.shards, BoxTable.build([(row, box) for row, box, _ in parts]))
        shared, alone = sharing.split(reader, plan, boxes, [out for _, _, out in parts])
        if not shared:
            reader.read(alone)
            return 0
        return pass_on(op, shared, [partial(reader.read, alone)], verify=reader.verify, timings=reader.timings)
