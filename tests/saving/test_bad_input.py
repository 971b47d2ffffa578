"""States that cannot be saved or filled: their own error, which says what, where and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import keys_of
from sorted_arguments import saving
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    MismatchError,
    NameCollisionError,
    StateError,
    UnknownObjectError,
    UnserializableError,
    UnsupportedTensorError,
    UsageError,
)


def _tree(**entries: Any) -> dict[str, Any]:
    return {"extra_state": entries}


def _value(path: Path) -> int:
    """What is committed at ``path``."""
    return int(bcp.open(path).section_values("extra_state")[("value",)])


# -- states that cannot be saved ---------------------------------------------------------------------------------------


class _Opaque:
    pass


@pytest.fixture
def previous(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint that every refused save must leave as it is."""
    path = tmp_path / "checkpoint"
    bcp.save(path, _tree(value=1))
    before = {key: (path / key).read_bytes() for key in keys_of(path)}
    yield path
    assert {key: (path / key).read_bytes() for key in keys_of(path)} == before


def _refused(path: Path, state: Any, error: type[Exception], *results: str, **options: Any) -> None:
    for background in (False, True):
        with pytest.raises(error) as caught:
            bcp.save(path, state, async_save=background, **saving(**options))
        for part in results:
            assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda x: x, "function"), (_Opaque(), "_Opaque"), (Decimal(1), "Decimal"), (object, "type"), (open, "builtin")],
    ids=["lambda", "object", "enum", "class", "builtin"],
)
def test_what_is_no_plain_value(previous: Path, value: Any, kind: str) -> None:
    state = _tree(value=2, deep={"er": [1, (2, value)]})
    _refused(
        previous, state, UnserializableError, r"extra_state\.deep\.er\.1\.1", kind, "allow_pickle=True", "state_dict"
    )


def test_a_lambda_in_an_optimizer_group(previous: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["warm_up"] = lambda step: step
    _refused(
        previous, {"model": model, "optimizer": optimizer}, UnserializableError, r"optimizer\.param_groups", "warm_up"
    )


def test_pickles_only_when_asked_at_both_ends(tmp_path: Path) -> None:
    bcp.save(tmp_path, _tree(value=1, colour=Decimal(3)), options=bcp.SaveOptions(allow_pickle=True))
    target = _tree(value=0, colour=None)
    with pytest.raises(StateError, match=r"extra_state\.colour was stored as a pickle.*allow_pickle=True to load"):
        bcp.load(tmp_path, target)
    assert target == _tree(value=0, colour=None)
    bcp.load(tmp_path, target, options=bcp.LoadOptions(allow_pickle=True))
    assert target == _tree(value=1, colour=Decimal(3))


def test_nan_keys(previous: Path) -> None:
    nan = float("nan")
    _refused(previous, _tree(table={nan: 1}), UnserializableError, r"extra_state\.table", "NaN key")
    _refused(previous, _tree(table=[{(1, nan): 1}]), UnserializableError, r"extra_state\.table", "NaN key")
    _refused(
        previous, _tree(table={_Opaque(): 1}), UnserializableError, r"extra_state\.table", "_Opaque", "keys must be"
    )


def test_tensors_whose_names_collide(previous: Path) -> None:
    state = _tree(**{"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    _refused(previous, state, NameCollisionError, r"'a\.b'", "rename")
    state = {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}
    _refused(previous, state, NameCollisionError, r"'a\.b'", "rename")


def test_values_with_dots_in_their_keys_do_not_collide(tmp_path: Path) -> None:
    """Values are stored under paths, so that both survive under their own."""
    bcp.save(tmp_path, _tree(**{"a.b": 1, "a": {"b": 2, "1": "text", 1: "number"}}))
    target = _tree(**{"a.b": 0, "a": {"b": 0, "1": "", 1: ""}})
    bcp.load(tmp_path, target)
    assert target == _tree(**{"a.b": 1, "a": {"b": 2, "1": "text", 1: "number"}})


def test_names_kept_for_ranks(previous: Path) -> None:
    _refused(previous, _tree(**{"weight@3": torch.ones(1)}), NameCollisionError, r"weight@3", "rename")
    bcp.save(previous.with_name("fine"), _tree(**{"weight@home": torch.ones(1), "count@3": 1}))


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
        (_nested, "as separate tensors"),
        (lambda: torch.ones(3, device="meta"), "materialize"),
        (lambda: nn.LazyLinear(3).weight, "forward pass"),
    ],
    ids=["coo", "csr", "quantised", "nested", "meta", "lazy"],
)
def test_tensors_without_dense_bytes(previous: Path, make: Any, advice: str) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    _refused(previous, _tree(value=2, inner={"odd": tensor}), UnsupportedTensorError, r"inner\.odd", advice)
    _refused(previous, {"model": {"odd": tensor}}, UnsupportedTensorError, "odd", advice)


def test_a_tensor_inside_a_plain_value(previous: Path) -> None:
    _refused(previous, _tree(odd={("a", 1): torch.ones(1)}), UnserializableError, r"extra_state\.odd", "tensor inside")


def test_a_tree_that_contains_itself(previous: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    _refused(previous, _tree(loop=loop), UnserializableError, r"extra_state\.loop", "contains itself")
    table: dict[str, Any] = {"deep": {}}
    table["deep"]["again"] = table
    _refused(previous, {"extra_state": table}, UnserializableError, "contains itself")


@pytest.mark.parametrize("state", [[1, 2], None, {}, nn.Linear(1, 1), "model"], ids=repr)
def test_a_state_that_is_no_mapping(previous: Path, state: Any) -> None:
    _refused(previous, state, StateError, "non-empty mapping such as", "'model': model")
    with pytest.raises(StateError, match="non-empty mapping such as"):
        bcp.load(previous, state)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "a b", 3, None, "-x", "ü", "x" * 300])
