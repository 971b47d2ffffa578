"""The marks ``full`` and ``sampled`` choose what runs outside of the full set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import sampling


@dataclass(eq=False)
class _Item:
    nodeid: str
    marks: tuple[pytest.Mark, ...] = ()

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def _items() -> list[Any]:
    some, one = pytest.mark.sampled(2).mark, pytest.mark.sampled(1, of="pairs").mark
    return [
        _Item("a.py::test_always"),
        _Item("a.py::test_full", (pytest.mark.full.mark,)),
        *(_Item(f"a.py::test_cases[{number}]", (some,)) for number in range(20)),
        *(_Item(f"a.py::test_more[{number}]", (some,)) for number in range(20)),
        _Item("a.py::test_first_of_a_pair", (one,)),
        _Item("b.py::test_second_of_a_pair", (one,)),
    ]


def _run(monkeypatch: pytest.MonkeyPatch, seed: int, full: str = "") -> list[str]:
    monkeypatch.setenv("BCP_TEST_FULL", full)
    monkeypatch.setenv("BCP_TEST_SEED", str(seed))
    items = _items()
    left_out = sampling.left_out(items)
    return [item.nodeid for item in items if item not in left_out]


def test_a_full_run_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, 1, full="1") == [item.nodeid for item in _items()]


def test_other_runs_take_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run(monkeypatch, seed) for seed in range(30)]
    for run in runs:
        assert run[0] == "a.py::test_always"
        kinds = [name.partition("[")[0].rpartition("::")[2] for name in run[1:]]
        assert kinds[:4] == ["test_cases"] * 2 + ["test_more"] * 2
        assert [kind.endswith("of_a_pair") for kind in kinds[4:]] == [True]
    assert runs[0] == _run(monkeypatch, 0)
    for number in range(20):
        assert any(f"a.py::test_cases[{number}]" in run for run in runs)
    assert len({run[-1] for run in runs}) == 2
    # Tests of equally many cases do not always run the same ones.
    assert any({name[-3:] for name in run[1:3]} != {name[-3:] for name in run[3:5]} for run in runs)


def test_the_sample_of_a_module_is_taken_from_those_of_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    module, few = pytest.mark.sampled(3, of="a").mark, pytest.mark.sampled(2).mark
    cases = [_Item(f"a.py::test_cases[{number}]", (few, module)) for number in range(50)]
    items: list[Any] = [*cases, *(_Item(f"a.py::test_{number}", (module,)) for number in range(4))]
    monkeypatch.setenv("BCP_TEST_FULL", "")
    for seed in range(20):
        monkeypatch.setenv("BCP_TEST_SEED", str(seed))
        assert len(items) - len(sampling.left_out(items)) == 3
