"""Back to the version before, from the memory of the workers; and engines that ask for a token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from join_probes import until
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint import telemetry
from bytecheckpoint.errors import EngineError, StateError, UsageError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.layout import Layout
from bytecheckpoint.inference.push.memory import DOUBLE, VersionStore
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

TOKEN = "a secret"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ToyEngine]]:
    with toy_engine(2) as first, toy_engine(1) as second:
        yield [first, second]


def _pusher(engines: list[ToyEngine], memory_bytes: int | None = None) -> Pusher:
    urls = [HttpEngine(engine.url) for engine in engines]
    return Pusher(urls, deadline_s=time_limit(30), memory_bytes=memory_bytes)


def _assert_serve(engines: list[ToyEngine], version: int) -> None:
    for engine in engines:
        seen = engine.look()
        assert seen["digests"] == expected_digests(version, len(seen["digests"]))
        assert not engine.paused


def test_all_engines_serve_the_version_before(engines: list[ToyEngine]) -> None:
    with _pusher(engines) as pusher:
        for version in (1, 2):
            pusher.push(ToyTrainee(version), version=version)
        assert pusher.rollback() == 1
        _assert_serve(engines, 1)
        assert [one["version"] for of_engine in pusher.state() for one in of_engine] == [1, 1, 1]
        with pytest.raises(StateError, match=r"do not all hold one version before.*nothing was changed"):
            pusher.rollback()
        pusher.push(ToyTrainee(3), version=3)
        _assert_serve(engines, 3)
    with _pusher(engines) as other:
        assert other.rollback() == 1
        _assert_serve(engines, 1)


def test_a_push_that_has_begun_takes_the_memory(engines: list[ToyEngine]) -> None:
    with _pusher(engines) as pusher:
        for version in (1, 2):
            pusher.push(ToyTrainee(version), version=version)
        engines[0].fault(0, "flip")
        with pytest.raises(Exception, match="did not arrive as they were sent"):
            pusher.push(ToyTrainee(3), version=3)
        with pytest.raises(StateError, match="they hold: none"):
            pusher.rollback()
        _assert_serve(engines, 2)


def test_a_version_that_was_verified_and_not_applied_is_not_the_one_before() -> None:
    """The next push writes into the memory of the version before."""
    layout = Layout((), ())
    versions = VersionStore()
    for number in (1, 2):
        version = versions.begin(Table(()), layout, DOUBLE, lambda _: False)
        version.version, version.digests = number, [1]
        versions.serve_next(f"push {number}")
    assert versions.before is not None
    verified = versions.begin(Table(()), layout, DOUBLE, lambda _: False)
    verified.version, verified.digests = 3, [3]
    assert versions.before is None
    versions.release()


def test_a_stream_holds_no_version_before(engines: list[ToyEngine]) -> None:
    nbytes = sum(parameter.nbytes for parameter in ToyTrainee(1).parameters())
    with _pusher(engines, memory_bytes=3 * nbytes // 2) as pusher:
        for version in (1, 2):
            assert pusher.push(ToyTrainee(version), version=version).mode == "streamed"
        with pytest.raises(StateError, match="nothing was changed"):
            pusher.rollback()
    _assert_serve(engines, 2)


def test_a_rollback_that_fails(engines: list[ToyEngine]) -> None:
    with _pusher(engines) as pusher:
        for version in (1, 2):
            pusher.push(ToyTrainee(version), version=version)
        engines[0].fault(1, "fail", 1)
        with pytest.raises(EngineError, match=r"is left paused; push again, or restart it: `bcp push CHECKPOINT --to"):
            pusher.rollback()
        assert engines[0].paused
        assert engines[1].paused  # engines switch together, or not at all
        pusher.push(ToyTrainee(3), version=3)
    _assert_serve(engines, 3)


def _die_while_paused(rank: int, world_size: int, url: str) -> None:
    telemetry.observe(lambda name, event: os.kill(os.getpid(), signal.SIGKILL) if name == "push.apply.paused" else None)
    with Pusher(HttpEngine(url, token=TOKEN), deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(2), version=2)


def test_an_engine_that_asks_for_a_token() -> None:
    with toy_engine(1, token=TOKEN) as engine:
        with pytest.raises(EngineError, match="answered 401"), Pusher(HttpEngine(engine.url)) as pusher:
            pusher.push(ToyTrainee(1), version=1)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with Pusher(HttpEngine(engine.url, headers=headers), deadline_s=time_limit(30)) as pusher:
            pusher.push(ToyTrainee(1), version=1)
        _assert_serve([engine], 1)
        with RankPool(1) as pool:  # its worker must have the token, to resume
            pool.run(_die_while_paused, engine.url, expect_death={0: signal.SIGKILL})
        until(lambda: not engine.paused, "resumed")
        _assert_serve([engine], 1)


def test_an_address_that_is_none() -> None:
    for wrong in ("127.0.0.1:8000", "file:///etc/passwd", ""):
        with pytest.raises(UsageError, match="begins with http:// or https://"):
            HttpEngine(wrong)
