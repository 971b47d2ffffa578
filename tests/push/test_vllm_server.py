"""Pushes into vLLM's server over HTTP, from a checkpoint and from FSDP-2. Needs vLLM."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.testing import time_limit

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from click.testing import CliRunner
from join_probes import until
from torch import nn
from torch.distributed.fsdp import fully_shard
from vllm_loras import CONFIG, lora, merge_descriptions, store
from vllm_pushes import made, reference_tokens
from vllm_server import ask_server, serving, tokens_of

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import DeadlineError, EngineError
from bytecheckpoint.inference.push import (
    AdapterEngine,
    HttpEngine,
    Pusher,
    PushReport,
    adapter_state,
)
from bytecheckpoint.inference.push.engines.base import ask
from bytecheckpoint.inference.push.messages import decode
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.sampled(3, of=__name__)]

_TP = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of two workers, and with an adapter."""
    folder = tmp_path_factory.mktemp("server")
    lora_options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"started={store(folder, 8)}"]
    with serving(folder, "--tensor-parallel-size", str(_TP), *lora_options) as url:
        yield url


def _push_sharded(rank: int, world_size: int, url: str, seeds: list[int]) -> list[tuple[PushReport, Any]]:
    found = []
    with Pusher(HttpEngine(url), deadline_s=time_limit(120)) as pusher:
        for seed in seeds:
            report = pusher.push(fully_shard(made("llama", seed)), version=seed)
            found.append((report, tokens_of(url) if rank == 0 else None))
    return found


def test_from_two_ranks_that_hold_shards(server: str) -> None:
    assert tokens_of(server) == reference_tokens(made("llama", 0))
    with RankPool(2) as pool:
        found = pool.run(_push_sharded, server, [1, 2, 3], timeout_s=200)[0]
    assert [tokens for _, tokens in found] == [reference_tokens(made("llama", seed)) for seed in (1, 2, 3)]
    for report, _ in found:
        assert all(worker.requested <= 0.55 * report.engine_bytes for worker in report.workers)
        assert all(nbytes > 0 for nbytes in report.written)


def test_the_command_and_the_version(server: str, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": made("llama", 4)}, step=4)
    done = CliRunner().invoke(cli, ["push", str(tmp_path / "c"), "--to", server])
    assert done.exit_code == 0, done.output
    assert tokens_of(server) == reference_tokens(made("llama", 4))
    assert ask_server(server, "/weight_info")["weight_version"] == "4"


@pytest.mark.parametrize("pause", ["keep", "abort"])
@pytest.mark.sampled(1)
def test_what_happens_to_requests(server: str, pause: Any) -> None:
    seed = {"keep": 5, "abort": 6}[pause]
    with Pusher(HttpEngine(server, pause=pause), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", seed), version=seed)
        assert tokens_of(server) == reference_tokens(made("llama", seed))
        assert ask_server(server, "/weight_info")["weight_version"] == str(seed)
        assert ask_server(server, "/is_paused") == {"is_paused": False}


def test_an_engine_that_its_owner_has_paused_stays_paused(server: str) -> None:
    """Also if the sender is killed. A request that waits meanwhile is answered with the new weights."""
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher, ThreadPoolExecutor(1) as threads:
        pusher.push(made("llama", 17), version=17)
        tokens_of(server)
        ask_server(server, "/pause", {})
        try:
            waiting = threads.submit(tokens_of, server)
            pusher.push(made("llama", 18), version=18)
            assert ask_server(server, "/is_paused")["is_paused"]
            with RankPool(1) as pool:
                pool.run(_die, server, "push.apply.loaded", expect_death={0: signal.SIGKILL})
            until(lambda: ask_server(server, "/weight_info")["weight_version"] == "11", "the worker has ended the push")
            assert ask_server(server, "/is_paused")["is_paused"]
            assert not waiting.done()
        finally:
            ask_server(server, "/resume", {})
        assert waiting.result() == tokens_of(server) == reference_tokens(made("llama", 11))


def _die(rank: int, world_size: int, url: str, point: str) -> None:
    telemetry.observe(lambda name, event: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
    with Pusher(HttpEngine(url), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 11), version=11)


def test_the_engine_ends_a_pause_of_a_sender_that_is_killed(server: str) -> None:
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 10), version=10)
    for point, seed in (("push.apply.paused", 10), ("push.apply.loaded", 11)):
        with RankPool(1) as pool:
            pool.run(_die, server, point, expect_death={0: signal.SIGKILL})
        until(lambda: not ask_server(server, "/is_paused")["is_paused"], "resumed")
        assert tokens_of(server) == reference_tokens(made("llama", seed))
        assert ask_server(server, "/weight_info")["weight_version"] == str(seed)
    ask_server(server, "/pause", {})
    done = CliRunner().invoke(cli, ["push", "--resume", server])
    assert done.exit_code == 0, done.output
    assert "serves version 11" in done.output
    assert tokens_of(server) == reference_tokens(made("llama", 11))


