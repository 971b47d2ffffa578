"""Where the loaders of torchdata keep the state of their sampler or dataset.

``find_part`` returns how to take the states of a sampler or a dataset out of the loader's state, and how to make the
loader continue from another one. A loader that may hold back samples which this state does not contain is refused.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import StateError, UsageError

State = Mapping[str, Any]

# Keys that the nodes of torchdata store with the state of their source.
_NODES = (
    ({"source"}, "source"),
    ({"it_state"}, "it_state"),
    ({"snapshot", "steps_since_snapshot"}, "snapshot"),
    ({"_num_yielded", "_epoch", "_sampler"}, "_sampler"),
    ({"_num_yielded", "iterable"}, "iterable"),
)


class LoaderPart(ABC):
    """The sampler or the dataset of a loader, which alone determines what the loader yields next."""

    def __init__(self, loader: Any, part: Any) -> None:
        self.loader, self.part = loader, part

    @abstractmethod
    def states(self, loader_state: State) -> list[State]:
        """The states of the part in a state of the loader: one, or one for each worker."""

    @abstractmethod
    def resume(self, loader_states: Sequence[State], whole: Any, rank: int, size: int) -> Callable[[], None]:
        """Return a function that makes the loader of one of ``size`` ranks continue with its share of ``whole``."""


def refuse_loader(loader: Any) -> None:
    """Raise ``UsageError`` for an object that has no state, or whose state is known to be wrong."""
    if any(base.__module__.partition(".")[0] == "accelerate" for base in type(loader).__mro__):
        raise UsageError(
            f"the state of accelerate's {type(loader).__name__} does not match the batches that it has yielded, "
            "because it reads one batch ahead (accelerate issue 3938); pass a StatefulDataLoader that accelerate has "
            "not prepared"
        )
    if _is_a(loader, "torchdata.nodes", "Loader") and getattr(loader, "restart_on_stop_iteration", False):
        raise UsageError(
            "a Loader of torchdata.nodes that restarts by itself returns an old state after it was loaded at the end "
            "of an epoch (torchdata 0.11); pass Loader(node, restart_on_stop_iteration=False), and iterate again for "
            "the next epoch"
        )
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return
    hint = ""
    if isinstance(loader, torch.utils.data.DataLoader):
        hint = "; use torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments"
    raise UsageError(f"{type(loader).__name__} has no state_dict() and load_state_dict(){hint}")


def find_part(loader: Any, part: Any) -> LoaderPart | None:
    """How to reach the state of ``part`` in that of ``loader``; None if it is not a part of the loader.

    Raises ``UsageError`` if the loader may hold back samples that the state of the part does not contain.
    """
    if _is_a(loader, "torchdata.stateful_dataloader", "StatefulDataLoader"):
        if getattr(loader, "dataset", None) is part:
            if isinstance(part, torch.utils.data.IterableDataset):
                return _DatasetOfLoader(loader, part)
            raise UsageError("the position in a map-style dataset is in the sampler; pass on_resize=sampler")
        if getattr(loader, "sampler", None) is part:
            return _SamplerOfLoader(loader, part)
    elif _is_a(loader, "torchdata.nodes", "Loader") and any(part is one for one in _sources_of(loader.root)):
        return _PartOfNodes(loader, part)
    if isinstance(part, (torch.utils.data.Sampler, torch.utils.data.Dataset)) and part is not loader:
        raise UsageError(
            f"on_resize is a {type(part).__name__} that is neither the sampler nor the dataset of the "
            f"{type(loader).__name__}; pass it to a StatefulDataLoader as sampler= (not inside of a batch_sampler, "
            "which may hold samples back) or as its iterable dataset, or wrap it in a node of torchdata.nodes"
        )
    return None


def workers_of(loader: Any) -> int | None:
    """The number of workers of a ``StatefulDataLoader``; None for another loader."""
    is_known = _is_a(loader, "torchdata.stateful_dataloader", "StatefulDataLoader")
    return int(loader.num_workers) if is_known else None


def stored_workers(find: Callable[[tuple[str, ...]], Any]) -> int | None:
    """The number of workers with which the state of a ``StatefulDataLoader`` was saved; None for another state.

    ``find`` returns the value at a path in the state, or None.
    """
    if find(("_num_yielded",)) is not None:
        return 0
    count = find(("_snapshot", "_main_snapshot", "_num_workers"))
    return count if isinstance(count, int) else None


class _PartOfLoader(LoaderPart):
    """A part of a ``StatefulDataLoader``."""

    def _snapshot(self, loader_state: State) -> State:
        if loader_state.get("_steps_since_snapshot", 0):
            raise StateError(
                "the loader's last snapshot is older than its last batch; make it with snapshot_every_n_steps=1"
            )
        snapshot: State = loader_state.get("_snapshot", loader_state)
        return snapshot

    def _at(self, share: Any) -> Callable[[], None]:
        """Return a function that makes the loader begin a new iteration, at the position ``share`` of its part."""

        def apply() -> None:
            self.part.load_state_dict(share)
            self.loader.load_state_dict({})

        return apply

    def _worker_states(self, loader_state: State) -> list[State]:
        """What the loader stores of the dataset, in each worker or in the process itself."""
        snapshot = self._snapshot(loader_state)
        if snapshot is loader_state:
            return [{"dataset_state": snapshot["dataset_state"], "fetcher_state": snapshot["fetcher_state"]}]
        workers = snapshot["_worker_snapshots"]
        return [workers[f"worker_{number}"] for number in range(len(workers))]


class _SamplerOfLoader(_PartOfLoader):
    def states(self, loader_state: State) -> list[State]:
        for worker in self._worker_states(loader_state):
            if worker.get("dataset_state") is not None or worker.get("fetcher_state") is not None:
                raise StateError(
                    "the dataset has a state, which cannot be divided; remove its state_dict(), or pass an "
                    "object with merge and split as on_resize that divides the loader's whole state"
                )
        snapshot = self._snapshot(loader_state)
        main = snapshot.get("_main_snapshot", snapshot)
        found = main["_sampler_iter_state"] if self.loader.batch_sampler is not None else None
        if found is None:
            found = {"sampler_state": main["_index_sampler_state"], "sampler_iter_state": main["_sampler_iter_state"]}
        state = found.get("sampler_iter_state") or found.get("sampler_state")
        if state is None:
            raise StateError("the loader was saved with a sampler that has no state; save it with the same sampler")
        return [state]

    def resume(self, loader_states: Sequence[State], whole: Any, rank: int, size: int) -> Callable[[], None]:
        return self._at(self.part.split(whole, rank, size))


class _DatasetOfLoader(_PartOfLoader):
    def states(self, loader_state: State) -> list[State]:
        found = []
        for worker in self._worker_states(loader_state):
            of_iterator = (worker.get("fetcher_state") or {}).get("dataset_iter_state")
            state = of_iterator if of_iterator is not None else worker.get("dataset_state")
            if state is None:
                raise StateError("the loader was saved with a dataset that has no state; save it with the same dataset")
            found.append(state)
        return found

    def resume(self, loader_states: Sequence[State], whole: Any, rank: int, size: int) -> Callable[[], None]:
        workers = self.loader.num_workers
        if not workers:
            return self._at(self.part.split(whole, rank, size))
        seeds = [one["_snapshot"]["_main_snapshot"]["_base_seed"] for one in loader_states if "_snapshot" in one]
        main = {
            "_num_workers": workers,
            "_sampler_iter_state": None,
            "_index_sampler_state": None,
            "_sampler_iter_yielded": 0,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
            "_base_seed": int(np.random.SeedSequence([*seeds, rank, size]).generate_state(1, np.uint64)[0] >> 2),
        }
        shares = [self.part.split(whole, number * size + rank, workers * size) for number in range(workers)]
        snapshot = {
            "_snapshot_step": 0,
            "_last_yielded_worker_id": workers - 1,
            "_main_snapshot": main,
            "_worker_snapshots": {
                f"worker_{number}": {
                    "worker_id": number,
                    "dataset_state": share,
                    "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": False},
                }
                for number, share in enumerate(shares)
            },
        }
        state = {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}
        return lambda: self.loader.load_state_dict(state)


class _PartOfNodes(LoaderPart):
    """A sampler or an iterable below the nodes of a ``torchdata.nodes.Loader``."""

    def states(self, loader_state: State) -> list[State]:
        holder, key = self._find(loader_state)
        return [holder[key]]

    def resume(self, loader_states: Sequence[State], whole: Any, rank: int, size: int) -> Callable[[], None]:
        state = copy.deepcopy(dict(loader_states[0]))
        state["num_yielded"] = 0
        holder, key = self._find(state)
        holder[key] = self.part.split(whole, rank, size)
        holder["_num_yielded"] = 0
        return lambda: self.loader.load_state_dict(state)

    def _find(self, loader_state: State) -> tuple[Any, str]:
        """The mapping with the state of the part, and its key there."""
        node: Any = loader_state["root"]
        while True:
            keys = set(node) if isinstance(node, Mapping) else set()
            key = next((key for known, key in _NODES if known == keys), None)
            if key is None:
                raise StateError(
                    f"a node stores {sorted(map(str, keys))}, which cannot be divided among ranks; below the loader, "
                    "use one source with Batcher (drop_last=False), Mapper, ParallelMapper, Prefetcher and PinMemory, "
                    "or pass an object with merge and split as on_resize that divides the loader's whole state"
                )
            if node.get("steps_since_snapshot"):
                raise StateError("a node's last snapshot is older than its last item; use snapshot_frequency=1")
            if key in ("_sampler", "iterable"):
                return node, key
            node = node[key]


def _sources_of(node: Any) -> Iterator[Any]:
    """The samplers and iterables below a node."""
    for name in ("sampler", "iterable"):
        if hasattr(node, name):
            yield getattr(node, name)
    for name in ("source", "_it"):
        below = getattr(node, name, None)
        if below is not None and below is not node and hasattr(below, "get_state"):
            yield from _sources_of(below)


def _is_a(obj: object, package: str, name: str) -> bool:
    """Whether an object is of a class, without importing the class's package."""
    return any(base.__name__ == name and base.__module__.startswith(package) for base in type(obj).__mro__)
