"""Read encoded and incremental checkpoints that earlier releases wrote, bit for bit, and refuse damaged ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import msgpack
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from golden import ENCODED_CASES, ROOT, describe_tensor
from independent_reader import names, numbers, read_checkpoint, read_payload

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, CorruptionError, FormatError, UnsupportedVersionError
from bytecheckpoint.testing.ranks import RankPool

MANIFEST = "manifest.msgpack"
every_case = pytest.mark.parametrize("name", ENCODED_CASES)


def expectation(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / f"{name}.json").read_text())
    return content


@every_case
def test_contains_exactly_the_saved_state(name: str) -> None:
    expected, checkpoint = expectation(name)["tensors"], bcp.open(ROOT / name)
    assert name in checkpoint.manifest.files.codec
    assert checkpoint.verify().ok
    assert set(checkpoint) == expected.keys()
    for full, described in expected.items():
        assert describe_tensor(checkpoint[full].load()) == described, full
    tree = {key: torch.zeros_like(tensor) for key, tensor in golden.compressible(name).items()}
    bcp.load(ROOT / name, {"tree": tree})
    assert {f"tree.{key}": describe_tensor(tensor) for key, tensor in tree.items()} == expected


@every_case
def test_an_independent_reader_reads_the_same(name: str) -> None:
    found, expected = read_checkpoint(ROOT / name), expectation(name)["tensors"]
    assert {full: [list(array.shape), array.tobytes().hex()] for full, array in found.items()} == {
        full: described[1:] for full, described in expected.items()
    }


@every_case
def test_chunks_are_stored_in_every_way(name: str) -> None:
    """As they are, encoded, and, with planes, with some planes as they are: otherwise the cases test too little."""
    frames = bcp.open(ROOT / name).manifest.files.frames
    assert frames is not None
    assert (frames.length == frames.nbytes).any()
    assert (frames.length < frames.nbytes // 2).any()
    assert ((frames.length > frames.nbytes * 0.7) & (frames.length < frames.nbytes)).any()


@every_case
def test_the_current_library_writes_what_an_independent_reader_reads(
    name: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Frames may differ with the release of zstd, what they decode to may not."""
    golden.write_case(rank_pool, name, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text())["tensors"] == expectation(name)["tensors"]
    old, new = read_checkpoint(ROOT / name), read_checkpoint(tmp_path / name)
    assert {full: array.tobytes() for full, array in new.items()} == {full: a.tobytes() for full, a in old.items()}
    payloads = [read_payload((root / name / MANIFEST).read_bytes()) for root in (ROOT, tmp_path)]
    for payload in payloads:
        payload["metadata"] = _of_the_user(payload["metadata"])
        for column in ("library_version", "frames"):
            del payload[column]
        for column in ("size", "head_length", "head_checksum"):
            del payload["files"][column]
    assert payloads[0] == payloads[1]


def _of_the_user(metadata: bytes) -> dict[str, Any]:
    """The metadata without the times, which vary."""
    return {key: value for key, value in msgpack.unpackb(metadata).items() if key != "bytecheckpoint.save"}


def test_an_incremental_checkpoint_contains_exactly_the_saved_state(tmp_path: Path) -> None:
    golden.write_incremental(tmp_path)
    for number, tree in enumerate(golden.incremental_trees(), 1):
        path = ROOT / golden.INCREMENTAL / f"step-{number}"
        checkpoint = bcp.open(path)
        assert checkpoint.verify().ok
        found = read_checkpoint(path)
        assert found.keys() == {f"tree.{name}" for name in tree}
        for name, tensor in tree.items():
            assert torch.equal(checkpoint[f"tree.{name}"].load(), tensor)
            assert found[f"tree.{name}"].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        payloads = [
            read_payload((root / path.name / MANIFEST).read_bytes())
            for root in (path.parent, tmp_path / golden.INCREMENTAL)
        ]
        for payload in payloads:
            payload["metadata"] = _of_the_user(payload["metadata"])
            del payload["library_version"]
            for column in ("size", "head_length", "head_checksum"):  # the header names the library's version
                del payload["files"][column]
            del payload["references"]["size"], payload["frames"]["offset"]
        assert payloads[0] == payloads[1]
    assert names(payloads[0]["references"]["name"]) == ["attempt-golden-1/tree-00000.safetensors"]


# -- damage --------------------------------------------------------------------------------------------------------


def _seal(document: dict[str, Any]) -> bytes:
    payload = msgpack.packb(document)
    parts = ("bytecheckpoint", 1, "raw", len(payload), payload)
    body = b"\x96" + b"".join(msgpack.packb(part) for part in parts) + b"\xc4\x10"
    return body + xxhash.xxh3_128_digest(body)


def _column(values: list[int]) -> dict[str, Any]:
    return {"w": 8, "d": np.array(values, "<u8").tobytes()}


