"""The manifest: what is encoded comes back, what is damaged is noticed, what breaks a rule is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from golden import EXAMPLE
from golden import example as tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from made_manifests import make_manifest
from sampling import examples

from bytecheckpoint.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnserializableError,
    UnsupportedVersionError,
)
from bytecheckpoint.format.checksums import empty_checksums
from bytecheckpoint.format.manifest.document import Manifest
from bytecheckpoint.format.manifest.envelope import decode, encode
from bytecheckpoint.format.manifest.payload import pack_metadata
from bytecheckpoint.format.manifest.validation import validate
from bytecheckpoint.tensors.dtypes import DTYPES, find_dtype
from bytecheckpoint.tensors.geometry import Box, decompose, find_overlap
from bytecheckpoint.tensors.metadata import BasicMeta, ByteMeta

F32 = find_dtype("float32")


def sums(*numbers: int) -> tuple[bytes, ...]:
    """The checksums that ``make_manifest`` makes up."""
    return tuple(number.to_bytes(16, "big") for number in numbers)


def rich() -> Manifest:
    """Return a small manifest with most features of the format."""
    shape = (5, 4)
    return make_manifest(
        [
            (
                "model",
                "grid",
                BasicMeta(F32, shape),
                [Box((i, j), (n, 2)) for i, n in ((0, 3), (3, 2)) for j in (0, 2)],
            ),
            ("model", "flat", BasicMeta(F32, shape), [*decompose(0, 7, shape), *decompose(7, 13, shape)]),
            ("model", "scalar", BasicMeta(find_dtype("int64"), ()), [Box((), ())]),
            ("model", "none", BasicMeta(F32, (0, 4)), [Box((0, 0), (0, 4))]),
            ("extra", "rng@0", BasicMeta(find_dtype("uint8"), (100,)), [Box((0,), (100,))]),
            ("extra", "rng@1", BasicMeta(find_dtype("uint8"), (100,)), [Box((0,), (100,))]),
            ("extra", "", BasicMeta(find_dtype("complex128"), (1,)), [Box((0,), (1,))]),
        ],
        ranks=2,
        aliases=[("model.tied", "model.grid"), ("model.again", "model.grid")],
        metadata={"lr": 0.5, "tags": ["a", None, True, b"\0"], "nested": {"深": -1}},
        scope={"extra.rng@0": 0, "extra.rng@1": 1},
    )


@functools.singledispatch
def plain(value: Any) -> Any:
    return value


@plain.register
def _(value: np.ndarray) -> Any:  # type: ignore[type-arg]
    return [str(value.dtype), value.tolist()]


def facts(manifest: Manifest) -> dict[str, Any]:
    """Everything a manifest holds, comparable."""
    tables = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    for name in ("files", "tensors", "shards"):
        tables[name] = {key: plain(value) for key, value in vars(tables[name]).items()}
    return {key: plain(value) for key, value in tables.items()}


def sealed(body: bytes) -> bytes:
    return body + b"\xc4\x10" + xxhash.xxh3_128_digest(body + b"\xc4\x10")


# -- round trip ----------------------------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid, or flat ranges decomposed."""
    numel = int(np.prod(shape, dtype=np.int64))
    if numel == 0 or not shape:
        return [Box.whole(shape)]
    if draw(st.booleans()):
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        return [box for start, stop in itertools.pairwise(cuts) for box in decompose(start, stop - start, shape)]
    parts: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        parts = [[*part, (a, b)] for part in parts for a, b in itertools.pairwise(cuts)]
    return [Box(tuple(a for a, _ in part), tuple(b - a for a, b in part)) for part in parts]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = st.tuples(
        st.sampled_from(["model", "optim", "m-1"]), st.text(st.characters(exclude_characters="\0", codec="utf-8"))
    )
    rows = []
    for section, fqn in draw(st.lists(names, max_size=5, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        boxes = draw(st.permutations(draw(tilings(shape))))
        rows.append((section, fqn, BasicMeta(DTYPES[draw(st.sampled_from(list(DTYPES)))], shape), boxes))
    plain_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
    metadata = draw(st.dictionaries(st.text(), plain_values, max_size=3))
    return make_manifest(rows, ranks=draw(st.integers(1, 4)), chunk_size=draw(st.integers(1, 40)), metadata=metadata)


@settings(deadline=None, max_examples=examples(150))
@given(manifests(), st.booleans())
def test_round_trip(manifest: Manifest, compress: bool) -> None:
    data = encode(manifest, compress=compress)
    found = decode(data)
    assert facts(found) == facts(manifest)
    assert encode(found, compress=compress) == data


def test_rich_round_trip() -> None:
    assert facts(decode(encode(rich()))) == facts(rich())


def test_empty_manifest() -> None:
    assert len(decode(encode(make_manifest([]))).tensors) == 0


def test_golden() -> None:
    """The bytes of a version never change. Uncompressed, for zstd's output may."""
    assert encode(tiny(), compress=False) == EXAMPLE.read_bytes()
    assert facts(decode(EXAMPLE.read_bytes())) == facts(tiny())


def test_highly_repetitive_manifests_stay_readable() -> None:
    """What compresses beyond the ratio that readers accept is stored raw."""
    rows = [("model", f"{'x' * 2000}{i:04}", BasicMeta(F32, (0,)), [Box((0,), (0,))]) for i in range(1500)]
    assert facts(decode(encode(make_manifest(rows)))) == facts(make_manifest(rows))


# -- look-ups ------------------------------------------------------------------------------------------------------


def test_lookups() -> None:
    manifest = tiny()
    row = manifest.tensor_row("model.w")
    assert row is not None
    assert (row, manifest.tensor_row("model.x"), manifest.tensor_row("model.tied")) == (1, None, None)
    assert (manifest.resolve("model.tied"), manifest.resolve("model.b")) == ("model.w", "model.b")
    assert [str(manifest.shards.box_of(i)) for i in range(3)[manifest.shards_of(row)]] == ["[0:2,0:3]", "[2:4,0:3]"]
    assert manifest.byte_meta(1) == ByteMeta("attempt-0/model-00000.safetensors", 4096, 24, 16, sums(1, 2))
    assert manifest.byte_meta(2) == ByteMeta("attempt-0/model-00001.safetensors", 4096, 24, 16, sums(3, 4))
    assert manifest.byte_meta(0) == ByteMeta("attempt-0/model-00000.safetensors", 4096 + 24, 6, 16, sums(5))
    assert manifest.section_tensors("model").tolist() == [0, 1]
    assert manifest.section_tensors("optimizer").tolist() == []
    assert (manifest.nbytes, manifest.file_bytes) == (54, 54 + 2 * 4096)


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_every_flipped_byte_is_noticed(compress: bool) -> None:
    data = encode(tiny(), compress=compress)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            with pytest.raises(CorruptionError):
                decode(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


def test_every_cut_is_noticed() -> None:
    data = encode(tiny())
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            decode(data[:size])
        with pytest.raises(CorruptionError):
            decode(data[size + 1 :])
    with pytest.raises(CorruptionError):
        decode(data + b"\0")


def test_unknown_version_names_both() -> None:
    """The version is reported even if the envelope has grown and its payload is unreadable."""
    for body in (msgpack.packb(["bytecheckpoint", 2, "lz5", 3, b"abc", b"more", None])[:-1], None):
        document = body or encode(tiny())[:16] + b"\x02" + encode(tiny())[17:-18]
        with pytest.raises(UnsupportedVersionError, match=r"format version 2.*reads version 1:"):
            decode(sealed(document))


def test_unknown_codec_is_named() -> None:
    with pytest.raises(UnsupportedVersionError, match="'lz5'"):
        decode(sealed(b"\x96" + msgpack.packb(["bytecheckpoint", 1, "lz5", 3, b"abc"])[1:]))


# -- rules ---------------------------------------------------------------------------------------------------------


def spoil(field: str, row: int, value: Any) -> Callable[[Manifest], None]:
    """Change one cell of one column, ``table.column`` or ``column``."""

    def change(manifest: Manifest) -> None:
        target: Any = manifest
        for part in field.split("."):
            target = getattr(target, part)
        target[row] = value

    return change


def set_field(field: str, value: Any) -> Callable[[Manifest], None]:
    return lambda manifest: setattr(manifest, field, value)


FAULTS: list[tuple[str, Callable[[Manifest], None], str]] = [
    ("world", set_field("world_size", 0), "world size"),
    ("step", set_field("step", -1), "step -1"),
    ("time", set_field("created", "yesterday"), "creation time"),
    ("attempt", set_field("attempt", ".."), "attempt"),
    ("section", spoil("sections", 0, dataclasses.replace(tiny().sections[0], name="a/b")), "section name"),
    ("file elsewhere", spoil("files.name", 0, "attempt-1/x.safetensors"), "plain name"),
    ("file twice", spoil("files.name", 0, "attempt-0/model-00001.safetensors"), "twice"),
    ("file rank", spoil("files.rank", 0, 2), "rank of file"),
    ("file section", spoil("files.section", 0, 1), "section of file"),
    ("file size", spoil("files.size", 0, 1 << 62), "size of file"),
    ("head", spoil("files.head_length", 0, 10_000), "head of 10000 bytes"),
    ("chunk size", spoil("files.chunk_size", 0, 0), "chunk size"),
    ("file kind", spoil("files.kind", 0, "pickle"), "kind 'pickle'"),
    ("not a tensor file", spoil("files.kind", 0, "values"), "head of"),
    ("name order", spoil("tensors.names", 0, "model.z"), "not in order"),
    ("name twice", spoil("tensors.names", 0, "model.w"), "not in order"),
    ("name of another section", spoil("tensors.names", 0, "a.b"), "does not begin with the name"),
    ("dtype", spoil("tensors.dtype", 0, 99), "dtype of tensor"),
    ("scope", spoil("scope", 0, 1), "does not end in its number"),
    ("scope beyond", spoil("scope", 0, 2), "scope of tensor"),
    ("shape", spoil("tensors.shape", 0, 1 << 61), "too large"),
    ("negative", spoil("tensors.shape", 0, -1), "negative"),
    ("box outside", spoil("shards.offsets", 0, 1), "is not inside tensor 'model.b'"),
    ("box overflow", spoil("shards.offsets", 0, (1 << 63) - 1), "is not inside"),
    ("hole", spoil("shards.lengths", 1, 1), "do not cover"),
    ("overlap", spoil("shards.offsets", 3, 1), "overlap"),
    ("no tensor", spoil("shards.tensor", 2, 2), "a tensor that does not exist"),
    ("no shard", spoil("shards.tensor", 0, 1), "has no shard"),
    ("shard order", spoil("shards.tensor", 2, 0), "order of their tensors"),
    ("no file", spoil("shard_file", 0, 2), "a file that does not exist"),
    ("negative file", spoil("shard_file", 0, -1), "a file that does not exist"),
    ("byte overlap", spoil("shard_offset", 0, 23), "overlap or hole"),
    ("byte hole", spoil("shard_offset", 1, 1), "overlap or hole"),
    ("outside file", spoil("shard_offset", 0, 25), "outside its 30 bytes"),
    ("offset overflow", spoil("shard_offset", 0, (1 << 63) - 1), "outside"),
    ("file longer", spoil("files.size", 0, 5000), "shards end at"),
    ("checksums", set_field("checksums", empty_checksums(4)), "4 chunk checksums"),
    ("codec", spoil("files.codec", 0, "zfp"), "an encoded file has no frames"),
    ("alias of nothing", spoil("aliases", 0, ("model.tied", "model.x")), "alias"),
    ("alias of itself", spoil("aliases", 0, ("model.tied", "model.tied")), "alias"),
    ("alias of a tensor", spoil("aliases", 0, ("model.b", "model.w")), "alias"),
    ("alias elsewhere", spoil("aliases", 0, ("other.w", "model.w")), "another section"),
    ("alias twice", set_field("aliases", [("model.a", "model.w"), ("model.a", "model.b")]), "twice"),
]


def test_a_shard_in_the_file_of_another_section_is_refused() -> None:
    """Both sections hold one tensor of one shape, so nothing else contradicts the exchange."""
    meta = BasicMeta(F32, (3,))
    boxes = [Box((0,), (3,))]
    manifest = make_manifest([("ema", "w", meta, boxes), ("model", "w", meta, boxes)])
    validate(manifest)
    assert len(manifest.shard_file) == 2
    manifest.shard_file = manifest.shard_file[::-1].copy()
    with pytest.raises(FormatError, match="not a tensor file of its section"):
        validate(manifest)


@pytest.mark.parametrize(("change", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_rules(change: Callable[[Manifest], None], message: str) -> None:
    manifest = tiny()
    change(manifest)
    with pytest.raises(CheckpointError, match=message) as caught:
        validate(manifest)
    assert type(caught.value) in (FormatError, UnsupportedVersionError)
    with pytest.raises(CheckpointError):
        encode(manifest)


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_disjointness_agrees_with_the_geometry(data: st.DataObject) -> None:
    """Boxes moved about at random in several tensors at once: refused exactly when two of them share an element."""
    shape = (4, 4)
    rows, faulty = [], False
    for index in range(data.draw(st.integers(1, 3))):
        boxes = data.draw(tilings(shape))
        if data.draw(st.booleans()):
            victim = data.draw(st.integers(0, len(boxes) - 1))
            lengths = boxes[victim].lengths
            moved = tuple(data.draw(st.integers(0, s - n)) for s, n in zip(shape, lengths))
            boxes = [*boxes[:victim], Box(moved, lengths), *boxes[victim + 1 :]]
        pair = find_overlap(np.array([b.offsets for b in boxes]), np.array([b.lengths for b in boxes]))
        faulty |= pair is not None
        rows.append(("model", f"t{index}", BasicMeta(F32, shape), sorted(boxes)))
    manifest = make_manifest(rows)
    if faulty:
        with pytest.raises(FormatError, match="overlap"):
            validate(manifest)
    else:
        validate(manifest)


def test_interlocked_boxes() -> None:
    """A pinwheel, which no axis separates, next to a grid."""
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1)), Box((2, 1), (1, 2))]
    grid = [Box((i, j), (1, 1)) for i in range(3) for j in range(3)]
    rows = [("m", f"{i}{k}", BasicMeta(F32, (3, 3)), b) for i in range(3) for k, b in enumerate((pinwheel, grid))]
    validate(make_manifest(rows))
    clash = [*pinwheel[:3], Box((0, 1), (1, 1)), pinwheel[4]]
    with pytest.raises(FormatError, match=r"\[0:1,0:2\] and \[0:1,1:2\] of tensor 'm.x'"):
        validate(make_manifest([*rows, ("m", "x", BasicMeta(F32, (3, 3)), clash)]))


def test_a_tensor_without_elements_has_one_shard() -> None:
    meta = BasicMeta(F32, (0, 4))
    with pytest.raises(FormatError, match="one of them is empty"):
        validate(make_manifest([("m", "x", meta, [Box((0, 0), (0, 2)), Box((0, 2), (0, 2))])]))
    with pytest.raises(FormatError, match="must be all of it"):
        validate(make_manifest([("m", "x", meta, [Box((0, 0), (0, 2))])]))
    with pytest.raises(FormatError, match="do not cover"):
        validate(make_manifest([("m", "x", BasicMeta(F32, ()), [Box((), ()), Box((), ())])]))


def test_user_metadata_is_plain() -> None:
    for bad in ({"a": object()}, {"a": 1 << 70}, {1: 2}, [1], {"a": "\ud800"}):
        with pytest.raises(UnserializableError, match="metadata"):
            pack_metadata(bad)  # type: ignore[arg-type]
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(UnserializableError, match="deep"):
        pack_metadata(deep)
