"""Run one contestant in a separate process on one workload, turn after turn.

``processes.py`` starts it and sends requests over a connection. It imports nothing that a peer's environment may lack.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from benchmarks import workloads
from benchmarks.floors import Floors
from benchmarks.measure import Meter, Sample
from benchmarks.page_cache import evict, tree_bytes, warm
from benchmarks.peers import Entry
from benchmarks.peers.base import Contestant

__all__ = ["Job", "create", "play", "serve"]


@dataclass(frozen=True)
class Job:
    """The task of a worker: an entry (None for the floors) on a workload, with files in an existing folder."""

    entry: Entry | None
    workload: str
    scale: float
    folder: str
    threads: int


class _Player(Protocol):
    def turn(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def create(entry: Entry) -> Contestant:
    """Create the contestant of an entry. Raises whatever error prevents it."""
    module, _, name = entry.factory.partition(":")
    contestant: Contestant = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)(**entry.options)
    return contestant


def play(meter: Meter, contestant: Contestant, state: Any, path: str, parts: tuple[str, ...]) -> dict[str, Sample]:
    """Run the requested parts: save to ``path``, load cold, load warm. Return samples by part."""
    samples: dict[str, Sample] = {}
    gc.collect()
    if "save" in parts:
        samples["save"] = meter.save(path, state)
    else:
        pending = contestant.save(path, state)
        if pending is not None:
            pending.wait()
    samples.setdefault("save", {})["file_bytes"] = tree_bytes(path)
    prepare: dict[str, Callable[[str], float]] = {"cold": evict, "warm": warm}
    for part, make in prepare.items():
        if part in parts:
            state.scramble()
            gc.collect()
            cached = make(path)
            samples[part] = {**meter.load(path, state), "cached": cached, "wrong": state.difference()}
    return samples


class _ContestantPlayer:
    def __init__(self, job: Job, entry: Entry) -> None:
        self._parts = entry.parts
        self._path = os.path.join(job.folder, "checkpoint")
        self._state = workloads.State(workloads.make(job.workload, job.scale))
        self._contestant = create(entry)
        self._meter: Meter | None = None
        self.versions = dict(self._contestant.versions())

    def turn(self) -> dict[str, Any]:
        self._state.fill()
        if self._meter is None:
            self._meter = Meter(self._contestant)
        try:
            return play(self._meter, self._contestant, self._state, self._path, self._parts)
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
            self._state.release()

    def close(self) -> None:
        self._contestant.close()
        if self._meter is not None:
            self._meter.close()


class _FloorPlayer:
    def __init__(self, job: Job) -> None:
        self._folder = job.folder
        self._floors = Floors(workloads.make(job.workload, job.scale).nbytes)
        self.versions: dict[str, str] = {}

    def turn(self) -> dict[str, Any]:
        return self._floors.measure(self._folder)

    def close(self) -> None:
        self._floors.close()


def serve(connection: Connection, log: str) -> None:
    """Answer a ``Job`` and then "turn" requests with ``(True, result)`` or ``(False, reason)``, until "end"."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    warnings.simplefilter("ignore")
    player: _Player | None = None
    try:
        while (request := connection.recv()) != "end":
            try:
                if isinstance(request, Job):
                    torch.set_num_threads(request.threads)
                    made = _FloorPlayer(request) if request.entry is None else _ContestantPlayer(request, request.entry)
                    player = made
                    connection.send((True, made.versions))
                elif player is not None:
                    connection.send((True, player.turn()))
            except Exception as error:  # noqa: BLE001 - it is reported, and the contestant is out
                traceback.print_exc()
                connection.send((False, reason(error)))
        if player is not None:
            player.close()
    except EOFError:  # the parent has ended
        return
    finally:
        connection.close()


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


if __name__ == "__main__":
    # Under its importable name, so that both sides pickle the same classes.
    from benchmarks.worker import serve as serve_by_name

    serve_by_name(Connection(int(sys.argv[1])), sys.argv[2])