def _end_in_apply(rank: int, world_size: int, url: str, number: int) -> None:
    """Send the request that applies a version, and do not wait for its answer."""
    rpc = HttpEngine._rpc

    def end(engine: HttpEngine, arguments: Any, timeout_s: float) -> list[Any]:
        if decode(arguments[0])["kind"] != "apply":
            return rpc(engine, arguments, timeout_s)
        HttpEngine._rpc = rpc  # type: ignore[method-assign]
        with contextlib.suppress(DeadlineError):
            rpc(engine, arguments, 0.05)
        os.kill(os.getpid(), number)
        return []

    HttpEngine._rpc = end  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Pusher(HttpEngine(url), deadline_s=time_limit(120)) as pusher:
        try:
            pusher.push(made("llama", 11), version=11)
        except KeyboardInterrupt:
            return


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=str)
@pytest.mark.sampled(1)
def test_a_sender_that_ends_while_the_engine_applies(server: str, end: int) -> None:
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 10), version=10)
    with RankPool(1) as pool:
        pool.run(_end_in_apply, server, int(end), expect_death={0: end} if end == signal.SIGKILL else {})
    until(lambda: not ask_server(server, "/is_paused")["is_paused"], "resumed")
    assert tokens_of(server) in [reference_tokens(made("llama", seed)) for seed in (10, 11)]
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        assert pusher.resume() == [pusher.state()[0][0]["version"]]
        pusher.push(made("llama", 12), version=12)
    assert tokens_of(server) == reference_tokens(made("llama", 12))


def test_wrong_arguments_are_answered(server: str) -> None:
    """An exception of a worker would leave the other one's response unread, for vLLM's next request."""
    for args in ([1], [], ["a", "b"], [None], ["a:b"], [["a"]]):
        answers = ask_server(server, "/collective_rpc", {"method": "bcp_push", "args": args})["results"]
        assert [decode(answer)["failure"]["kind"] for answer in answers] == [
            decode(answers[0])["failure"]["kind"]
        ] * _TP
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 12), version=12)
    assert tokens_of(server) == reference_tokens(made("llama", 12))


def _digests(url: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = ask_server(url, "/collective_rpc", {"method": "bcp_test_digest"})["results"]
    return found


@pytest.mark.sampled(1, of="engines of vLLM")
def test_joins_of_other_layouts_while_an_engine_goes_on(server: str, tmp_path: Path) -> None:
    """The server, of two workers, gives to an engine of two pipeline stages and other weights, and gets others back."""
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 7), version=7)
    given = reference_tokens(made("llama", 7))
    limit_s = time_limit(60)
    with (
        serving(tmp_path / "hf", "--pipeline-parallel-size", "2") as stages,
        Pusher(HttpEngine(stages), deadline_s=limit_s) as pusher,
    ):
        started = _digests(stages)
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(pusher.push, HttpEngine(server))
            while not joining.done():
                assert tokens_of(server) == given
            report = joining.result()
        assert report.version == 7
        assert report.written == [sum(worker.sent for worker in report.workers)]
        assert tokens_of(stages) == given
        joined = _digests(stages)
        pusher.push(made("llama", 8), version=8)
        assert tokens_of(stages) == reference_tokens(made("llama", 8))
        pushed = _digests(stages)
        for one, other in ((started, joined), (joined, pushed)):
            assert all(before != after for before, after in zip(one, other, strict=True))
        # As if it had been pushed to.
        pusher.push(made("llama", 7), version=7)
        assert _digests(stages) == joined
        assert tokens_of(server) == given
        pusher.push(made("llama", 8), version=8)
        with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as back:
            assert back.push(HttpEngine(stages)).version == 8
        assert tokens_of(stages) == reference_tokens(made("llama", 8))
        os.kill(ask(HttpEngine(stages), "state", {}, time_limit(60))[1]["pid"], signal.SIGKILL)
        # An error of the first request after it, or of a later one when the server has noticed. vLLM never replies to
        # one that arrives while it shuts down.
        with (
            Pusher(HttpEngine(stages), deadline_s=time_limit(10)) as impatient,
            pytest.raises((EngineError, DeadlineError), match=stages) as failed,
        ):
            impatient.push(made("llama", 7), version=7)
        if isinstance(failed.value, EngineError):
            assert "its workers was killed or failed, and its log has" in str(failed.value)
    assert tokens_of(server) == reference_tokens(made("llama", 8))


