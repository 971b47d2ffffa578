"""Rank 0's part of a push: it talks to the engines, and plans for all senders."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgpack
import xxhash

from ...errors import DisagreementError
from ...geometry import Box
from ..parts import Part
from .committing import apply_on, take_back
from .engines import Budget, Engine, ask
from .messages import Table, unpack_parts
from .planning import Holding, Plan, check_taken_whole, plan_push
from .report import WorkerReport
from .writing import KEPT, SENT, UNCHANGED, Job, pack_writes

__all__ = ["Lead", "Outcome"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Worker:
    engine: int
    number: int
    receiver: str
    host: str


@dataclass(frozen=True)
class _Planned:
    table: Table
    plan: Plan
    workers: list[_Worker]
    jobs: list[list[Job]]
    packed: list[bytes]
    digest: bytes


@dataclass(frozen=True)
class Outcome:
    """What one sender did: digests of its chunks, and what became of each of their places."""

    digests: list[int]
    became: bytes


class Lead:
    """What rank 0 keeps between pushes: what engines want, and the plan, for as long as both sides stay the same."""

    def __init__(self, engines: Sequence[Engine], chunk_bytes: int) -> None:
        self._engines, self._chunk_bytes = list(engines), chunk_bytes
        self._sources: tuple[tuple[bytes, ...], Table, dict[str, list[Holding]]] | None = None
        self._wanted: dict[bytes, tuple[list[_Worker], list[list[Part]]]] = {}
        self._planned: tuple[Any, _Planned] | None = None
        self._was_strict = False
        self._transaction = ""
        self._answers: list[dict[str, Any]] = []

    @property
    def has_engines(self) -> bool:
        return bool(self._engines)

    def knows(self, fingerprints: Sequence[bytes]) -> bool:
        """Whether the senders' descriptions are those of last time."""
        return self._sources is not None and self._sources[0] == tuple(fingerprints)

    def learn_sources(self, fingerprints: Sequence[bytes], descriptions: Sequence[bytes]) -> None:
        """Take in what the senders have. Raises ``DisagreementError`` where they mean different tensors by a name."""
        table, held = _merged(descriptions)
        self._sources = tuple(fingerprints), table, held

    @property
    def table(self) -> Table:
        assert self._sources is not None
        return self._sources[1]

    def describe(self, strict: bool, budget: Budget) -> None:
        """Ask the engines what they want of the senders' table, unless they said so before. Raises ``MismatchError``
        for what they do not take; with ``strict``, also where an engine takes only a part of a tensor."""
        table = self.table
        if table.digest in self._wanted and (self._was_strict or not strict):
            return
        self._was_strict = strict
        workers: list[_Worker] = []
        parts: list[list[Part]] = []
        for number, answers in enumerate(
            self._on_all(lambda e: ask(e, "describe", {"table": table.packed, "strict": strict}, budget.left))
        ):
            for index, answer in enumerate(answers):
                workers.append(_Worker(number, index, answer["receiver"], answer["host"]))
                parts.append(unpack_parts(answer["parts"]))
            if strict:
                check_taken_whole(self._engines[number].name, table, parts[-len(answers) :])
        self._wanted = {table.digest: (workers, parts)}

    def plan(self, senders: int) -> _Planned:
        """Raises ``PlanError`` for what is wanted and not there."""
        assert self._sources is not None
        fingerprints, table, held = self._sources
        workers, parts = self._wanted[table.digest]
        key = (fingerprints, table.digest, [worker.receiver for worker in workers])
        if self._planned is None or self._planned[0] != key:
            plan = plan_push(parts, held, senders, chunk_bytes=self._chunk_bytes)
            jobs = [[_job(plan, write) for write in writes] for writes in plan.writes]
            packed = [pack_writes(of_sender) for of_sender in jobs]
            digest = xxhash.xxh3_128_digest(b"".join([layout.digest for layout in plan.layouts] + packed))
            self._planned = key, _Planned(table, plan, workers, jobs, packed, digest)
        return self._planned[1]

    def prepare(self, planned: _Planned, budget: Budget) -> bool:
        """Begin the transaction on every worker; False where one has been restarted and must be asked what it wants."""
        self._transaction = secrets.token_hex(16)
        self._answers = []
        # Layouts are sent only to who does not know them.
        for with_layouts in (False, True):
            message = self._message(planned, with_layouts)
            answers = self._on_all(partial(_prepare_on, message=message, budget=budget))
            flat = [answer for of_engine in answers for answer in of_engine]
            if [answer["receiver"] for answer in flat] != [worker.receiver for worker in planned.workers]:
                break
            if not any(answer.get("unknown") for answer in flat):
                self._answers = flat
                return True
        self._wanted.clear()
        return False

    def _message(self, planned: _Planned, with_layouts: bool) -> dict[str, Any]:
        layouts = {
            worker.receiver: [layout.digest, layout.packed if with_layouts else None]
            for worker, layout in zip(planned.workers, planned.plan.layouts, strict=True)
        }
        return {"transaction": self._transaction, "table": planned.table.digest, "layouts": layouts}

    def assignment(self, planned: _Planned, sender: int, has_plan: bool) -> bytes:
        """What a sender has to know."""
        known = []
        for job in planned.jobs[sender]:
            for target, chunk in job.write.chunks:
                answer = self._answers[target]
                known.append([answer[held][chunk] if answer[held] else None for held in ("known", "served")])
        packed: bytes = msgpack.packb(
            {
                "plan": planned.digest,
                "writes": None if has_plan else planned.packed[sender],
                "arenas": [answer["arena"] for answer in self._answers],
                "known": known,
            }
        )
        return packed

    def listen(self, targets: Iterable[int], planned: _Planned, deadline_s: float, budget: Budget) -> dict[int, Any]:
        """Addresses of the TCP road of the engines that these targets are of."""
        engines = {planned.workers[target].engine for target in targets}
        message = {"transaction": self._transaction, "deadline_s": deadline_s}
        found: dict[int, Any] = {}
        for engine in sorted(engines):
            answers = ask(self._engines[engine], "listen", message, budget.left)
            first = next(t for t, worker in enumerate(planned.workers) if worker.engine == engine)
            found |= {first + number: answer["tcp"] for number, answer in enumerate(answers)}
        return found

    def verify(self, planned: _Planned, outcomes: Sequence[Outcome], version: int | str, budget: Budget) -> None:
        """The first phase: every worker proves what arrived."""
        digests = [[0] * len(layout.chunks) for layout in planned.plan.layouts]
        unchanged: list[list[int]] = [[] for _ in planned.plan.layouts]
        for jobs, outcome in zip(planned.jobs, outcomes, strict=True):
            became = iter(outcome.became)
            for job, digest in zip(jobs, outcome.digests, strict=True):
                for target, chunk in job.write.chunks:
                    digests[target][chunk] = digest
                    if next(became) == UNCHANGED:
                        unchanged[target].append(chunk)
        by_worker = {
            worker.receiver: [digests[target], unchanged[target]] for target, worker in enumerate(planned.workers)
        }
        message = {"transaction": self._transaction, "version": version, "chunks": by_worker}
        self._on_all(lambda engine: ask(engine, "verify", message, budget.left))

    def apply(self, version: int | str, budget: Budget) -> None:
        """The second phase. Where one engine fails, those that did not are taken back."""
        message = {"transaction": self._transaction, "version": version}
        errors = self._on_all(lambda engine: apply_on(engine, message, version, budget))
        failed = [error for error in errors if error is not None]
        if not failed:
            return
        for engine, error in zip(self._engines, errors, strict=True):
            if error is None:
                after = take_back(engine, message, budget)
                if after is not None:
                    failed.append(after)
        first = failed[0]
        if len(failed) > 1:
            raise type(first)("\n".join(str(error) for error in failed)) from first
        raise first

    def reports(self, planned: _Planned, outcomes: Sequence[Outcome]) -> tuple[list[WorkerReport], list[int]]:
        counted = [[0, 0, 0] for _ in planned.workers]
        written = [0] * len(outcomes)
        for sender, (jobs, outcome) in enumerate(zip(planned.jobs, outcomes, strict=True)):
            became = iter(outcome.became)
            for job in jobs:
                for target, _ in job.write.chunks:
                    kind = next(became)
                    counted[target][kind] += job.write.nbytes
                    written[sender] += job.write.nbytes if kind == SENT else 0
        reports = [
            WorkerReport(
                self._engines[worker.engine].name, worker.number, worker.host, sum(layout.sizes),
                of[SENT], of[UNCHANGED], of[KEPT],
            )
            for worker, layout, of in zip(planned.workers, planned.plan.layouts, counted, strict=True)
        ]  # fmt: skip
        return reports, written

    def tell(self, kind: str, budget: Budget) -> list[list[dict[str, Any]]]:
        """Ask every engine something that needs no transaction."""
        return self._on_all(lambda engine: ask(engine, kind, {}, budget.left))

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _on_all(self, ask_one: Callable[[Engine], T]) -> list[T]:
        """At once on all engines; raises the first error when all have answered."""
        if len(self._engines) == 1:
            return [ask_one(self._engines[0])]
        with ThreadPoolExecutor(len(self._engines), thread_name_prefix="bcp-push-engine") as threads:
            return [future.result() for future in [threads.submit(ask_one, engine) for engine in self._engines]]


