"""Random streams continue exactly, or start again reproducibly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import StateError, UsageError
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.encoding import encode_value
from bytecheckpoint.frameworks.rng import RNGState
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(autouse=True)
def _untouched_generators() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def draw() -> list[Any]:
    gauss = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]
    return [*gauss, random.random(), np.random.rand(2).tolist(), torch.rand(3).tolist()]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    return decode_value(encode_value(state, "rng"))  # type: ignore[no-any-return]


def test_streams_continue_exactly_even_between_two_gaussians() -> None:
    seed(3)
    draw()
    state = through_bytes(RNGState().state_dict())
    expected = draw()
    seed(99)
    RNGState().load_state_dict(state)
    assert draw() == expected


def test_state_dict_draws_no_numbers() -> None:
    seed(5)
    expected = draw()
    seed(5)
    RNGState().state_dict()
    assert draw() == expected


def test_reseeding_is_repeatable_and_different_for_every_rank() -> None:
    seed(7)
    state = through_bytes(RNGState(rank=0, world_size=2).state_dict())
    drawn = {}
    for _ in range(2):
        for rank in range(4):
            seed(rank)
            RNGState(rank=rank, world_size=4).load_state_dict(state)
            now = draw()
            assert drawn.setdefault(rank, now) == now
    flat = [str(part) for values in drawn.values() for part in values]
    assert len(set(flat)) == len(flat)


def test_lowest_gives_everyone_the_stored_streams() -> None:
    seed(7)
    state = through_bytes(RNGState(rank=0, world_size=2).state_dict())
    expected = draw()
    for rank in range(3):
        RNGState("lowest", rank=rank, world_size=3).load_state_dict(state)
        assert draw() == expected


def test_error_refuses_another_rank_and_changes_nothing() -> None:
    state = RNGState(rank=0, world_size=2).state_dict()
    before = RNGState().state_dict()
    with pytest.raises(StateError, match="rank 0 of 2 loaded on rank 0 of 3"):
        RNGState("error", rank=0, world_size=3).load_state_dict(state)
    assert encode_value(RNGState().state_dict(), "rng") == encode_value(before, "rng")


def test_another_bit_generator_of_numpy_is_kept() -> None:
    old = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        state = through_bytes(RNGState().state_dict())
        expected = np.random.rand(3).tolist()
        np.random.rand(5)
        RNGState().load_state_dict(state)
        assert np.random.rand(3).tolist() == expected
        RNGState(rank=1, world_size=2).load_state_dict(state)
        other = np.random.rand(3).tolist()
        RNGState(rank=1, world_size=2).load_state_dict(state)
        assert np.random.rand(3).tolist() == other != expected
    finally:
        np.random.set_bit_generator(old)
    with pytest.raises(StateError, match="was a PCG64 when saving and is a MT19937"):
        RNGState().load_state_dict(state)


def test_bad_arguments_and_states() -> None:
    with pytest.raises(UsageError, match="on_resize"):
        RNGState("modulo")  # type: ignore[arg-type]
    with pytest.raises(StateError, match="lacks numpy"):
        RNGState().load_state_dict({"rank": 0, "world_size": 1, "python": (), "torch": None})


def test_states_of_absent_accelerators(caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    state = RNGState().state_dict()
    assert state["accelerator"] == {}
    state["accelerator"] = {"type": "cuda", "states": [np.zeros(16, np.uint8)]}
    with pytest.raises(StateError, match=r"1 cuda device\(s\) were stored, but this process has no accelerator"):
        RNGState("error").load_state_dict(state)
    RNGState().load_state_dict(state)
    assert "only matching generators are restored" in caplog.text


@pytest.mark.gpu
def test_accelerator_streams_continue_exactly() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:  # a build for CUDA has one, but not necessarily a driver
        pytest.skip("no accelerator")
    torch.manual_seed(1)
    torch.rand(3, device=device)
    state = through_bytes(RNGState().state_dict())
    assert state["accelerator"]["type"] == device.type
    expected = torch.rand(3, device=device)
    torch.rand(7, device=device)
    RNGState().load_state_dict(state)
    assert torch.equal(torch.rand(3, device=device), expected)
    drawn = []
    for rank in (0, 1):
        RNGState(rank=rank, world_size=5).load_state_dict(state)
        drawn.append(torch.rand(3, device=device))
    assert not torch.equal(drawn[0], drawn[1])


def _save_streams(rank: int, world_size: int, path: str) -> list[Any]:
    seed(rank)
    bcp.save(path, {"rng": RNGState()}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return draw()


def _load_streams(rank: int, world_size: int, path: str, policy: Any) -> tuple[list[Any], dict[str, tuple[str, str]]]:
    report = bcp.load(
        path,
        {"extra_state": {}, "rng": RNGState(policy)},
        strict=False,
        options=bcp.LoadOptions(deadline_s=time_limit(30)),
    )
    return draw(), report.resumed


def test_the_report_states_which_generators_continue(tmp_path: Path) -> None:
    names = ("rng.python", "rng.numpy", "rng.torch")
    with RankPool(3) as pool:
        saved = pool.run(_save_streams, str(tmp_path), world_size=3)
        for policy in ("reseed", "lowest", "error"):
            for rank, (drawn, resumed) in enumerate(pool.run(_load_streams, str(tmp_path), policy, world_size=3)):
                assert drawn == saved[rank]
                assert resumed == dict.fromkeys(names, ("continued", f"rank {rank} of 3"))
        for rank, (drawn, resumed) in enumerate(pool.run(_load_streams, str(tmp_path), "reseed", world_size=2)):
            assert not set(map(str, drawn)) & {str(one) for of_rank in saved for one in of_rank}
            detail = f"rank {rank} of 2, from the streams of rank 0 of 3"
            assert resumed == dict.fromkeys(names, ("reseeded", detail))
        for drawn, resumed in pool.run(_load_streams, str(tmp_path), "lowest", world_size=2):
            assert drawn == saved[0]
            assert resumed == dict.fromkeys(names, ("continued", "rank 0 of 3"))


def test_devices_without_a_stored_state_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    state = through_bytes(RNGState().state_dict())
    monkeypatch.setattr("bytecheckpoint.frameworks.rng._accelerators", lambda: ("cuda", 2))
    target = RNGState()
    target.load_state_dict(state)
    assert {name: what for name, (what, _) in target.resumed.items()} == {
        **dict.fromkeys(("python", "numpy", "torch"), "continued"),
        **dict.fromkeys(("cuda:0", "cuda:1"), "unchanged"),
    }
