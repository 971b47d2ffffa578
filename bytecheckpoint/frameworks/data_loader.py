"""The state of a data loader, stored once for each data-parallel rank, and how another number of ranks continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from ..errors import BytecheckpointError, MismatchError, StateError, UsageError
from .loader_states import find_part, refuse_loader, stored_workers, workers_of

Resumed = dict[str, tuple[str, str]]


@runtime_checkable
class Divisible(Protocol):
    """What can continue on another number of data-parallel ranks.

    It is the loader itself, a sampler or dataset of a torchdata loader, or an object made for this purpose. The states
    are those of the loader, or of the sampler or the dataset.
    """

    def merge(self, states: Sequence[Any]) -> Any:
        """Return what is left, given the state of every data-parallel rank, in their order."""

    def split(self, whole: Any, rank: int, world_size: int) -> Any:
        """Return the state with which a rank continues, given the result of ``merge``."""


OnLoaderResize = Literal["error", "skip"] | Divisible


class DataLoaderState:
    """A data loader as a part of the state: each data-parallel rank's position is saved once.

    Ranks that read the same samples (tensor or pipeline parallelism) have one data-parallel rank; their loaders are
    replicas. At the saved number of data-parallel ranks, each loader gets exactly the state of its data-parallel rank,
    whatever the number of other ranks. At another number, ``on_resize`` applies; ``LoadReport.resumed`` states what
    happened.

    Args:
        loader: An object with ``state_dict`` and ``load_state_dict``; None on a rank that reads no data.
        on_resize: What a load does at another number of data-parallel ranks. ``error`` fails. ``skip`` leaves the
            loader unchanged, so that it begins anew. An object with ``merge(states)`` and ``split(whole, rank,
            world_size)`` divides what is left: ``bytecheckpoint.data.ElasticSampler`` or ``ElasticDataset``, if it is
            the sampler or the dataset of a loader of torchdata (a ``StatefulDataLoader``, or a ``Loader`` of nodes);
            the loader itself; or any other object, which gets the loaders' states and returns one of them.
        group: The data-parallel process group, or a one-dimensional device mesh. By default, all ranks of the default
            process group.
        dp_rank: This process's data-parallel rank, instead of ``group``.
        dp_size: The number of data-parallel ranks, instead of ``group``.

    Attributes:
        loader: As passed to the constructor.
        on_resize: As passed to the constructor.
        dp_rank: This process's data-parallel rank.
        dp_size: The number of data-parallel ranks.
        resumed: What the last load did, as in ``LoadReport.resumed``; empty before the first.

    Raises:
        UsageError: The loader has no usable state, ``on_resize`` is neither a policy nor an object with ``merge`` and
            ``split``, or the data-parallel ranks are wrong.

    Example:
        >>> sampler = ElasticSampler(dataset, rank=dp_rank, world_size=dp_size)
        >>> loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4)
        >>> loader_state = bcp.DataLoaderState(loader, on_resize=sampler, dp_rank=dp_rank, dp_size=dp_size)
        >>> bcp.save(path, {"model": model, "dataloader": loader_state})
    """

    def __init__(
        self,
        loader: Any,
        on_resize: OnLoaderResize = "error",
        *,
        group: Any = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
    ) -> None:
        self.dp_rank, self.dp_size = _place(group, dp_rank, dp_size)
        self.loader, self.on_resize = loader, on_resize
        self.resumed: Resumed = {}
        if loader is not None:
            refuse_loader(loader)
        if isinstance(on_resize, str) and on_resize in ("error", "skip"):
            return
        if isinstance(on_resize, (str, type)) or not isinstance(on_resize, Divisible):
            kind = repr(on_resize) if isinstance(on_resize, (str, type)) else type(on_resize).__name__
            raise UsageError(f"on_resize={kind} is no policy and has no merge and split; {_advice(loader)}")
        place = getattr(on_resize, "rank", self.dp_rank), getattr(on_resize, "world_size", self.dp_size)
        if place != (self.dp_rank, self.dp_size):
            raise UsageError(
                f"on_resize={type(on_resize).__name__} was made for rank {place[0]} of {place[1]}, but the loader's "
                f"data-parallel rank is {self.dp_rank} of {self.dp_size}; pass the same ranks to both (dp_rank=, "
                "dp_size= or group=)"
            )
        if loader is not None:
            find_part(loader, on_resize)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, under its data-parallel rank.

        Returns:
            The number of data-parallel ranks, and this rank's state with its number of leaves.
        """
        if self.loader is None:
            return {"dp_size": self.dp_size}
        state = self.loader.state_dict()
        return {"dp_size": self.dp_size, "ranks": {str(self.dp_rank): {"leaves": _leaves(state), "state": state}}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the states of all data-parallel ranks; of the same number of them, this rank's is enough.

        Args:
            state_dict: The union of what ``state_dict`` returned on the ranks.

        Raises:
            MismatchError: The number of ranks or workers differs, and ``on_resize`` is ``error``.
            StateError: The states are not complete, or ``merge`` and ``split`` do not accept them.
        """
        prepare(self, state_dict, "the data loader")()


def needs_all(target: DataLoaderState, saved: int, find: Callable[[tuple[str, ...]], Any]) -> bool:
    """Whether a load needs the states of all data-parallel ranks, and not only this rank's.

    Args:
        target: The loader to load.
        saved: The number of data-parallel ranks that saved.
        find: Returns the value at a path in this rank's stored state, or None.

    Returns:
        Whether the ranks, or the workers of the loader, are not as many as when saving.
    """
    return saved != target.dp_size or _other_workers(target, find) is not None


def prepare(target: DataLoaderState, stored: Mapping[str, Any], where: str) -> Callable[[], None]:
    """Check the stored states and divide them, without changing anything.

    Args:
        target: The loader to load.
        stored: The union of what ``state_dict`` returned on the ranks. It may lack ``ranks`` if none is needed.
        where: The full name of the loader, for messages.

    Returns:
        The function that loads them.

    Raises:
        MismatchError: The number of ranks or workers differs, and ``on_resize`` is ``error``.
        StateError: The states are not complete, or ``merge`` and ``split`` do not accept them.
    """
    ranks, saved, size = stored.get("ranks", {}), stored["dp_size"], target.dp_size
    own = str(target.dp_rank)
    if target.loader is None:
        return lambda: target.resumed.clear()
    if target.on_resize == "skip" and "ranks" not in stored:
        return _loading(target, lambda: None, "unchanged", f"saved by {saved} data-parallel rank(s), loaded by {size}")
    workers = None
    if saved == size:
        state = _complete(ranks, own, where)
        workers = _other_workers(target, lambda path: _value_at(state, path))
        if workers is None:
            return _loading(
                target, lambda: target.loader.load_state_dict(state), "continued", f"data-parallel rank {own} of {size}"
            )
    sizes = f"saved by {saved} data-parallel rank(s), loaded by {size}"
    if workers is not None:
        sizes = f"saved with {workers} worker(s), loaded with {workers_of(target.loader)}"
    if target.on_resize == "skip":
        return _loading(target, lambda: None, "unchanged", sizes)
    if not isinstance(target.on_resize, Divisible):
        raise MismatchError(f"{where} was {sizes}; {_advice(target.loader)}", [("data_loader", where, sizes)])
    load = _dividing(target, [_complete(ranks, str(rank), where) for rank in range(saved)], f"{where} ({sizes})")
    return _loading(target, load, "divided", sizes)


def _dividing(target: DataLoaderState, states: Sequence[Any], where: str) -> Callable[[], None]:
    """Return the function that loads this rank's share of what was left on all ranks."""
    part, divisible = find_part(target.loader, target.on_resize), target.on_resize
    assert isinstance(divisible, Divisible)
    try:
        found = states if part is None else [state for one in states for state in part.states(one)]
        whole = divisible.merge(found)
        if part is not None:
            return part.resume(states, whole, target.dp_rank, target.dp_size)
        share = divisible.split(whole, target.dp_rank, target.dp_size)
    except BytecheckpointError as error:
        raise StateError(f"{where}: {error}") from error
    except Exception as error:
        raise StateError(
            f"{where}: merge or split of {type(divisible).__name__} raised {type(error).__name__}: {error}"
        ) from error
    return lambda: target.loader.load_state_dict(share)


def _loading(target: DataLoaderState, load: Callable[[], None], what: str, detail: str) -> Callable[[], None]:
    """Return a function that loads, and records what it did."""
    resumed = {"": (what, detail)}
    if what != "unchanged" and workers_of(target.loader):
        # The state of a StatefulDataLoader contains the seed of its workers, and not the states of their generators.
        seeds = "their first seeds" if what == "continued" else "new seeds"
        resumed["workers"] = ("reseeded", f"the random generators of the workers begin with {seeds}")

    def run() -> None:
        load()
        target.resumed.clear()
        target.resumed.update(resumed)

    return run


def _complete(ranks: Mapping[str, Any], rank: str, where: str) -> Any:
    """The stored state of a data-parallel rank."""
    stored = ranks.get(rank)
    if not isinstance(stored, Mapping) or "state" not in stored or stored.get("leaves") != _leaves(stored["state"]):
        raise StateError(
            f"{where}: the state of data-parallel rank {rank} is not complete: no rank saved it, or the ranks with "
            "this data-parallel rank saved different states; give ranks the same data-parallel rank only if they "
            "read the same samples with equally seeded loaders"
        )
    return stored["state"]


def _leaves(state: Any) -> int:
    """How many values a state has, if only mappings are opened."""
    return sum(map(_leaves, state.values())) if isinstance(state, Mapping) and state else 1


def _value_at(state: Any, path: Sequence[str]) -> Any:
    for key in path:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state


def _other_workers(target: DataLoaderState, find: Callable[[tuple[str, ...]], Any]) -> int | None:
    """The number of workers with which a state was saved, if the loader has another number; otherwise None."""
    workers, saved = workers_of(target.loader), stored_workers(find)
    return saved if workers is not None and saved is not None and saved != workers else None


def _advice(loader: Any) -> str:
    """What to pass as ``on_resize``."""
    advice = (
        "pass DataLoaderState(loader, on_resize=...) with 'skip', which lets the loader begin anew, or with an object "
        "that has merge(states) and split(whole, rank, world_size), such as a bytecheckpoint.data.ElasticSampler or "
        "ElasticDataset of the loader"
    )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch.utils.data.distributed.DistributedSampler):
        return f"the order of {type(sampler).__name__} depends on the number of ranks; {advice}"
    return advice


def _place(group: Any, dp_rank: int | None, dp_size: int | None) -> tuple[int, int]:
    """This process's data-parallel rank and the number of data-parallel ranks."""
    if group is not None and (dp_rank is not None or dp_size is not None):
        raise UsageError("pass either group, or dp_rank and dp_size")
    if (dp_rank is None) != (dp_size is None):
        raise UsageError("pass dp_rank and dp_size together")
    if dp_rank is not None and dp_size is not None:
        if not 0 <= dp_rank < dp_size:
            raise UsageError(f"dp_rank must be from 0 to dp_size - 1, not {dp_rank!r} of {dp_size!r}")
        return dp_rank, dp_size
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise UsageError(f"group is a device mesh of {group.ndim} dimensions; pass its data-parallel part")
        group = group.get_group()
    rank = distributed.get_rank(group)
    if rank < 0:
        raise UsageError("this rank does not belong to group; pass the data-parallel group that it is in")
    return rank, distributed.get_world_size(group)
