"""``bcp push``."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from host_device import host_device
from join_probes import until
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.checkpoint import Checkpoint
from bytecheckpoint.cli import cli
from bytecheckpoint.cli import push as push_module
from bytecheckpoint.inference.push import HttpEngine
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(4, of=__name__)


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


def test_a_checkpoint_into_an_engine(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(7)}, step=70)
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url])
    assert done.exit_code == 0, done.output
    assert "the engines serve version 70" in done.output
    assert engine.look()["digests"] == expected_digests(7, 2)
    assert engine.look()["log"].count("/update_weight_version") == 1
    again = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url, "--json", "--version", "again"])
    document = json.loads(again.stdout)
    assert document["version"] == "again"
    assert [worker["sent"] for worker in document["workers"]] == [0, 0]


def test_mismatches_are_refused(engine: ToyEngine, tmp_path: Path) -> None:
    before = engine.look()["digests"]
    model = ToyTrainee(8)
    del model.norm
    bcp.save(tmp_path / "c", {"model": model})
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url])
    assert done.exit_code == 1
    assert "norm: 64 of 64 elements" in done.stderr
    assert engine.look()["digests"] == before
    partial = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url, "--partial"])
    assert partial.exit_code == 0, partial.output


def test_from_an_engine_into_two_others(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(9)}, step=90)
    CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url])
    with toy_engine(1) as one, toy_engine(2) as two:
        done = CliRunner().invoke(cli, ["push", engine.url, "--to", one.url, "--to", two.url, "--json"])
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        assert (document["source"], document["version"]) == (engine.url, 90)
        assert one.look()["digests"] == expected_digests(9, 1)
        assert two.look()["digests"] == expected_digests(9, 2)
        done = CliRunner().invoke(cli, ["push", f"{engine.url}/", "--to", one.url, "--version", "nine"])
        assert "the engines serve version nine" in done.output
    done = CliRunner().invoke(cli, ["push", engine.url, "--to", engine.url, "--rename", "model.a=model.b"])
    assert done.exit_code == 2
    assert "--rename, --exclude, --adapter, --group and --cuda-ipc apply to checkpoints" in done.stderr
    done = CliRunner().invoke(cli, ["push", "http://127.0.0.1:9", "--to", engine.url])
    assert done.exit_code == 6
    assert "http://127.0.0.1:9/collective_rpc cannot be reached" in done.stderr


def test_two_engines_in_a_group(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(11)}, step=110)
    with toy_engine(1) as other:
        arguments = ["push", str(tmp_path / "c"), "--to", engine.url, "--to", other.url, "--group", "gloo", "--json"]
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["mode"] == "streamed"
        assert engine.look()["digests"] == expected_digests(11, 2)
        assert other.look()["digests"] == expected_digests(11, 1)


def test_by_cuda_ipc(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(12)}, step=120)
    push = ["push", str(tmp_path / "c"), "--cuda-ipc", "--to"]
    with toy_engine(2, devices=["host", "host"]) as engine, host_device():
        done = CliRunner().invoke(cli, [*push, engine.url, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["mode"] == "streamed"
        assert engine.look()["digests"] == expected_digests(12, 2)
    for others in (["--group", "gloo"], ["--protocol", "checkpoint-engine"]):
        done = CliRunner().invoke(cli, [*push, "http://127.0.0.1:9", *others])
        assert done.exit_code == 2
        assert "--cuda-ipc" in done.stderr


def test_an_engine_that_was_left_paused_resumes(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(13)}, step=130)
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", engine.url])
    assert done.exit_code == 0, done.output
    HttpEngine(engine.url).pause(time_limit(10))
    assert engine.paused
    done = CliRunner().invoke(cli, ["push", "--resume", engine.url])
    assert done.exit_code == 0, done.output
    assert f"{engine.url} serves version 130" in done.output
    assert not engine.paused
    for wrong in (["--resume", engine.url, "--to", engine.url], ["--resume", "a:1"], [str(tmp_path / "c")], []):
        done = CliRunner().invoke(cli, ["push", *wrong])
        assert done.exit_code == 2, (wrong, done.output)


def test_behind_a_proxy_that_authenticates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(14)}, step=140)
    with toy_engine(1, token="a-secret") as engine:
        push, resume = ["push", str(tmp_path / "c"), "--to", engine.url], ["push", "--resume", engine.url]
        for wrong in (push, [*push, "--token", "b-secret"], [*resume, "--header", "X-Key: b-secret"]):
            done = CliRunner().invoke(cli, wrong)
            assert done.exit_code == 6
            assert "answered 401" in done.stderr
            assert "secret" not in done.output
        for option in (["--token", "a-secret"], ["--header", "Authorization: Bearer a-secret"]):
            done = CliRunner().invoke(cli, [*push, *option])
            assert done.exit_code == 0, done.output
            HttpEngine(engine.url, token="a-secret").pause(time_limit(10))
            done = CliRunner().invoke(cli, [*resume, *option])
            assert done.exit_code == 0, done.output
            assert not engine.paused
        monkeypatch.setenv("BYTECHECKPOINT_PUSH_TOKEN", "a-secret")
        assert CliRunner().invoke(cli, resume).exit_code == 0
        done = CliRunner().invoke(cli, [*resume, "--header", "a-secret"])
        assert done.exit_code == 2
        assert "secret" not in done.output
        assert "secret" not in CliRunner().invoke(cli, ["push", "--help"]).output


def test_the_commits_of_a_job_are_followed(engine: ToyEngine, tmp_path: Path) -> None:
    for step in (1, 2):
        bcp.save(tmp_path / f"step-{step}", {"model": ToyTrainee(20 + step)}, step=step)
    before = engine.look()["log"].count("/pause")
    command = ["push", "--watch", str(tmp_path), "--to", engine.url, "--watch-timeout", str(time_limit(3))]
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(CliRunner().invoke, cli, command)
        until(lambda: engine.look()["digests"] == expected_digests(22, 2), "the newest is served")
        bcp.save(tmp_path / "step-3", {"model": ToyTrainee(23)}, step=3)
        done = following.result()
    assert done.exit_code == 0, done.output
    assert engine.look()["digests"] == expected_digests(23, 2)
    assert engine.look()["log"].count("/pause") == before + 2
    assert "the engines serve version 3" in done.output
    done = CliRunner().invoke(cli, ["push", "--watch", str(tmp_path), str(tmp_path), "--to", engine.url])
    assert done.exit_code == 2


def _spoil(folder: Path) -> None:
    (data,) = folder.glob("*/model-*.safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)


def test_checkpoints_that_cannot_be_pushed_are_left_out(
    engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempted, push = list[int](), push_module._Following.push

    def watched(following: push_module._Following, checkpoint: Checkpoint) -> None:
        if checkpoint.step == 3:
            shutil.rmtree(tmp_path / "step-3")  # as retention does
        try:
            push(following, checkpoint)
        finally:
            attempted.append(checkpoint.step or 0)

    monkeypatch.setattr(push_module._Following, "push", watched)
    command = ["push", "--watch", str(tmp_path), "--to", engine.url, "--watch-timeout", str(time_limit(60))]
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(CliRunner().invoke, cli, command)
        for step in range(1, 5):
            model = ToyTrainee(40 + step)
            if step == 1:
                model.norm.data[3] = torch.nan
            bcp.save(tmp_path / "new", {"model": model}, step=step)
            if step == 2:
                _spoil(tmp_path / "new")
            (tmp_path / "new").rename(tmp_path / f"step-{step}")
            until(lambda step=step: step in attempted or following.done(), f"step {step} was tried")
        assert engine.look()["digests"] == expected_digests(44, 2)
        del model.norm
        bcp.save(tmp_path / "step-5", {"model": model}, step=5)
        done = following.result()
    assert attempted == [1, 2, 3, 4, 5]
    assert done.exit_code == 1  # it does not fit
    for step, why in enumerate(("NaN or infinite", "damaged|checksum|corrupt", "step-3"), 1):
        assert re.search(rf"step {step} was not pushed: .*({why})", done.stderr), done.stderr


def test_no_engine(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": ToyTrainee(8)})
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", "http://127.0.0.1:9"])
    assert done.exit_code == 6
    assert "is the engine up?" in done.stderr


class _Relay:
    """A port that leads to an engine, to none, or to another one, as when an engine is down or has restarted."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.engine: ToyEngine | None = None
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with ThreadPoolExecutor(32) as threads, suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if self.engine is None:
                    connection.close()
                    continue
                port = int(self.engine.url.rpartition(":")[2])
                other = socket.create_connection(("127.0.0.1", port))
                for one, two in ((connection, other), (other, connection)):
                    threads.submit(self._copy, one, two)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.mark.parametrize("is_alone", [True, False])
