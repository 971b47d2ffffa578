"""A sampler of one global order, which any number of data-parallel ranks can continue."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ..errors import StateError, UsageError
from ..runtime.arguments import whole_number
from ..runtime.modes import default_modes


@dataclass(frozen=True)
class Remainder:
    """The positions that no rank has consumed: those in ``behind``, and then all from ``position`` to ``size - 1``.

    ``behind`` holds increasing positions below ``position``. It is empty as long as all ranks consume equally many.
    Rank ``r`` of ``n`` gets every n-th of these positions, beginning with the r-th.
    """

    size: int
    position: int = 0
    behind: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        steps = (-1, *self.behind, self.position)
        increasing = all(a < b for a, b in pairwise(steps))
        if not increasing or self.position > self.size:
            raise ValueError(f"{list(self.behind)} and {self.position} are not increasing positions below {self.size}")

    def __len__(self) -> int:
        return len(self.behind) + self.size - self.position

    def __getitem__(self, index: int) -> int:
        """The position at ``index`` of those that are left."""
        ahead = index - len(self.behind)
        return self.behind[index] if ahead < 0 else self.position + ahead

    def share(self, rank: int, world_size: int, *, drop_last: bool = False) -> int:
        """How many of these positions a rank gets. With ``drop_last``, every rank gets equally many."""
        return len(self) // world_size if drop_last else max(0, -(-(len(self) - rank) // world_size))

    def without(self, consumed: Sequence[int]) -> Remainder:
        """What is left after each rank has consumed so many of its positions."""
        world_size = len(consumed)
        begin = min(consumed) * world_size
        end = min(max(consumed) * world_size, len(self))
        left = [self[index] for index in range(begin, end) if index // world_size >= consumed[index % world_size]]
        passed = max(0, end - len(self.behind))
        return Remainder(self.size, self.position + passed, (*left, *self.behind[end:]))


@dataclass(frozen=True)
class _Place:
    """A rank's place in an epoch: ``yielded`` of its share of what was left when this number of ranks began."""

    epoch: int
    began: Remainder
    yielded: int = 0


