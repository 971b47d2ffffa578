"""Data loaders of every supported kind over numbered samples, for tests that count which samples they yield."""

from __future__ import annotations

import importlib.util
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

import bytecheckpoint as bcp
from bytecheckpoint.data import ElasticDataset, ElasticSampler

__all__ = ["KINDS", "SAMPLES", "SHARD_SIZES", "Numbers", "PackingLoader", "Reader", "make_reader", "take"]

SHARD_SIZES = [11, 3, 0, 17, 5, 8, 1]
"""The lengths of the shards of iterable datasets."""

SAMPLES = sum(SHARD_SIZES)

BATCH = 2


class Numbers(Dataset[int]):
    """A map-style dataset whose samples are their indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class PackingLoader:
    """A loader with ``merge`` and ``split``: packs documents of varying length into windows, and buffers the rest.

    Document ``d`` consists of the samples ``d, d + DOCUMENTS, ...``. The buffer is a tensor.
    """

    DOCUMENTS = 9
    WINDOW = 2

    def __init__(self, rank: int, world_size: int) -> None:
        self.documents = list(range(rank, self.DOCUMENTS, world_size))
        self.buffer = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        while self.documents or len(self.buffer):
            while self.documents and len(self.buffer) < self.WINDOW:
                document = torch.arange(self.documents.pop(0), SAMPLES, self.DOCUMENTS)
                self.buffer = torch.cat([self.buffer, document])
            window, self.buffer = self.buffer[: self.WINDOW], self.buffer[self.WINDOW :]
            yield window.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"documents": list(self.documents), "buffer": self.buffer.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.documents, self.buffer = list(state["documents"]), state["buffer"].clone()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        documents = sorted(document for state in states for document in state["documents"])
        return {"documents": documents, "buffer": torch.cat([state["buffer"] for state in states])}

    def split(self, whole: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
        return {name: whole[name][rank::world_size] for name in ("documents", "buffer")}


@dataclass
class Reader:
    """A loader, and how it continues."""

    loader: Any
    on_resize: Any
    set_epoch: Callable[[int], None] = lambda epoch: None

    def state(self, rank: int, world_size: int, on_resize: Any = None) -> bcp.DataLoaderState:
        policy = self.on_resize if on_resize is None else on_resize
        return bcp.DataLoaderState(self.loader, policy, dp_rank=rank, dp_size=world_size)


def _workers(count: int) -> dict[str, Any]:
    # A forked worker need not import torch again.
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


def _sampled(rank: int, world_size: int, workers: int = 0, **options: Any) -> Reader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = ElasticSampler(SAMPLES, rank=rank, world_size=world_size, seed=5)
    return Reader(
        StatefulDataLoader(Numbers(), BATCH, sampler=sampler, **_workers(workers), **options),
        sampler,
        sampler.set_epoch,
    )


def _nodes(rank: int, world_size: int) -> Reader:
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    sampler = ElasticSampler(SAMPLES, rank=rank, world_size=world_size, seed=5)
    node = ParallelMapper(SamplerWrapper(sampler, initial_epoch=3), Numbers().__getitem__, num_workers=2)
    root = Prefetcher(Batcher(node, BATCH, drop_last=False), 3)
    return Reader(Loader(root, restart_on_stop_iteration=False), sampler)


def _iterable_nodes(rank: int, world_size: int) -> Reader:
    from torchdata.nodes import Batcher, IterableWrapper, Loader

    data = ElasticDataset(shards(), rank=rank, world_size=world_size, seed=5)
    root = Batcher(IterableWrapper(data), BATCH, drop_last=False)
    return Reader(Loader(root, restart_on_stop_iteration=False), data, data.set_epoch)


def shards() -> list[range]:
    """Shards without a state."""
    ends = [sum(SHARD_SIZES[: index + 1]) for index in range(len(SHARD_SIZES))]
    return [range(end - size, end) for end, size in zip(ends, SHARD_SIZES)]


def _sharded(rank: int, world_size: int, workers: int = 0) -> Reader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = ElasticDataset(shards(), rank=rank, world_size=world_size, seed=5)
    return Reader(StatefulDataLoader(data, BATCH, **_workers(workers)), data, data.set_epoch)


def _rows(first: int, size: int) -> Iterator[dict[str, int]]:
    for number in range(first, first + size):
        yield {"number": number}


def _all_rows(spans: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    for first, size in spans:
        yield from _rows(first, size)


def hugging_face_stream() -> Any:
    """A stream of Hugging Face datasets, one shard for each range, with a mapping and a filter that keeps all."""
    from datasets import IterableDataset

    spans = [(one.start, len(one)) for one in shards()]
    stream = IterableDataset.from_generator(_all_rows, gen_kwargs={"spans": spans})
    return stream.map(lambda row: {"number": row["number"] + 1000}).filter(lambda row: row["number"] >= 1000)


def _hugging_face(rank: int, world_size: int, workers: int = 0) -> Reader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = hugging_face_stream()
    parts = [stream.shard(stream.num_shards, index) for index in range(stream.num_shards)]
    data = ElasticDataset(parts, rank=rank, world_size=world_size, seed=5)
    loader = StatefulDataLoader(data, BATCH, **_workers(workers), collate_fn=_numbers)
    return Reader(loader, data, data.set_epoch)


def _numbers(rows: list[dict[str, int]]) -> list[int]:
    return [row["number"] - 1000 for row in rows]


def _packing(rank: int, world_size: int) -> Reader:
    loader = PackingLoader(rank, world_size)
    return Reader(loader, loader)


_NEEDS = {
    "sampler": "torchdata",
    "shards": "torchdata",
    "nodes": "torchdata",
    "hugging": "datasets",
    "packing": "torch",
}

_MAKERS: dict[str, Callable[[int, int], Reader]] = {
    "sampler": _sampled,
    "sampler-workers": lambda rank, size: _sampled(rank, size, 2),
    "sampler-persistent": lambda rank, size: _sampled(rank, size, 1, persistent_workers=True),
    "shards": _sharded,
    "shards-workers": lambda rank, size: _sharded(rank, size, 2),
    "nodes": _nodes,
    "nodes-iterable": _iterable_nodes,
    "hugging-face": _hugging_face,
    "hugging-face-workers": lambda rank, size: _hugging_face(rank, size, 2),
    "packing": _packing,
}

KINDS = [kind for kind in _MAKERS if importlib.util.find_spec(_NEEDS.get(kind.partition("-")[0], "torchdata"))]
"""The kinds of loaders whose packages are installed."""


def make_reader(kind: str, rank: int, world_size: int) -> Reader:
    """Make a loader in a process that may be a daemon, which otherwise could not start the loader's workers."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", ".*use of fork.*", DeprecationWarning)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital.*", UserWarning)  # called by torchdata 0.11
        return _MAKERS[kind](rank, world_size)


def take(iterator: Iterator[Any], batches: int | None = None) -> list[list[int]]:
    """The next batches; all that are left by default."""
    found: list[list[int]] = []
    while batches is None or len(found) < batches:
        batch = next(iterator, None)
        if batch is None:
            break
        found.append(batch.tolist() if isinstance(batch, torch.Tensor) else list(batch))
    return found
