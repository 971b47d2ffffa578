"""What a worker that gives has mapped is given back when it fails, and not when the interpreter looks for circles."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from bytecheckpoint.dtypes import dtype_named
from bytecheckpoint.errors import EngineError
from bytecheckpoint.geometry import Box
from bytecheckpoint.inference.push.giving import _Give
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.planning import Write
from bytecheckpoint.inference.push.roads import Place, Road
from bytecheckpoint.inference.push.sources import Source
from bytecheckpoint.inference.push.writing import Job

FLOAT32 = dtype_named("float32")
JOBS = [Job(Write(f"w{n}", Box((0,), (64,)), FLOAT32, ((0, n),)), (Place(0, 0, n),)) for n in range(6)]


class Mapped(Source):
    def __init__(self) -> None:
        self.table, self.held = Table(()), []
        self.memory = torch.ones(64)

    def fetch(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        return [self.memory[:] for _ in wanted]


class Broken(Road):
    """Breaks for all threads at once, as a connection does."""

    def __init__(self) -> None:
        self._all = threading.Barrier(2, timeout=1.0)

    def write(self, place: Place, data: torch.Tensor, digest: int) -> None:
        try:
            self._all.wait()
            raise BrokenPipeError("nobody reads")
        except (OSError, threading.BrokenBarrierError):
            self.finish()

    def finish(self) -> None:
        raise EngineError("the other end has gone")

    def close(self) -> None:
        """It is closed."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_road_that_breaks_in_several_threads() -> None:
    for _ in range(10):
        source = Mapped()
        memory = weakref.ref(source.memory)
        give = _Give(None, source, 60.0)  # type: ignore[arg-type]
        del source
        give.begin(JOBS, b"", [(None, None)] * len(JOBS), {0: lambda _: Broken()}, frozenset(), 60.0, 60.0)
        with pytest.raises(EngineError, match="the other end has gone"):
            _wait_for(give)
        give.join()
        assert memory() is None


def _wait_for(give: _Give) -> None:
    while give.outcome() is None:
        time.sleep(0.001)