def _lengths(change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        document["frames"]["length"] = _column(change(numbers(document["frames"]["length"])))

    return edit


def _files(column: str, change: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    """Change a number of the encoded file."""

    def edit(document: dict[str, Any]) -> None:
        row = next(row for row, name in enumerate(names(document["files"]["name"])) if name.endswith(".frames"))
        values = numbers(document["files"][column])
        values[row] = change(values[row])
        document["files"][column] = _column(values)

    return edit


def _codec(new: bytes) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        of = document["files"]["codec"]["of"]
        of["d"] = of["d"].replace(b"zstd\0", new + b"\0")

    return edit


def _checksums(document: dict[str, Any]) -> None:
    del document["frames"]["checksums"]


def _a_checksum_less(document: dict[str, Any]) -> None:
    document["frames"]["checksums"] = document["frames"]["checksums"][:-16]


def _encode_values(document: dict[str, Any]) -> None:
    index = document["files"]["codec"]["index"]
    index["d"] = bytes([max(index["d"])]) * len(index["d"])


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], type[CheckpointError], str]] = {
    "no frames": (lambda document: document.pop("frames"), FormatError, "does not have exactly the fields"),
    "a frame less": (_lengths(lambda all_: all_[:-1]), FormatError, "frames.source"),
    "an empty frame": (_lengths(lambda all_: [0, *all_[1:]]), FormatError, "frame 0 has 0 bytes"),
    "a frame longer than its chunk": (_lengths(lambda all_: [1025, *all_[1:]]), FormatError, "frame 0 has 1025 bytes"),
    "a frame of 10 GB": (_lengths(lambda all_: [10 << 30, *all_[1:]]), FormatError, "has 10737418240 bytes"),
    "a frame of 2^64-1": (_lengths(lambda all_: [(1 << 64) - 1, *all_[1:]]), FormatError, "over 2\\^63-1"),
    "shorter in sum": (_lengths(lambda all_: [*all_[:-1], all_[-1] - 1]), FormatError, "do not add up to its size"),
    "another size": (_files("size", lambda size: size + 1), FormatError, "do not add up to its size"),
    "a checksum less": (_a_checksum_less, FormatError, "checksums are not those of the frames"),
    "no checksums": (_checksums, FormatError, "frames does not have exactly the fields"),
    "a chunk of 1 GB": (_files("chunk_size", lambda _: 1 << 30), FormatError, "from 1 to 16777216"),
    "a chunk of nothing": (_files("chunk_size", lambda _: 0), FormatError, "from 1 to 16777216"),
    "smaller chunks": (_files("chunk_size", lambda _: 512), FormatError, "frames, but the encoded files have"),
    "a name that is none": (_codec(b"../zstd"), FormatError, "codec name '../zstd' is not allowed"),
    "raw": (_codec(b"raw"), FormatError, "frames, but the encoded files have 0 chunks"),
    "encoded values": (_encode_values, FormatError, "or it is no tensor file"),
}


def _reference(name: str) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        document["references"]["name"] = {"n": 1, "d": name.encode() + b"\0"}

    return edit


def _add_reference(document: dict[str, Any]) -> None:
    name, size = document["references"]["name"]["d"], numbers(document["references"]["size"])
    document["references"] = {"name": {"n": 2, "d": name + b"attempt-1/file\0"}, "size": _column(size * 2)}


def _repeat_reference(document: dict[str, Any]) -> None:
    name, size = document["references"]["name"]["d"], numbers(document["references"]["size"])
    document["references"] = {"name": {"n": 2, "d": name * 2}, "size": _column(size * 2)}
    source = numbers(document["frames"]["source"])
    source[source.index(1)] = 2
    document["frames"]["source"] = _column(source)


