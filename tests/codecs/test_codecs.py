from __future__ import annotations

import struct
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.codecs import find_codec, list_codecs
from bytecheckpoint.errors import FormatError, UnsupportedVersionError

BUILTIN = ["zstd", "zstd-planes"]


def decoded(name: str, frame: bytes, size: int) -> bytes:
    out = bytearray(size)
    find_codec(name).decode(memoryview(frame), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("name", BUILTIN)
@given(data=st.binary(min_size=1, max_size=5000), repeat=st.integers(1, 50), width=st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=examples(60))
def test_round_trip(name: str, data: bytes, repeat: int, width: int) -> None:
    data = data * repeat
    assert decoded(name, find_codec(name).encode(memoryview(data), width), len(data)) == data


@given(values=st.binary(min_size=8, max_size=80_000), width=st.sampled_from([1, 2, 4, 8]), repeat=st.integers(1, 9))
@settings(deadline=None, max_examples=examples(60))
def test_planes_are_the_strided_bytes(values: bytes, width: int, repeat: int) -> None:
    """The format of a frame, by numpy's strides and zstandard's own decompressor."""
    data = np.frombuffer(values * repeat, np.uint8)
    frame = find_codec("zstd-planes").encode(data.data, width)
    found = frame[0]
    assert found == (width if len(data) % width == 0 else 1)
    lengths = np.frombuffer(frame, "<u4", found, 1)
    at = 1 + 4 * found
    for plane, length in enumerate(lengths.tolist()):
        expected = data[plane::found].tobytes()
        stored, at = frame[at : at + length], at + length
        assert length <= len(expected)
        assert (stored if length == len(expected) else zstandard.decompress(stored)) == expected
    assert at == len(frame)


def test_planes_of_random_weights_shrink_as_measured() -> None:
    weights = np.random.default_rng(0).standard_normal(1 << 18, np.float32)
    for width, ratio in ((4, 0.846), (2, 0.692)):
        chunks = np.ascontiguousarray(weights.view(np.uint8).reshape(-1, 4)[:, 4 - width :]).reshape(-1, 1 << 18)
        frames = [find_codec("zstd-planes").encode(chunk.data, width) for chunk in chunks]
        assert sum(map(len, frames)) / chunks.size == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("wrong", [1, 9996, 10004])
def test_size_must_be_exact(name: str, wrong: int) -> None:
    frame = find_codec(name).encode(memoryview(bytes(10000)), 4)
    with pytest.raises(FormatError):
        decoded(name, frame, wrong)


def claims(size: int) -> bytes:
    """A zstd frame with one empty block that claims ``size`` bytes."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


def planes(*parts: bytes) -> bytes:
    return struct.pack(f"<B{len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


_BOMB = zstandard.compress(bytes(100 << 20))
_SMALL = zstandard.compress(bytes(500))

HOSTILE = {
    "empty": ("zstd", b""),
    "claims 10 GB": ("zstd", claims(10 << 30)),
    "claims the size, holds nothing": ("zstd", claims(1000)),
    "bomb of 100 MB": ("zstd", _BOMB),
    "no planes": ("zstd-planes", b"\0"),
    "empty frame": ("zstd-planes", b""),
    "255 planes": ("zstd-planes", b"\xff" + bytes(4 * 255)),
    "a header cut short": ("zstd-planes", b"\x04\0\0"),
    "three planes of 1000 bytes": ("zstd-planes", planes(b"", b"", b"")),
    "planes too long": ("zstd-planes", planes(bytes(500), bytes(501))),
    "planes too short": ("zstd-planes", planes(bytes(500), bytes(499))),
    "a plane of 4 GB": ("zstd-planes", struct.pack("<B2I", 2, 500, (1 << 32) - 1) + bytes(500)),
    "a plane that claims 10 GB": ("zstd-planes", planes(_SMALL, claims(10 << 30))),
    "a plane that is a bomb": ("zstd-planes", planes(_SMALL, _BOMB)),
    "bytes after the planes": ("zstd-planes", planes(_SMALL, _SMALL) + b"x"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_frames_are_refused_in_little_memory(case: str) -> None:
    name, frame = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decoded(name, frame, 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BUILTIN)
@given(junk=st.binary(max_size=200), size=st.integers(1, 1000), cut=st.integers(0, 40))
@settings(deadline=None, max_examples=examples(80))
def test_junk_never_raises_anything_else(name: str, junk: bytes, size: int, cut: int) -> None:
    frame = find_codec(name).encode(memoryview(bytes(size)), 2)
    for hostile in (junk, frame[:cut] + junk, b"\x28\xb5\x2f\xfd" + junk):
        with suppress(FormatError):
            decoded(name, hostile, size)


def test_zstd_refuses_a_frame_without_its_size() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    frame = stream.compress(bytes(1000)) + stream.flush()
    with pytest.raises(FormatError, match="does not state"):
        decoded("zstd", frame, 1000)


@pytest.mark.parametrize("name", BUILTIN)
def test_extra_and_truncated_data_is_refused(name: str) -> None:
    frame = find_codec(name).encode(memoryview(bytes(1000)), 4)
    for bad in (frame + b"x", *(frame[:end] for end in range(len(frame)))):
        with pytest.raises(FormatError):
            decoded(name, bad, 1000)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_codec_is_thread_safe(name: str) -> None:
    codec = find_codec(name)
    pieces = [bytes([i, 7]) * 20_000 for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda piece: codec.encode(memoryview(piece), 2), pieces))
        assert list(pool.map(lambda frame: decoded(name, frame, 40_000), packed)) == pieces


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"no codec is named 'lzma9'; known: .*zstd, zstd-planes"):
        find_codec("lzma9")


def test_plugin_is_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reverse_codec.py").write_text(
        "from bytecheckpoint.codecs import Codec\n"
        "class Reverse(Codec):\n"
        "    name = 'reverse'\n"
        "    def encode(self, data, width): return bytes(data)[::-1]\n"
        "    def decode(self, frame, out): out[:] = frame[::-1]\n"
    )
    info = tmp_path / "reverse_codec-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reverse-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bytecheckpoint.codecs]\nreverse = reverse_codec:Reverse\nother = reverse_codec:Reverse\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert find_codec("reverse").encode(memoryview(b"abc"), 1) == b"cba"
        assert set(list_codecs()) >= {"reverse", "zstd", "zstd-planes"}
        with pytest.raises(UnsupportedVersionError, match="does not create a Codec named 'other'"):
            find_codec("other")
    finally:
        find_codec.cache_clear()
        sys.modules.pop("reverse_codec", None)
