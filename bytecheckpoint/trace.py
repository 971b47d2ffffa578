"""Named steps: what is timed, what is logged, and where tests inject crashes are one and the same list.

``saving.py`` and ``loading.py`` wrap every protocol step in ``Timings.step``. Observers see each step begin and end in
the thread that runs it; an observer that raises (or kills the process) does so in the middle of the protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["LOAD_STEPS", "SAVE_STEPS", "Observer", "Timings", "observe"]

SAVE_STEPS = ("check", "describe", "agree", "plan", "stage", "write", "confirm", "commit", "clean")
LOAD_STEPS = ("check", "open", "describe", "plan", "read", "apply", "report")

Observer = Callable[[str, str], None]
"""Called with ``("save.write", "enter")`` and ``("save.write", "exit")``; inner points of a step bear a longer name,
such as ``save.write.file``, and the event ``"point"``."""

_log = logging.getLogger("bytecheckpoint")
_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Call ``observer`` at every step of this process from now on. Returns a function that takes it off again."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def notify(name: str, event: str) -> None:
    for observer in tuple(_observers):
        observer(name, event)


@dataclass
class Timings:
    """Seconds and bytes of each step of one save or load, in the order in which they ran."""

    operation: str
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a block as step ``name``; observers see it as ``<operation>.<name>``."""
        full = f"{self.operation}.{name}"
        notify(full, "enter")
        begin = time.perf_counter()
        try:
            yield
            notify(full, "exit")
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            _log.debug("%s took %.4f s", full, self.seconds[name])

    def point(self, name: str) -> None:
        """A place inside a step where an observer may look in."""
        if _observers:
            notify(f"{self.operation}.{name}", "point")

    def count(self, name: str, nbytes: int) -> None:
        """Add bytes moved by step ``name``."""
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def __str__(self) -> str:
        parts = []
        for name, seconds in self.seconds.items():
            moved = self.nbytes.get(name)
            rate = f" ({moved / 1e6:.1f} MB, {moved / 1e9 / max(seconds, 1e-9):.2f} GB/s)" if moved else ""
            parts.append(f"{name} {seconds * 1e3:.1f} ms{rate}")
        return f"{self.operation}: " + ", ".join(parts)
