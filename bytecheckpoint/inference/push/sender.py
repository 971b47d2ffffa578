"""What a rank keeps from push to push: what it writes where, and the ways there."""

from __future__ import annotations

from collections.abc import Sequence

from .arena import Address
from .device_memory import compute_device
from .digesting import words_of
from .group import Group, GroupAddress, join_group
from .roads import Road, SharedMemory
from .writing import IN_HOST_MEMORY, Job, Making

__all__ = ["Sender"]


class Sender:
    """One rank's: jobs, mappings of arenas, and its group."""

    def __init__(self, deadline_s: float, tcp_only: bool) -> None:
        self.deadline_s, self.tcp_only = deadline_s, tcp_only
        self.plan, self.task = b"", b""
        self.jobs: list[Job] = []
        self.group: Group | None = None
        self._memories: dict[str, SharedMemory] = {}

    @property
    def targets(self) -> list[int]:
        return sorted({place.target for job in self.jobs for place in job.places})

    @property
    def nbytes(self) -> int:
        """That it writes, where nothing is there already."""
        return sum(job.nbytes for job in self.jobs)

    def shared(self, arenas: Sequence[Address], there: Sequence[str]) -> dict[int, Road]:
        """Roads to those targets that shared memory reaches. Mappings are kept until the worker has given up the arena,
        and it is not ``there`` any more: the first touch of each page costs as much as a copy of it."""
        if self.tcp_only:
            return {}
        for token in [token for token in self._memories if token not in there]:
            self._memories.pop(token).close()
        found: dict[int, Road] = {}
        for target in self.targets:
            token = arenas[target].token
            road = self._memories.get(token) or SharedMemory.open(arenas[target])
            if road is not None:
                found[target] = self._memories[token] = road
        return found

    def making(self, on_device: bool) -> Making:
        """How chunks are made for workers whose memory is ``on_device``."""
        return Making(compute_device(), words_of) if on_device else IN_HOST_MEMORY

    def join(self, address: GroupAddress, rank: int) -> Group:
        """The group of that address, which this rank may be in already. Raises ``EngineError``."""
        if self.group is None or self.group.name != address.name:
            self.leave()
            self.group = join_group(address, rank)
        return self.group

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        self.leave()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        self.jobs, self.plan, self.task = [], b"", b""
