"""A sender's part of what goes over a group: while one step is on its way, what goes in the next is made ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch

from .digesting import digests_of
from .group import Group, Transfer
from .layout import ALIGNMENT
from .quantizer import Quantizer, torch_dtype_of
from .sources import Source
from .steps import Turn, sends_of
from .writing import SENT, THREADS, Job

__all__ = ["send_all"]


@dataclass(frozen=True)
class _Ready:
    """A step's chunks, and their digests."""

    step: int
    jobs: list[tuple[Job, Turn]]
    chunks: list[torch.Tensor]
    digests: torch.Tensor


def send_all(
    source: Source,
    jobs: Sequence[Job],
    turns: Sequence[Turn],
    quantizer: Quantizer,
    group: Group,
    senders: int,
    check: Callable[[], None],
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[int], bytes]:
    """As ``write_all``, to the parties of ``group`` behind the ``senders``; digests go with the chunks. Raises
    ``GroupBroken``, and what ``check`` raises."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)  # other threads' streams know nothing of what is still computed
    made = _Making(source, quantizer, group.device)
    became = bytearray()
    with ThreadPoolExecutor(1, thread_name_prefix="bcp-push-ready") as ahead, made.threads:
        steps = iter(_by_step(jobs, turns))
        coming = [ahead.submit(made.ready, *step) for step in [next(steps, None)] if step is not None]
        while coming:
            check()
            ready = coming.pop().result()
            following = next(steps, None)
            if following is not None:
                coming.append(ahead.submit(made.ready, *following))
            group.exchange(_transfers(ready, senders), [], ready.step, check)
            for job, _ in ready.jobs:
                became += bytes([SENT]) * len(job.places)
                wrote(job.nbytes)
    return [], bytes(became)


def _by_step(jobs: Sequence[Job], turns: Sequence[Turn]) -> Iterator[tuple[int, list[tuple[Job, Turn]]]]:
    for step, of_step in groupby(zip(jobs, turns, strict=True), key=lambda one: one[1].step):
        yield step, list(of_step)


def _transfers(ready: _Ready, senders: int) -> list[Transfer]:
    """Chunks in order, and behind them what each party needs to prove its own."""
    found: list[Transfer] = []
    of_party: dict[int, list[int]] = {}
    for number, ((job, turn), chunk) in enumerate(zip(ready.jobs, ready.chunks, strict=True)):
        targets = [senders + place.target for place in job.places]
        found += [(party, chunk[begin:end]) for party, begin, end in sends_of(turn, chunk.numel(), targets)]
        for party in targets:
            of_party.setdefault(party, []).append(number)
    for party, numbers in sorted(of_party.items()):
        found.append((party, ready.digests[numbers].view(torch.uint8)))
    return found


class _Making:
    """Has memory for two steps: the one that is on its way, and the next. What is sent as it is needs none."""

    def __init__(self, source: Source, quantizer: Quantizer, device: torch.device) -> None:
        self._source, self._quantizer, self._device = source, quantizer, device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bcp-push-cast")

    def ready(self, step: int, jobs: list[tuple[Job, Turn]]) -> _Ready:
        writes = [job.write for job, _ in jobs]
        fetches = self._quantizer.fetches(writes)
        fetched = self._source.fetch([(fetch.name, fetch.box) for fetch in fetches])
        elements = self._quantizer.ready(writes, fetches, fetched, self.threads)
        there = [
            self._quantizer.as_they_are(tensor, write, self._device)
            for tensor, write in zip(elements, writes, strict=True)
        ]
        taken = self._take([0 if made is not None else write.nbytes for made, write in zip(there, writes, strict=True)])
        chunks = [room if made is None else made for made, room in zip(there, taken, strict=True)]

        def cast(number: int) -> None:
            write = writes[number]
            out = chunks[number].view(torch_dtype_of(write)).view(write.box.lengths)
            self._quantizer.fill(out, elements[number], write)

        list(self.threads.map(cast, [number for number, made in enumerate(there) if made is None]))
        digests = digests_of(chunks)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # others send from streams of their own
        return _Ready(step, jobs, chunks, digests)

    def _take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        self._buffers.reverse()
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        if self._buffers[0].numel() < total:
            self._buffers[0] = torch.empty(total, dtype=torch.uint8, device=self._device)
        at, found = 0, []
        for size in sizes:
            found.append(self._buffers[0][at : at + size])
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return found
