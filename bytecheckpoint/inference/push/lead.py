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
from .block_plan import Exchange, holdings_of_blocks, plan_exchange
from .committing import apply_on, take_back
from .engines import Budget, Engine, ask
from .messages import Table
from .planning import Holding, Plan, plan_push
from .quantizer import pack_task
from .quantizing import scale_name
from .report import WorkerReport
from .wishes import Wish, blocks_by_name, wish_of
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
    tasks: list[bytes]
    exchange: Exchange
    engine_tables: list[bytes]
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
        self._wanted: dict[bytes, tuple[list[_Worker], list[Wish]]] = {}
        self._planned: tuple[Any, _Planned] | None = None
        self._was_strict = False
        self._transaction = ""
        self._answers: list[dict[str, Any]] = []

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
        wishes = self._on_all(lambda engine: wish_of(engine, table, strict, budget))
        blocks_by_name(wishes)
        workers = [
            _Worker(number, index, answer["receiver"], answer["host"])
            for number, wish in enumerate(wishes)
            for index, answer in enumerate(wish.answers)
        ]
        self._wanted = {table.digest: (workers, wishes)}

    def plan(self, senders: int) -> _Planned:
        """Raises ``PlanError`` for what is wanted and not there."""
        assert self._sources is not None
        fingerprints, table, held = self._sources
        workers, wishes = self._wanted[table.digest]
        key = (fingerprints, table.digest, [worker.receiver for worker in workers])
        if self._planned is None or self._planned[0] != key:
            parts = [of_worker for wish in wishes for of_worker in wish.parts]
            blocks = blocks_by_name(wishes)
            exchange = plan_exchange(held, table, blocks, senders)
            held = holdings_of_blocks(held, blocks, senders)
            plan = plan_push(parts, held, senders, chunk_bytes=self._chunk_bytes, blocks=blocks)
            scales = {scale_name(name) for name in blocks}
            # Scales come last: by then the blocks have been looked at.
            jobs = [[_job(plan, w) for w in sorted(of, key=lambda w: w.name in scales)] for of in plan.writes]
            packed = [pack_writes(of_sender) for of_sender in jobs]
            tasks = [pack_task(blocks, exchange, sender) if blocks else b"" for sender in range(senders)]
            digest = xxhash.xxh3_128_digest(b"".join([layout.digest for layout in plan.layouts] + packed + tasks))
            tables = [wish.table.digest for wish in wishes]
            self._planned = key, _Planned(table, plan, workers, jobs, packed, tasks, exchange, tables, digest)
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
            worker.receiver: [
                layout.digest, layout.packed if with_layouts else None, planned.engine_tables[worker.engine]
            ]
            for worker, layout in zip(planned.workers, planned.plan.layouts, strict=True)
        }  # fmt: skip
        return {"transaction": self._transaction, "layouts": layouts}

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
                "task": None if has_plan else planned.tasks[sender],
                "arenas": [answer["arena"] for answer in self._answers],
                "known": known,
            }
        )
        return packed

    def merge_maxima(self, planned: _Planned, said: Sequence[bytes]) -> list[bytes]:
        """For each sender, of the blocks that are cut, the maxima that it needs."""
        return planned.exchange.merged(said)

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