def test_engines_that_are_down_or_restart_get_the_last_checkpoint(
    is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one beyond a quorum."""
    monkeypatch.setattr(push_module, "_POLL_S", 0.1)
    monkeypatch.setattr(push_module, "_LOOK_S", 0.2)
    stop, tried = threading.Event(), threading.Event()
    look, push = push_module._Following.stop, push_module._Following.push

    def watched(following: push_module._Following, checkpoint: Checkpoint) -> None:
        push(following, checkpoint)
        tried.set()

    monkeypatch.setattr(push_module._Following, "push", watched)
    monkeypatch.setattr(push_module._Following, "stop", lambda following: look(following) or stop.is_set())
    bcp.save(tmp_path / "step-1", {"model": ToyTrainee(31)}, step=1)
    relay = _Relay()
    command = ["push", "--watch", str(tmp_path), "--to", relay.url, "--deadline", str(time_limit(10))]
    try:
        with toy_engine(2) as first, toy_engine(2) as restarted, toy_engine(1) as up, ThreadPoolExecutor(1) as thread:
            command += [] if is_alone else ["--to", up.url, "--quorum", "1"]
            following = thread.submit(CliRunner().invoke, cli, command)
            try:
                assert tried.wait(time_limit(60))
                assert is_alone or up.look()["digests"] == expected_digests(31, 1)
                for worker in range(2):
                    restarted.fault(worker, "start version", 0)  # from an older checkpoint
                for engine in (first, restarted):
                    relay.engine = engine
                    until(lambda engine=engine: engine.look()["digests"] == expected_digests(31, 2), "it is served")
            finally:
                stop.set()
            done = following.result()
    finally:
        relay.close()
    assert done.exit_code == 0, done.output
    assert done.output.count("the engines serve version 1 ") == (2 if is_alone else 3)
    assert ("trying again every" if is_alone else "was left out") in done.stderr
