"""Pushes of wide weights into engines that hold them in 8 bits with a scale per block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.fsdp import fully_shard
from toy_blocks import QUANTIZED, block_digests, quantized_state
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import BytecheckpointError, MismatchError
from bytecheckpoint.inference.push import HttpEngine, Pusher, PushReport, quantizer
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(5, of=__name__)

CUT = (64, 24)  # FSDP-2 on two ranks cuts a matrix after 32 rows, in the middle of its blocks
WHOLE = (16, 16)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module")
def cut() -> Iterator[ToyEngine]:
    with toy_engine(1, blocks=CUT) as started:
        yield started


@pytest.fixture(scope="module")
def whole() -> Iterator[ToyEngine]:
    with toy_engine(2, blocks=WHOLE) as started:
        yield started


def _trainee(version: int, dtype: torch.dtype) -> Any:
    model = ToyTrainee(version).to(dtype)
    return fully_shard(model) if torch.distributed.is_initialized() else model


def _push(
    rank: int, world_size: int, url: str, versions: list[int], dtype: torch.dtype = torch.bfloat16
) -> list[PushReport]:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        return [pusher.push(_trainee(version, dtype), version=version) for version in versions]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_process(cut: ToyEngine, whole: ToyEngine, dtype: torch.dtype) -> None:
    for engine, tp, blocks in ((cut, 1, CUT), (whole, 2, WHOLE)):
        _push(0, 1, engine.url, [1, 2], dtype)
        assert engine.look()["digests"] == block_digests(_trainee(2, dtype), tp, blocks)


def test_blocks_that_are_split_between_senders(cut: ToyEngine, whole: ToyEngine, pool: RankPool) -> None:
    for engine, tp, blocks in ((cut, 1, CUT), (whole, 2, WHOLE)):
        first, other = pool.run(_push, engine.url, [3, 4])
        assert engine.look()["digests"] == block_digests(_trainee(4, torch.bfloat16), tp, blocks)
        assert first == other
        assert min(first[0].written) > 0


def test_bytes(pool: RankPool) -> None:
    """One byte per element, and four per block."""
    with toy_engine(1, blocks=CUT) as engine:
        (report,) = pool.run(_push, engine.url, [5], torch.float32)[0]
    state = quantized_state(_trainee(5, torch.float32), CUT)
    assert [worker.requested for worker in report.workers] == [sum(tensor.nbytes for tensor in state.values())]
    assert [worker.sent for worker in report.workers] == [worker.requested for worker in report.workers]
    assert report.workers[0].requested < 0.5 * report.engine_bytes


def test_unchanged_chunks_are_not_sent(cut: ToyEngine, pool: RankPool) -> None:
    reports = pool.run(_push_with_a_change, cut.url)[0]
    assert [[worker.sent for worker in report.workers] for report in reports[1:]] == [[64 * 64 + 3 * 4], [0]]


def _push_with_a_change(rank: int, world_size: int, url: str) -> list[PushReport]:
    model = _trainee(6, torch.bfloat16)
    found = []
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        found.append(pusher.push(model, version=6))
        with torch.no_grad():
            model.q.weight.mul_(1.5)
        found.append(pusher.push(model, version=7))
        found.append(pusher.push(model, version=8))
    return found


def test_from_a_checkpoint(cut: ToyEngine, whole: ToyEngine, pool: RankPool, tmp_path: Path) -> None:
    for version, engine, tp, blocks in ((9, cut, 1, CUT), (10, whole, 2, WHOLE)):
        model = _trainee(version, torch.bfloat16)
        bcp.save(tmp_path / f"c{version}", {"model": model}, step=version)
        done = CliRunner().invoke(cli, ["push", str(tmp_path / f"c{version}"), "--to", engine.url])
        assert done.exit_code == 0, done.output
        assert engine.look()["digests"] == block_digests(model, tp, blocks)
        _push(0, 1, engine.url, [1, 2])
        reports = pool.run(_push_checkpoint, engine.url, str(tmp_path / f"c{version}"))
        assert engine.look()["digests"] == block_digests(model, tp, blocks)
        assert min(reports[0].written) > 0


def _push_checkpoint(rank: int, world_size: int, url: str, path: str) -> PushReport:
    with Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        return pusher.push(bcp.open(path))


def test_already_quantized_tensors(cut: ToyEngine) -> None:
    state = quantized_state(_trainee(11, torch.bfloat16), CUT)
    with Pusher(HttpEngine(cut.url), deadline_s=time_limit(30)) as pusher:
        pusher.push({"model": state}, version=11)
    assert cut.look()["digests"] == block_digests(_trainee(11, torch.bfloat16), 1, CUT)


def test_engines_of_both_kinds(cut: ToyEngine, pool: RankPool) -> None:
    with toy_engine(2, "bfloat16") as wide:
        pool.run(_push_to_two, cut.url, wide.url)
        assert wide.look()["digests"] == expected_digests(12, 2, torch.bfloat16)
    assert cut.look()["digests"] == block_digests(_trainee(12, torch.float32), 1, CUT)


def _push_to_two(rank: int, world_size: int, *urls: str) -> None:
    with Pusher([HttpEngine(url) for url in urls], deadline_s=time_limit(30)) as pusher:
        pusher.push(_trainee(12, torch.float32), version=12)


def test_engines_of_different_blocks(cut: ToyEngine, whole: ToyEngine) -> None:
    _push(0, 1, cut.url, [1])
    before = cut.look()["digests"]
    with Pusher([HttpEngine(cut.url), HttpEngine(whole.url)], deadline_s=time_limit(30)) as pusher:
        with pytest.raises(MismatchError, match="in blocks of 64x24, and others in blocks of 16x16"):
            pusher.push(_trainee(13, torch.bfloat16), version=13)
    assert cut.look()["digests"] == before


@pytest.mark.parametrize("group", [None, "gloo"])
def test_streamed(cut: ToyEngine, whole: ToyEngine, pool: RankPool, group: Any) -> None:
    """In a stream, the scales come with the weights of their layer."""
    for engine, tp, blocks in ((cut, 1, CUT), (whole, 2, WHOLE)):
        first, _ = pool.run(_stream, engine.url, [5, 6], group)
        assert {report.mode for report in first} == {"streamed"}
        assert engine.look()["digests"] == block_digests(_trainee(6, torch.bfloat16), tp, blocks)


def _stream(rank: int, world_size: int, url: str, versions: list[int], group: Any) -> list[PushReport]:
    with Pusher(
        HttpEngine(url), deadline_s=time_limit(30), memory_bytes=16_384, chunk_bytes=4096, group=group
    ) as pusher:
        return [pusher.push(_trainee(version, torch.bfloat16), version=version) for version in versions]


def test_the_holder_quantizes_for_a_joining_engine(cut: ToyEngine, whole: ToyEngine) -> None:
    with toy_engine(2, "bfloat16") as holder:
        _push(0, 1, holder.url, [7])
        with Pusher(HttpEngine(whole.url), deadline_s=time_limit(30)) as pusher:
            pusher.push(HttpEngine(holder.url))
        assert whole.look()["digests"] == block_digests(_trainee(7, torch.bfloat16), 2, WHOLE)
        # No worker of the holder has all of a block.
        with Pusher(HttpEngine(cut.url), deadline_s=time_limit(30)) as pusher:
            pusher.push(HttpEngine(holder.url))
        assert cut.look()["digests"] == block_digests(_trainee(7, torch.bfloat16), 1, CUT)
        # And from one that has them quantised to another.
        with toy_engine(1, blocks=WHOLE) as other, Pusher(HttpEngine(other.url), deadline_s=time_limit(30)) as pusher:
            pusher.push(HttpEngine(whole.url))
            assert other.look()["digests"] == block_digests(_trainee(7, torch.bfloat16), 1, WHOLE)


def test_an_engine_that_has_no_scales(pool: RankPool) -> None:
    with toy_engine(1, "float8_e4m3fn") as engine:
        before = engine.look()["digests"]
        raised = pool.run(_fail, engine.url)
        assert {kind for kind, _ in raised} == {MismatchError.__name__}
        for _, message in raised:
            assert "q.weight: bfloat16[64, 64] is sent for float8_e4m3fn" in message
            assert "no scales" in message
        assert engine.look()["digests"] == before


def _fail(rank: int, world_size: int, url: str, fails: bool = False) -> tuple[str, str]:
    """Return the class and message of this rank's error."""
    with pytest.MonkeyPatch.context() as patched, Pusher(HttpEngine(url), deadline_s=time_limit(30)) as pusher:
        if fails and rank == 1:
            patched.setattr(quantizer.Quantizer, "partial_maxima", _broken)
        try:
            pusher.push(_trainee(14, torch.bfloat16), version=14)
        except BytecheckpointError as error:
            return type(error).__name__, str(error)
    raise AssertionError("the push did not fail")


def _broken(self: object) -> bytes:
    raise MemoryError("no memory for maxima")


def test_a_sender_that_fails_while_maxima_are_exchanged(cut: ToyEngine, pool: RankPool) -> None:
    _push(0, 1, cut.url, [1])
    raised = pool.run(_fail, cut.url, True)
    assert {kind for kind, _ in raised} == {"RankFailedError"}
    assert len({message.splitlines()[0] for _, message in raised}) == 1
    assert "no memory for maxima" in raised[0][1]
    assert "rank 1" in raised[0][1]
    assert cut.look()["digests"] == block_digests(_trainee(1, torch.bfloat16), 1, CUT)
    assert not cut.paused
    pool.run(_push, cut.url, [15])
    assert cut.look()["digests"] == block_digests(_trainee(15, torch.bfloat16), 1, CUT)


def test_the_toy_model_is_quantized() -> None:
    assert set(QUANTIZED) < set(ToyTrainee(0).state_dict())
