"""Read checkpoints of format version 2 that earlier releases wrote, bit for bit, and refuse damaged ones."""

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
from golden import ENCODED_CASES, ENCODED_ROOT, describe_tensor
from independent_reader import names, numbers, read_checkpoint, read_payload

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, CorruptionError, FormatError, UnsupportedVersionError
from bytecheckpoint.testing.ranks import RankPool

MANIFEST = "manifest.msgpack"
every_case = pytest.mark.parametrize("name", ENCODED_CASES)


def expectation(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ENCODED_ROOT / f"{name}.json").read_text())
    return content


@every_case
def test_contains_exactly_the_saved_state(name: str) -> None:
    expected, checkpoint = expectation(name)["tensors"], bcp.open(ENCODED_ROOT / name)
    assert checkpoint.manifest.version == 2
    assert name in checkpoint.manifest.files.codec
    assert checkpoint.verify().ok
    assert set(checkpoint) == expected.keys()
    for full, described in expected.items():
        assert describe_tensor(checkpoint[full].load()) == described, full
    tree = {key: torch.zeros_like(tensor) for key, tensor in golden.compressible(name).items()}
    bcp.load(ENCODED_ROOT / name, {"tree": tree})
    assert {f"tree.{key}": describe_tensor(tensor) for key, tensor in tree.items()} == expected


@every_case
def test_an_independent_reader_reads_the_same(name: str) -> None:
    found, expected = read_checkpoint(ENCODED_ROOT / name), expectation(name)["tensors"]
    assert {full: [list(array.shape), array.tobytes().hex()] for full, array in found.items()} == {
        full: described[1:] for full, described in expected.items()
    }


@every_case
def test_chunks_are_stored_in_every_way(name: str) -> None:
    """As they are, encoded, and, with planes, with some planes as they are: otherwise the cases test too little."""
    frames = bcp.open(ENCODED_ROOT / name).manifest.files.frames
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
    old, new = read_checkpoint(ENCODED_ROOT / name), read_checkpoint(tmp_path / name)
    assert {full: array.tobytes() for full, array in new.items()} == {full: a.tobytes() for full, a in old.items()}
    payloads = [read_payload((root / name / MANIFEST).read_bytes()) for root in (ENCODED_ROOT, tmp_path)]
    for payload in payloads:
        for column in ("library_version", "frames"):
            del payload[column]
        for column in ("size", "head_length", "head_checksum"):
            del payload["files"][column]
    assert payloads[0] == payloads[1]


# -- damage --------------------------------------------------------------------------------------------------------


def _seal(document: dict[str, Any], version: int) -> bytes:
    payload = msgpack.packb(document)
    parts = ("bytecheckpoint", version, "raw", len(payload), payload)
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
    del document["frames"]["checksum"]


def _encode_values(document: dict[str, Any]) -> None:
    index = document["files"]["codec"]["index"]
    index["d"] = bytes([max(index["d"])]) * len(index["d"])


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], type[CheckpointError], str]] = {
    "no frames": (lambda document: document.pop("frames"), FormatError, "does not have exactly the fields"),
    "a frame less": (_lengths(lambda all_: all_[:-1]), FormatError, "frames.checksum"),
    "an empty frame": (_lengths(lambda all_: [0, *all_[1:]]), FormatError, "frame 0 has 0 bytes"),
    "a frame longer than its chunk": (_lengths(lambda all_: [1025, *all_[1:]]), FormatError, "frame 0 has 1025 bytes"),
    "a frame of 10 GB": (_lengths(lambda all_: [10 << 30, *all_[1:]]), FormatError, "has 10737418240 bytes"),
    "a frame of 2^64-1": (_lengths(lambda all_: [(1 << 64) - 1, *all_[1:]]), FormatError, "over 2\\^63-1"),
    "shorter in sum": (_lengths(lambda all_: [*all_[:-1], all_[-1] - 1]), FormatError, "do not add up to its size"),
    "another size": (_files("size", lambda size: size + 1), FormatError, "do not add up to its size"),
    "no checksums": (_checksums, FormatError, "frames does not have exactly the fields"),
    "a chunk of 1 GB": (_files("chunk_size", lambda _: 1 << 30), FormatError, "from 1 to 16777216"),
    "a chunk of nothing": (_files("chunk_size", lambda _: 0), FormatError, "from 1 to 16777216"),
    "smaller chunks": (_files("chunk_size", lambda _: 512), FormatError, "frames, but the encoded files have"),
    "a name that is none": (_codec(b"../zstd"), FormatError, "codec name '../zstd' is not allowed"),
    "raw": (_codec(b"raw"), FormatError, "frames, but the encoded files have 0 chunks"),
    "encoded values": (_encode_values, FormatError, "or it is no tensor file"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ENCODED_ROOT / "zstd", tmp_path / "checkpoint"))


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_hostile_manifest_is_refused(case: str, root: Path) -> None:
    change, error, message = MANIFESTS[case]
    document = read_payload((root / MANIFEST).read_bytes())
    change(document)
    (root / MANIFEST).write_bytes(_seal(document, 2))
    with pytest.raises(error, match=message):
        bcp.open(root)


def test_frames_are_no_part_of_version_1(root: Path) -> None:
    document = read_payload((root / MANIFEST).read_bytes())
    (root / MANIFEST).write_bytes(_seal(document, 1))
    with pytest.raises(FormatError, match="does not have exactly the fields"):
        bcp.open(root)
    del document["frames"]
    (root / MANIFEST).write_bytes(_seal(document, 1))
    with pytest.raises(UnsupportedVersionError, match="a file has codec 'zstd'"):
        bcp.open(root)


def test_a_codec_of_another_package_is_named_with_the_remedy(root: Path) -> None:
    document = read_payload((root / MANIFEST).read_bytes())
    _codec(b"fancy")(document)
    (root / MANIFEST).write_bytes(_seal(document, 2))
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
    lengths, checksums = numbers(document["frames"]["length"]), numbers(document["frames"]["checksum"])
    content, frame = file.read_bytes(), FRAMES[case]
    content = content[:head] + frame + content[head + lengths[0] :]
    file.write_bytes(content)
    lengths[0], checksums[0] = len(frame), xxhash.xxh3_64_intdigest(frame)
    document["frames"] = {"length": _column(lengths), "checksum": _column(checksums)}
    _files("size", lambda _: len(content))(document)
    (root / MANIFEST).write_bytes(_seal(document, 2))
    target = {key: torch.zeros_like(tensor) for key, tensor in golden.compressible("zstd").items()}
    with pytest.raises(CorruptionError, match=rf"undecodable frame .* in tensor tree\.\w+ .*, bytes \[{head}, "):
        bcp.load(root, {"tree": target})
    assert not bcp.open(root).verify().ok
