"""Engines inside the processes of a job's ranks, one in each, as trainers colocate them: one engine to the coordinator.

Rank 0 sends requests through the job's control plane; the other ranks serve them while they wait for rank 0.
"""

from __future__ import annotations

from typing import Any

import msgpack

from ....control.base import Operation
from ....errors import BytecheckpointError
from ..messages import error_of, failure_of, pack
from .base import Engine

_PHASE = "push.colocated"


class ColocatedEngines(Engine):
    """The engines of all ranks, whose workers are those of rank 0's engine, then those of rank 1's, and so on.

    Args:
        own: The engine of this rank.
    """

    name = "the engines of the ranks"

    def __init__(self, own: Engine) -> None:
        self._own, self.resumes = own, own.resumes
        self.op: Operation  # the current push, on all ranks

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [text for texts in self._on_all("call", request, timeout_s) for text in texts]

    def note_pause(self, timeout_s: float, *, left_paused: bool) -> None:
        self._on_all("note_pause", timeout_s, left_paused=left_paused)  # each engine keeps its own answer

    def pause(self, timeout_s: float) -> None:
        self._on_all("pause", timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self._on_all("resume", version, timeout_s, changed=changed)

    def serve(self) -> None:
        """On other ranks than 0, do what rank 0 requests of this rank's engine, until its ``dismiss``."""
        while (packed := self.op.broadcast(_PHASE, None)) != b"":
            self.op.gather(_PHASE, self._answer(packed))

    def dismiss(self) -> None:
        """On rank 0, end ``serve``."""
        self.op.broadcast(_PHASE, b"")

    def _on_all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Return what this method of all ranks' engines returns. Raises the first failure, after all have answered."""
        packed = pack([method, arguments, options])
        self.op.broadcast(_PHASE, packed)
        answers = [msgpack.unpackb(one) for one in self.op.gather(_PHASE, self._answer(packed)) or ()]
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise error_of(failure, f"rank {rank}")
        return [found for found, _ in answers]

    def _answer(self, packed: bytes) -> bytes:
        method, arguments, options = msgpack.unpackb(packed)
        try:
            answer: Any = [getattr(self._own, method)(*arguments, **options), None]
        except BytecheckpointError as error:
            answer = [None, failure_of(error, serving="")]
        return pack(answer)
