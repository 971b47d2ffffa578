"""Compare saves to and loads from an S3 store with the best client's own put and get of the same bytes.

    pip install -c requirements/benchmarks.txt obstore
    python -m benchmarks.object_store --endpoint http://127.0.0.1:9104 --key KEY --secret SECRET --bucket BUCKET
        [--scale 0.2] [--rounds 7] [--json benchmarks/results/object_store.json]

Each system runs in a separate process, and they take turns: save to a new prefix, load it, and the objects are
removed. The first round warms up and is dropped. The floor is obstore: a multipart put of one buffer, and ranged gets
whose bytes are dropped. *streamed* is its put of an iterator of parts, as a save would have to use it, which has its
bytes piece by piece. Processor time and memory are those of the client's process, not of the server's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import bytecheckpoint as bcp
from benchmarks import results
from benchmarks.measure import Meter
from benchmarks.peers.base import Contestant, Pending
from benchmarks.tables import Grid, show
from benchmarks.workloads import Memory, State, make
from bytecheckpoint.storage_backends import open_backend

__all__ = ["main", "measure", "table"]

_PART, _PARTS_IN_FLIGHT = 16 << 20, 8
_RANGE, _RANGES_IN_FLIGHT = 8 << 20, 8


@dataclass(frozen=True)
class Store:
    """An S3 endpoint, and a bucket that exists."""

    endpoint: str
    key: str
    secret: str
    bucket: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of fsspec."""
        return {"endpoint_url": self.endpoint, "key": self.key, "secret": self.secret}


