"""A small training job that saves and loads below one root, in each mode."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.testing import time_limit

_RESULT_S = time_limit(60)


class Job:
    """Saves to ``<root>/step-<step>``, and returns when the save is committed or has failed."""

    def __init__(self, root: str, *, deadline_s: float, layout: Any = "shards", is_async: bool = False) -> None:
        self._root, self._deadline_s, self._layout, self._is_async = root, deadline_s, layout, is_async
        self.raised: float | None = None
        """When the first of several calls raised: all of them are made nevertheless."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        handle = bcp.save(
            f"{self._root}/step-{step}",
            state,
            step=step,
            async_save=self._is_async,
            options=bcp.SaveOptions(layout=self._layout, deadline_s=self._deadline_s),
        )
        handle.result(_RESULT_S)

    def load(self, step: int, state: dict[str, Any]) -> None:
        bcp.load(f"{self._root}/step-{step}", state, options=bcp.LoadOptions(deadline_s=self._deadline_s))

    def close(self) -> None:
        """End the job normally."""

    def leave(self, error: BaseException) -> None:
        """End the job with ``error``."""


class ManagedJob(Job):
    """Uses a ``CheckpointManager``; ``load`` loads the newest checkpoint."""

    def __init__(self, root: str, *, deadline_s: float, layout: Any = "shards") -> None:
        super().__init__(root, deadline_s=deadline_s, layout=layout)
        self._manager = bcp.CheckpointManager(
            root,
            save=bcp.SaveOptions(layout=layout),
            job=bcp.JobOptions(deadline_s=deadline_s, lease_s=time_limit(0.6), coordinate_every_s=0.05),
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        # Some ranks raise an early failure in save() and others in wait(), so all ranks make both calls.
        try:
            assert self._manager.save(step, state, force=True) is not None, f"step {step} was not saved"
        except BytecheckpointError:
            self.raised = time.monotonic()
            with suppress(BytecheckpointError):
                self._manager.wait()
            took = time.monotonic() - self.raised
            assert took <= self._deadline_s + time_limit(2), f"wait() took {took:.2f} s after save() had failed"
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
    """Return a job of one of ``crash_cells.SAVE_MODES``."""
    if mode == "manager":
        return ManagedJob(root, deadline_s=deadline_s, layout=layout)
    return Job(root, deadline_s=deadline_s, layout=layout, is_async=mode == "async")
