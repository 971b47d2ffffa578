"""How long a save took is stored with the checkpoint, and nothing depends on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import UsageError
from bytecheckpoint.format.manifest import payload
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY, decode, encode
from bytecheckpoint.format.manifest.payload import SAVE_TIMES_KEY
from bytecheckpoint.telemetry import SAVE_STEPS, Timings
from bytecheckpoint.telemetry.save_times import SaveTimes, pack_steps
from bytecheckpoint.testing.ranks import RankPool


def _times(seconds_by_rank: list[dict[str, float]], *, is_async: bool = True) -> SaveTimes:
    return SaveTimes.of(
        Timings("save"), [pack_steps(Timings("save", seconds=one)) for one in seconds_by_rank], is_async=is_async
    )


def test_the_stall_is_that_of_the_slowest_rank_in_the_call() -> None:
    ranks = [{"plan": 1.0, "stage": 2.0, "write": 9.0}, {"plan": 0.5, "stage": 3.0, "write": 1.0}]
    assert _times(ranks).stall == pytest.approx(3.5)
    synchronous = _times(ranks, is_async=False)
    assert synchronous.stall == synchronous.seconds


def test_steps_that_did_not_run_are_left_out_and_those_after_confirm_too() -> None:
    found = _times([dict.fromkeys(("check", "write", "confirm", "commit"), 1.0)])
    assert list(found.ranks) == ["check", "write"]


def test_a_document_of_many_ranks_is_small_and_shows_the_slowest() -> None:
    random = np.random.default_rng(0)
    ranks = [dict.fromkeys(SAVE_STEPS, float(one)) for one in random.uniform(1, 2, 4096)]
    ranks[1234]["write"] = 20.0
    times = _times(ranks)
    document = times.to_document()
    assert sum(len(one) for one in document["ranks"].values()) == 4096 * 7
    found = SaveTimes.from_document(document, 4096)
    assert found is not None
    assert found.ranks["write"].argmax() == 1234
    for step, seconds in found.ranks.items():
        assert np.abs(seconds - times.ranks[step]).max() <= times.ranks[step].max() / 255 / 2 + 1e-9


_GOOD = {"seconds": 1.0, "stall": 0.5, "slowest": {"write": 0.5}, "ranks": {"write": b"\xff\x80"}}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {**_GOOD, "seconds": None},
        {**_GOOD, "seconds": math.inf},
        {**_GOOD, "stall": math.nan},
        {**_GOOD, "stall": -1.0},
        {**_GOOD, "seconds": 10**400},
        {**_GOOD, "slowest": [1.0]},
        {**_GOOD, "slowest": {"plan": 1.0}},
        {**_GOOD, "slowest": {"write": "slow"}},
        {**_GOOD, "slowest": {"write": -1.0}},
        {**_GOOD, "ranks": {"write": b"\xff"}},
        {**_GOOD, "ranks": {"write": b""}},
        {**_GOOD, "ranks": {"write": 3}},
        {**_GOOD, "ranks": b""},
    ],
)
def test_a_document_that_is_anything_else_is_ignored(wrong: dict[str, Any]) -> None:
    assert SaveTimes.from_document(_GOOD, 2) is not None
    assert SaveTimes.from_document(wrong, 2) is None


def _save(rank: int, world_size: int, path: str, is_async: bool) -> dict[str, float]:
    state = {"model": {f"w{rank}": torch.ones(1000)}}
    handle = bcp.save(path, state, metadata={"run": "r1"}, async_save=is_async)
    handle.result()
    return handle.timings.seconds


@pytest.mark.parametrize("is_async", [False, True])
def test_the_manifest_has_the_steps_of_all_ranks(rank_pool: RankPool, tmp_path: Path, is_async: bool) -> None:
    measured = rank_pool.run(_save, str(tmp_path), is_async, world_size=2)
    found = bcp.open(tmp_path)
    assert found.metadata == {"run": "r1"}
    times = SaveTimes.from_document(found.manifest.save_times, 2)
    assert times is not None
    for step in ("check", "describe", "agree", "plan", "stage", "write"):
        slowest = max(one[step] for one in measured)
        assert times.ranks[step].max() == pytest.approx(slowest, rel=1e-6)
        for rank in range(2):
            assert abs(times.ranks[step][rank] - measured[rank][step]) <= slowest / 250
    assert times.seconds >= max(times.stall, times.ranks["write"][0])
    assert (times.stall == times.seconds) != is_async


def test_a_checkpoint_without_them_or_with_wrong_ones_is_valid(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(3)}}, metadata={"run": "r1"})
    manifest = decode((tmp_path / MANIFEST_KEY).read_bytes())
    for wrong in ({}, {"seconds": "x"}):
        manifest.save_times = wrong
        (tmp_path / MANIFEST_KEY).write_bytes(encode(manifest))
        found = bcp.open(tmp_path)
        assert found.verify().ok
        assert found.metadata == {"run": "r1"}
        assert found.manifest.save_times == wrong
    manifest.metadata[SAVE_TIMES_KEY] = "not a map"
    manifest.save_times = {}
    (tmp_path / MANIFEST_KEY).write_bytes(encode(manifest))
    assert bcp.open(tmp_path).manifest.save_times == {}


def test_metadata_of_the_greatest_size_leaves_no_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_MAX_METADATA", 100)
    bcp.save(tmp_path, {"model": {"w": torch.ones(3)}}, metadata={"large": bytes(80)})
    found = bcp.open(tmp_path)
    assert found.manifest.save_times == {}
    assert found.metadata == {"large": bytes(80)}


def test_the_key_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'bytecheckpoint.save' of metadata is reserved"):
        bcp.save(tmp_path, {"model": {"w": torch.ones(3)}}, metadata={SAVE_TIMES_KEY: {}})
