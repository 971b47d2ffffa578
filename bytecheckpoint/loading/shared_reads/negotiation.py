"""Negotiate which reads ranks share.

Ranks never exchange lists of requests. Each rank sorts its requests into a few classes and offers one digest of each to
rank 0. Rank 0 answers with the ranks of each digest that several ranks offered, if sharing is likely to be faster. See
``planners.request_classes`` for the classes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ...control.peers import PeerIdentity
from ...errors import StorageError
from ...format.manifest.document import Manifest
from ...planners.request_classes import (
    BoxRequest,
    ClassSummary,
    RankGroups,
    RequestClass,
    classify_requests,
    group_ranks,
    is_scattered,
)
from ...storage_backends.base import StorageBackend
from ...version import VERSION

ShareReads = Literal["auto", "always", "never"]
"""``auto``: share reads if that is likely to be faster. ``always``: whenever several ranks request the same bytes."""

Answer: TypeAlias = Mapping[bytes, Sequence[Sequence[Sequence[int]]]]
"""By digest, and for each stripe, the ranks that share, as spans ``[first, count, step]``. Plain data."""

_MIN_SHARED_BYTES = 64 << 10  # fewer bytes are not worth a connection
# With at least this many ranks on one host, one of them reads a cold disk for all. Measured with 1 GiB from a disk of
# 3 GB/s on two cores: reading separately takes 0.8, 1.1 and 1.7 s for 2, 3 and 4 ranks; sharing takes 1.2, 1.7 and
# 1.7 s and reads each byte once. From the page cache, 4 ranks take 0.8 s separately and 1.8 s when they share.
_MIN_LOCAL_RANKS = 4
_MIN_REMOTE_RANKS = 2
_SAMPLED_SHARDS = 16  # enough to see whether a checkpoint's files are in the page cache


@dataclass(frozen=True)
class ReadOffer:
    """The reads that one rank could share. ``message`` is for rank 0."""

    rank: int
    classes: Sequence[RequestClass]
    message: list[Any]

    def groups(self, answer: Answer) -> RankGroups:
        """The ranks that share this rank's classes, by digest."""
        digests = {one.summary.digest for one in self.classes}
        return {digest: [*map(_expand, spans)] for digest, spans in answer.items() if digest in digests}


def make_offer(
    manifest: Manifest, requests: Sequence[BoxRequest], mode: ShareReads, *, verify: bool, rank: int
) -> ReadOffer:
    """Sort one rank's requests into classes that other ranks may share."""
    classes: Sequence[RequestClass] = ()
    if mode != "never":
        # Ranks share only if they run the same code in the same mode.
        salt = f"{VERSION}/{mode}/{verify}"
        min_bytes = _MIN_SHARED_BYTES if mode == "auto" else 1
        classes = classify_requests(manifest.tensors, manifest.shards, requests, salt=salt, min_bytes=min_bytes)
    host = PeerIdentity.of_this_process(rank)
    return ReadOffer(rank, classes, [host.boot_id or host.host, mode, [one.summary for one in classes]])


def answer_offers(backend: StorageBackend, manifest: Manifest, messages: Sequence[Sequence[Any]]) -> Answer:
    """Decide on rank 0 which classes are shared. ``messages`` are the offers' by rank.

    Ranks of several hosts always share. Ranks of one host share if the files come from a remote store, or if there are
    at least four of them and the files are on a disk and not in its page cache. Stripes are shared by two ranks unless
    the page cache holds the files, since each rank would otherwise read whole frames.
    """
    hosts = [message[0] for message in messages]
    modes = [message[1] for message in messages]
    offers = [[ClassSummary(*offer) for offer in message[2]] for message in messages]
    min_ranks: int | None = None
    answer = {}
    for digest, stripes in group_ranks(offers).items():
        ranks = [rank for of_stripe in stripes for rank in of_stripe]
        if modes[ranks[0]] == "auto" and len({hosts[rank] for rank in ranks}) == 1:
            min_ranks = _min_ranks_of_a_host(backend, manifest) if min_ranks is None else min_ranks
            is_faster = min_ranks < sys.maxsize if is_scattered(stripes) else max(map(len, stripes)) >= min_ranks
            if not is_faster:
                continue
        answer[digest] = [*map(_spans, stripes)]
    return answer


def _min_ranks_of_a_host(backend: StorageBackend, manifest: Manifest) -> int:
    """How many ranks of one host must request the same bytes to share them, judged by a few of the shards."""
    count = len(manifest.shards)
    rows = sorted({index * count // _SAMPLED_SHARDS for index in range(_SAMPLED_SHARDS)}) if count else []
    for shard in map(manifest.byte_meta, rows):
        if shard.length:
            try:
                with backend.open_object(shard.file) as stored:
                    if not stored.is_cached(shard.offset, shard.length):
                        return _MIN_LOCAL_RANKS if stored.direct_alignment() else _MIN_REMOTE_RANKS
            except StorageError:
                # Reading raises the same error with the name of the tensor.
                return _MIN_REMOTE_RANKS
    return sys.maxsize


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as ``[first, count, step]``: one span for evenly spaced replicas in a job of any size."""
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
