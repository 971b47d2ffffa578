"""Which of this rank's reads it shares with others: what the ranks tell each other, and what comes of it.

The ranks' claims carry, besides faults, an offer for each class of wants; rank 0 answers with the ranks of each that
several brought. See ``planners.share_classes`` and ``share_plan`` for the rest, and ``ring_exchange`` and
``scatter_exchange`` in ``engine.reading`` for how the bytes travel.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint import cut
from .control.peers import PeerIdentity
from .engine.reading.passing_on import SharedJob
from .engine.reading.reader import Reader, ReadPart
from .engine.reading.ring_exchange import RingJob
from .errors import StateError, StorageError
from .geometry import Box
from .manifest import Manifest
from .planners import (
    LoadPlan,
    Offer,
    Ring,
    SharedPart,
    Slab,
    Want,
    WantClass,
    classify_wants,
    group_ranks,
    is_scattered,
    plan_ring,
    rings_of,
    scatters_of,
)
from .scatter_reads import plan_scatter
from .storage_backends.base import StorageBackend
from .version import VERSION

__all__ = ["SHARE_READS", "ReadSharing", "answer_offers"]

SHARE_READS = ("auto", "always", "never")

_LEAST = 64 << 10  # bytes that are worth connecting for
_MANY = 4  # ranks of one host whose disk is better read once than by each
_LOOKS = 16


@dataclass
class ReadSharing:
    """What one rank may share, and with whom it does. ``mode`` is one of ``SHARE_READS``.

    ``auto`` passes on between hosts, and on one host what comes from afar or, for four ranks or more, from a cold disk;
    it does not where the page cache has the files. Measured with ranks of one host that load the same 1 GiB from a disk
    of 3 GB/s on two cores (busy with other things, too). Each on its own, past the cache: 0.8, 1.1 and 1.7 s for 2, 3
    and 4 ranks, and as many GiB from the disk. Passed on: 1.2, 1.7 and 1.7 s, and 1 GiB. Through a cache that the first
    is to fill, 1.5, 2.0 and 1.7 s, and the most CPU. When the cache has it, 0.8 s for 4 ranks, passed on 1.8 s.
    Stripes are scattered by two ranks already, unless the cache has the files: each alone would read whole frames.
    """

    mode: str
    verify: bool
    rank: int
    wants: list[Want] = field(default_factory=list)
    classes: list[WantClass] = field(default_factory=list)
    groups: dict[bytes, list[list[int]]] = field(default_factory=dict)

    def check(self) -> None:
        if self.mode not in SHARE_READS:
            raise StateError(f"share_reads must be one of {', '.join(SHARE_READS)}, not {self.mode!r}")

    def offer(self, manifest: Manifest, wants: Sequence[tuple[int, Box, torch.dtype]]) -> list[Any]:
        """What rank 0 is told: plain data."""
        if self.mode != "never":
            salt = f"{VERSION}/{self.mode}/{self.verify}"
            least = _LEAST if self.mode == "auto" else 1
            self.wants = [Want(row, box, str(dtype)) for row, box, dtype in wants]
            self.classes = classify_wants(manifest.tensors, manifest.shards, self.wants, salt=salt, least=least)
        host = PeerIdentity.of_this_process(self.rank)
        return [host.boot_id or host.host, self.mode, [one.offer for one in self.classes]]

    def take_answer(self, answer: Mapping[bytes, Sequence[Sequence[Sequence[int]]]]) -> None:
        mine = {one.offer.digest for one in self.classes}
        self.groups = {digest: [*map(_expand, spans)] for digest, spans in answer.items() if digest in mine}

    def split(
        self, reader: Reader, plan: LoadPlan, wanted: Sequence[Box], memory: Sequence[torch.Tensor]
    ) -> tuple[list[SharedJob], list[ReadPart]]:
        """What is shared, and what this rank reads for itself alone."""
        rows = _Rows(reader, plan, wanted, memory)
        jobs: list[SharedJob] = []
        for ranks, classes in rings_of(self.rank, self.classes, self.groups).items():
            parts = rows.take(_wants_of(classes))
            jobs.append(rows.job(classes[0].offer.digest.hex(), plan_ring(ranks, parts)))
        for ranks, classes in scatters_of(self.rank, self.classes, self.groups).items():
            job = plan_scatter(reader, ranks, classes, self.wants, memory)
            if job is not None:
                rows.take(_wants_of(classes))
                jobs.append(job)
        return jobs, rows.rest()


def answer_offers(backend: StorageBackend, manifest: Manifest, offers: Sequence[list[Any]]) -> dict[bytes, Any]:
    """Rank 0's answer to all: by digest the ranks that share, as ``[first, count, step]``. ``offers`` is by rank."""
    least: int | None = None
    answer = {}
    for digest, by_stripe in group_ranks([[Offer(*offer) for offer in of_rank] for _, _, of_rank in offers]).items():
        ranks = [rank for of_stripe in by_stripe for rank in of_stripe]
        if offers[ranks[0]][1] == "auto" and len({offers[rank][0] for rank in ranks}) == 1:
            least = _least_ranks(backend, manifest) if least is None else least
            enough = least < sys.maxsize if is_scattered(by_stripe) else max(map(len, by_stripe)) >= least
            if not enough:
                continue
        answer[digest] = [*map(_spans, by_stripe)]
    return answer


