"""Random states: ``save`` and ``load`` must do exactly what torch.save, torch.load and ``load_state_dict`` do.

What is around the state is drawn, too: the caller's modes of torch, sections under other names, a relative path
and a change of the working directory, and other files in the root. A normal run draws a few dozen states,
``BCP_TEST_EXAMPLES=50`` draws fifty times as many. Hypothesis reduces a state that fails and prints it; keep it in
``KEPT``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sampling
from caller_modes import MODES
from generated_states import StateSpec, assert_equal, build, load_with_torch, specs, state_of, train
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp

_PLAIN = StateSpec(
    layers=("linear",),
    depth=0,
    optimizer="SGD",
    groups=1,
    empty_group=False,
    scheduler=None,
    average=False,
    steps=1,
    used_target=False,
    empty_tree=False,
    tree={},
)

_TENSOR = ("tensor", (3,), "bool", 1)

KEPT = [
    # These failed once: the hyper-parameters of an empty group,
    replace(_PLAIN, empty_group=True, scheduler="cosine", steps=0, used_target=True),
    # the order of keys,
    replace(_PLAIN, layers=("shared",), average=True),
    replace(
        _PLAIN, empty_tree=True, tree={"b": _TENSOR, 10: 1, 2: ("ordered", [("b", _TENSOR), ("a", 1)]), "a": _TENSOR}
    ),
    # and state that only the methods or hooks of a module store.
    replace(_PLAIN, layers=("own format", "hooked", "spectral norm")),
]


@dataclass(frozen=True)
class Surroundings:
    """What is around a state. ``is_moved``: it is saved to a relative path, and the working directory changes then."""

    saving: str = "none"
    loading: str = "none"
    is_renamed: bool = False
    is_moved: bool = False
    others: tuple[str, ...] = ()


_NAMES = ["step-1.tmp", "ünï cödé", ".hidden", "latest", "objects.old", "attempt-x", "lost+found", "manifest.json"]

SURROUNDINGS = st.builds(
    Surroundings,
    saving=st.sampled_from(sorted(MODES)),
    loading=st.sampled_from(sorted(MODES)),
    is_renamed=st.booleans(),
    is_moved=st.booleans(),
    others=st.lists(st.sampled_from(_NAMES), unique=True, max_size=3).map(tuple),
)


def _check(spec: StateSpec, around: Surroundings) -> None:
    folder, before = Path(tempfile.mkdtemp()), Path.cwd()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of schedulers that step before the optimizer has stepped
            _compare(spec, around, folder)
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def _save(state: dict[str, Any], around: Surroundings, folder: Path) -> None:
    for number, name in enumerate(around.others):
        (folder / name).write_bytes(b"other") if number % 2 else (folder / name).mkdir()
    if around.is_renamed:
        state = {f"stored_{name}": obj for name, obj in state.items()}
    with MODES[around.saving]():
        if around.is_moved:
            os.chdir(folder)
            handle = bcp.save("bcp", state, async_save=True)
            os.chdir("/")
            handle.result()
        else:
            bcp.save(folder / "bcp", state)


def _load(state: dict[str, Any], around: Surroundings, folder: Path) -> None:
    renamed = {f"stored_{name}.": f"{name}." for name in state} if around.is_renamed else None
    with MODES[around.loading]():
        newest = bcp.latest(folder)
        assert newest is not None
        assert newest.url == str(folder / "bcp")
        bcp.load(newest, state, rename=renamed)


def _compare(spec: StateSpec, around: Surroundings, folder: Path) -> None:
    source = build(spec, 0)
    train(source, spec.steps)
    expected, found = build(spec, 1), build(spec, 2)
    for built in (expected, found):
        train(built, int(spec.used_target), seed=9)
    load_with_torch(source, expected, folder / "torch")
    _save(state_of(source), around, folder)
    _load(state_of(found), around, folder)
    for name, obj in state_of(expected).items():
        other = state_of(found)[name]
        if hasattr(obj, "state_dict"):
            assert_equal(obj.state_dict(), other.state_dict(), name)
        else:
            assert_equal(obj, other, name)
    for built in (source, expected, found):
        train(built, 3, seed=5)
    for built in (expected, found):
        assert_equal(source.model.state_dict(), built.model.state_dict(), "model after three steps")
        assert_equal(source.optimizer.state_dict(), built.optimizer.state_dict(), "optimizer after three steps")


@pytest.mark.parametrize("spec", KEPT, ids=range(len(KEPT)))
def test_states_that_failed_once(spec: StateSpec) -> None:
    _check(spec, Surroundings())


@seed(sampling.seed())
@settings(
    max_examples=sampling.examples(160, 40),
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(specs(), SURROUNDINGS)
def test_save_and_load_equal_torch_save_and_load_state_dict(spec: StateSpec, around: Surroundings) -> None:
    _check(spec, around)
