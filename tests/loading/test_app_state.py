"""``AppState``: sections that are restored late, and sections that a checkpoint may lack."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import AppState, CheckpointManager
from bytecheckpoint.errors import CorruptionError, MismatchError, UsageError
from bytecheckpoint.testing import RankPool


def _parts(value: float) -> dict[str, object]:
    return {
        "model": {"w": torch.full((4,), value)},
        "extra": {"step": int(value)},
        "late": {"a": torch.full((2,), value), "b": int(value)},
    }


def test_a_load_leaves_late_sections_to_load_late(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", AppState(_parts(1.0), late=["late"]))
    parts = _parts(0.0)
    app = AppState(parts, late=["late"])
    assert app.load_late() is None
    assert sorted(bcp.load(tmp_path / "c", app).loaded) == ["extra.step", "model.w"]
    assert parts["extra"] == {"step": 1}
    assert parts["late"]["b"] == 0
    report = app.load_late()
    assert report is not None
    assert report.url == str(tmp_path / "c")
    assert parts["late"]["b"] == 1
    assert torch.equal(parts["late"]["a"], torch.full((2,), 1.0))
    assert app.load_late() is None


def test_random_numbers_drawn_between_are_undone(tmp_path: Path) -> None:
    app = AppState({"extra": {"a": 1}, "rng": bcp.RNGState()}, late=["rng"])
    bcp.save(tmp_path / "c", app)
    expected = torch.rand(3), random.random()
    bcp.load(tmp_path / "c", app)
    torch.rand(7)  # as a data loader does
    app.load_late()
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_objects_may_be_created_after_the_state(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", _parts(3.0))
    found: dict[str, object] = {}
    app = AppState(lambda: found, late=["late"])
    found |= {"model": {"w": torch.zeros(4)}}
    bcp.load(tmp_path / "c", app)
    assert found["model"]["w"][0] == 3.0
    assert app.load_late() is None
    bcp.load(tmp_path / "c", app)
    found["late"] = {"a": torch.zeros(2), "b": 0}
    app.load_late()
    assert found["late"]["b"] == 3


def test_optional_sections_stay_unchanged_if_they_are_not_stored(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": {"w": torch.ones(4)}, "ema": {"w": torch.ones(4)}})
    parts = {"model": {"w": torch.zeros(4)}, "scaler": {"scale": 7.0}, "ema": {"w": torch.zeros(4)}}
    with pytest.raises(MismatchError, match=r"scaler"):
        bcp.load(tmp_path / "c", AppState(parts))
    report = bcp.load(tmp_path / "c", AppState(parts, optional=["scaler", "ema"]), strict="exact")
    assert parts["scaler"] == {"scale": 7.0}
    assert parts["ema"]["w"][0] == 1
    assert any("scaler is not stored" in note for note in report.notes)


def test_an_optional_section_that_is_stored_has_the_usual_rules(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": {"w": torch.ones(4)}, "scaler": {"scale": 1.0}})
    parts = {"model": {"w": torch.zeros(4)}, "scaler": {"growth": 2}}
    with pytest.raises(MismatchError, match=r"scaler\.growth"):
        bcp.load(tmp_path / "c", AppState(parts, optional=["scaler"]))
    assert parts["model"]["w"][0] == 0


def test_only_optional_sections_and_none_of_them_stored(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": {"w": torch.ones(4)}})
    parts = {"scaler": {"scale": 7.0}, "rng": bcp.RNGState()}
    app = AppState(parts, optional=["scaler", "rng"], late=["rng"])
    assert bcp.load(tmp_path / "c", app).loaded == []
    assert app.load_late() is not None
    assert parts["scaler"] == {"scale": 7.0}


def test_strictness_of_late_sections(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", _parts(1.0))
    parts = {"model": {"w": torch.zeros(4)}, "late": {"a": torch.zeros(2), "new": 5}}
    app = AppState(parts, late=["late"])
    bcp.load(tmp_path / "c", app, strict={"late": False})
    assert app.load_late().missing == ["late.new"]
    bcp.load(tmp_path / "c", app)
    with pytest.raises(MismatchError, match=r"late\.new"):
        app.load_late()
    with pytest.raises(UsageError, match=r"strict names sections that are not in the state: \['latte'\]"):
        bcp.load(tmp_path / "c", app, strict={"latte": False})


def test_patterns_and_renames_apply_to_what_is_not_late(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", _parts(1.0))
    parts = {"model": {"v": torch.zeros(4)}, "extra": {"step": 0}, "late": {"a": torch.zeros(2), "b": 0}}
    app = AppState(parts, late=["late"])
    bcp.load(tmp_path / "c", app, include=["model"], rename={"model.w": "model.v"})
    app.load_late()
    assert parts["model"]["v"][0] == 1
    assert parts["extra"]["step"] == 0
    assert parts["late"]["b"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sections": 5}, "a mapping or a function"),
        ({"sections": {"a": {}}, "late": ["b"]}, r"late names sections that do not exist: \['b'\]"),
        ({"sections": {"a": {}}, "optional": "a"}, "optional must be a list"),
    ],
)
def test_invalid_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AppState(**arguments)


def test_a_state_that_is_late_altogether(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"a": {"b": 1}})
    with pytest.raises(bcp.errors.StateError, match="every section of the AppState is late"):
        bcp.load(tmp_path / "c", AppState({"a": {"b": 0}}, late=["a"]))


def test_a_manager_falls_back_and_loads_late_from_the_same_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, cadence=bcp.Cadence(every_steps=1)) as manager:
        for step in (1, 2):
            manager.save(step, AppState(_parts(float(step)), late=["late"]))
    damaged = next((tmp_path / "step-2").glob("attempt-*/model-*"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    parts = _parts(0.0)
    app = AppState(parts, late=["late"])
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(app).step == 1
        assert app.load_late().step == 1
    assert parts["late"]["b"] == 1


def test_a_late_section_that_is_damaged_can_be_tried_again(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", _parts(1.0))
    app = AppState(parts := _parts(0.0), late=["late"])
    bcp.load(tmp_path / "c", app)
    file = next((tmp_path / "c").glob("attempt-*/late-*.safetensors"))
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptionError):
        app.load_late()
    file.write_bytes(good)
    app.load_late()
    assert parts["late"]["b"] == 1


def _on_two_ranks(rank: int, world_size: int, path: str) -> list[float]:
    state = {"model": {"w": torch.full((4,), 1.0)}, "rng": bcp.RNGState()}
    torch.manual_seed(rank)
    app = AppState(state, late=["rng"], optional=["rng"])
    bcp.save(path, app)
    first = torch.rand(1).item()
    bcp.load(path, app)
    torch.rand(5 + rank)
    app.load_late()
    return [first, torch.rand(1).item()]


def test_ranks_restore_their_own_late_state(rank_pool: RankPool, tmp_path: Path) -> None:
    found = rank_pool.run(_on_two_ranks, str(tmp_path / "c"), world_size=2)
    assert found[0][0] == found[0][1]
    assert found[1][0] == found[1][1]
    assert found[0][0] != found[1][0]


def test_a_function_may_make_its_objects_each_time(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    app = AppState(lambda: {"optimizer": [optimizer], "model": [model]})
    bcp.save(tmp_path / "c", app)
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    bcp.load(tmp_path / "c", app)
    assert torch.equal(model.weight, expected)
    assert optimizer.param_groups[0]["lr"] == 0.5
