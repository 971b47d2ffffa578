"""Where the ranks of a manager meet: short operations of all, and what those hear that come later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack

from ..checkpointer import Checkpointer
from ..control.base import Operation
from ..finding import find_newest

__all__ = ["Meetings"]


class Meetings:
    """Of all ranks, each of which waits ``deadline_s`` for the others."""

    def __init__(self, checkpointer: Checkpointer, deadline_s: float) -> None:
        self._checkpointer, self._deadline_s = checkpointer, deadline_s

    def operation(self) -> Operation:
        """The next one, for the caller to close."""
        return self._checkpointer.operation("manager", self._deadline_s)

    @contextmanager
    def meeting(self, leads_to: str = "") -> Iterator[Operation]:
        """One operation of all ranks. Where it fails on this rank, others may have gone on already to what it
        ``leads_to``: they hear of it there."""
        op = self.operation()
        try:
            yield op
        except BaseException as error:
            op.close()
            if leads_to:
                next_op = op.follow(leads_to, deadline_s=self._deadline_s)
                next_op.fail("meet", error)
                next_op.close()
            raise
        finally:
            op.close()

    def tell(self, error: BaseException) -> None:
        """Let the other ranks raise, where they meet next, what ended the training on this one."""
        op = self.operation()
        op.fail("training", error)
        op.close()

    def newest(
        self,
        op: Operation,
        root: str,
        excluding: Sequence[str],
        allow_fresh: bool,
        storage_options: Mapping[str, Any],
    ) -> str | None:
        """The name of the newest checkpoint that holds, for all ranks. Rank 0 looks: ranks on a network file system may
        see different things. Raises as ``find_newest``."""
        answer = None
        with op.phase("find"):
            if op.rank == 0:
                found = find_newest(root, excluding=excluding, allow_fresh=allow_fresh, storage_options=storage_options)
                answer = msgpack.packb(None if found is None else found.name)
        name: str | None = msgpack.unpackb(op.broadcast("found", answer))
        return name
