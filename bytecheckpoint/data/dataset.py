"""An iterable dataset of shards, which any number of data-parallel ranks and workers can continue."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import StateError, UsageError
from ..runtime.modes import default_modes


@dataclass
class _Progress:
    """What is left for one reader, which is a rank, or one of its workers.

    ``reader`` is its number and the number of all readers. ``left`` are the numbers of the shards, in the order in
    which the reader reads them. ``places`` holds the states of those that it, or a reader before it, has begun.
    ``reading`` is the shard with ``state_dict`` that is being read. ``divided`` states that ``split`` made it; then the
    caller may choose another epoch.
    """

    epoch: int
    left: list[int]
    places: dict[int, Any]
    reader: tuple[int, int]
    divided: bool = False
    reading: int | None = None


class ElasticDataset(IterableDataset[Any]):
    """Reads shards (files, or streams) one after another, each on one data-parallel rank and in one of its workers.

    The state lists the shards that are left, and how far each of them has been read. So another number of ranks, or of
    workers, can divide them: no sample is lost or read twice.

    A shard with ``state_dict`` and ``load_state_dict``, such as an ``IterableDataset`` of Hugging Face datasets,
    continues from its own state. In any other shard, the samples that were already read are read again and passed over,
    so it must yield the same samples in each iteration.

    Shards of different lengths make ranks finish at different times. Call ``set_epoch`` before each epoch.

    Args:
        shards: The shards: objects that can be iterated more than once, and have not been iterated. All ranks pass the
            same shards in the same order.
        rank: This process's data-parallel rank.
        world_size: The number of data-parallel ranks.
        shuffle: Whether the order of the shards is a random permutation in each epoch.
        seed: Determines the permutations, together with the epoch. It is equal on all ranks.

    Raises:
        UsageError: A shard holds samples back that its state does not contain (a shuffle buffer), or is already split
            by rank; or an argument is not a number in the required range.

    Example:
        >>> stream = load_dataset("allenai/c4", "en", streaming=True, split="train")
        >>> shards = [stream.shard(stream.num_shards, index) for index in range(stream.num_shards)]
        >>> data = ElasticDataset(shards, rank=dp_rank, world_size=dp_size)
        >>> loader = StatefulDataLoader(data, batch_size=8, num_workers=4)
        >>> bcp.save(path, {"model": model, "dataloader": bcp.DataLoaderState(loader, on_resize=data)})
    """

    def __init__(
        self,
        shards: Sequence[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank!r} and world_size {world_size!r} are not a rank and a number of ranks")
        self._shards = list(shards)
        for number, shard in enumerate(self._shards):
            _check_shard(number, shard)
        self.rank, self.world_size = rank, world_size
        self._shuffle, self._seed = bool(shuffle), int(seed)
        self._fresh = {
            number: copy.deepcopy(shard.state_dict()) for number, shard in enumerate(self._shards) if _has_state(shard)
        }
        # Persistent workers keep their copy of the dataset, and see the epoch only in shared memory.
        self._epoch = torch.full((1,), -1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._next: _Progress | None = None
        self._progress: _Progress | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return max(0, int(self._epoch[0]))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration.

        Args:
            epoch: The epoch. If it differs from a loaded one, the next iteration begins at the start of the epoch.
        """
        self._epoch[0] = epoch
        if self._next is not None and self._next.epoch != epoch:
            self._next = None

    def __iter__(self) -> Iterator[Any]:
        self._progress, self._next = self._begin(), None
        return self._read(self._progress)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left for this rank, or in a worker, for this worker.

        Returns:
            Plain values, and the states of shards.
        """
        progress = self._begin() if self._progress is None else self._progress
        if progress.reading is not None:
            progress.places[progress.reading] = self._shards[progress.reading].state_dict()
        return {
            "shards": len(self._shards),
            "epoch": progress.epoch,
            "left": list(progress.left),
            "places": {str(number): copy.deepcopy(place) for number, place in progress.places.items()},
            "reader": list(progress.reader),
            "divided": False,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration at a stored place.

        Args:
            state_dict: What ``state_dict`` returned for the same rank and worker, or what ``split`` returned.

        Raises:
            StateError: It is not the state of an ``ElasticDataset`` of as many shards.
        """
        self._check(state_dict)
        self._next = _Progress(
            state_dict["epoch"],
            list(state_dict["left"]),
            {int(number): copy.deepcopy(place) for number, place in state_dict["places"].items()},
            (state_dict["reader"][0], state_dict["reader"][1]),
            state_dict["divided"],
        )
        self._progress = None

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Combine the states of all ranks and workers.

        Args:
            states: The state of each worker of each rank, or of each rank.

        Returns:
            All shards that are left, and their places.

        Raises:
            StateError: The states are not of one epoch, or two of them contain one shard.
        """
        left: list[int] = []
        places: dict[str, Any] = {}
        for state in states:
            self._check(state)
            if state["epoch"] != states[0]["epoch"]:
                raise StateError(
                    f"readers of an ElasticDataset are in the epochs {states[0]['epoch']} and {state['epoch']}; save "
                    "while all ranks are in the same epoch"
                )
            twice = sorted(set(left) & set(state["left"]))
            if twice:
                raise StateError(
                    f"several readers of an ElasticDataset read the shards {twice[:8]}; make it with the data-parallel "
                    "rank and the number of data-parallel ranks"
                )
            left += state["left"]
            places.update(state["places"])
        order = {number: at for at, number in enumerate(self._order(states[0]["epoch"]))}
        # Shards that have been begun come first, so that they are dealt evenly.
        left.sort(key=lambda number: (str(number) not in places, order[number]))
        return {"shards": len(self._shards), "epoch": states[0]["epoch"], "left": left, "places": places}

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state with which one of a number of readers continues.

        Args:
            whole: What ``merge`` returned.
            rank: The number of the reader: the rank, or with workers, the rank plus ``worker * number of ranks``.
            world_size: The number of readers on all ranks.

        Returns:
            The state, for ``load_state_dict``.
        """
        left = whole["left"][rank::world_size]
        places = {str(one): whole["places"][str(one)] for one in left if str(one) in whole["places"]}
        return {**whole, "left": left, "places": places, "reader": [rank, world_size], "divided": True}

    def _begin(self) -> _Progress:
        """Where the next iteration begins, in this process."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = (worker * self.world_size + self.rank, workers * self.world_size)
        progress = self._next
        # In a worker, this is the only place where a state that was loaded meets the epoch that the caller chose.
        is_other_epoch = progress is not None and progress.divided and self._epoch[0] not in (-1, progress.epoch)
        if progress is None or is_other_epoch:
            return _Progress(self.epoch, self._order(self.epoch)[reader[0] :: reader[1]], {}, reader)
        if progress.reader != reader:
            raise StateError(
                f"the state of reader {progress.reader[0]} of {progress.reader[1]} of an ElasticDataset was loaded by "
                f"reader {reader[0]} of {reader[1]} (ranks times workers); save and load it with "
                "DataLoaderState(loader, on_resize=dataset), which divides the shards again"
            )
        return progress

    @default_modes()
    def _order(self, epoch: int) -> list[int]:
        count = len(self._shards)
        if not self._shuffle:
            return list(range(count))
        generator = torch.Generator()
        generator.manual_seed(self._seed + epoch)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def _read(self, progress: _Progress) -> Iterator[Any]:
        """Yield the samples of each shard; before each, the progress is already that behind the sample."""
        while progress.left:
            number = progress.left[0]
            shard = self._shards[number]
            place = progress.places.get(number)
            if number in self._fresh:
                shard.load_state_dict(copy.deepcopy(self._fresh[number] if place is None else place))
                for sample in _samples(shard):
                    progress.reading = number
                    yield sample
                progress.reading = None
            else:
                count = place or 0
                for sample in itertools.islice(iter(shard), count, None):
                    count += 1
                    progress.places[number] = count
                    yield sample
            progress.left.pop(0)
            progress.places.pop(number, None)

    def _check(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not {"shards", "epoch", "left", "places"} <= set(state):
            raise StateError("this is not the state of an ElasticDataset; it was saved with another dataset")
        if state["shards"] != len(self._shards):
            raise StateError(
                f"the state belongs to an ElasticDataset of {state['shards']} shards, but this one has "
                f"{len(self._shards)}; pass the same shards in the same order"
            )


def _has_state(shard: Any) -> bool:
    return callable(getattr(shard, "state_dict", None)) and callable(getattr(shard, "load_state_dict", None))


def _is_hugging_face(shard: Any) -> bool:
    return any(base.__module__ == "datasets.iterable_dataset" for base in type(shard).__mro__)


def _check_shard(number: int, shard: Any) -> None:
    """Raise ``UsageError`` unless the state of a shard contains every sample that it has read and not yielded."""
    if not hasattr(shard, "__iter__") or isinstance(shard, Iterator):
        raise UsageError(
            f"shard {number} is a {type(shard).__name__}, which cannot be iterated again; pass an object that makes a "
            "new iterator each time"
        )
    if not _is_hugging_face(shard):
        return
    names = []
    inner = getattr(shard, "_ex_iterable", None)
    while inner is not None:
        names.append(type(inner).__name__)
        inner = getattr(inner, "ex_iterable", None)
    if any("BufferShuffled" in name for name in names):
        raise UsageError(
            f"shard {number} shuffles in a buffer, which its state does not contain, so a load would lose its samples; "
            "leave out stream.shuffle(), and let ElasticDataset shuffle the shards"
        )
    if getattr(shard, "_distributed", None) is not None:
        raise UsageError(
            f"shard {number} was split by split_dataset_by_node, so each rank would pass over samples; pass "
            "stream.shard(stream.num_shards, index) of the whole stream"
        )
    formatting: Any = getattr(shard, "_formatting", None)
    if formatting is not None and formatting.is_table:
        raise UsageError(
            f"shard {number} has the format {formatting.format_type!r}, in which its state may pass over a batch; "
            "remove the format with stream.with_format(None)"
        )


def _samples(shard: Any) -> Iterator[Any]:
    """Iterate over a whole shard. In a worker, a stream of Hugging Face datasets would yield only a part of itself."""
    if get_worker_info() is None or not _is_hugging_face(shard):
        yield from shard
        return
    for batch in shard.iter(batch_size=1):
        yield {key: column[0] for key, column in batch.items()}
