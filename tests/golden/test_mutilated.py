"""Damage golden checkpoints in listed ways: each damage raises its specific error, and nothing is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from golden import ROOT, describe
from independent_reader import read_payload

import bytecheckpoint as bcp
from bytecheckpoint import errors

MANIFEST = "manifest.msgpack"


def _file(root: Path, ending: str) -> Path:
    return next(file for file in sorted(root.rglob("*")) if file.name.endswith(ending))


def _edit(ending: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def mutilate(root: Path) -> None:
        file = _file(root, ending)
        file.write_bytes(change(file.read_bytes()))

    return mutilate


def _delete(ending: str) -> Callable[[Path], None]:
    return lambda root: _file(root, ending).unlink()


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        position = at % len(data)
        return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]

    return change


def _swap(one: str, other: str) -> Callable[[Path], None]:
    def mutilate(root: Path) -> None:
        first, second = _file(root, one), _file(root, other)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    return mutilate


def _resealed(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Replace the payload, with a correct checksum."""

    def mutilate(data: bytes) -> bytes:
        document = read_payload(data)
        change(document)
        payload = msgpack.packb(document)
        return _envelope("bytecheckpoint", 1, "raw", len(payload), payload)

    return mutilate


def _envelope(*parts: Any) -> bytes:
    body = b"\x96" + b"".join(msgpack.packb(part) for part in parts) + b"\xc4\x10"
    return body + xxhash.xxh3_128_digest(body)


def _reopened(change: Callable[..., bytes]) -> Callable[[bytes], bytes]:
    """``change`` gets the codec, raw length and stored payload."""
    return lambda data: change(*msgpack.unpackb(data)[2:5])


