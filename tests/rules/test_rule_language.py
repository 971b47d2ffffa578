"""The language itself: patterns, documents, maps of names and their inverses."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import Array, random_trainer, renamed
from sampling import examples

from bytecheckpoint.errors import RuleError
from bytecheckpoint.rules import (
    Averaged,
    Flat,
    Ignored,
    Replicated,
    Resolution,
    Rule,
    Rules,
    Sharded,
    Source,
    Split,
    Unique,
)
from bytecheckpoint.rules.patterns import Pattern
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta

F64 = DTYPES["float64"]

SEGMENTS = ["a", "w{x}", "{y}b", "{l:int}", "h{l:int}", "{rest:path}", "*", "**", "{x}"]


@pytest.mark.parametrize(
    ("pattern", "name", "captures"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "a.b.c", None),
        ("a.b", "a", None),
        ("{x}.b", "a.b", {"x": "a"}),
        ("{x}.b", "a.a.b", None),
        ("w{x}", "w", None),
        ("w{x}v", "wv", None),
        ("w{x}v", "w1v", {"x": "1"}),
        ("aa{x}aa", "aaa", None),
        ("h.{l:int}", "h.0", {"l": 0}),
        ("h.{l:int}", "h.10", {"l": 10}),
        ("h.{l:int}", "h.01", None),
        ("h.{l:int}", "h.-1", None),
        ("h.{l:int}", "h.\u0661", None),
        ("h.{l:int}", "h." + "9" * 19, None),
        ("h.{l+3}", "h.3", {"l": 0}),
        ("h.{l:int+3}", "h.2", None),
        ("h.{l-1}", "h.0", {"l": 1}),
        ("weight{e:int}", "weight3", {"e": 3}),
        ("weight{e:int}", "weight_scale", None),
        ("{x:path}.w", "w", None),
        ("{x:path}.w", "a.w", {"x": "a"}),
        ("{x:path}.w", "a.b.w", {"x": "a.b"}),
        ("a.{x:path}.b.{y}", "a.b.b.b.b", {"x": "b.b", "y": "b"}),
        ("a.*.c", "a.b.c", {}),
        ("a.*.c", "a.b.b.c", None),
        ("**.c", "a.b.c", {}),
        ("**.c", "c", None),
        ("a.**", "a", None),
        ("{x}", "", None),
    ],
)
def test_patterns(pattern: str, name: str, captures: dict[str, Any] | None) -> None:
    assert Pattern.parse(pattern).match(name) == captures


def test_a_part_matches_the_names_of_the_parts_only() -> None:
    pattern = Pattern.parse("attn.{part}_proj.weight")
    assert pattern.match("attn.q_proj.weight", ("q", "k", "v")) == {"part": "q"}
    assert pattern.match("attn.o_proj.weight", ("q", "k", "v")) is None


@given(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=6), st.data())
def test_a_pattern_matches_what_it_formats(segments: list[str], data: st.DataObject) -> None:
    text = ".".join(segments)
    try:
        pattern = Pattern.parse(text)
    except ValueError:
        return
    assert str(pattern) == text
    if pattern.has_wildcards:
        return
    texts = st.text("ab1.", min_size=1, max_size=4)
    values: dict[str, str | int] = {}
    for name, kind in pattern.fields.items():
        if kind == "int":
            values[name] = data.draw(st.integers(0, 10**17))
        else:
            values[name] = data.draw(texts.filter(lambda one: kind == "path" or "." not in one))  # noqa: B023
    assert pattern.match(pattern.format(values)) == values


def test_matching_long_names_is_linear() -> None:
    name = ".".join(["a"] * 200_000)
    assert Pattern.parse("a.{x:path}.a.a").match(name) is not None
    assert Pattern.parse("a.**.a.b").match(name) is None


# ---------------------------------------------------------------------------------------------------------- documents

NAMES = st.text(string.ascii_letters + '_-"\\\x00\x7f\n\té☃ ', min_size=1, max_size=5)


def rules_with_odd_texts() -> st.SearchStrategy[Rule]:
    name = NAMES.filter(lambda text: "." not in text)
    sizes = st.dictionaries(name, st.integers(0, 1 << 40), min_size=1, max_size=3)
    axes = st.lists(name, min_size=1, max_size=3, unique=True).map(tuple)
    return st.one_of(
        st.builds(Ignored, match=name, optional=st.booleans()),
        st.builds(Unique, match=name, rename=st.none() | name, dim=st.integers(0, 5), parts=sizes),
        st.builds(Replicated, match=name, compare=st.booleans(), padded_from=st.none() | st.integers(0, 9)),
        st.builds(Averaged, match=name, axis=axes),
        st.builds(Sharded, match=name, axis=axes, widths=st.lists(st.integers(0, 9)).map(tuple)),
        st.builds(Flat, match=name, axis=axes, each=st.booleans(), order=st.sampled_from(["listed", "sorted"]) | axes),
    )


@given(st.lists(rules_with_odd_texts(), max_size=4))
def test_documents_are_read_as_they_were_written(rules: list[Rule]) -> None:
    one = Rules(rules)
    again = Rules.from_toml(one.to_toml())
    assert again == one
    assert list(again) == rules
    assert again.to_toml() == one.to_toml()


def test_documents_of_random_trainers_are_read_as_they_were_written() -> None:
    for number in range(500):
        rules = Rules(random_trainer(number).rules)
        assert Rules.from_toml(rules.to_toml()) == rules


def test_every_field_is_written() -> None:
    rules = Rules(
        [
            Sharded(
                match="a.{l:int}.{c:int}.w",
                optional=True,
                rename="b.{l+2}.{c}.{part}",
                indexed={"l": ("vp", "pp"), "c": ("ep",)},
                dim=1,
                parts={"q": 8, "k": 2},
                unit=4,
                groups=2,
                interleaved=False,
                shared=("k",),
                axis=("tp", "cp"),
                also=(Split(dim=0, axis=("ep",)),),
                replicas=("dp", "pp"),
            ),
            Sharded(match="b", rename="c.{l}", stacked=("l",), axis=("tp",), parts={"q": 3}, widths={"q": (1, 2)}),
            Replicated(match="d", compare=True, padded_from=7),
            Flat(match="e", axis=("dp",), rename="x.{member}", order=("z", "y"), alignment=2, padding=3, each=True),
        ]
    )
    text = rules.to_toml()
    assert Rules.from_toml(text) == rules
    for word in ("optional", "rename", "indexed", "dim", "unit", "groups", "interleaved", "shared", "also", "replicas"):
        assert f"\n{word} " in text
    assert 'indexed     = { l = ["vp", "pp"], c = "ep" }' in text
    assert 'also        = [{ dim = 0, axis = "ep" }]' in text


def test_the_document_of_the_documentation() -> None:
    text = """