class _Obstore(Contestant):
    """The best client by itself: one object of as many bytes as the state."""

    durable = True

    def __init__(self, store: Store, nbytes: int, *, streamed: bool) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore, self._streamed = obstore, streamed
        self._store = S3Store(
            store.bucket,
            endpoint=store.endpoint,
            access_key_id=store.key,
            secret_access_key=store.secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        self._memory = Memory(nbytes)
        self._view = self._memory.view[:nbytes]
        self._memory.tensor.random_()
        self._threads = ThreadPoolExecutor(_RANGES_IN_FLIGHT)

    def save(self, path: str, state: Any) -> Pending | None:
        parts = (self._view[at : at + _PART] for at in range(0, len(self._view), _PART))
        content: Any = parts if self._streamed else self._view
        self._obstore.put(self._store, _key(path), content, chunk_size=_PART, max_concurrency=_PARTS_IN_FLIGHT)
        return None

    def load(self, path: str, state: Any) -> None:
        size = len(self._view)

        def get(start: int) -> int:
            return len(self._obstore.get_range(self._store, _key(path), start=start, end=min(start + _RANGE, size)))

        if sum(self._threads.map(get, range(0, size, _RANGE))) != size:
            raise OSError("the store returned another number of bytes")

    def close(self) -> None:
        self._threads.shutdown()


def _key(path: str) -> str:
    return path.removeprefix("s3://").partition("/")[2] + "/object"


class _Library(Contestant):
    """This library with its defaults: checked, and durable when the store has confirmed the manifest."""

    durable = True

    def __init__(self, store: Store) -> None:
        self._options = store.options
        self._checkpointer = bcp.Checkpointer()

    def save(self, path: str, state: Any) -> Pending | None:
        self._checkpointer.save(path, state.sections, storage_options=self._options)
        return None

    def load(self, path: str, state: Any) -> None:
        self._checkpointer.load(path, state.sections, storage_options=self._options)

    def close(self) -> None:
        self._checkpointer.close()


class _Dcp(Contestant):
    """DCP with its writer and reader for fsspec, in one process."""

    durable = True

    def __init__(self, store: Store) -> None:
        self._options = store.options

    def save(self, path: str, state: Any) -> Pending | None:
        writer = FsspecWriter(path, thread_count=4, **self._options)
        save(dict(state.flat), storage_writer=writer, no_dist=True)
        return None

    def load(self, path: str, state: Any) -> None:
        load(dict(state.flat), storage_reader=FsspecReader(path, **self._options), no_dist=True)


CONTESTANTS: dict[str, Callable[[Store, int], Contestant]] = {
    "obstore": lambda store, nbytes: _Obstore(store, nbytes, streamed=False),
    "obstore, streamed": lambda store, nbytes: _Obstore(store, nbytes, streamed=True),
    "bytecheckpoint, s3fs": lambda store, nbytes: _Library(store),
    "DCP over fsspec": lambda store, nbytes: _Dcp(store),
}
"""By name; the first is the floor."""


class _Player:
    """Takes the turns of one contestant, in a separate process."""

    _only: _Player

    def __init__(self, name: str, store: Store, workload: str, scale: float) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _Player._only = self
        self._state = State(make(workload, scale))
        self._state.fill()
        self._is_floor = name.startswith("obstore")
        self._contestant = CONTESTANTS[name](store, self._state.nbytes)
        self._meter = Meter(self._contestant)

    @classmethod
    def turn(cls, path: str) -> dict[str, Any]:
        """Save to a path and load it back."""
        self = cls._only
        sample = {"save": self._meter.save(path, self._state)}
        self._state.scramble()
        sample["load"] = self._meter.load(path, self._state)
        wrong = None if self._is_floor else self._state.difference()
        if wrong is not None:
            raise AssertionError(f"{wrong} was not restored")
        self._state.fill()
        return sample


def measure(
    store: Store,
    scale: float,
    rounds: int,
    *,
    workload: str = "gpt2-adam",
    names: Sequence[str] = tuple(CONTESTANTS),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the samples of each contestant, one for each round after the first."""
    context = multiprocessing.get_context("spawn")
    made = make(workload, scale)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                ProcessPoolExecutor(1, context, initializer=_Player, initargs=(name, store, workload, scale))
            )
            for name in names
        }
        for turn in range(rounds + 1):
            for name, process in processes.items():
                say(f"round {turn} of {rounds}, {name}")
                path = f"s3://{store.bucket}/bench-{uuid.uuid4().hex}"
                sample = process.submit(_Player.turn, path).result()
                backend = open_backend(path, **store.options)
                backend.delete([one.key for one in backend.list()])
                if turn:
                    found[name].append(sample)
    return {"title": made.title, "bytes": made.nbytes, "contestants": found}


def table(result: Mapping[str, Any]) -> Grid:
    """Return medians of the rates as shares of the floor in the same round, and what they cost."""
    (floor, base), *_ = result["contestants"].items()
    columns = ["", "save, MB/s"]
    columns += [f"save / {floor}", "least to most", "CPU s/GB", "memory, MB"]
    columns += ["load, MB/s", f"load / {floor}", "least to most", "CPU s/GB", "memory, MB"]
    rows = []
    for name, samples in result["contestants"].items():
        row = [name]
        for part, key in (("save", "durable_s"), ("load", "seconds")):
            shares = [one[part][key] / other[part][key] for one, other in zip(base, samples)]
            row += [
                f"{result['bytes'] / 1e6 / statistics.median(one[part][key] for one in samples):.0f}",
                f"{statistics.median(shares):.2f}",
                f"{min(shares):.2f} to {max(shares):.2f}",
                f"{statistics.median(one[part]['cpu_s'] for one in samples) / result['bytes'] * 1e9:.2f}",
                f"{statistics.median(one[part]['peak_bytes'] for one in samples) / 1e6:.0f}",
            ]
        rows.append(tuple(row))
    return Grid(f"{result['title']}, {result['bytes'] / 1e6:.0f} MB", tuple(columns), rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("endpoint", "key", "secret", "bucket"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--server", default="unknown", help="what serves the endpoint, for the report")
    parser.add_argument("--scale", type=float, default=0.2, help="share of the bytes of GPT-2 with Adam")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    store = Store(options.endpoint, options.key, options.secret, options.bucket)
    command = "python -m benchmarks.object_store --endpoint URL --key KEY --secret SECRET --bucket BUCKET"
    settings = {"scale": options.scale, "rounds": options.rounds, "threads": 1, "server": options.server}
    words = f"{command} --scale {options.scale:g} --rounds {options.rounds}"
    document = results.header(words, settings, Path.cwd())
    document["versions"] |= {name: version(name) for name in ("obstore", "s3fs", "aiobotocore")}
    document["result"] = measure(store, options.scale, options.rounds)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, []), indent=1) + "\n")


if __name__ == "__main__":
    main()
