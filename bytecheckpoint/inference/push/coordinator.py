"""Rank 0's part of a push: it talks to the engines, and plans for all senders."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgpack
import xxhash

from .block_plan import holdings_of_blocks, plan_exchange
from .committing import apply_on, take_back
from .engines import Budget, Engine, ask
from .group import Gathering, GroupAddress, GroupBackend
from .messages import Table, first_cause
from .planned import Jobs, Outcome, Planned, Worker, merged
from .planning import Holding, plan_push
from .report import WorkerReport
from .report_counting import count_bytes
from .staging import DOUBLE, MODES, STREAMED, Mode
from .wishes import Wish, blocks_by_name, wish_of
from .writing import UNCHANGED

__all__ = ["Lead"]

T = TypeVar("T")


class Lead:
    """What rank 0 keeps between pushes: what engines want, and the plan, for as long as both sides stay the same."""

    def __init__(
        self,
        engines: Sequence[Engine],
        chunk_bytes: int,
        memory_bytes: int | None,
        deadline_s: float,
        group: GroupBackend | None = None,
        cuda_ipc: bool = False,
    ) -> None:
        self._engines, self._chunk_bytes = list(engines), chunk_bytes
        self._memory_bytes, self._deadline_s = memory_bytes, deadline_s
        self._sources: tuple[tuple[bytes, ...], Table, dict[str, list[Holding]]] | None = None
        self._wanted: dict[bytes, tuple[list[Worker], list[Wish]]] = {}
        self._planned: tuple[Any, Planned] | None = None
        self._was_strict = False
        self._cuda_ipc = cuda_ipc
        self._group, self._gathering = group, None if group is None else Gathering(group, deadline_s)
        self._transaction = ""
        self._answers: list[dict[str, Any]] = []
        self.mode: Mode = DOUBLE

    def knows(self, fingerprints: Sequence[bytes]) -> bool:
        """Whether the senders' descriptions are those of last time."""
        return self._sources is not None and self._sources[0] == tuple(fingerprints)

    def learn_sources(self, fingerprints: Sequence[bytes], descriptions: Sequence[bytes]) -> None:
        """Take in what the senders have. Raises as ``merged``."""
        table, held = merged(descriptions)
        self._sources = tuple(fingerprints), table, held

    @property
    def table(self) -> Table:
        assert self._sources is not None
        return self._sources[1]

    @property
    def planned(self) -> Planned:
        assert self._planned is not None
        return self._planned[1]

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
            Worker(number, index, answer["receiver"], answer["host"])
            for number, wish in enumerate(wishes)
            for index, answer in enumerate(wish.answers)
        ]
        self._wanted = {table.digest: (workers, wishes)}

    def plan(self, senders: int) -> None:
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
            tables = [wish.table.digest for wish in wishes]
            self._planned = key, Planned(plan, workers, tables, blocks, exchange)

    def prepare(self, budget: Budget) -> bool:
        """Begin the transaction on every worker; False where one has been restarted and must be asked what it wants."""
        self._transaction = secrets.token_hex(16)
        self._answers, mode = [], STREAMED if self._group or self._cuda_ipc else ""
        with_layouts = False
        while True:
            answers = self._on_all(partial(_prepare_on, message=self._message(with_layouts, mode), budget=budget))
            flat = [answer for of_engine in answers for answer in of_engine]
            if [answer["receiver"] for answer in flat] != [worker.receiver for worker in self.planned.workers]:
                break
            if any(answer.get("unknown") for answer in flat):
                if with_layouts:
                    break
                with_layouts = True  # only to who does not know them
                continue
            least = min((answer["mode"] for answer in flat), key=MODES.index)
            if all(answer["mode"] == least for answer in flat):
                self._answers, self.mode = flat, least
                return True
            mode = least  # one way for all: they change together
        self._wanted.clear()
        return False

    def _message(self, with_layouts: bool, mode: str) -> dict[str, Any]:
        layouts = {
            worker.receiver: [
                layout.digest,
                layout.packed if with_layouts else None,
                self.planned.tables[worker.engine],
            ]
            for worker, layout in zip(self.planned.workers, self.planned.plan.layouts, strict=True)
        }
        hosts = Counter(worker.host for worker in self.planned.workers)
        return {
            "transaction": self._transaction,
            "layouts": layouts,
            "memory": self._memory_bytes,
            "sharers": {worker.receiver: hosts[worker.host] for worker in self.planned.workers},
            "mode": mode,
            "group": self._group or "",
            "cuda_ipc": self._cuda_ipc,
            "deadline_s": self._deadline_s,
        }

    @property
    def _rings(self) -> tuple[tuple[int, int], ...]:
        return tuple((answer["ring"][0], answer["ring"][1]) for answer in self._answers if "ring" in answer)

    def _jobs(self) -> Jobs:
        return self.planned.jobs(self._rings)

    def assignment(self, sender: int, plan: bytes) -> bytes:
        """What a sender has to know, which has the plan of this digest."""
        made = self._jobs()
        known = []
        for job in made.jobs[sender]:
            for target, chunk in job.write.chunks:
                answer = self._answers[target]
                known.append([answer[held][chunk] if answer[held] else None for held in ("known", "served")])
        packed: bytes = msgpack.packb(
            {
                "plan": made.digest,
                "writes": None if plan == made.digest else made.packed[sender],
                "task": None if plan == made.digest else made.tasks[sender],
                "arenas": [answer["arena"] for answer in self._answers],
                "tokens": [token for answer in self._answers for token in answer.get("tokens", ())],
                "rings": [answer["ring"] for answer in self._answers if "ring" in answer],
                "on_device": self._cuda_ipc,
                "known": known,
                "turns": self.planned.in_steps(self._rings).turns[sender] if self._group else None,
            }
        )
        return packed

    @property
    def nbytes(self) -> int:
        """That all senders write, where nothing is there already."""
        return sum(job.nbytes for jobs in self._jobs().jobs for job in jobs)

    def merge_maxima(self, said: Sequence[bytes]) -> list[bytes]:
        """For each sender, of the blocks that are cut, the maxima that it needs."""
        return self.planned.exchange.merged(said)

    def listen(self, targets: Iterable[int], budget: Budget) -> dict[int, Any]:
        """Addresses of the TCP road of the engines that these targets are of."""
        engines = {self.planned.workers[target].engine for target in targets}
        message = {"transaction": self._transaction, "deadline_s": self._deadline_s}
        found: dict[int, Any] = {}
        for engine in sorted(engines):
            answers = ask(self._engines[engine], "listen", message, budget.left)
            first = next(t for t, worker in enumerate(self.planned.workers) if worker.engine == engine)
            found |= {first + number: answer["tcp"] for number, answer in enumerate(answers)}
        return found

    def group_address(self, senders: Sequence[str]) -> GroupAddress:
        """Of the group for this push. ``senders`` say which group each is in, if any."""
        assert self._gathering is not None
        workers = [worker.receiver for worker in self.planned.workers]
        return self._gathering.address(senders, workers, [answer["group"] for answer in self._answers])

    def have_join(self, address: GroupAddress, budget: Budget) -> None:
        """All workers join the group, which takes as long as the last party does, and begin to receive by it."""
        takes = self.planned.in_steps(self._rings).takes
        senders = address.size - len(takes)
        parties = {
            worker.receiver: [senders + target, None if xxhash.xxh3_128_digest(of) == answer["takes"] else of]
            for target, (worker, answer, of) in enumerate(zip(self.planned.workers, self._answers, takes, strict=True))
        }
        message = {"transaction": self._transaction, "address": address.plain(), "parties": parties}
        self._on_all(lambda engine: ask(engine, "join", message, budget.left))

    def verify(self, outcomes: Sequence[Outcome], version: int | str, budget: Budget) -> None:
        """The first phase: every worker proves what arrived."""
        digests = [[0] * len(layout.chunks) for layout in self.planned.plan.layouts]
        unchanged: list[list[int]] = [[] for _ in self.planned.plan.layouts]
        for jobs, outcome in zip(self._jobs().jobs, outcomes, strict=True):
            became = iter(outcome.became)
            for job, digest in zip(jobs, outcome.digests, strict=True):
                for target, chunk in job.write.chunks:
                    digests[target][chunk] = digest
                    if next(became) == UNCHANGED:
                        unchanged[target].append(chunk)
        by_worker = {
            worker.receiver: [digests[target], unchanged[target]] for target, worker in enumerate(self.planned.workers)
        }
        message = {"transaction": self._transaction, "version": version, "chunks": by_worker}
        self._on_all(lambda engine: ask(engine, "verify", message, budget.left))

    def apply(
        self,
        version: int | str,
        budget: Budget,
        request: str = "apply",
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """The second phase; or all of it, by the request "stream", meanwhile senders write. Where one engine fails,
        those that did not are taken back, unless it is ``given_up``."""
        message = {"transaction": self._transaction, "version": version}
        workers = zip(self.planned.workers, self._answers, strict=True)
        torn = {self._engines[worker.engine] for worker, answer in workers if answer["torn"]}
        errors = self._on_all(
            lambda engine: apply_on(
                engine, message, version, budget, request, was_torn=engine in torn, given_up=given_up
            )
        )
        failed = [error for error in errors if error is not None]
        if not failed:
            return
        if given_up():
            raise first_cause(failed)
        for engine, error in zip(self._engines, errors, strict=True):
            if error is None:
                after = take_back(engine, message, budget)
                if after is not None:
                    failed.append(after)
        first = first_cause(failed)
        first.args = ("\n".join(str(error) for error in (first, *(one for one in failed if one is not first))),)
        raise first

    def reports(self, outcomes: Sequence[Outcome]) -> tuple[list[WorkerReport], list[int]]:
        """Of each worker, and the bytes that left each sender."""
        names = [self._engines[worker.engine].name for worker in self.planned.workers]
        reports, written = count_bytes(self.planned, self._jobs(), outcomes, names)
        return reports, self.planned.in_steps(self._rings).left if self._group else written

    def finish(self, budget: Budget) -> None:
        """A stream is over, and all senders have come to their end."""
        message = {"transaction": self._transaction}
        self._on_all(lambda engine: ask(engine, "finish", message, budget.left))

    def tell(self, kind: str, budget: Budget) -> list[list[dict[str, Any]]]:
        """Ask every engine something that needs no transaction."""
        return self._on_all(lambda engine: ask(engine, kind, {}, budget.left))

    def close(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
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