def _number(table: str, column: str, row: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        packed = document[table][column]
        values = np.frombuffer(packed["d"], f"<u{packed['w']}").astype("<u8")
        values[row] = value
        document[table][column] = {"w": 8, "d": values.tobytes()}

    return change


def _text(table: str, column: str, old: bytes, new: bytes) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        part = document[table][column]
        part = part.get("of", part)
        assert old in part["d"]
        part["d"] = part["d"].replace(old, new, 1)

    return change


def _payload(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return _edit(MANIFEST, _resealed(change))


def _manifest(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return _edit(MANIFEST, change)


def _use_parent_path(document: dict[str, Any]) -> None:
    _text("files", "name", b"attempt-golden-single/", b"../tempt-golden-single/")(document)


DAMAGED, CHANGED = "not a manifest, or damaged at its start", "checksum mismatch in the manifest"
CORRUPT, BROKEN, NEWER = errors.CorruptionError, errors.FormatError, errors.UnsupportedVersionError

# The change of the manifest, the expected error, and a part of its message.
OPEN: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "nothing": (shutil.rmtree, errors.CheckpointNotFoundError, "nothing is stored there"),
    "no manifest": (_delete(MANIFEST), errors.NotACheckpointError, "none was committed"),
    "empty manifest": (_manifest(lambda data: b""), CORRUPT, DAMAGED),
    "zeros": (_manifest(lambda data: b"\0" * len(data)), CORRUPT, DAMAGED),
    "cut in half": (_manifest(lambda data: data[: len(data) // 2]), CORRUPT, CHANGED),
    "one byte short": (_manifest(lambda data: data[:-1]), CORRUPT, CHANGED),
    "one byte more": (_manifest(lambda data: data + b"\0"), CORRUPT, CHANGED),
    "flipped magic": (_manifest(_flip(5)), CORRUPT, DAMAGED),
    "flipped version": (_manifest(_flip(16)), CORRUPT, CHANGED),
    "flipped payload": (_manifest(_flip(200)), CORRUPT, CHANGED),
    "flipped checksum": (_manifest(_flip(-1)), CORRUPT, CHANGED),
    "newer version": (
        _manifest(lambda data: _envelope("bytecheckpoint", 2, {"any": "thing"}, None, b"", 1)),
        NEWER,
        "format version 2; this library reads version 1",
    ),
    "unknown codec": (
        _manifest(_reopened(lambda codec, size, stored: _envelope("bytecheckpoint", 1, "lz9", size, stored))),
        NEWER,
        "codec 'lz9'",
    ),
    "wrong length": (
        _manifest(_reopened(lambda codec, size, stored: _envelope("bytecheckpoint", 1, codec, size + 1, stored))),
        BROKEN,
        "does not state the expected",
    ),
    "bomb": (
        _manifest(_reopened(lambda *_: _envelope("bytecheckpoint", 1, "zstd", 1 << 31, zstandard.compress(b"")))),
        BROKEN,
        "claims to expand to 2147483648",
    ),
    "unknown field": (_payload(lambda document: document.update(more=1)), BROKEN, "does not have exactly the fields"),
    "field missing": (_payload(lambda document: document.pop("aliases")), BROKEN, "does not have exactly the fields"),
    "unknown dtype": (_payload(_text("tensors", "dtype", b"float32", b"float33")), BROKEN, "unknown dtype 'float33'"),
    "unknown kind": (_payload(_text("files", "kind", b"values", b"pickle")), NEWER, "'pickle'"),
    "unknown file codec": (
        _payload(_text("files", "codec", b"raw", b"lz9")),
        BROKEN,
        "frames, but the encoded files have",
    ),
    "path with ..": (_payload(_use_parent_path), BROKEN, "is not a plain name inside attempt-golden-single/"),
    "name twice": (
        _payload(_text("tensors", "name", b"model.down.weight", b"model.down.bias")),
        BROKEN,
        "'model.down.bias' and 'model.down.bias' are equal or not in order",
    ),
    "box outside": (
        _payload(_number("shards", "offsets", 1, 1)),
        BROKEN,
        "is not inside tensor 'model.coarse' of shape (3, 2)",
    ),
    "shape changed": (
        _payload(_number("tensors", "shape", 0, 2)),
        BROKEN,
        "is not inside tensor 'model.coarse' of shape (2, 2)",
    ),
    "file of another section": (_payload(_number("shards", "file", 0, 2)), BROKEN, "not a tensor file"),
    "offset moved": (_payload(_number("shards", "offset", 0, 1 << 40)), BROKEN, "outside its 396 bytes of data"),
    "rank beyond the world": (_payload(_number("files", "rank", 0, 7)), BROKEN, "rank of file"),
    "tie to nothing": (_payload(_text("aliases", "target", b"model.up", b"model.uq")), BROKEN, "alias"),
}

MODEL, OPTIMIZER = "model-00000.safetensors", "optimizer-00000.safetensors"
VALUES = "optimizer-00000.msgpack"
SWAPPED = "this is not the file that was saved (changed, or swapped with another)"

LOAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "file missing": (_delete(MODEL), MODEL, "file is missing"),
    "values missing": (_delete(VALUES), VALUES, "file is missing"),
    "file empty": (_edit(MODEL, lambda data: b""), MODEL, "cannot read its first"),
    "file cut in its header": (_edit(MODEL, lambda data: data[:100]), MODEL, "cannot read its first"),
    "file cut in its data": (_edit(MODEL, lambda data: data[:-1]), MODEL, "cannot read bytes"),
    "values cut": (_edit(VALUES, lambda data: data[:-1]), VALUES, "file has"),
    "values longer": (_edit(VALUES, lambda data: data + b"\0"), VALUES, "file has"),
    "flipped header length": (_edit(MODEL, _flip(2)), MODEL, SWAPPED),
    "flipped header": (_edit(MODEL, _flip(60)), MODEL, SWAPPED),
    "flipped padding": (_edit(MODEL, _flip(4095)), MODEL, SWAPPED),
    "flipped first byte": (_edit(MODEL, _flip(4096)), MODEL, "checksum mismatch in tensor model."),
    "flipped last byte": (_edit(MODEL, _flip(-1)), MODEL, "checksum mismatch in tensor model."),
    "flipped optimizer byte": (_edit(OPTIMIZER, _flip(-1)), OPTIMIZER, "checksum mismatch in tensor optimizer.state."),
    "flipped value": (_edit(VALUES, _flip(-3)), VALUES, "checksum mismatch in the values of section optimizer"),
    "swapped": (_swap(MODEL, OPTIMIZER), MODEL, SWAPPED),
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "single", tmp_path / "single"))


@pytest.mark.parametrize("kind", OPEN)
def test_a_mutilated_manifest_is_refused(kind: str, copy: Path) -> None:
    mutilate, error, part = OPEN[kind]
    mutilate(copy)
    state = dict(zip(("model", "optimizer"), golden.plain_target("single")))
    before = describe(state["model"].state_dict())
    for read in (lambda: bcp.open(copy), lambda: bcp.load(copy, state)):
        with pytest.raises(error) as caught:
            read()
        assert type(caught.value) is error
        assert str(copy) in str(caught.value)
        assert part in str(caught.value)
    assert describe(state["model"].state_dict()) == before


@pytest.mark.parametrize("kind", LOAD)
def test_a_mutilated_file_is_detected(kind: str, copy: Path) -> None:
    mutilate, file, part = LOAD[kind]
    mutilate(copy)
    checkpoint = bcp.open(copy)
    report = checkpoint.verify()
    assert not report.ok
    assert any(file in problem for problem in report.problems)
    model, optimizer = golden.plain_target("single")
    with pytest.raises(errors.CorruptionError) as caught:
        bcp.load(copy, {"model": model, "optimizer": optimizer})
    assert type(caught.value) is errors.CorruptionError
    assert file in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["fsdp2-4", "fsdp1-flat-3", "tp-2"])
def test_swapped_files_of_two_ranks_are_detected(name: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(ROOT / name, tmp_path / name))
    _swap("model-00000.safetensors", "model-00001.safetensors")(root)
    model, _ = golden.plain_target(name)
    with pytest.raises(errors.CorruptionError, match="swapped with another"):
        bcp.load(root, {"model": model})
    assert not bcp.open(root).verify().ok


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_number("shards", "offsets", 5, 2), "overlap or are not in the order of their offsets"),
        (_number("shards", "lengths", 5, 2), "they have 40 of 30 elements"),
        (_number("tensors", "shape", 2, 4), "they have 30 of 40 elements"),
    ],
    ids=["moved", "longer", "hole"],
)
def test_shards_that_do_not_tile_are_refused(change: Any, part: str, tmp_path: Path) -> None:
    """``model.cube``, the second tensor, is stored in three boxes of one row each."""
    root = Path(shutil.copytree(ROOT / "fsdp2-4", tmp_path / "fsdp2-4"))
    _payload(change)(root)
    with pytest.raises(errors.FormatError, match=r"model\.cube") as caught:
        bcp.open(root)
    assert part in str(caught.value)