def _frames(column: str, change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        document["frames"][column] = _column(change(numbers(document["frames"][column])))

    return edit


def _size(change: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        document["references"]["size"] = _column([change(numbers(document["references"]["size"])[0])])

    return edit


_NAME = "is not a file of an older checkpoint"

REFERENCES: dict[str, tuple[Callable[[dict[str, Any]], None], type[CheckpointError], str]] = {
    "not shared": (lambda document: document.update(shared=False), FormatError, _NAME),
    "up": (_reference("../attempt-1/file"), FormatError, _NAME),
    "only up": (_reference("../file"), FormatError, _NAME),
    "an empty folder": (_reference("/file"), FormatError, _NAME),
    "this folder": (_reference("./file"), FormatError, _NAME),
    "up in the middle": (_reference("attempt-1/../file"), FormatError, _NAME),
    "up at the end": (_reference("attempt-1/.."), FormatError, _NAME),
    "three components": (_reference("attempt-1/a/file"), FormatError, _NAME),
    "absolute": (_reference("/etc/passwd"), FormatError, _NAME),
    "a drive": (_reference("c:\\windows\\attempt-1/file"), FormatError, _NAME),
    "a backslash": (_reference("attempt\\1/file"), FormatError, _NAME),
    "a line feed": (_reference("attempt\n/file"), FormatError, _NAME),
    "a long attempt": (_reference(f"{'x' * 256}/file"), FormatError, _NAME),
    "its own attempt": (_reference("attempt-golden-2/tree-00000.frames"), FormatError, _NAME),
    "one component": (_reference("file"), FormatError, _NAME),
    "no name": (_reference(""), FormatError, _NAME),
    "nothing refers to it": (_add_reference, FormatError, "no frame refers to one of the references"),
    "the same file twice": (_repeat_reference, FormatError, "a reference occurs twice"),
    "no references": (lambda document: document.pop("references"), FormatError, "exactly the fields"),
    "a source that does not exist": (_frames("source", lambda all_: [9 * one for one in all_]), FormatError, "9 of 1"),
    "a source of 2^63": (_frames("source", lambda all_: [one << 63 for one in all_]), FormatError, "over 2\\^63-1"),
    "a source less": (_frames("source", lambda all_: all_[:-1]), FormatError, "frames.source"),
    "an offset less": (_frames("offset", lambda all_: all_[:-1]), FormatError, "frames.offset"),
    "an offset more": (_frames("offset", lambda all_: [*all_, 0]), FormatError, "frames.offset"),
    "an offset after the end": (_frames("offset", lambda all_: [*all_[:-1], 1 << 40]), FormatError, "is outside"),
    "an offset of 2^63-1": (_frames("offset", lambda all_: [(1 << 63) - 1, *all_[1:]]), FormatError, "is outside"),
    "a short reference": (_size(lambda size: size // 2), FormatError, "is outside"),
    "a reference of 2^62": (_size(lambda size: 1 << 62), FormatError, "size of reference"),
    "own frames that others have": (_files("size", lambda size: size + 1024), FormatError, "do not add up to its size"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_a_hostile_reference_is_refused(case: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(ROOT / golden.INCREMENTAL, tmp_path / "root")) / "step-2"
    change, error, message = REFERENCES[case]
    document = read_payload((root / MANIFEST).read_bytes())
    change(document)
    (root / MANIFEST).write_bytes(_seal(document))
    with pytest.raises(error, match=message):
        bcp.open(root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "zstd", tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest_is_refused(case: str, root: Path) -> None:
    change, error, message = MANIFESTS[case]
    document = read_payload((root / MANIFEST).read_bytes())
    change(document)
    (root / MANIFEST).write_bytes(_seal(document))
    with pytest.raises(error, match=message):
        bcp.open(root)


def test_a_codec_of_another_package_is_named_with_the_remedy(root: Path) -> None:
    document = read_payload((root / MANIFEST).read_bytes())
    _codec(b"fancy")(document)
    (root / MANIFEST).write_bytes(_seal(document))
    with pytest.raises(UnsupportedVersionError, match=r"tree-00000\.frames: no codec is named 'fancy'.*Install"):
        bcp.open(root)["tree.weight"].load()


def _claims(size: int) -> bytes:
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


FRAMES = {
    "claims 10 GB": _claims(10 << 30),
    "claims its size, and holds nothing": _claims(1024),
    "bomb of 64 MB": zstandard.compress(bytes(64 << 20), 19)[:900],
    "too short": zstandard.compress(bytes(1000)),
    "too long": zstandard.compress(bytes(1100)),
    "cut": zstandard.compress(bytes(range(256)) * 4)[:-9],
    "no frame": b"junk" * 20,
    "planes": struct.pack("<B4I", 4, 1, 1, 1, 1) + b"abcd",
}


@pytest.mark.parametrize("case", FRAMES)
def test_a_hostile_frame_with_a_correct_checksum_is_refused(case: str, root: Path) -> None:
    """It takes the place of the first frame; the manifest agrees with it in every other respect."""
    document = read_payload((root / MANIFEST).read_bytes())
    file = next(root.rglob("*.frames"))
    row = [Path(name).name for name in names(document["files"]["name"])].index(file.name)
    head = numbers(document["files"]["head_length"])[row]
    lengths, checksums = numbers(document["frames"]["length"]), document["frames"]["checksums"]
    content, frame = file.read_bytes(), FRAMES[case]
    content = content[:head] + frame + content[head + lengths[0] :]
    file.write_bytes(content)
    lengths[0], checksums = len(frame), xxhash.xxh3_128_digest(frame) + checksums[16:]
    document["frames"].update(length=_column(lengths), checksums=checksums)
    _files("size", lambda _: len(content))(document)
    (root / MANIFEST).write_bytes(_seal(document))
    target = {key: torch.zeros_like(tensor) for key, tensor in golden.compressible("zstd").items()}
    with pytest.raises(CorruptionError, match=rf"undecodable frame .* in tensor tree\.\w+ .*, bytes \[{head}, "):
        bcp.load(root, {"tree": target})
    assert not bcp.open(root).verify().ok
