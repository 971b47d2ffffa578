"""A small training job that saves and loads below one root, in each of the ways that a job can."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError

_RESULT_S = 60.0


class Job:
    """Saves to ``<root>/step-<step>``, and is over when that is committed or has failed."""

    def __init__(self, root: str, *, deadline_s: float, layout: Any = "shards", is_async: bool = False) -> None:
        self._root, self._deadline_s, self._layout, self._is_async = root, deadline_s, layout, is_async
        self.raised: float | None = None
        """When the first of several calls raised, which all are to be made."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        handle = bcp.save(
            f"{self._root}/step-{step}",
            state,
            step=step,
            async_save=self._is_async,
            layout=self._layout,
            deadline_s=self._deadline_s,
        )
        handle.result(_RESULT_S)

    def load(self, step: int, state: dict[str, Any]) -> None:
        bcp.load(f"{self._root}/step-{step}", state, deadline_s=self._deadline_s)

    def close(self) -> None:
        """In good order."""

    def leave(self, error: BaseException) -> None:
        """As a job does that ends with ``error``."""


class ManagedJob(Job):
    """With a ``CheckpointManager``. ``load`` loads the newest."""

    def __init__(self, root: str, *, deadline_s: float, layout: Any = "shards") -> None:
        super().__init__(root, deadline_s=deadline_s, layout=layout)
        self._manager = bcp.CheckpointManager(
            root, layout=layout, deadline_s=deadline_s, lease_s=0.6, meet_every_s=0.05
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        # What fails while it begins is raised by some ranks at once and by others later, so all make both calls.
        try:
            assert self._manager.save(step, state, force=True) is not None, f"step {step} was not saved"
        except BytecheckpointError:
            self.raised = time.monotonic()
            with suppress(BytecheckpointError):
                self._manager.wait()
            took = time.monotonic() - self.raised
            assert took <= self._deadline_s + 2.0, f"wait() took {took:.2f} s after save() had failed"
            raise
        self._manager.wait()

    def load(self, step: int, state: dict[str, Any]) -> None:
        assert self._manager.resume(state) is not None

    def close(self) -> None:
        self._manager.close()

    def leave(self, error: BaseException) -> None:
        trace: TracebackType | None = error.__traceback__
        self._manager.__exit__(type(error), error, trace)


def new_job(mode: str, root: str, *, deadline_s: float, layout: Any = "shards") -> Job:
    """``mode`` is one of ``crash_cells.SAVE_MODES``."""
    if mode == "manager":
        return ManagedJob(root, deadline_s=deadline_s, layout=layout)
    return Job(root, deadline_s=deadline_s, layout=layout, is_async=mode == "async")