[[rule]]
match  = "model.layers.{l}.attn.qkv.weight"
kind   = "sharded"
dim    = 0
parts  = { q = 2048, k = 512, v = 512 }
groups = 8
axis   = "tp"
"""
    rules = Rules.from_toml(text)
    parts = {"q": 2048, "k": 512, "v": 512}
    assert list(rules) == [Sharded(match="model.layers.{l}.attn.qkv.weight", parts=parts, groups=8, axis=("tp",))]


def test_variables() -> None:
    text = '[[rule]]\nmatch = "a"\nkind = "unique"\nparts = { q = "heads", k = "kv" }\nunit = "size"\ngroups = "kv"\n'
    (rule,) = Rules.from_toml(text, {"heads": 8, "kv": 2, "size": 64})
    assert rule == Unique(match="a", parts={"q": 8, "k": 2}, unit=64, groups=2)


# --------------------------------------------------------------------------------------------------- maps of names


def applied(resolution: Resolution, tensors: Mapping[str, Array]) -> dict[str, Array]:
    arrays = list(tensors.values())
    result = {}
    for name, tensor in resolution.tensors.items():
        result[name] = np.full(tensor.meta.shape, np.nan)
        for region in tensor.regions:
            result[name][region.box.slices()] = arrays[region.source][region.within.slices()].reshape(
                region.box.lengths
            )
    return result


def metas(tensors: Mapping[str, Array]) -> dict[str, BasicMeta]:
    return {name: BasicMeta(F64, array.shape) for name, array in tensors.items()}


HEADS = {"q": 4, "k": 2, "v": 2}
MAPS = {
    "names": [Unique(match="old.{x:path}", rename="new.{x}")],
    "numbers": [Unique(match="l.{l:int}.w", rename="layers.{l+3}.w")],
    "stacked": [Unique(match="l.{l:int}.w{e:int}", rename="w", stacked=("l", "e"))],
    "unstacked": [Unique(match="w", rename="l.{l+1}.w{e}", stacked=("l", "e"))],
    "split": [Unique(match="{x}.qkv", rename="{x}.{part}_proj", parts=HEADS, unit=3, groups=2)],
    "split by parts": [Unique(match="{x}.qkv", rename="{x}.{part}_proj", parts=HEADS, groups=2, interleaved=False)],
    "joined": [Unique(match="{x}.{part}_proj", rename="{x}.gate_up", parts=("gate", "up"), dim=1)],
    "all": [Unique(match="e.gu", rename="e.{e}.{part}", stacked=("e",), parts=("gate", "up"), dim=1)],
    "copied": [Replicated(match="**")],
}
TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "names": {"old.a": (2,), "old.b.c": ()},
    "numbers": {"l.0.w": (2, 1), "l.1.w": (3, 1)},
    "stacked": {f"l.{layer}.w{e}": (2, 3) for layer in range(2) for e in range(3)},
    "unstacked": {"w": (2, 3, 4)},
    "split": {"a.qkv": (24, 2), "b.qkv": (24,)},
    "split by parts": {"a.qkv": (8, 2)},
    "joined": {"a.gate_proj": (2, 3), "a.up_proj": (2, 3)},
    "all": {"e.gu": (3, 2, 8)},
    "copied": {"x": (1, 2)},
}


@pytest.mark.parametrize("case", MAPS)
def test_the_inverse_of_a_map_restores_names_and_tensors(case: str) -> None:
    rules = Rules(MAPS[case])
    tensors = {
        name: np.random.default_rng(number).random(shape) for number, (name, shape) in enumerate(TENSORS[case].items())
    }
    new = applied(renamed(rules, metas(tensors)), tensors)
    assert (new.keys() == tensors.keys()) == (case == "copied")
    old = applied(renamed(rules.inverse(), metas(new)), new)
    assert old.keys() == tensors.keys()
    assert all(np.array_equal(old[name], tensors[name]) for name in tensors)
    assert rules.inverse().inverse() == rules


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(SEGMENTS[:6]), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_renames_are_inverted(segments: list[str], rng: Any, data: st.DataObject) -> None:
    """Any rename that is accepted has an inverse, which restores every name that matches."""
    match = ".".join(segments)
    rename = ".".join(rng.sample([*segments, "new"], len(segments) + 1)).replace(":int}", f"{rng.choice(['', '+2'])}}}")
    try:
        rules = Rules([Unique(match=match, rename=rename.replace(":path", ""))])
    except ValueError:
        return
    pattern = Pattern.parse(match)
    values = {
        name: data.draw(st.integers(0, 99) if kind == "int" else st.text("ab1", min_size=1, max_size=3))
        for name, kind in pattern.fields.items()
    }
    name = pattern.format(values)
    (new,) = renamed(rules, {name: BasicMeta(F64, (1,))}).tensors
    (old,) = renamed(rules.inverse(), {new: BasicMeta(F64, (1,))}).tensors
    assert old == name


def test_a_map_reads_parts_of_stored_boxes() -> None:
    """A fused tensor that is stored as two boxes, of which a load needs a part of the second projection."""
    rules = Rules([Unique(match="gu", rename="{part}", parts=("gate", "up"))])
    resolution = renamed(rules, {"gu": BasicMeta(F64, (8, 4))})
    (region,) = resolution.tensors["up"].regions
    lower = Box((0, 0), (6, 4))
    upper = Box((6, 0), (2, 4))
    first, second = region.held_in(lower), region.held_in(upper)
    assert first is not None
    assert second is not None
    assert (first.box, first.within) == (Box((0, 0), (2, 4)), Box((4, 0), (2, 4)))
    assert (second.box, second.within) == (Box((2, 0), (2, 4)), Box((6, 0), (2, 4)))
    assert second.needed_for(Box((0, 0), (2, 4))) is None
    assert region.held_in(Box((0, 0), (4, 4))) is None


def test_rows_and_sources() -> None:
    rules = Rules(
        [
            Sharded(match="w", axis=("tp",), rename="model.w"),
            Flat(match="flat", axis=("dp",), rename="state.{member}.m"),
            Ignored(match="extra"),
        ]
    )
    sources = [Source("w", (2, 3), F64, {"tp": 0}), Source("w", (1, 3), F64, {"tp": 1}), Source("extra", (1,), F64)]
    for tp, rows in ((0, 2), (1, 1)):
        members = (("w", (rows, 3)),)
        size = -(-rows * 3 // 2)
        sources += [Source("flat", (size,), F64, {"tp": tp, "dp": dp}, members) for dp in range(2)]
    resolution = rules.resolve(sources, {"tp": 2, "dp": 2})
    assert [
        (name, str(region.box), region.source, region.position)
        for name, tensor in resolution.tensors.items()
        for region in tensor.regions
    ] == [
        ("model.w", "[0:2,0:3]", 0, 0),
        ("model.w", "[2:3,0:3]", 1, 0),
        ("state.model.w.m", "[0:1,0:3]", 3, 0),
        ("state.model.w.m", "[1:2,0:3]", 4, 0),
        ("state.model.w.m", "[2:3,0:2]", 5, 0),
        ("state.model.w.m", "[2:3,2:3]", 6, 0),
    ]
    assert (str(resolution.tensors["model.w"].meta), resolution.tensors["model.w"].rule.match) == ("float64[3, 3]", "w")
    held = resolution.by_source()
    assert held[2] == []
    assert [name for name, _ in held[0] + held[3]] == ["model.w", "state.model.w.m"]


def test_copies() -> None:
    mesh = {"dp": 2}
    sources = [Source(name, (2,), F64, {"dp": dp}) for name in ("a", "b", "c") for dp in range(2)]
    rules = Rules([Replicated(match="a"), Replicated(match="b", compare=True), Averaged(match="c", axis=("dp",))])
    found = rules.resolve(sources, mesh, average="mean").tensors
    assert [tensor.copies for tensor in found.values()] == ["same", "compare", "mean"]
    assert all(len(tensor.regions) == 2 for tensor in found.values())
    alone = rules.resolve(sources[::2], {"dp": 1}).tensors
    assert alone["c"].copies == "same"


def test_members_that_the_rule_names_have_the_shapes_of_stored_tensors() -> None:
    """ZeRO inside tensor parallelism, where the files list no members."""
    rules = Rules(
        [
            Sharded(match="{x}.w", axis=("tp",), rename="model.{x}.w"),
            Flat(match="master", axis=("dp",), rename="{member}.master", order=("b.w", "a.w")),
        ]
    )
    sources = [Source(f"{x}.w", (rows, 2), F64, {"tp": tp}) for x in "ab" for tp, rows in ((0, 2), (1, 1))]
    sources += [
        Source("master", (size,), F64, {"tp": tp, "dp": dp}) for tp, size in ((0, 4), (1, 2)) for dp in range(2)
    ]
    resolution = rules.resolve(sources, {"tp": 2, "dp": 2})
    tensor = resolution.tensors["model.b.w.master"]
    assert tensor.meta == BasicMeta(F64, (3, 2))
    assert [(region.source, str(region.box), region.position) for region in tensor.regions] == [
        (4, "[0:2,0:2]", 0),
        (6, "[2:3,0:2]", 0),
    ]


@pytest.mark.parametrize("stored", ["pairs", "halves"])
def test_pairs_and_halves_on_ranks(stored: str) -> None:
    """Three heads of 6 on two ranks."""
    natural = np.arange(18 * 2).reshape(18, 2)
    paired = natural.reshape(3, 2, 3, 2).swapaxes(1, 2).reshape(18, 2)
    before, after = (paired, natural) if stored == "pairs" else (natural, paired)
    rules = Rules([Sharded(match="q", axis=("tp",), **{stored: 6})])  # type: ignore[arg-type]
    held = [before[:12], before[12:]]
    sources = [Source("q", one.shape, F64, {"tp": rank}) for rank, one in enumerate(held)]
    found = np.full((18, 2), -1)
    for region in rules.resolve(sources, {"tp": 2}).tensors["q"].regions:
        found[region.box.slices()] = held[region.source][region.within.slices()]
    assert np.array_equal(found, after)
    with pytest.raises(RuleError, match=r"needs complete heads of 6, found [12]0"):
        rules.resolve([Source("q", (10, 2), F64, {"tp": rank}) for rank in range(2)], {"tp": 2})


def test_what_pairs_exclude() -> None:
    for wrong in ({"pairs": 3}, {"pairs": 4, "halves": 4}, {"pairs": 4, "groups": 2}):
        with pytest.raises(RuleError, match="one even size of a head"):
            Rules([Unique(match="q", **wrong)])  # type: ignore[arg-type]
    (one,) = Rules([Unique(match="a", rename="b", pairs=4)]).inverse()
    assert one == Unique(match="b", rename="a", halves=4)
