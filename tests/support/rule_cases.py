"""Random trainers: global tensors, what each rank stores of them by plain slicing, and the rules that describe it.

Nothing here uses the rules' own arithmetic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bytecheckpoint.rules import Averaged, Flat, Replicated, Resolution, Rule, Rules, Sharded, Source, Split, Unique
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.metadata import BasicMeta

Array = npt.NDArray[np.float64]
Place = dict[str, int]


def renamed(rules: Rules, metas: Mapping[str, BasicMeta]) -> Resolution:
    """Apply rules to whole tensors, as a map of names."""
    return rules.resolve(Source(name, meta.shape, meta.dtype) for name, meta in metas.items())


class Stored(NamedTuple):
    name: str
    place: Place
    array: Array
    members: tuple[tuple[str, tuple[int, ...]], ...] | None = None


@dataclass
class Trainer:
    """What a trainer stores, and the global tensors that a reader must find."""

    mesh: dict[str, int]
    layers: list[int] = field(default_factory=list)  # of each pipeline stage
    rules: list[Rule] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    expected: dict[str, Array] = field(default_factory=dict)

    def sources(self) -> list[Source]:
        return [Source(one.name, one.array.shape, DTYPES["float64"], one.place, one.members) for one in self.stored]


def random_trainer(number: int) -> Trainer:
    """A trainer with one to three rules, and possibly a flat buffer of all tensors."""
    rng = random.Random(number)
    mesh = {"tp": rng.randint(1, 4), "pp": rng.randint(1, 3), "ep": rng.randint(1, 2)}
    trainer = Trainer(mesh, [rng.randint(0, 2) for _ in range(mesh["pp"])])
    trainer.layers[rng.randrange(mesh["pp"])] += 1
    for prefix in "abc"[: rng.randint(1, 3)]:
        _add_tensors(trainer, prefix, rng)
    _add_markers(trainer)
    if rng.random() < 0.4:
        trainer = _flattened(trainer, rng)
    rng.shuffle(trainer.rules)
    rng.shuffle(trainer.stored)
    return trainer


def _add_markers(trainer: Trainer) -> None:
    """Every rank stores something, as in a real folder."""
    size = 0
    for tp in range(trainer.mesh["tp"]):
        for pp in range(trainer.mesh["pp"]):
            for ep in range(trainer.mesh["ep"]):
                trainer.stored.append(Stored("marker", {"tp": tp, "pp": pp, "ep": ep}, np.zeros(size)))
    trainer.rules.append(Replicated(match="marker"))
    trainer.expected["marker"] = np.zeros(size)


# ------------------------------------------------------------------------------------------------ one layer's tensor

Parts = dict[str, Array]
"""A tensor, or the parts of a fused one, by name."""


class Layout(NamedTuple):
    """How ranks store a tensor: the fields of the rule, and the rule's class.

    ``make`` returns the global tensor, or its parts, and ``(place, part, array)`` of each rank.
    """

    rule: Callable[..., Rule]
    fields: dict[str, Any]
    make: Callable[[], tuple[Parts, list[tuple[Place, str, Array]]]]


def _fresh(shape: Sequence[int], rng: random.Random) -> Array:
    first = rng.randrange(1 << 40)
    return np.arange(first, first + math.prod(shape), dtype=np.float64).reshape(tuple(shape))


def _widths(count: int, rng: random.Random, least: int = 0) -> list[int]:
    return [rng.randint(least, 4) for _ in range(count)]


def _cut(array: Array, widths: Sequence[int], dim: int) -> list[Array]:
    ends = np.cumsum([0, *widths])
    return [np.take(array, range(a, b), axis=dim) for a, b in pairwise(ends)]


def _layout(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    return rng.choice([_whole, _plain, _plain, _padded, _fused, _fused, _heads, _heads])(mesh, rng)


def _whole(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
    kind = rng.choice(["unique", "replicated", "averaged"])

    def make() -> tuple[Parts, list[tuple[Place, str, Array]]]:
        array = _fresh(shape, rng)
        ranks = mesh["tp"] if kind == "replicated" else 1
        return {"": array}, [({"tp": tp}, "", array) for tp in range(ranks)]

    if kind == "averaged":  # of one rank, whose value is the mean
        return Layout(Averaged, {"axis": ("tp",)}, make)
    return Layout(Unique if kind == "unique" else Replicated, {}, make)


def _plain(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    ndim = rng.randint(1, 3)
    dim = rng.randrange(ndim)
    tp = mesh["tp"]
    widths = _widths(tp, rng)
    shape = [rng.randint(1, 3) for _ in range(ndim)]
    shape[dim] = sum(widths)
    fields: dict[str, Any] = {"dim": dim, "axis": ("tp",)}
    if rng.random() < 0.3:
        fields["widths"] = tuple(widths)
    mode = rng.choice(["plain", "replicas", "nested", "also"])
    if mode == "also" and ndim == 1:
        mode = "nested"
    ep = mesh["ep"]
    inner = [_widths(ep, rng) for _ in range(tp)]
    other = _widths(ep, rng)
    if mode == "nested":
        fields.pop("widths", None)
        fields["axis"] = ("tp", "ep")
        shape[dim] = sum(map(sum, inner))
    elif mode == "also":
        second = rng.choice([d for d in range(ndim) if d != dim])
        shape[second] = sum(other)
        fields["also"] = (Split(dim=second, axis=("ep",)),)
    elif mode == "replicas":
        fields["replicas"] = ("ep",)

    def make() -> tuple[Parts, list[tuple[Place, str, Array]]]:
        array = _fresh(shape, rng)
        if mode == "nested":
            outer = _cut(array, [sum(one) for one in inner], dim)
            cut = [_cut(piece, each, dim) for piece, each in zip(outer, inner)]
        elif mode == "also":
            cut = [_cut(piece, other, second) for piece in _cut(array, widths, dim)]
        else:
            copies = ep if mode == "replicas" else 1
            cut = [[piece] * copies for piece in _cut(array, widths, dim)]
        held = [({"tp": t, "ep": e}, "", piece) for t, row in enumerate(cut) for e, piece in enumerate(row)]
        return {"": array}, [({"tp": p["tp"]}, part, a) if mode == "plain" else (p, part, a) for p, part, a in held]

    return Layout(Sharded, fields, make)


def _padded(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    tp, each = mesh["tp"], rng.randint(1, 3)
    true = rng.randint(0, tp * each)

    def make() -> tuple[Parts, list[tuple[Place, str, Array]]]:
        array = _fresh((tp * each, 2), rng)
        return {"": array[:true]}, [({"tp": t}, "", piece) for t, piece in enumerate(np.split(array, tp))]

    return Layout(Sharded, {"axis": ("tp",), "padded_from": true}, make)


def _fused(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    """Parts without groups: each rank stores its piece of every part, one after the other."""
    tp, dim, unit = mesh["tp"], rng.randrange(2), rng.randint(1, 2)
    names = ["gate", "up", "extra"][: rng.randint(2, 3)]
    mode = rng.choice(["even", "widths", "equal"])
    widths = {name: [rng.randint(1, 2)] * tp if mode == "even" else _widths(tp, rng) for name in names}
    fields: dict[str, Any] = {"dim": dim, "axis": ("tp",)}
    if mode == "equal":
        widths = dict.fromkeys(names, widths[names[0]])
        fields["parts"] = tuple(names)
    else:
        fields |= {"parts": {name: sum(widths[name]) for name in names}, "unit": unit}
        widths = {name: [n * unit for n in each] for name, each in widths.items()}
    if mode == "widths":
        fields["widths"] = {name: tuple(each) for name, each in widths.items()}
    return Layout(Sharded, fields, lambda: _of_parts(widths, dim, rng, [[[t] for _ in names] for t in range(tp)]))


def _heads(mesh: Mapping[str, int], rng: random.Random) -> Layout:
    """Groups of heads: several per rank, or several ranks per group, which share the heads of keys and values."""
    tp, dim, unit = mesh["tp"], rng.randrange(2), rng.randint(1, 2)
    interleaved = rng.random() < 0.7
    sharing = rng.choice([n for n in (1, 2, 4) if tp % n == 0])
    counts = [rng.randint(1, 2) for _ in range(tp)] if sharing == 1 else [1] * (tp // sharing)
    groups = sum(counts)
    each = {"q": sharing * rng.randint(1, 2), "k": 1, "v": rng.randint(1, 2)}
    fields: dict[str, Any] = {"dim": dim, "axis": ("tp",), "groups": groups, "unit": unit, "interleaved": interleaved}
    fields["parts"] = {name: size * groups for name, size in each.items()}
    if sharing > 1:
        fields["shared"] = ("k", "v")
    sizes = {name: size * unit for name, size in each.items()}

    def make() -> tuple[Parts, list[tuple[Place, str, Array]]]:
        by_group = [{name: _fresh((size, 3), rng) for name, size in sizes.items()} for _ in range(groups)]
        whole = {name: _joined([group[name] for group in by_group], dim) for name in sizes}
        whole[""] = _joined(_ordered(by_group, interleaved=interleaved), dim)
        first = 0
        stored: list[tuple[Place, str, Array]] = []
        for t in range(tp):
            if sharing == 1:
                held = by_group[first : first + counts[t]]
                first += counts[t]
            else:
                group = by_group[t // sharing]
                held = [{n: a if n != "q" else np.split(a, sharing)[t % sharing] for n, a in group.items()}]
            stored.append(({"tp": t}, "", _joined(_ordered(held, interleaved=interleaved), dim)))
            stored += [({"tp": t}, name, _joined([group[name] for group in held], dim)) for name in sizes]
        return whole, stored

    return Layout(Sharded, fields, make)


def _ordered(groups: Sequence[Mapping[str, Array]], *, interleaved: bool) -> list[Array]:
    if interleaved:
        return [array for group in groups for array in group.values()]
    return [group[name] for name in groups[0] for group in groups]


def _joined(arrays: Sequence[Array], dim: int) -> Array:
    return np.moveaxis(np.concatenate(arrays), 0, dim)


def _of_parts(
    widths: Mapping[str, Sequence[int]], dim: int, rng: random.Random, ranks: Sequence[Any]
) -> tuple[Parts, list[tuple[Place, str, Array]]]:
    cut = {name: [_fresh((n, 3), rng) for n in each] for name, each in widths.items()}
    whole = {name: _joined(pieces, dim) for name, pieces in cut.items()}
    whole[""] = np.concatenate(list(whole.values()), dim)
    stored: list[tuple[Place, str, Array]] = []
    for t in range(len(ranks)):
        stored.append(({"tp": t}, "", _joined([pieces[t] for pieces in cut.values()], dim)))
        stored += [({"tp": t}, name, _joined([pieces[t]], dim)) for name, pieces in cut.items()]
    return whole, stored


# ------------------------------------------------------------------------------------------------------ the layers


def _add_tensors(trainer: Trainer, prefix: str, rng: random.Random) -> None:
    """Add a tensor of each layer: under names with numbers, or stacked, with or without its parts as names."""
    rule, fields, make = _layout(trainer.mesh, rng)
    fields = dict(fields)
    parts = list(fields.get("parts", ()))
    splitting = rng.choice(["", "split", "join"]) if parts else ""
    layers = rng.choice(["none", "names", "join", "spread"])
    stage = layers != "none" and rng.random() < 0.4 and trainer.mesh["pp"] > 1
    shift = rng.randint(0, 2) if layers in ("names", "spread") else 0
    number = f"{{l{shift:+}}}" if shift else "{l}"
    stored_name = {"none": prefix, "spread": prefix}.get(layers, f"{prefix}.{{l:int}}")
    global_name = f"{prefix}.new" + (f".{number}" if layers in ("names", "spread") else "")
    stored_name += ".{part}_proj" if splitting == "join" else ".w"
    global_name += ".{part}" if splitting == "split" else ""
    if layers in ("join", "spread"):
        fields["stacked"] = ("l",)
    if stage:
        fields["indexed"] = {"l": ("pp",)}
    trainer.rules.append(rule(match=stored_name, rename=global_name, **fields))

    per_stage = trainer.layers if stage else [1 if layers == "none" else 3]
    everything = [[make() for _ in range(count)] for count in per_stage]
    made = [whole for of_stage in everything for whole, _ in of_stage]
    for part in parts if splitting == "split" else [""]:
        arrays = [whole[part] for whole in made]
        name = global_name.replace("{part}", part)
        if layers in ("names", "spread"):
            for n, array in enumerate(arrays):
                trainer.expected[name.replace(number, str(n + shift))] = array
        else:
            trainer.expected[name] = np.stack(arrays) if layers == "join" else arrays[0]
    chosen_parts = parts if splitting == "join" else [""]  # word-ok: of the stored tensors
    for pp, of_stage in enumerate(everything):
        where = {"pp": pp} if stage else {}
        held = [
            [(place, part, array) for place, part, array in stored if part in chosen_parts] for _, stored in of_stage
        ]
        if layers == "spread" and held:
            held = [[(one[0][0], one[0][1], np.stack([array for _, _, array in one])) for one in zip(*held)]]
        for n, of_layer in enumerate(held):
            for place, part, array in of_layer:
                name = stored_name.replace("{l:int}", str(n)).replace("{part}", part)
                trainer.stored.append(Stored(name, {**place, **where}, np.array(array, order="C")))


# --------------------------------------------------------------------------------------------------------- flat buffers


def _flattened(trainer: Trainer, rng: random.Random) -> Trainer:
    """The same tensors as members of a flat buffer per rank, which data-parallel ranks divide."""
    dp = rng.randint(1, 4)
    each, alignment, padding = rng.random() < 0.5, rng.randint(1, 3), rng.randint(1, 3)
    order = rng.choice(["listed", "sorted", "reversed"])
    rule = Flat(
        match="flat.{key}", rename="state.{member}.{key}", axis=("dp",), order=order, alignment=alignment,
        padding=padding, each=each,
    )  # fmt: skip
    flat = Trainer({**trainer.mesh, "dp": dp}, rules=[*trainer.rules, rule])
    flat.expected = {f"state.{name}.m": array for name, array in trainer.expected.items()}
    by_place: dict[tuple[tuple[str, int], ...], list[Stored]] = {}
    for one in trainer.stored:
        by_place.setdefault(tuple(sorted(one.place.items())), []).append(one)
    for place, held in by_place.items():
        rng.shuffle(held)
        members = tuple((one.name, one.array.shape) for one in held)
        by_name = {"listed": held, "sorted": sorted(held), "reversed": held[::-1]}
        arrays = [one.array.ravel() for one in by_name[order]]
        for rank, buffer in enumerate(_buffers(arrays, dp, each=each, alignment=alignment, padding=padding, rng=rng)):
            flat.stored.append(Stored("flat.m", {**dict(place), "dp": rank}, buffer, members))
    return flat


def _buffers(
    arrays: Sequence[Array], ranks: int, *, each: bool, alignment: int, padding: int, rng: random.Random
) -> list[Array]:
    if each:
        buffers: list[Array] = [np.zeros(0)] * ranks
        for array in arrays:
            share = -(-array.size // ranks)
            share += -share % padding
            padded = np.concatenate([array, np.full(share * ranks - array.size, np.nan)])
            for rank, piece in enumerate(np.split(padded, ranks)):
                gap = np.full(-buffers[rank].size % alignment, np.nan)
                buffers[rank] = np.concatenate([buffers[rank], gap, piece])
        return buffers
    whole = np.zeros(0)
    for array in arrays:
        whole = np.concatenate([whole, np.full(-whole.size % alignment, np.nan), array])
    used = whole.size
    share = -(-used // ranks)
    share += -share % padding
    cut = np.split(np.concatenate([whole, np.full(share * ranks - used, np.nan)]), ranks)
    if rng.random() < 0.3:  # without the padding
        cut = [piece[: max(0, used - rank * share)] for rank, piece in enumerate(cut)]
    return cut


def rules_of(trainer: Trainer) -> Rules:
    return Rules(trainer.rules)
