"""Find replicas that have diverged before a save keeps one of them and drops the others.

*Unproven* replicas are parameters that several ranks hold under one name, although nothing declares that they are
equal. Every save compares them completely, by the digests with which it also compares plain values.

*Declared* replicas (``DistributedDataParallel``, ``Replicate()``, HSDP) are compared by sample: each save takes another
part of the tensors. Every rank can compute with which ranks it shares a tensor, so it adds one term per set of ranks to
a sum of 16 bytes, which is zero over all ranks if all copies are equal (``planners.contents``). The comparison
needs no message unless a copy differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgpack
import torch.distributed as dist
import xxhash

from ..errors import ReplicaMismatchError
from ..frameworks.digests import tensor_digest
from ..frameworks.dtensor import replica_ranks
from ..planners.contents import contribution
from ..runtime.messages import format_ranks
from ..tensors.shards import MeshShard, SectionSource, Shard

Replicas = Literal["auto", "check", "trust", "own"]
"""How a save treats tensors that several ranks hold. ``auto``: refuse unproven replicas that differ, and warn of
declared ones, of which a sample is compared. ``check``: compare all, and refuse those that differ. ``trust``: compare
none and store any copy. ``own``: like ``auto``, but store every rank's copy of an unproven replica that differs."""

SAMPLE = 16
"""One of so many declared replicas is compared in each save: at 25 GB/s, a small part of the time of the copy."""

Contents: TypeAlias = dict[str, dict[tuple[str, bytes], list[int]]]
"""By full name of a tensor, the ranks that hold each content: a dtype with a shape (which may be left out), and a
digest."""

_SHOWN_NAMES = 8
_MAX_SET_NUMBER = 1 << 31


def add_digests(sources: Iterable[SectionSource]) -> None:
    """Add digests of the unproven replicas."""
    for source in sources:
        if source.unproven:
            for shard in source.shards:
                if shard.fqn in source.unproven:
                    source.digests[shard.fqn] = tensor_digest(shard.meta, shard.tensor)


class DeclaredReplicas:
    """The digests of this rank's declared replicas, by the ranks that hold them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        # Sets have ranks of the default process group. A save of fewer ranks, or with other numbers, compares nothing.
        group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._is_whole_job = world_size > 1 and group == (rank, world_size)
        self._sets: dict[tuple[int, ...], list[tuple[str, bytes]]] = {}
        self.must_match = False
        """Whether the save fails if copies differ."""

    def add(self, sources: Mapping[str, SectionSource], *, seed: str, everything: bool, on_device: bool) -> None:
        """Add digests of the sample that ``seed`` chooses, or of all replicas, which must match then.

        Without ``on_device``, leave out tensors on devices, where a digest waits for all work that is queued.
        """
        if not self._is_whole_job:
            return
        self.must_match = everything
        number = xxhash.xxh3_64_intdigest(seed.encode())
        for section, source in sources.items():
            for shard in source.shards:
                full = f"{section}.{shard.fqn}"
                if not everything and xxhash.xxh3_64_intdigest(full.encode(), seed=number) % SAMPLE:
                    continue
                if not on_device and shard.tensor.device.type != "cpu":
                    continue
                ranks = _holders(source, shard)
                if len(ranks) > 1:
                    self._sets.setdefault(ranks, []).append((full, tensor_digest(shard.meta, shard.tensor)))

    def checksum(self) -> int:
        """Return this rank's term of a sum (exclusive or) that is zero if all copies are equal."""
        total = 0
        for ranks, items in self._sets.items():
            number = xxhash.xxh3_64_intdigest(msgpack.packb(ranks)) % _MAX_SET_NUMBER
            total ^= contribution(msgpack.packb(sorted(items)), number, ranks.index(self._rank), len(ranks))
        return total

    def pack(self) -> bytes:
        """Pack the digests for ``find_diverged``."""
        return bytes(msgpack.packb([[ranks, items] for ranks, items in self._sets.items()]))


def _holders(source: SectionSource, shard: Shard) -> tuple[int, ...]:
    if isinstance(shard, MeshShard):
        place = shard.find_place()
        return () if place is None else replica_ranks(place)
    return source.replicated.get(shard.fqn, ())


def find_diverged(packed: Sequence[bytes]) -> Contents:
    """Return the contents of every tensor whose declared replicas differ. ``packed`` is by rank.

    A rank may lack state of an optimizer that it does not step; then only the others are compared.
    """
    by_set: dict[tuple[int, ...], dict[str, dict[int, bytes]]] = {}
    for rank, data in enumerate(packed):
        for ranks, items in msgpack.unpackb(data, use_list=False):
            for name, digest in items:
                by_set.setdefault(ranks, {}).setdefault(name, {})[rank] = digest
    diverged: Contents = {}
    for names in by_set.values():
        for name, digests in names.items():
            contents: dict[tuple[str, bytes], list[int]] = {}
            for rank, digest in digests.items():
                contents.setdefault(("", digest), []).append(rank)
            if len(contents) > 1 and name not in diverged:
                diverged[name] = contents
    return diverged


def replica_error(contents: Contents, *, are_declared: bool) -> ReplicaMismatchError:
    """Describe tensors whose copies differ."""
    lines = [f"  {name}: {_describe(contents[name])}" for name in sorted(contents)[:_SHOWN_NAMES]]
    if len(contents) > _SHOWN_NAMES:
        lines.append(f"  and {len(contents) - _SHOWN_NAMES} more")
    if are_declared:
        advice = (
            "The state declares that these ranks hold replicas (DistributedDataParallel, Replicate() or HSDP), so some "
            "of them have diverged, and a checkpoint has one copy of each tensor. Resume from a checkpoint that was "
            "saved before that, or pass replicas='trust' to compare nothing"
        )
    else:
        advice = (
            "Nothing declares that these tensors are replicas, so one stored copy may lose the others. If each rank "
            "holds a part of a larger tensor, use DTensors, FSDP, or the adapter of the framework. If the copies are "
            "meant to differ, pass replicas='own' to store each rank's copy. If any copy will do, pass replicas='trust'"
        )
    count = f"{len(contents)} tensor{'s' * (len(contents) > 1)} of the state"
    return ReplicaMismatchError("\n".join([f"{count} differ between ranks:", *lines, advice]))


def _describe(contents: Mapping[tuple[str, bytes], list[int]]) -> str:
    have_one_meta = len({meta for meta, _ in contents}) == 1
    parts: list[str] = []
    for (meta, _), ranks in sorted(contents.items(), key=lambda item: item[1]):
        shape = "" if have_one_meta else f" of {meta}"
        parts.append(f"rank(s) {format_ranks(ranks)} hold {'another copy' if parts else 'one copy'}{shape}")
    return ", ".join(parts)
