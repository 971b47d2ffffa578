from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.codecs import find_codec, list_codecs
from bytecheckpoint.errors import FormatError, UnsupportedVersionError

BUILTIN = ["raw", "zstd"]


@pytest.mark.parametrize("name", BUILTIN)
@given(data=st.binary(max_size=5000), repeat=st.integers(1, 50))
@settings(deadline=None, max_examples=30)
def test_round_trip(name: str, data: bytes, repeat: int) -> None:
    data = data * repeat
    codec = find_codec(name)
    assert codec.decompress(codec.compress(memoryview(data)), len(data)) == data


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("wrong", [0, 9999, 10001, 1 << 40])
def test_size_must_be_exact(name: str, wrong: int) -> None:
    codec = find_codec(name)
    with pytest.raises(FormatError):
        codec.decompress(codec.compress(bytes(10000)), wrong)


@given(junk=st.binary(max_size=200), size=st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_zstd_never_returns_another_size(junk: bytes, size: int) -> None:
    try:
        content = find_codec("zstd").decompress(b"\x28\xb5\x2f\xfd" + junk, size)
    except FormatError:
        return
    assert len(content) == size


def test_zstd_refuses_a_frame_without_its_size() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    frame = stream.compress(bytes(1000)) + stream.flush()
    with pytest.raises(FormatError, match="does not state"):
        find_codec("zstd").decompress(frame, 1000)


def test_zstd_refuses_extra_and_truncated_data() -> None:
    frame = find_codec("zstd").compress(bytes(1000))
    for bad in (frame + b"x", frame[:-1], b""):
        with pytest.raises(FormatError):
            find_codec("zstd").decompress(bad, 1000)


def test_a_codec_is_thread_safe() -> None:
    codec = find_codec("zstd")
    pieces = [bytes([i]) * 20_000 for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(codec.compress, pieces))
        assert list(pool.map(lambda part: codec.decompress(part, 20_000), packed)) == pieces


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"no codec is named 'lzma9'; known: raw, zstd"):
        find_codec("lzma9")


def test_plugin_is_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reverse_codec.py").write_text(
        "from bytecheckpoint.codecs import Codec\n"
        "class Reverse(Codec):\n"
        "    name = 'reverse'\n"
        "    def compress(self, data): return bytes(data)[::-1]\n"
        "    def decompress(self, data, size): return bytes(data)[::-1]\n"
    )
    info = tmp_path / "reverse_codec-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reverse-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[bytecheckpoint.codecs]\nreverse = reverse_codec:Reverse\nother = reverse_codec:Reverse\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert find_codec("reverse").compress(b"abc") == b"cba"
        assert set(list_codecs()) >= {"raw", "reverse", "zstd"}
        with pytest.raises(UnsupportedVersionError, match="does not create a Codec named 'other'"):
            find_codec("other")
    finally:
        find_codec.cache_clear()
        sys.modules.pop("reverse_codec", None)
