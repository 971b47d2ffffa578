"""Random states: ``save`` and ``load`` must do exactly what torch.save, torch.load and ``load_state_dict`` do.

A normal run draws a few dozen states, ``BCP_GENERATED_STATES=2000`` draws more. Hypothesis reduces a state that fails
and prints it; keep it in ``KEPT``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import sampling
from generated_states import StateSpec, assert_equal, build, load_with_torch, specs, state_of, train
from hypothesis import HealthCheck, Phase, given, seed, settings

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

EXAMPLES = int(os.environ.get("BCP_GENERATED_STATES") or 40)


def _check(spec: StateSpec) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of schedulers that step before the optimizer has stepped
            _compare(spec, folder)
    finally:
        shutil.rmtree(folder)


def _compare(spec: StateSpec, folder: Path) -> None:
    source = build(spec, 0)
    train(source, spec.steps)
    expected, found = build(spec, 1), build(spec, 2)
    for built in (expected, found):
        train(built, int(spec.used_target), seed=9)
    load_with_torch(source, expected, folder / "torch")
    bcp.save(folder / "bcp", state_of(source))
    bcp.load(folder / "bcp", state_of(found))
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
    _check(spec)


@seed(sampling.seed())
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(specs())
def test_save_and_load_equal_torch_save_and_load_state_dict(spec: StateSpec) -> None:
    _check(spec)
