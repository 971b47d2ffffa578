"""Pushes into an engine with two pipeline stages, whose workers request different tensors. It runs in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint.errors import MismatchError
from bytecheckpoint.inference.push import Pusher
from bytecheckpoint.inference.push.engine_model import EngineModel
from bytecheckpoint.inference.push.engines.base import Engine
from bytecheckpoint.inference.push.messages import PROTOCOL, decode, encode
from bytecheckpoint.inference.push.receiver import Receiver
from bytecheckpoint.testing import time_limit

WIDTH = 64
STREAMED = {"memory_bytes": 20_000, "chunk_bytes": 4096}
# The embedding is also the head, so both stages have it.
STAGES = (("embedding", "0.up", "0.down"), ("1.up", "1.down", "norm", "embedding"))
ALL = dict.fromkeys(name for stage in STAGES for name in stage)


def _shape(name: str) -> tuple[int, ...]:
    return (WIDTH,) if name == "norm" else (2 * WIDTH, WIDTH)


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(_shape(name), generator=generator) for name in ALL}


class _Stage(EngineModel):
    """An ``EngineModel``. Like vLLM's, it asserts shapes without a message."""

    quantized, blocks = False, None

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.model = self._made("cpu")
        self.load(iter(_tensors(0).items()))

    def _made(self, device: str) -> nn.ParameterDict:
        tensors = {name.replace(".", "_"): torch.empty(_shape(name), device=device) for name in self._names}
        return nn.ParameterDict({name: nn.Parameter(tensor, False) for name, tensor in tensors.items()})

    def make(self) -> nn.ParameterDict:
        return self._made("meta")

    def run_loader(self, model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name in self._names:
                parameter = model[name.replace(".", "_")]
                assert parameter.shape == loaded.shape
                parameter.data.copy_(loaded)
            elif name not in ALL:
                raise ValueError(f"There is no module or parameter named {name!r}")

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.run_loader(self.model, weights)

    def restore(self) -> bool:
        return False

    def clear_caches(self) -> None:
        """Does nothing: there are no caches."""


class _Engine(Engine):
    """An engine with a thread per worker."""

    name = "the engine"

    def __init__(self, stages: Sequence[Sequence[str]]) -> None:
        self.models = [_Stage(names) for names in stages]
        self._receivers = [Receiver(model) for model in self.models]
        self._threads = ThreadPoolExecutor(len(stages))

    def call(self, request: str, timeout_s: float) -> list[str]:
        return list(self._threads.map(lambda receiver: receiver.answer(request), self._receivers))

    def pause(self, timeout_s: float) -> None:
        """Do nothing: no request is running."""

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Do nothing: no request is running."""

    def shut(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._threads.shutdown()

    def serves(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return whether each stage serves these tensors."""
        return all(
            torch.equal(parameter, tensors[name.replace("_", ".")])
            for stage in self.models
            for name, parameter in stage.model.items()
        )


@contextmanager
def _engine(stages: Sequence[Sequence[str]] = STAGES) -> Iterator[_Engine]:
    made = _Engine(stages)
    try:
        yield made
    finally:
        made.shut()


@pytest.fixture
def engine() -> Iterator[_Engine]:
    with _engine() as made:
        yield made


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_each_stage_requests_its_own_tensors(engine: _Engine, options: dict[str, Any]) -> None:
    with Pusher(engine, deadline_s=time_limit(20), **options) as pusher:
        for seed in (1, 2, 3):
            report = pusher.push({"model": _tensors(seed)})
            assert engine.serves(_tensors(seed))
    sizes = {name: tensor.nbytes for name, tensor in _tensors(0).items()}
    assert [worker.sent for worker in report.workers] == [sum(sizes[name] for name in names) for names in STAGES]


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_a_stage_that_requests_nothing_participates(engine: _Engine, options: dict[str, Any]) -> None:
    """A push of some tensors leaves the others unchanged."""
    expected = _tensors(0)
    with Pusher(engine, deadline_s=time_limit(20), **options) as pusher:
        for seed in (1, 2):
            of_last = {name: _tensors(seed)[name] for name in ("1.up", "1.down")}
            report = pusher.push({"model": of_last}, strict=False)
            expected |= of_last
            assert engine.serves(expected)
            assert [worker.requested for worker in report.workers] == [0, 2 * 2 * WIDTH * WIDTH * 4]
        assert len({state["version"] for state in pusher.state()[0]}) == 1
        pusher.push({"model": _tensors(3)})
        assert engine.serves(_tensors(3))
        pusher.push({"model": {"0.up": _tensors(4)["0.up"]}}, strict=False)
        assert engine.serves({**_tensors(3), "0.up": _tensors(4)["0.up"]})


def test_no_worker_requests_anything() -> None:
    with _engine(STAGES[1:]) as last, Pusher(last, deadline_s=time_limit(20)) as pusher:
        with pytest.raises(MismatchError, match="the engine requests none of the tensors; nothing was sent"):
            pusher.push({"model": {"0.up": _tensors(1)["0.up"]}}, strict=False)
        assert last.serves(_tensors(0))


def test_the_error_names_worker_and_tensor(engine: _Engine) -> None:
    tensors = _tensors(1)
    without = {name: tensor for name, tensor in tensors.items() if name != "1.down"}
    longer = {**tensors, "1.up": torch.zeros(2 * WIDTH + 1, WIDTH)}
    unknown = {**tensors, "2.up": tensors["1.up"]}
    with Pusher(engine, deadline_s=time_limit(20)) as pusher:
        with pytest.raises(MismatchError, match=r"(?s)worker 1 of the engine.*1_down: 8,192 of 8,192 elements"):
            pusher.push({"model": without})
        with pytest.raises(MismatchError, match=r"(?s)worker 1 of.*at 1\.up, which is float32\[129, 64\]\n  no weight"):
            pusher.push({"model": longer})
        with pytest.raises(MismatchError, match=r"(?s)worker 0 of.*named '2\.up'"):
            pusher.push({"model": unknown})
        assert engine.serves(_tensors(0))
        pusher.push({"model": tensors})
        assert engine.serves(tensors)


def test_stages_send_to_other_stages(engine: _Engine) -> None:
    """A model without stages, and one that is divided elsewhere."""
    with Pusher(engine, deadline_s=time_limit(20)) as pusher:
        pusher.push({"model": _tensors(5)}, version=5)
    for stages in ([tuple(ALL)], [tuple(ALL)[:2], tuple(ALL)[2:]]):
        with _engine(stages) as joining, Pusher(joining, deadline_s=time_limit(20)) as pusher:
            assert pusher.push(engine).version == 5
            assert joining.serves(_tensors(5))


def test_a_failed_return_to_the_start_weights_is_not_forgotten(
    engine: _Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is repeated finds that nothing can be loaded any more."""

    def ask(kind: str, **message: str) -> list[dict[str, Any]]:
        request = encode({"kind": kind, "nonce": "n", "protocol": PROTOCOL, **message})
        return [decode(answer) for answer in engine.call(request, time_limit(20))]

    with Pusher(engine, deadline_s=time_limit(20)) as pusher:
        pusher.push({"model": _tensors(1)})
    tries = {model: iter([True, False]) for model in engine.models}

    def restore(model: _Stage) -> bool:
        if next(tries[model]):
            raise OSError("the disk is broken")
        return False

    monkeypatch.setattr(_Stage, "restore", restore)
    transaction = ask("status")[0]["transaction"]
    assert all(
        "the disk is broken" in answer["failure"]["message"] for answer in ask("revert", transaction=transaction)
    )
    assert not any("failure" in answer for answer in ask("revert", transaction=transaction))
    assert all("was reverted" in answer["inconsistent_reason"] for answer in ask("status"))