def _wants_of(classes: Sequence[WantClass]) -> set[int]:
    return {want for one in classes for want in one.wants}


def _least_ranks(backend: StorageBackend, manifest: Manifest) -> int:
    """How many ranks of one host must want the same for passing on to be worth it, going by a few places."""
    count = len(manifest.shards)
    rows = sorted({index * count // _LOOKS for index in range(_LOOKS)}) if count else []
    for at in map(manifest.byte_meta, rows):
        if at.length:
            try:
                with backend.open_object(at.file) as stored:
                    if not stored.is_at_hand(at.offset, at.length):
                        return _MANY if stored.direct_pages() else 2
            except StorageError:
                # Whoever reads it will say so, and better.
                return 2
    return sys.maxsize


class _Rows:
    """Rows of a load plan, each going to a ring or to this rank's own reads."""

    def __init__(self, reader: Reader, plan: LoadPlan, wanted: Sequence[Box], memory: Sequence[torch.Tensor]) -> None:
        self._reader, self._memory, self._wanted = reader, memory, wanted
        self._pieces = list(plan.pieces())
        self._left = set(range(len(self._pieces)))

    def take(self, wants: set[int]) -> list[SharedPart]:
        """What is read for these wants, in an order that all ranks find: that of the stored bytes."""
        manifest = self._reader.manifest
        rows = [row for row in sorted(self._left) if self._pieces[row][0] in wants]
        self._left.difference_update(rows)
        tensor = manifest.shards.tensor
        itemsize = manifest.tensors.itemsize()
        parts = []
        for row in sorted(rows, key=self._place):
            want, stored, box = self._pieces[row]
            size = int(itemsize[int(tensor[stored])])
            chunk = int(manifest.files.chunk_size[int(manifest.shard_file[stored])])
            memory = self._memory[want].dtype.itemsize
            parts.append(SharedPart(row, box, manifest.shards.box_of(stored), size, memory, chunk))
        return parts

    def rest(self) -> list[ReadPart]:
        """What no ring took."""
        pieces = [self._pieces[row] for row in sorted(self._left)]
        return [ReadPart(stored, box, cut(self._memory[want], box, self._wanted[want])) for want, stored, box in pieces]

    def job(self, name: str, ring: Ring) -> RingJob:
        return RingJob(f"read/{name}", ring, self._view, self._read, self._describe)

    def _place(self, row: int) -> tuple[Any, ...]:
        manifest = self._reader.manifest
        want, stored, box = self._pieces[row]
        file, offset = int(manifest.shard_file[stored]), int(manifest.shard_offset[stored])
        return file, offset, box, self._wanted[want], str(self._memory[want].dtype)

    def _view(self, slab: Slab) -> torch.Tensor:
        want = self._pieces[slab.row][0]
        return cut(self._memory[want], slab.box, self._wanted[want])

    def _read(self, slabs: Sequence[Slab]) -> None:
        self._reader.read([ReadPart(self._pieces[slab.row][1], slab.box, self._view(slab)) for slab in slabs])

    def _describe(self, slab: Slab) -> str:
        manifest = self._reader.manifest
        tensor = int(manifest.shards.tensor[self._pieces[slab.row][1]])
        return f"{self._reader.backend.url}: {slab.box} of tensor {manifest.tensors.names[tensor]}"


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as ``[first, count, step]``: one for a job of any size whose replicas are laid out evenly."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == 1:
            found[-1][1:] = [2, rank - found[-1][0]]
        elif found and rank == found[-1][0] + found[-1][1] * found[-1][2]:
            found[-1][1] += 1
        else:
            found.append([rank, 1, 1])
    return found


def _expand(spans: Sequence[Sequence[int]]) -> list[int]:
    return [first + step * index for first, count, step in spans for index in range(count)]