def _prepare_on(engine: Engine, message: dict[str, Any], budget: Budget) -> list[dict[str, Any]]:
    return ask(engine, "prepare", message, budget.left)


def _job(plan: Plan, write: Any) -> Job:
    return Job(write, tuple((target, plan.layouts[target].offsets[chunk]) for target, chunk in write.chunks))


def _merged(descriptions: Sequence[bytes]) -> tuple[Table, dict[str, list[Holding]]]:
    rows: dict[str, Any] = {}
    held: dict[tuple[str, Box], list[int]] = {}
    pinned: set[str] = set()
    for sender, description in enumerate(descriptions):
        packed, boxes, names, _ = msgpack.unpackb(description)
        for name, meta in Table.unpack(packed).rows:
            if rows.setdefault(name, meta) != meta:
                raise DisagreementError(f"senders disagree on {name}: {rows[name]} before rank {sender}, {meta} on it")
        pinned.update(names)
        for name, offsets, lengths in boxes:
            held.setdefault((name, Box(tuple(offsets), tuple(lengths))), []).append(sender)
    found: dict[str, list[Holding]] = {}
    for (name, box), senders in held.items():
        owners = tuple(sorted(set(senders)))
        found.setdefault(name, []).append(Holding(box, owners[:1] if name in pinned else owners))
    return Table(tuple(rows.items())), found