def test_an_engine_gives_to_itself(server: str) -> None:
    """In chunks of another size, so that all is sent."""
    with Pusher(HttpEngine(server), deadline_s=time_limit(120), chunk_bytes=1 << 14) as pusher:
        pusher.push(made("llama", 9), version=9)
    holder = HttpEngine(server)
    with Pusher(HttpEngine(server), deadline_s=time_limit(120), chunk_bytes=1 << 15) as pusher:
        report = pusher.push(holder, version="nine")
    holder.close()
    assert [worker.sent for worker in report.workers] == [worker.requested for worker in report.workers]
    assert tokens_of(server) == reference_tokens(made("llama", 9))
    assert ask_server(server, "/weight_info")["weight_version"] == "nine"


class _Trainee(nn.Module):
    """The factors of an adapter, under the names of a PEFT model that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, tensor in lora(seed).items():
            *parents, leaf = name.replace(".weight", ".default.weight").split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in dict(place.named_children()):
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            place.register_parameter(leaf, nn.Parameter(tensor))


def _push_adapter(rank: int, world_size: int, url: str, name: str, seed: int) -> PushReport:
    engine = AdapterEngine(HttpEngine(url), name, CONFIG)
    with Pusher(engine if rank == 0 else None, deadline_s=time_limit(120)) as pusher:
        return pusher.push({"model": adapter_state(fully_shard(_Trainee(seed)))}, version=seed)


def test_pushes_keep_adapters(server: str, tmp_path: Path) -> None:
    """Also one whose file is gone: vLLM would end when it reads the file again."""
    ask_server(server, "/v1/load_lora_adapter", {"lora_name": "own", "lora_path": store(tmp_path, 8)})
    tokens_of(server, "own")
    shutil.rmtree(tmp_path)
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher:
        pusher.push(made("llama", 16), version=16)
    assert tokens_of(server, "own") == reference_tokens(merge_descriptions(16, 8))
    assert tokens_of(server) == reference_tokens(made("llama", 16))


def test_adapters(server: str) -> None:
    with Pusher(HttpEngine(server), deadline_s=time_limit(120)) as pusher, RankPool(2) as pool:
        pusher.push(made("llama", 7), version=7)
        assert tokens_of(server, "started") == reference_tokens(merge_descriptions(7, 8))
        report = pool.run(_push_adapter, server, "started", 9)[0]
        assert tokens_of(server, "started") == reference_tokens(merge_descriptions(7, 9))
        assert [worker.sent for worker in report.workers] == [report.engine_bytes] * 2
        # An unknown adapter name is registered once; vLLM reads no file.
        pool.run(_push_adapter, server, "fresh", 10)
        ask_server(server, "/v1/load_lora_adapter", {"lora_name": "fresh", "lora_path": "pushed"})
        assert tokens_of(server, "fresh") == reference_tokens(merge_descriptions(7, 10))
        pool.run(_push_adapter, server, "fresh", 11)
        assert tokens_of(server, "fresh") == reference_tokens(merge_descriptions(7, 11))
        assert tokens_of(server) == reference_tokens(made("llama", 7))
        assert ask_server(server, "/weight_info")["weight_version"] == "7"
        pusher.push(made("llama", 12), version=12)
    for name, seed in (("started", 9), ("fresh", 11)):
        assert tokens_of(server, name) == reference_tokens(merge_descriptions(12, seed))
