"""Every fault is reported before a byte is read, all of them in one error, with what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bytecheckpoint.errors import RuleError, UsageError
from bytecheckpoint.rules import Averaged, Flat, Ignored, Replicated, Rule, Rules, Sharded, Source, Split, Unique
from bytecheckpoint.tensors.dtypes import DTYPES

F32 = DTYPES["float32"]
QKV = {"q": 2048, "k": 512, "v": 512}


def stored(name: str, *shapes: Sequence[int], axis: str = "tp", **more: int) -> list[Source]:
    return [Source(name, tuple(shape), F32, {axis: index, **more}) for index, shape in enumerate(shapes)]


def faults_of(rules: Sequence[Rule], sources: Sequence[Source], mesh: Mapping[str, int]) -> RuleError:
    with pytest.raises(RuleError) as caught:
        Rules(rules).resolve(sources, mesh)
    return caught.value


SHARDED = Sharded(match="w", axis=("tp",))
CASES: dict[str, tuple[list[Rule], list[Source], dict[str, int], str, str]] = {
    "two rules": (
        [Sharded(match="a.{x}.w", axis=("tp",)), Replicated(match="a.*.w")],
        stored("a.b.w", [4], [4]),
        {"tp": 2},
        "ambiguous",
        "a.b.w: is matched by rule 1 ('a.{x}.w') of kind 'sharded' and rule 2 ('a.*.w') of kind 'replicated'; "
        "change one of the patterns",
    ),
    "no rule": (
        [
            Unique(match=name, optional=True)
            for name in ("a.qkv.weight", "a.proj.weight", "a.norm.weight", "b", "c.zzz")
        ],
        [Source("a.qkv.weights", (2,), F32)],
        {},
        "missing",
        "a.qkv.weights: has no rule; nearest: rule 1 ('a.qkv.weight'), rule 2 ('a.proj.weight'), "
        "rule 3 ('a.norm.weight'); "
        'add one, with kind = "ignored" if it is not needed',
    ),
    "the shape of the issue": (
        [Sharded(match="qkv", axis=("tp",), parts=QKV, groups=8)],
        stored("qkv", [1500, 4], [1500, 4]),
        {"tp": 2},
        "shape",
        "qkv: rule 1 ('qkv') needs 3072 = 8 x (256 + 64 + 64), found 3000 = 1500 + 1500 (dimension 0)",
    ),
    "parts": (
        [Sharded(match="qkv", axis=("tp",), parts=QKV)],
        stored("qkv", [1536, 4], [1500, 4]),
        {"tp": 2},
        "shape",
        "needs 3072 = 2048 + 512 + 512, by rank 1536 + 1536, found 3036 = 1536 + 1500 (dimension 0)",
    ),
    "parts that ranks do not divide": (
        [Sharded(match="w", axis=("tp",), parts={"a": 4, "b": 3})],
        stored("w", [4], [3]),
        {"tp": 2},
        "shape",
        "needs b = 3 to be divisible by 2 ranks, found a remainder of 1; state the widths",
    ),
    "equal parts": (
        [Sharded(match="w", axis=("tp",), parts=("gate", "up"))],
        stored("w", [3], [3]),
        {"tp": 2},
        "shape",
        "needs 2 equal parts (gate, up) of each rank's size, found 3",
    ),
    "widths": (
        [Sharded(match="w", axis=("tp",), widths=(3, 2))],
        stored("w", [2], [2]),
        {"tp": 2},
        "shape",
        "needs widths of 2 ranks that add up to 4, found [3, 2]",
    ),
    "widths of a part": (
        [Sharded(match="w", axis=("tp",), parts={"a": 4, "b": 2}, widths={"a": (3, 2)})],
        stored("w", [4], [3]),
        {"tp": 2},
        "shape",
        "needs widths of a of 2 ranks that add up to 4, found [3, 2]",
    ),
    "more ranks than groups": (
        [Sharded(match="w", axis=("tp",), parts={"q": 8, "k": 3}, groups=1)],
        stored("w", [7], [7]),
        {"tp": 2},
        "shape",
        "needs the 3 indices of k in each group divided among the 2 ranks that share a group, found a remainder of 1; "
        'if these ranks all hold k whole, add shared = ["k"]',
    ),
    "ranks that share a group": (
        [Sharded(match="w", axis=("tp",), parts={"q": 8, "k": 4}, groups=1)],
        stored("w", [8], [8]),
        {"tp": 2},
        "shape",
        "needs 6 = 4 + 2 on each of 2 ranks, 2 of which share a group, found 16 = 8 + 8; "
        "shared lists the parts of a group that these ranks all hold",
    ),
    "groups of a size that is not stated": (
        [Sharded(match="w", axis=("tp",), parts=("a", "b"), groups=3)],
        stored("w", [4], [4]),
        {"tp": 2},
        "shape",
        "needs a divisible by 3 groups, found 4",
    ),
    "padding": (
        [Sharded(match="w", axis=("tp",), padded_from=9)],
        stored("w", [4], [4]),
        {"tp": 2},
        "shape",
        "needs at least padded_from = 9, found 8 (dimension 0)",
    ),
    "another dimension": (
        [Sharded(match="w", axis=("tp",))],
        stored("w", [4, 3], [4, 2]),
        {"tp": 2},
        "shape",
        "needs one size of dimension 1, found [4, 3] and [4, 2]",
    ),
    "dimension": (
        [Sharded(match="w", axis=("tp",), dim=1)],
        stored("w", [4], [4]),
        {"tp": 2},
        "shape",
        "refers to dimension 1, found [4]",
    ),
    "dimensions": (
        [SHARDED],
        stored("w", [4], [4, 1]),
        {"tp": 2},
        "shape",
        "needs equally many dimensions, found [4] and [4, 1]",
    ),
    "dtype": (
        [SHARDED],
        [*stored("w", [4]), Source("w", (4,), DTYPES["bfloat16"], {"tp": 1})],
        {"tp": 2},
        "dtype",
        "describes one tensor, but it is stored as bfloat16 and float32",
    ),
    "an unused rule": (
        [SHARDED, Unique(match="model.embed")],
        stored("w", [4], [4]),
        {"tp": 2},
        "unused",
        "rule 2 ('model.embed') matches no tensor (nearest: w); correct it, remove it, or add optional = true",
    ),
    "a rename that collides": (
        [Unique(match="a.{x}", rename="c.{x}"), Unique(match="b.{x}", rename="c.{x}")],
        [Source("a.w", (1,), F32), Source("b.w", (1,), F32)],
        {},
        "rename",
        "b.w: rule 2 ('b.{x}') makes 'c.w', which 'a.w' becomes as well, by rule 1 ('a.{x}')",
    ),
    "a negative number": (
        [Unique(match="a.{l:int}", rename="b.{l-1}")],
        [Source("a.0", (1,), F32)],
        {},
        "rename",
        "makes {l-1} negative for l = 0",
    ),
    "a missing shard": (
        [Sharded(match="w", axis=("tp",)), Replicated(match="x")],
        [*stored("w", [4], [4]), *stored("x", [1], [1], [1])],
        {"tp": 3},
        "rank",
        "needs the shard of tp=2, which no rank stored",
    ),
    "a missing rank": (
        [SHARDED],
        stored("w", [4], [4]),
        {"tp": 3},
        "rank",
        "no tensor is stored by tp=2 of 3 ranks; are its files missing?",
    ),
    "a rank outside the mesh": (
        [SHARDED],
        stored("w", [4], [4]),
        {"tp": 1},
        "rank",
        "tensors are stored by tp=1, but the mesh has 1 ranks on this axis",
    ),
    "an axis outside the mesh": (
        [Sharded(match="w", axis=("cp",))],
        stored("w", [4]),
        {"tp": 1},
        "rank",
        "divides along axis 'cp', which is not in the mesh (tp=1)",
    ),
    "a tensor of no rank": (
        [Sharded(match="w", axis=("tp",)), Replicated(match="x")],
        [Source("w", (4,), F32), *stored("x", [1], [1])],
        {"tp": 2},
        "rank",
        "divides along axis 'tp', but the only rank is no coordinate on it",
    ),
    "holders that are not explained": (
        [Unique(match="w")],
        stored("w", [4], [4]),
        {"tp": 2},
        "rank",
        'does not explain that the ranks tp = 0, 1 hold it; if these are copies, use kind = "replicated" or '
        "add 'tp' to replicas",
    ),
    "two tensors of one rank": (
        [Unique(match="w")],
        [Source("w", (4,), F32)] * 2,
        {},
        "rank",
        "describes one tensor, but the only rank stored 'w' and 'w'",
    ),
    "a missing layer": (
        [Unique(match="w.{l:int}", rename="w", stacked=("l",))],
        [Source("w.999999999999999999", (4,), F32)],
        {},
        "rank",
        "joins tensors, but the one of l = 0 is missing",
    ),
    "a missing part": (
        [Unique(match="{part}", rename="qk", parts=("q", "k"))],
        [Source("q", (4,), F32)],
        {},
        "rank",
        "joins tensors, but the one of part = k is missing",
    ),
    "layers of other shapes": (
        [Unique(match="w.{l:int}", rename="w", stacked=("l",))],
        [Source("w.0", (4,), F32), Source("w.1", (5,), F32)],
        {},
        "shape",
        "joins tensors of the shapes [4] and [5]",
    ),
    "too many layers": (
        [Unique(match="w", rename="w.{l}", stacked=("l",))],
        [Source("w", (10**12, 1), F32)],
        {},
        "shape",
        "would make 1000000000000 tensors of one, found [1000000000000, 1]",
    ),
    "too few dimensions": (
        [Unique(match="w", rename="w.{l}.{e}", stacked=("l", "e"))],
        [Source("w", (2,), F32)],
        {},
        "shape",
        "needs equal lengths of the dimensions l, e, found [2]",
    ),
    "numbers over no axis": (
        [Unique(match="w.{l:int}", indexed={"l": ("pp",)})],
        [Source("w.0", (4,), F32)],
        {},
        "rank",
        "continues {l} over pp, but neither captures nor its rank (the only rank) have all of them",
    ),
    "averaged": (
        [Averaged(match="w", axis=("dp",))],
        stored("w", [4], [4], axis="dp"),
        {"dp": 2},
        "average",
        "has a value that is in no file, because the ranks of dp hold different ones; compute it with `bcp reshard` "
        "and a method",
    ),
    "a flat buffer without members": (
        [Flat(match="w", axis=("dp",))],
        [Source("w", (4,), F32, {"dp": 0})],
        {"dp": 1},
        "shape",
        "needs the members of the buffer, which the file does not list; state them: order = [...]",
    ),
    "members of unknown shape": (
        [Flat(match="w", axis=("dp",), order=("a",))],
        [Source("w", (4,), F32, {"dp": 0})],
        {"dp": 1},
        "shape",
        "needs the shape of member 'a' from a tensor of this name, but it is not stored there",
    ),
    "an order of other members": (
        [Flat(match="w", axis=("dp",), order=("a",))],
        [Source("w", (4,), F32, {"dp": 0}, (("b", (4,)),))],
        {"dp": 1},
        "shape",
        "states an order of other members than the file lists; they differ in a, b",
    ),
    "the size of a flat buffer": (
        [Flat(match="w", axis=("dp",), padding=2), Unique(match="a")],
        [Source("w", (340,), F32, {"dp": rank}, (("a", (1022,)),)) for rank in range(3)],
        {"dp": 3},
        "shape",
        "needs 342 = 1026 / 3 elements on each rank for 1 members with alignment = 1 and padding = 2, "
        "found [340] on dp=0",
    ),
    "a missing flat buffer": (
        [Flat(match="w", axis=("dp",)), Replicated(match="x")],
        [Source("w", (4,), F32, {"dp": 0}, (("x", (8,)),)), *stored("x", [8], [8], axis="dp")],
        {"dp": 2},
        "rank",
        "needs the buffer of rank 1 of dp, which no rank stored",
    ),
    "different lists of members": (
        [Flat(match="w", axis=("dp",))],
        [Source("w", (4,), F32, {"dp": rank}, (("x", (7 + rank,)),)) for rank in range(2)],
        {"dp": 2},
        "shape",
        "describes one buffer, but the ranks list different members or shapes",
    ),
    "a flat buffer in a flat buffer": (
        [Flat(match="w", axis=("dp",))],
        [Source("w", (4,), F32, {"dp": 0}, (("w", (4,)),))],
        {"dp": 1},
        "shape",
        "has the member 'w', which rule 1 ('w') describes as a flat buffer",
    ),
    "a member without a rule": (
        [Flat(match="w", axis=("dp",))],
        [Source("w", (4,), F32, {"dp": 0}, (("x.y", (4,)),))],
        {"dp": 1},
        "missing",
        "x.y: has no rule; nearest: rule 1 ('w'); add one",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_does_not_fit(case: str) -> None:
    rules, sources, mesh, kind, message = CASES[case]
    error = faults_of(rules, sources, mesh)
    assert message in str(error)
    assert kind in [fault[0] for fault in error.faults]


def test_all_faults_are_in_one_error() -> None:
    rules = [SHARDED, Unique(match="unused"), Sharded(match="qkv", axis=("tp",), parts=QKV, groups=8)]
    sources = [
        *stored("w", [4], [5], [6]),
        *stored("qkv", [1000], [1000]),
        *stored("layers.0.x", [1]),
        *stored("layers.7.x", [1]),
    ]
    error = faults_of(rules, sources, {"tp": 3})
    assert {fault[0] for fault in error.faults} == {"missing", "unused", "rank"}
    assert [fault[1] for fault in error.faults if fault[0] == "missing"] == ["layers.0.x", "layers.7.x"]
    assert "(4 faults)" in str(error)
    assert "layers.0.x and 1 like it: has no rule" in str(error)
    assert isinstance(error, UsageError)


def test_a_message_has_a_limited_length() -> None:
    names = ["".join(chr(97 + (n >> shift & 15)) for shift in (8, 4, 0)) for n in range(4000)]
    error = faults_of([], [Source(name, (1,), F32) for name in names], {})
    assert len(error.faults) == 4000
    assert len(str(error)) < 40_000
    assert str(error).endswith("... and 3936 more")


RULES: dict[str, tuple[Rule, str]] = {
    "empty": (Unique(match=""), "rule 1: match '' is empty"),
    "empty segment": (Unique(match="a..b"), "match 'a..b' has an empty segment"),
    "two captures": (
        Unique(match="a.{x}{y}"),
        "has two captures in the segment '{x}{y}', which could be separated in several ways",
    ),
    "twice": (Unique(match="{x}.{x}"), "captures {x} twice"),
    "two paths": (
        Unique(match="**.a.{x:path}"),
        "has more than one part that matches several segments ('**' or '{x:path}')",
    ),
    "path in a segment": (
        Unique(match="a{x:path}.b"),
        "has other text next to {x:path} in 'a{x:path}', which must be between dots",
    ),
    "type": (
        Unique(match="{x:float}"),
        "has a part that is no capture in '{x:float}'; write {name}, {name:int}, {name:path}",
    ),
    "star": (Unique(match="a*"), "has a part that is no capture in 'a*'"),
    "shift": (Unique(match="{x:path+1}"), "adds to a text in '{x:path+1}'"),
    "reserved": (Ignored(match="{member}"), "captures {member}, which has another meaning; choose another name"),
    "lost capture": (Unique(match="a.{x}", rename="b"), "rename 'b' is not invertible: it lacks {x} of match 'a.{x}'"),
    "unknown capture": (
        Unique(match="a.{x}", rename="b.{x}.{y}"),
        "rename uses {y}, which match does not capture; known: part, x",
    ),
    "wildcards": (
        Unique(match="a.*", rename="b"),
        "rename 'b' is not invertible: match 'a.*' has '*' or '**', which are not captured",
    ),
    "wildcard in rename": (Unique(match="a", rename="b.*"), "rename 'b.*' has '*' or '**', which stand for no name"),
    "adjacent": (
        Unique(match="{x}.{y}", rename="{x}{y}"),
        "rename '{x}{y}' is not invertible: it has two captures in the segment",
    ),
    "path in rename": (
        Unique(match="a.{x:path}", rename="b{x}"),
        "rename 'b{x}' is not invertible: with its captures, it has other text next to",
    ),
    "number": (Unique(match="a.{l}", rename="b.{l+1}"), "uses {l} as a number; write {l:int} in match"),
    "stack both": (Unique(match="a.{l:int}", rename="b.{l}", stacked=("l",)), "stacks {l}, but both names have it"),
    "stack none": (Unique(match="a", rename="b", stacked=("l",)), "stacks {l}, but neither name has it"),
    "stack sides": (
        Unique(match="a.{l:int}", rename="b.{e}", stacked=("l", "e")),
        "stacks l, e, of which some are in match and some in rename",
    ),
    "stack twice": (Unique(match="a", rename="b.{e}", stacked=("e", "e")), "stacks a capture twice"),
    "stack wildcard": (Unique(match="**", stacked=("e",)), "match '**' has wildcards, so stacked needs a rename"),
    "indexed": (Unique(match="a", indexed={"l": ("pp",)}), "indexed names 'l', which match 'a' does not capture"),
    "part on both sides": (Unique(match="a.{part}", rename="b.{part}", parts=("q", "k")), "has {part} in both names"),
    "part without parts": (Unique(match="a.{part}", rename="b"), "has {part} in a name, but no parts"),
    "groups": (
        Unique(match="a", parts={"q": 10}, groups=4),
        "has groups = 4, which does not divide the size 10 of part 'q'",
    ),
    "shared": (Unique(match="a", parts={"q": 8}, groups=4, shared=("k",)), "shares 'k', which is not a part; parts: q"),
    "needs groups": (Unique(match="a", parts={"q": 8}, shared=("q",)), "has shared, which needs groups"),
    "interleaved": (Unique(match="a", parts={"q": 8}, interleaved=False), "has interleaved, which needs groups"),
    "too many groups": (Unique(match="a", groups=10**12), "has 1000000000000 groups, which is more than any model has"),
    "padding": (Unique(match="a", parts={"q": 8}, padded_from=3), "has padded_from with parts or groups"),
    "part name": (Unique(match="a", parts={"q.k": 8}), "has a part 'q.k'; a part is named by a text without dots"),
    "same part": (Unique(match="a", parts=("q", "q")), "names a part twice"),
    "unit": (Unique(match="a", parts=("q", "k"), unit=2), "has a unit, but parts without sizes"),
    "same dim": (Sharded(match="a", axis=("tp",), also=(Split(dim=0, axis=("ep",)),)), "divides dimension 0 twice"),
    "same axis": (
        Sharded(match="a", axis=("tp",), also=(Split(dim=1, axis=("tp",)),)),
        "divides along axis 'tp' twice",
    ),
    "replicas": (
        Sharded(match="a", axis=("tp",), replicas=("tp",)),
        "has replicas on axis 'tp', along which it divides",
    ),
    "no axis": (Sharded(match="a", axis=()), "has no axis"),
    "widths and groups": (Sharded(match="a", axis=("tp",), groups=2, widths=(1, 1)), "has widths and groups"),
    "widths of a part": (
        Sharded(match="a", axis=("tp",), parts={"q": 2}, widths={"k": (2,)}),
        "has widths of 'k', which is not a part; parts: q",
    ),
    "widths of equal parts": (
        Sharded(match="a", axis=("tp",), parts=("q",), widths={"q": (2,)}),
        "has widths by part, but parts without sizes",
    ),
    "widths of parts": (
        Sharded(match="a", axis=("tp",), parts={"q": 2}, widths=(2,)),
        "state them by part: widths = { part = [...] }",
    ),
    "flat rename": (
        Flat(match="a", axis=("dp",), rename="b"),
        "rename 'b' lacks {member}, so that all members would have one name",
    ),
    "flat capture": (
        Flat(match="a", axis=("dp",), rename="{member}.{x}"),
        "rename uses {x}, which match does not capture",
    ),
    "flat syntax": (Flat(match="a", axis=("dp",), rename="{member}{x}"), "rename '{member}{x}' has two captures"),
    "python type": (Unique(match=5), "rule 1: match must be a text, found 5"),  # type: ignore[arg-type]
    "no rule": ("a", "rule 1: is 'a', which is no rule; kinds: unique, replicated"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule_contradicts_itself(case: str) -> None:
    rule, message = RULES[case]
    with pytest.raises(RuleError, match=re.escape(message)):
        Rules([rule])


def test_contradictions_of_all_rules_are_in_one_error() -> None:
    with pytest.raises(RuleError) as caught:
        Rules([Unique(match=""), Unique(match="a"), Unique(match="a.{x}", rename="{y}")])
    assert [fault[:2] for fault in caught.value.faults] == [("rule", "rule 1"), ("rule", "rule 3"), ("rule", "rule 3")]


HEAD = '[[rule]]\nmatch = "a"\n'
DOCUMENTS: dict[str, tuple[str, str]] = {
    "syntax": ("[[rule]\n", "this is not TOML: "),
    "table": ("[[rules]]\n", "unknown table 'rules'; a rule begins with [[rule]]"),
    "one rule": ("[rule]\n", "'rule' is not an array of tables; a rule begins with [[rule]]"),
    "no kind": (HEAD, "rule 1 (line 1): has no kind; kinds: unique, replicated, averaged, sharded, flat, ignored"),
    "kind": (
        f'{HEAD}kind = "shardet"',
        "has the unknown kind 'shardet'; kinds: unique, replicated, averaged, sharded, flat, ignored; "
        "did you mean 'sharded'?",
    ),
    "key": (
        f'# c\n\n{HEAD}kind = "sharded"\naxes = "tp"',
        "rule 1 (line 3): unknown key 'axes' of kind 'sharded'; did you mean 'axis'?",
    ),
    "missing key": (f'{HEAD}kind = "sharded"', "has no axis, which kind 'sharded' needs"),
    "key of another kind": (f'{HEAD}kind = "flat"\naxis = "dp"\ngroups = 8', "unknown key 'groups' of kind 'flat'"),
    "text": (f'{HEAD}kind = "unique"\nrename = 3', "rename must be a text, found 3"),
    "flag": (f'{HEAD}kind = "unique"\noptional = 1', "optional must be true or false, found 1"),
    "number": (f'{HEAD}kind = "unique"\ndim = -1', "dim must be a number of at least 0, found -1"),
    "no number": (f'{HEAD}kind = "unique"\ngroups = true', "groups must be a number of at least 1, found True"),
    "texts": (f'{HEAD}kind = "unique"\nstacked = [1]', "stacked must be a text or a list of texts, found [1]"),
    "table of numbers": (
        f'{HEAD}kind = "unique"\nparts = {{ q = 1.5 }}',
        "parts has an entry 'q' that must be a number of at least 0, found 1.5",
    ),
    "no table": (f'{HEAD}kind = "unique"\nindexed = "l"', "indexed must be a table, found 'l'"),
    "numbers": (f'{HEAD}kind = "sharded"\naxis = "tp"\nwidths = 3', "widths must be a list of numbers, found 3"),
    "order": (
        f'{HEAD}kind = "flat"\naxis = "dp"\norder = "random"',
        "order must be 'listed', 'sorted', 'reversed' or a list of names, found 'random'",
    ),
    "splits": (
        f'{HEAD}kind = "sharded"\naxis = "tp"\nalso = [{{ dim = 1 }}]',
        "also must be a list of tables like { dim = 1, axis = 'tp' }, found [{'dim': 1}]",
    ),
    "variable": (
        f'{HEAD}kind = "unique"\ngroups = "kv_heads"',
        "groups is the variable 'kv_heads', which has no value; pass variables={'kv_heads': ...} (passed: 'heads')",
    ),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_document_is_not_valid(case: str) -> None:
    text, message = DOCUMENTS[case]
    with pytest.raises(RuleError, match=re.escape(message)):
        Rules.from_toml(text, {"heads": 8})


def test_faults_of_a_document_have_lines() -> None:
    text = f'{HEAD}kind = "x"\n\n{HEAD}kind = "unique"\ndim = "d"\n\n{HEAD}kind = "unique"\nrename = "{{x}}"\n'
    with pytest.raises(RuleError) as caught:
        Rules.from_toml(text)
    labels: list[Any] = [fault[:2] for fault in caught.value.faults]
    assert labels == [("syntax", "rule 1 (line 1)"), ("syntax", "rule 2 (line 5)"), ("rule", "rule 3 (line 10)")]


def test_no_inverse() -> None:
    rules = Rules(
        [
            Sharded(match="a", axis=("tp",)),
            Ignored(match="b"),
            Unique(match="c", padded_from=3),
            Unique(match="d.{l:int}", indexed={"l": ("pp",)}),
            Unique(match="e", rename="f"),
        ]
    )
    with pytest.raises(RuleError) as caught:
        rules.inverse()
    assert [fault[2] for fault in caught.value.faults] == [
        "rule 1 ('a') describes ranks",
        "rule 2 ('b') ignores tensors, which cannot be made",
        "rule 3 ('c') has padded_from, which loses what the inverse needs",
        "rule 4 ('d.{l:int}') has indexed, which loses what the inverse needs",
    ]