def test_section_names_that_cannot_be_files(previous: Path, name: Any) -> None:
    _refused(previous, {name: {"value": 1}}, StateError, re.escape(repr(name)), "use .*letters, digits")


def test_sections_of_unknown_kinds(previous: Path) -> None:
    _refused(previous, {"extra": _Opaque()}, UnknownObjectError, "'extra'", "_Opaque", "register_adapter")
    _refused(previous, {"model": [nn.Linear(1, 1), _Opaque()]}, UnserializableError, r"model\.1", "_Opaque")
    _refused(previous, _tree(value=1), UnknownObjectError, "'nonsense'", "the known ones are", framework="nonsense")


def test_an_optimizer_that_nothing_names(previous: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    _refused(previous, {"optimizer": optimizer}, StateError, "group 0, parameter 0", "Add the module")
    _refused(previous, _tree(optimizer=optimizer), UnserializableError, r"extra_state\.optimizer", "separate section")


def test_options_that_mean_nothing(previous: Path) -> None:
    _refused(previous, _tree(value=1), UsageError, "step must .*-1", step=-1)
    for metadata in ({"f": _Opaque()}, {3: 1}, {"nan": {float("nan"): 1}}):
        _refused(previous, _tree(value=1), bcp.errors.BytecheckpointError, "metadata", metadata=metadata)


# -- loading into the wrong things -------------------------------------------------------------------------------------


def test_loading_into_the_wrong_things(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Linear(2, 2), "extra_state": {"value": 1, "list": [1, 2]}})
    other = nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, {"model": other, "extra_state": {"value": 0, "list": torch.ones(1)}})
    results = str(caught.value)
    for part in (
        r"model\.weight: stored \[2, 2\], requested \[3, 2\]",
        r"model\.bias: stored \[2\], requested \[3\]",
        r"extra_state\.list",
        "nothing was changed",
        re.escape(str(tmp_path)),
    ):
        assert re.search(part, results), results
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_a_section_that_is_not_stored(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Linear(2, 2)})
    model = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match=r"ema: no such section; the checkpoint has model"):
        bcp.load(tmp_path, {"model": model, "ema": nn.Linear(2, 2)})
