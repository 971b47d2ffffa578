"""Pushes into an SGLang server, of which there is a strict stand-in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from join_probes import until
from leak_watch import held_now, left_since
from sglang_server import SglangServer, sglang_server
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyTrainee, digest_of, expected_digests

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import BytecheckpointError, EngineError, MismatchError
from bytecheckpoint.inference.push import Pusher, SglangEngine
from bytecheckpoint.inference.push.memory import DOUBLE, STREAMED
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

RING = {"memory_bytes": 20_000, "chunk_bytes": 4096}  # of some 160,000


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SglangServer]:
    with sglang_server(tmp_path / "start") as started:
        yield started


def _pusher(url: str, folder: Path, **options: Any) -> Pusher:
    engine = SglangEngine(url, folder=folder, token="secret")
    return Pusher(engine, deadline_s=time_limit(30), **options)


def _push(rank: int, world_size: int, url: str, folder: Path, versions: list[int], options: dict[str, Any]) -> Any:
    engine = SglangEngine(url, folder=folder, token="secret") if rank == 0 else None
    with Pusher(engine, deadline_s=time_limit(30), **options) as pusher:
        return [pusher.push(fully_shard(ToyTrainee(version)), version=version).mode for version in versions]


def _assert_serves(server: SglangServer, version: int, name: str, folder: Path) -> None:
    seen = server.look()
    assert seen["digests"] == expected_digests(version, 2)
    assert (seen["mode"], seen["weight_version"]) == ("", name)
    assert not list(folder.glob("bcp-*"))


@pytest.mark.parametrize(("options", "mode"), [({}, DOUBLE), (RING, STREAMED)], ids=[DOUBLE, STREAMED])
def test_pushes_of_two_ranks(
    server: SglangServer, pool: RankPool, tmp_path: Path, options: dict[str, Any], mode: str
) -> None:
    assert pool.run(_push, server.url, tmp_path, [1, 2, 3], options)[0] == [mode] * 3
    _assert_serves(server, 3, "3", tmp_path)
    steps = ["pause_generation", "update_weights_from_disk", "update_weight_version", "continue_generation"]
    assert server.look()["log"] == [f"/{step}" for step in steps] * 3


def test_a_load_that_fails_is_undone(server: SglangServer, tmp_path: Path) -> None:
    with _pusher(server.url, tmp_path) as pusher:
        for served, name in ((0, "rolled back"), (1, "1")):
            server.fail("raise", "in load")
            with pytest.raises(EngineError, match=r"update_weights_from_disk answered 400.*the layer does not fit"):
                pusher.push(ToyTrainee(5), version=5)
            _assert_serves(server, served, name, tmp_path)
            pusher.push(ToyTrainee(served + 1), version=served + 1)
        _assert_serves(server, 2, "2", tmp_path)
        assert pusher.rollback() == 1
        _assert_serves(server, 1, "1", tmp_path)


def test_a_stream_that_cannot_be_undone(server: SglangServer, tmp_path: Path) -> None:
    with _pusher(server.url, tmp_path, **RING) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        server.fail("raise", "in load")
        with pytest.raises(EngineError, match=r"does not fit(.|\n)*is left paused; push again, or restart it"):
            pusher.push(ToyTrainee(2), version=2)
        assert server.paused
        pusher.push(ToyTrainee(3), version=3)
    _assert_serves(server, 3, "3", tmp_path)


def test_mismatches_are_found_before_anything_changes(server: SglangServer, tmp_path: Path) -> None:
    tensors = ToyTrainee(1).state_dict()
    del tensors["q.bias"]
    tensors |= {"norm": torch.zeros(3), "typo": torch.zeros(1)}
    with _pusher(server.url, tmp_path) as pusher, pytest.raises(MismatchError) as raised:
        pusher.push({"model": tensors}, version=1)
    for name in ("q.bias: the senders do not have it", "norm: it is [3]", "typo: the engine has no such tensor"):
        assert name in str(raised.value)
    assert server.look()["log"] == []


def test_what_is_wrong_with_the_engine(server: SglangServer, tmp_path: Path) -> None:
    with Pusher(SglangEngine(server.url), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(EngineError, match=r"/pause_generation answered 401.*token=.*--admin-api-key"):
            pusher.push(ToyTrainee(1), version=1)
    with _pusher(server.url, tmp_path / "none") as pusher, pytest.raises(EngineError, match="pass folder="):
        pusher.push(ToyTrainee(1), version=1)
    seen = server.look()
    assert (seen["digests"], seen["mode"]) == (expected_digests(0, 2), "")


def test_requests_in_flight_and_their_cache(server: SglangServer, tmp_path: Path) -> None:
    engine = SglangEngine(server.url, folder=tmp_path, token="secret", pause="in_place", dtype=torch.bfloat16)
    with Pusher(engine, deadline_s=time_limit(30)) as pusher:
        pusher.push(ToyTrainee(1), version=1)
    assert server.look()["digests"] == [digest_of(ToyTrainee(1).bfloat16(), 2, rank) for rank in range(2)]


def _die(rank: int, world_size: int, url: str, folder: Path, point: str) -> None:
    with _pusher(url, folder) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        if point.startswith("push."):
            telemetry.observe(lambda name, event: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
        else:
            SglangServer(url).fail("SIGKILL", point, os.getpid())
        pusher.push(ToyTrainee(2), version=2)


@pytest.mark.parametrize(
    ("point", "served"),
    [("push.apply.paused", 1), ("in load", 2), ("push.apply.loaded", 2)],
    ids=["paused", "loading", "loaded"],
)
def test_a_killed_sender(server: SglangServer, tmp_path: Path, point: str, served: int) -> None:
    with RankPool(1) as ranks:
        ranks.run(_die, server.url, tmp_path, point, expect_death={0: signal.SIGKILL})
        until(lambda: not server.paused, "the guard has ended the pause")
        until(lambda: not list(tmp_path.glob("bcp-*")), "the guard has removed the folder")
    _assert_serves(server, served, str(served), tmp_path)


def _interrupt(rank: int, world_size: int, url: str, folder: Path) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _pusher(url, folder) as pusher:
        pusher.push(ToyTrainee(1), version=1)
        SglangServer(url).fail("SIGINT", "in load", os.getpid())
        try:
            pusher.push(ToyTrainee(2), version=2)
        except KeyboardInterrupt:
            return "interrupted"
    return "pushed"


def test_an_interrupt_while_the_engine_loads(server: SglangServer, tmp_path: Path) -> None:
    with RankPool(1) as ranks:
        assert ranks.run(_interrupt, server.url, tmp_path) == ["interrupted"]
    seen = server.look()
    assert seen["mode"] == ""
    assert seen["digests"] == expected_digests(int(seen["weight_version"]), 2)


def test_a_checkpoint_and_resources(server: SglangServer, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(7)}, step=70)

    def push() -> None:
        with _pusher(server.url, tmp_path) as pusher:
            pusher.push(bcp.open(tmp_path / "c"))

    push()
    before = held_now()
    for _ in range(3):
        push()
    assert left_since(before, turns=3) == []
    _assert_serves(server, 7, "70", tmp_path)


def test_from_the_command_line(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(7)}, step=70)
    with sglang_server(tmp_path / "start", token="") as server:
        done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", server.url, "--protocol", "sglang"])
        assert done.exit_code == 0, done.output
        _assert_serves(server, 7, "70", tmp_path)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with (
        _pusher("http://127.0.0.1:9", tmp_path) as pusher,
        pytest.raises(BytecheckpointError, match="the engine up"),
    ):
        pusher.push(ToyTrainee(1), version=1)
