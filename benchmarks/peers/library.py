"""This library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bytecheckpoint as bcp
from benchmarks.peers.base import Contestant, Pending

__all__ = ["Library"]


class Library(Contestant):
    """``bytecheckpoint`` as it comes: checksums on, one checkpointer for the whole run."""

    durable = True

    def __init__(self, *, background: bool = False, verify: bool = True) -> None:
        self._background, self._verify = background, verify
        self._checkpointer = bcp.Checkpointer()
        self._stages: Mapping[str, float] = {}

    def save(self, path: str, state: Any) -> Pending | None:
        handle = self._checkpointer.save(path, state.sections, async_save=self._background)
        self._stages = handle.timings.seconds
        return Pending(handle.result) if self._background else None

    def load(self, path: str, state: Any) -> None:
        report = self._checkpointer.load(path, state.sections, verify=self._verify)
        self._stages = report.timings.seconds

    def versions(self) -> Mapping[str, str]:
        return {"bytecheckpoint": bcp.__version__}

    def stages(self) -> Mapping[str, float]:
        return dict(self._stages)

    def close(self) -> None:
        self._checkpointer.close()