class ElasticSampler(Sampler[int]):
    """Divides the indices of a dataset among data-parallel ranks, like torch's ``DistributedSampler``.

    Each epoch has one global order, which depends on ``seed`` and the epoch alone. The ranks take turns in it. So the
    state of all ranks together determines which samples are left, and another number of ranks can divide them.

    Every rank gets each sample of its share once; no sample is repeated to make shares equal. Call ``set_epoch`` before
    each epoch. After a load in the middle of an epoch, ``set_epoch`` with the same epoch keeps the position.

    Args:
        data: The dataset, or its number of samples.
        rank: This process's data-parallel rank.
        world_size: The number of data-parallel ranks.
        shuffle: Whether the order of each epoch is a random permutation.
        seed: Determines the permutations, together with the epoch. It is equal on all ranks.
        drop_last: Whether every rank gets equally many samples, by leaving out fewer than ``world_size`` samples at the
            end of the epoch. Otherwise, the shares of ranks may differ by one sample.

    Attributes:
        rank: As passed to the constructor.
        world_size: As passed to the constructor.
        epoch: The current epoch.

    Raises:
        UsageError: An argument is not a number in the required range.

    Example:
        >>> sampler = ElasticSampler(dataset, rank=dp_rank, world_size=dp_size)
        >>> loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler)
        >>> bcp.save(path, {"model": model, "dataloader": bcp.DataLoaderState(loader, on_resize=sampler)})
    """

    def __init__(
        self,
        data: Any,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        size = len(data) if hasattr(data, "__len__") else data
        self._size = whole_number(0)("data must have a length, or be one:", size)
        self.world_size = whole_number(1)("world_size", world_size)
        self.rank = whole_number(0)("rank", rank)
        if self.rank >= self.world_size:
            raise UsageError(f"rank {self.rank} is not below world_size {self.world_size}")
        self._seed = whole_number(0)("seed", seed)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self.epoch = 0
        self._next: _Place | None = None
        self._iterator: _Iterator | None = None
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration.

        Args:
            epoch: The epoch. If it differs from a loaded one, the next iteration begins at the start of the epoch.

        Raises:
            UsageError: ``epoch`` is not a whole number of at least 0.
        """
        self.epoch = whole_number(0)("epoch", epoch)
        if self._next is not None and self._next.epoch != self.epoch:
            self._next = None

    def __iter__(self) -> Iterator[int]:
        self._iterator = _Iterator(self)
        return self._iterator

    def __len__(self) -> int:
        place = self._begin()
        return self._share(place) - place.yielded

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the newest iterator.

        Returns:
            Plain values.
        """
        return self._to_state(self._begin() if self._iterator is None else self._iterator.place)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration at a stored place.

        Args:
            state_dict: What ``state_dict`` returned for the same rank and number of ranks, or what ``split`` returned.

        Raises:
            StateError: It belongs to another order, rank or number of ranks.
        """
        self._next = self._to_place(state_dict)
        self._iterator = None

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Combine the states of all ranks.

        Args:
            states: The state of each rank.

        Returns:
            The epoch, and the positions of its order that no rank has consumed, as plain values.

        Raises:
            StateError: The states are not those of all ranks at one time, or belong to another order.
        """
        for state in states:
            self._check_order(state)
        first = states[0]
        world_size = first["world_size"]
        if len(states) != world_size or sorted(state["rank"] for state in states) != list(range(world_size)):
            ranks = [state["rank"] for state in states]
            raise StateError(f"the states of ranks {ranks} of an ElasticSampler are not those of {world_size} ranks")
        for key in ("world_size", "epoch", "position", "behind"):
            if any(state[key] != first[key] for state in states):
                found = [state[key] for state in states]
                raise StateError(
                    f"the ranks of an ElasticSampler differ in {key} ({found[:8]}), so they were not saved at one time "
                    "of one epoch; save between the same two steps on all ranks"
                )
        consumed = {state["rank"]: state["yielded"] for state in states}
        left = _remainder(first).without([consumed[rank] for rank in range(world_size)])
        return {**self._identity(first["epoch"]), "epoch": first["epoch"], **_as_state(left)}

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state with which one of a number of ranks continues.

        Args:
            whole: What ``merge`` returned.
            rank: The rank.
            world_size: The number of ranks.

        Returns:
            The state, for ``load_state_dict``.
        """
        return {**whole, "rank": rank, "world_size": world_size, "yielded": 0}

    def _begin(self) -> _Place:
        """Where the next iteration begins."""
        return self._next or _Place(self.epoch, Remainder(self._size))

    def _take(self) -> _Place:
        """Where an iteration that begins now begins."""
        place, self._next = self._begin(), None
        return place

    def _share(self, place: _Place) -> int:
        return place.began.share(self.rank, self.world_size, drop_last=self._drop_last)

    @default_modes()
    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator()
            generator.manual_seed(self._seed + epoch)
            order = torch.randperm(self._size, generator=generator) if self._shuffle else torch.arange(self._size)
            self._order = (epoch, order.numpy())
        return self._order[1]

    def _identity(self, epoch: int) -> dict[str, Any]:
        """What determines the order of an epoch, and a checksum of its first elements."""
        first = self._order_of(epoch)[:1024]
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "order": zlib.crc32(first.tobytes()),
        }

    def _check_order(self, state: Mapping[str, Any]) -> None:
        needed = {"size", "seed", "shuffle", "order", "epoch", "position", "behind", "rank", "world_size", "yielded"}
        if not isinstance(state, Mapping) or not needed <= set(state):
            raise StateError("this is not the state of an ElasticSampler; it was saved with another sampler")
        behind = state["behind"]
        counts = [state[key] for key in ("epoch", "position", "rank", "world_size", "yielded")]
        counts += behind if isinstance(behind, (list, tuple)) else [None]
        if not all(isinstance(one, Integral) and int(one).bit_length() < 63 for one in counts):
            raise StateError("this is not a valid state of an ElasticSampler: it has something in place of a number")
        identity = self._identity(state["epoch"])
        differing = {key: (state[key], value) for key, value in identity.items() if state[key] != value}
        if not differing:
            return
        if set(differing) == {"order"}:
            raise StateError("this version of torch shuffles in another order than the one that saved the state")
        differing.pop("order", None)
        text = ", ".join(f"{key} {was!r} (now {value!r})" for key, (was, value) in differing.items())
        raise StateError(f"the state was saved by an ElasticSampler with {text}, which has another order of samples")

    def _to_state(self, place: _Place) -> dict[str, Any]:
        return {
            **self._identity(place.epoch),
            "epoch": place.epoch,
            **_as_state(place.began),
            "rank": self.rank,
            "world_size": self.world_size,
            "yielded": place.yielded,
        }

    def _to_place(self, state: Mapping[str, Any]) -> _Place:
        self._check_order(state)
        if (state["rank"], state["world_size"]) != (self.rank, self.world_size):
            raise StateError(
                f"the state of rank {state['rank']} of {state['world_size']} does not belong to an ElasticSampler of "
                f"rank {self.rank} of {self.world_size}; pass DataLoaderState(loader, on_resize=sampler) to save and "
                "load, with the ranks with which the sampler was made"
            )
        return _Place(state["epoch"], _remainder(state), state["yielded"])


class _Iterator(Iterator[int]):
    """One pass over a rank's share. It begins with the first number that it yields.

    Loaders make iterators that they never use, which must not change where the sampler begins.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._began: _Place | None = None
        self._yielded = 0
        self._has_begun = False

    @property
    def place(self) -> _Place:
        """Where the next number comes from."""
        began = self._began
        return self._sampler._begin() if began is None else _Place(began.epoch, began.began, self._yielded)

    def __next__(self) -> int:
        sampler = self._sampler
        if not self._has_begun:
            self._bind(self._began or sampler._take())
            self._has_begun = True
        assert self._began is not None
        if self._yielded >= self._share:
            raise StopIteration
        position = self._began.began[sampler.rank + self._yielded * sampler.world_size]
        self._yielded += 1
        return int(self._order[position])

    def state_dict(self) -> dict[str, Any]:
        """The state for ``load_state_dict`` of an iterator or the sampler."""
        return self._sampler._to_state(self.place)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a stored place."""
        self._bind(self._sampler._to_place(state_dict))
        self._sampler._next = None

    def _bind(self, place: _Place) -> None:
        self._began, self._yielded = place, place.yielded
        self._share = self._sampler._share(place)
        self._order = self._sampler._order_of(place.epoch)


def _remainder(state: Mapping[str, Any]) -> Remainder:
    try:
        return Remainder(state["size"], state["position"], tuple(state["behind"]))
    except ValueError as error:
        raise StateError(f"this is not a valid state of an ElasticSampler: {error}") from error


def _as_state(left: Remainder) -> dict[str, Any]:
    return {"position": left.position, "behind": list(left.behind)}
