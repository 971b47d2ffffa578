"""How far a push is, told while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Progress", "Telling"]

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""A stage of ``STAGES``, and the bytes written in it of how many; both are 0 where a stage writes none."""


class Telling:
    """To one ``progress``, if there is one; no more after it has raised, which fails no push. For one thread."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._stage, self._done, self._total = "", 0, 0

    def begin(self, stage: str) -> None:
        self._stage, self._done, self._total = stage, 0, 0
        self._tell()

    def expect(self, total: int) -> None:
        """So many bytes of this stage."""
        self._total = total
        self._tell()

    def wrote(self, nbytes: int) -> None:
        """So many more."""
        self.reached(self._done + nbytes)

    def reached(self, done: int) -> None:
        """So many in all."""
        if done != self._done:
            self._done = done
            self._tell()

    def _tell(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._stage, self._done, self._total)
        except Exception:  # noqa: BLE001 - whatever a bar on a screen raises
            _log.exception("push: what was to be told of its progress raised, and is told no more")
            self._progress = None
