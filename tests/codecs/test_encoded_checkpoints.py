"""Checkpoints whose tensors are encoded: every load, every tool and every kind of damage."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import zstandard
from click.testing import CliRunner
from counting_backend import CountingBackend
from damage import flipped, keys_of, replaced, swapped
from small_training import differing, memory, training
from sorted_arguments import loading, saving

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import location
from bytecheckpoint.cli import cli
from bytecheckpoint.codecs import find_codec
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.engine.checksums import ChunkHasher
from bytecheckpoint.engine.encoding import ChunkEncoder, EncodedPiece
from bytecheckpoint.engine.files import FileImage
from bytecheckpoint.engine.reading.reader import ReadPart, ShardReader
from bytecheckpoint.engine.resources import IOEngine
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptionError,
    RankFailedError,
    StorageError,
    UnsupportedVersionError,
    UsageError,
)
from bytecheckpoint.format.checksums import checksum_of
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(26, of=__name__)

CODECS = ["zstd", "zstd-planes"]
CHUNK = 4096


def tree() -> dict[str, torch.Tensor]:
    """Tensors that shrink well, a little and not at all, and some without a whole chunk."""
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(301, 47, generator=generator),
        "half": (torch.randn(77, 133, generator=generator) * 0.02).bfloat16(),
        "moment": torch.randn(5001, generator=generator).square() * 1e-6,
        "complex": torch.randn(70, 33, generator=generator, dtype=torch.complex64),
        "double": torch.randn(1000, generator=generator, dtype=torch.float64),
        "steps": torch.arange(20_001),
        "noise": torch.randint(0, 256, (9001,), generator=generator, dtype=torch.uint8),
        "zeros": torch.zeros(300, 300),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module", params=CODECS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoded") / "checkpoint"
    bcp.save(path, {"tree": tree(), "extra": {"n": 1}}, options=bcp.SaveOptions(codec=request.param, chunk_size=CHUNK))
    return path


def frames_file(path: Path) -> Path:
    return next(path.rglob("*.frames"))


# -- loads ---------------------------------------------------------------------------------------------------------


def test_every_tensor_is_loaded_bit_for_bit(saved: Path) -> None:
    for options in ({}, {"verify": False}):
        state = {"tree": {name: torch.full_like(tensor, 3) for name, tensor in tree().items()}, "extra": {"n": 0}}
        bcp.load(saved, state, **loading(**options))
        assert _same(state["tree"], tree())
        assert state["extra"] == {"n": 1}
    checkpoint = bcp.open(saved)
    assert checkpoint.verify().ok
    assert checkpoint.manifest.file_bytes < 0.8 * checkpoint.manifest.nbytes


def test_slices_are_those_of_torch(saved: Path) -> None:
    chance, checkpoint = random.Random(3), bcp.open(saved)
    for name, tensor in tree().items():
        for _ in range(6):
            index = tuple(slice(*sorted((chance.randint(0, n), chance.randint(0, n)))) for n in tensor.shape)
            assert torch.equal(checkpoint[f"tree.{name}"][index], tensor[index]), (name, index)


def test_a_load_casts_and_fills_strided_memory(saved: Path) -> None:
    state = {"weight": torch.zeros(47, 301, dtype=torch.float64).T, "moment": torch.zeros(10_002)[::2]}
    bcp.load(saved, {"tree": state}, strict=False)
    assert torch.equal(state["weight"], tree()["weight"].double())
    assert torch.equal(state["moment"], tree()["moment"])


def test_a_slice_reads_only_its_frames(saved: Path) -> None:
    checkpoint = bcp.open(saved)
    backend, manifest = CountingBackend(checkpoint.index.data), checkpoint.manifest
    row = manifest.tensor_row("tree.steps")
    assert row is not None
    shard = manifest.shards_of(row).start
    out = torch.zeros(10, dtype=torch.int64)
    with closing(IOEngine()) as engine:
        ShardReader(backend, manifest, engine.io).read([ReadPart(shard, Box((9000,), (10,)), out)])
    assert out.tolist() == list(range(9000, 9010))
    head = int(manifest.files.head_length[int(manifest.shard_file[shard])])
    sizes = [call.size for call in backend.matching(key="*.frames") if call.operation.startswith("read")]
    assert 0 < sum(sizes) - head < 2 * CHUNK


def _train(rank: int, world_size: int, path: str, value: float, codec: str | None) -> list[str]:
    if codec is not None:
        state = training(value, shard=world_size > 1)
        bcp.save(path, state, options=bcp.SaveOptions(chunk_size=512, codec=codec))
        return []
    expected = memory(training(1.0, shard=world_size > 1))
    found = []
    for share_reads in ("auto", "always"):
        state = training(value, shard=world_size > 1)
        bcp.load(path, state, options=bcp.LoadOptions(share_reads=share_reads))
        found += differing(memory(state), expected)
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_a_load_reshards(codec: str, rank_pool: RankPool, tmp_path: Path) -> None:
    for writers, readers in ((3, 2), (1, 3), (2, 1)):
        path = str(tmp_path / f"{writers}")
        rank_pool.run(_train, path, 1.0, codec, world_size=writers)
        assert len(list(Path(path).rglob("*.frames"))) >= writers
        assert rank_pool.run(_train, path, 5.0, None, world_size=readers) == [[]] * readers


def test_many_pieces_in_little_staging_memory(tmp_path: Path) -> None:
    """Chunks that continue in the next piece, and pieces that wait for earlier ones."""
    generator = torch.Generator().manual_seed(2)
    state = {f"t{n}": torch.randn(1_300_003 + n, generator=generator) for n in range(6)}
    with bcp.Checkpointer(memory_budget=24 << 20) as own:
        for number, is_async in enumerate((False, True, True)):
            own.save(
                tmp_path / f"{number}", {"s": state}, async_save=is_async, options=bcp.SaveOptions(codec="zstd-planes")
            ).result()
    for number in range(3):
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        bcp.load(tmp_path / f"{number}", {"s": found})
        assert _same(found, state)
        assert bcp.open(tmp_path / f"{number}").verify().ok


# -- the encoder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_pieces_encoded_in_any_order_are_the_file(seed: int) -> None:
    chance = random.Random(seed)
    chunk, count = chance.choice([64, 700, 4096]), chance.randint(0, 9)
    sizes = [chance.choice([0, 1, 63, 64, 65, 1000, chance.randint(1, 30_000)]) for _ in range(count)]
    head = bytes(chance.choice([0, 10, 5000]))
    numbers = np.random.default_rng(seed)
    data = (
        np.where(numbers.random(sum(sizes)) < 0.3, numbers.integers(0, 256, sum(sizes)), 7).astype(np.uint8).tobytes()
    )
    offsets = [sum(sizes[:i]) for i in range(count)]
    widths = [chance.choice([1, 2, 4]) for _ in sizes]
    image = FileImage("key", "s", "tensors", head, offsets, sizes, (), widths, "zstd-planes")
    codec = find_codec("zstd-planes")
    hasher = ChunkHasher([len(head) + offset for offset in offsets], sizes, chunk)
    encoder = ChunkEncoder(image, chunk, codec, hasher)
    whole, pieces, released = bytearray(head + data), [], []
    at = 0
    while at < len(whole):
        step = chance.choice([1, 100, 4096, 20_000])
        hasher.update(at, memoryview(whole)[at : at + step])
        piece = encoder.cut(at, memoryview(whole)[at : at + step], lambda at=at: released.append(at))
        at += step
        if piece is not None:
            pieces.append(piece)
    chance.shuffle(pieces)
    file = io.BytesIO()
    placed: list[EncodedPiece] = [one for piece in pieces for one in encoder.encode(piece)]
    for one in placed:
        file.seek(one.offset)
        for part in one.parts:
            file.write(part)
    size, frames = encoder.finish()
    stored = file.getvalue()
    assert size == len(stored)
    assert stored[: len(head)] == head
    chunks = [data[low : min(low + chunk, end)] for low, end in _chunks(offsets, sizes, chunk)]
    assert len(frames.length) == len(chunks)
    at = len(head)
    checksums = frames.checksums.tolist()
    for expected, length in zip(chunks, frames.length.tolist(), strict=True):
        frame = stored[at : at + length]
        if length < len(expected):
            assert checksum_of(frame) == checksums.pop(0)
        assert length <= len(expected)
        assert (frame if length == len(expected) else _decode(codec, frame, len(expected))) == expected
        at += length
    assert at == len(stored)
    assert checksums == []


def _chunks(offsets: Sequence[int], sizes: Sequence[int], chunk: int) -> Iterator[tuple[int, int]]:
    for offset, size in zip(offsets, sizes):
        for low in range(offset, offset + size, chunk):
            yield low, offset + size


def _decode(codec: Any, frame: bytes, size: int) -> bytes:
    out = bytearray(size)
    codec.decode(memoryview(frame), memoryview(out))
    return bytes(out)


def test_zstandard_itself_reads_the_frames(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"tree": tree()}, options=bcp.SaveOptions(codec="zstd", chunk_size=CHUNK))
    manifest = bcp.open(tmp_path).manifest
    frames, content = manifest.files.frames, frames_file(tmp_path).read_bytes()
    assert frames is not None
    found = []
    for position, length, nbytes in zip(frames.position.tolist(), frames.length.tolist(), frames.nbytes.tolist()):
        frame = content[position : position + length]
        found.append(frame if length == nbytes else zstandard.decompress(frame))
    tensors = tree()
    rows = manifest.shards_in(manifest.files.codec.index("zstd")).tolist()
    names = [manifest.tensors.fqn_of(int(manifest.shards.tensor[row])) for row in rows]
    assert b"".join(found) == b"".join(
        tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name in names
        if tensors[name].numel()
    )


# -- damage --------------------------------------------------------------------------------------------------------


def _load_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        bcp.load(path, {"tree": {name: torch.zeros_like(tensor) for name, tensor in tree().items()}})
    return str(caught.value)


def test_a_flipped_bit_anywhere_names_tensor_and_frame(saved: Path) -> None:
    chance, file = random.Random(11), frames_file(saved)
    manifest = bcp.open(saved).manifest
    row = manifest.files.name.index(str(file.relative_to(saved)))
    head, size = int(manifest.files.head_length[row]), file.stat().st_size
    frames = manifest.files.frames
    assert frames is not None
    # The first and the last byte of some frames, and any others.
    frame_rows = chance.sample(range(len(frames.length)), 8)
    offsets = [int(frames.position[one]) for one in frame_rows]
    offsets += [int(frames.position[one] + frames.length[one]) - 1 for one in frame_rows]
    offsets += [chance.randrange(head, size) for _ in range(20)]
    for offset in offsets:
        with flipped(file, offset, chance.randrange(8)):
            problems = "\n".join(bcp.open(saved).verify().problems)
            for message in (_load_error(saved), problems):
                assert str(file) in message
                ranges = [(int(low), int(high)) for low, high in re.findall(r"bytes \[(\d+), (\d+)\)", message)]
                assert any(low <= offset < high and high - low <= CHUNK for low, high in ranges), message
                at = int(np.searchsorted(frames.position, offset, side="right")) - 1
                shard = next(
                    one
                    for one in manifest.shards_in(row).tolist()
                    if 0 <= frames.begin[at] - manifest.shard_offset[one] < manifest.shard_nbytes[one]
                )
                assert manifest.tensors.names[int(manifest.shards.tensor[shard])] in message
    for offset in (0, 7, 8, head - 1):
        with flipped(file, offset):
            assert str(file) in _load_error(saved)
            assert not bcp.open(saved).verify().ok
    assert bcp.open(saved).verify().ok


def test_a_truncated_file_names_the_first_missing_frame(saved: Path) -> None:
    file = frames_file(saved)
    content = file.read_bytes()
    for length in (0, 1, 4095, 4096, 5000, len(content) // 2, len(content) - 1):
        with replaced(file, content[:length]):
            message = _load_error(saved)
            assert str(file) in message
            assert f"the file has {length} bytes, but the manifest states {len(content)}" in message or length == 0
            assert not bcp.open(saved).verify().ok


def test_two_frames_that_changed_places_are_noticed(saved: Path) -> None:
    frames, file = bcp.open(saved).manifest.files.frames, frames_file(saved)
    assert frames is not None
    content = bytearray(file.read_bytes())
    by_length: dict[int, int] = {}
    for at, length in enumerate(frames.length.tolist()):
        other = by_length.setdefault(length, at)
        one, two = (slice(int(frames.position[i]), int(frames.position[i]) + length) for i in (other, at))
        if content[one] != content[two]:
            content[one], content[two] = content[two], content[one]
            break
    else:
        pytest.fail("no two frames of one length")
    with replaced(file, bytes(content)):
        assert "checksum mismatch" in _load_error(saved)


def test_a_codec_that_returns_other_bytes_is_noticed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = type(find_codec(bcp.open(saved).manifest.files.codec[0]))
    decode = codec.decode

    def broken(self: Any, frame: memoryview, out: memoryview) -> None:
        decode(self, frame, out)
        out[0] ^= 1

    monkeypatch.setattr(codec, "decode", broken)
    message = _load_error(saved)
    assert re.search(r"checksum mismatch in tensor tree\.\w+ .*, decoded bytes \[\d+, \d+\)", message), message
    assert "returns other bytes than were saved" in message


def test_files_of_two_saves_that_changed_places(saved: Path, tmp_path: Path) -> None:
    codec = bcp.open(saved).manifest.files.codec[0]
    state = {name: tensor + 1 if tensor.numel() else tensor for name, tensor in tree().items()}
    bcp.save(tmp_path / "other", {"tree": state}, options=bcp.SaveOptions(codec=codec, chunk_size=CHUNK))
    with swapped(frames_file(saved), frames_file(tmp_path / "other")):
        assert "mismatch" in _load_error(saved) or "bytes, but the manifest" in _load_error(saved)


def test_a_failed_write_leaves_nothing_and_the_next_save_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"s": {"a": torch.randn(3_000_000)}}
    rules = [FaultRule("write", "*.frames", error=StorageError("injected"), nth=2)]
    real = location.open_backend
    monkeypatch.setattr(location, "open_backend", lambda url, **o: FaultyBackend(real(url, **o), rules))
    for is_async in (False, True):
        with pytest.raises(StorageError, match="injected"):
            bcp.save(tmp_path / "x", state, async_save=is_async, options=bcp.SaveOptions(codec="zstd-planes")).result()
        assert keys_of(tmp_path) == []
        rules[:] = [FaultRule("write", "*.frames", error=StorageError("injected"), nth=2)]
    rules.clear()
    bcp.save(tmp_path / "x", state, async_save=True, options=bcp.SaveOptions(codec="zstd-planes")).result()
    assert torch.equal(bcp.open(tmp_path / "x")["s.a"].load(), state["s"]["a"])


def _killed(rank: int, world_size: int, path: str) -> None:
    """Die when all frames are written, and only the manifest is missing."""

    def kill(name: str, event: str) -> None:
        if rank == 0 and name == "save.commit":
            os.kill(os.getpid(), signal.SIGKILL)

    telemetry.observe(kill)
    with pytest.raises(RankFailedError):
        bcp.save(
            path, training(2.0, shard=True), options=bcp.SaveOptions(codec="zstd-planes", deadline_s=time_limit(30))
        )


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        pool.run(_train, str(tmp_path), 1.0, "zstd", world_size=2)
        pool.run(_killed, str(tmp_path), expect_death={0: signal.SIGKILL}, world_size=2)
    assert _train(0, 1, str(tmp_path), 7.0, None) == []
    bcp.save(tmp_path, training(3.0), options=bcp.SaveOptions(codec="zstd-planes"))
    assert bcp.open(tmp_path).verify().ok


# -- other readers and tools ---------------------------------------------------------------------------------------


def test_readers_of_safetensors_refuse_the_file(saved: Path) -> None:
    with pytest.raises(safetensors.SafetensorError, match="header too large"):
        safetensors.safe_open(frames_file(saved), "pt").__enter__()


def test_without_a_codec_nothing_changes(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"tree": tree()})
    manifest = bcp.open(tmp_path).manifest
    assert set(manifest.files.codec) == {"raw"}
    assert not list(tmp_path.rglob("*.frames"))


def test_a_codec_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "halves_codec.py").write_text(
        "from bytecheckpoint.codecs import Codec\n"
        "class Halves(Codec):\n"
        "    name = 'halves'\n"
        "    def encode(self, data, width):\n"
        "        half = len(data) // 2\n"
        "        return bytes(data[:half]) if data[:half] == data[half:] else bytes(data)\n"
        "    def decode(self, frame, out):\n"
        "        out[:] = bytes(frame) * 2\n"
    )
    info = tmp_path / "code" / "halves_codec-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bytecheckpoint.codecs]\nhalves = halves_codec:Halves\n")
    state = {"s": {"a": torch.ones(1000), "b": torch.arange(10)}}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "code"))
        try:
            bcp.save(tmp_path / "x", state, options=bcp.SaveOptions(codec="halves"))
            assert torch.equal(bcp.open(tmp_path / "x")["s.a"].load(), state["s"]["a"])
            assert torch.equal(bcp.open(tmp_path / "x")["s.b"].load(), state["s"]["b"])
        finally:
            find_codec.cache_clear()
            sys.modules.pop("halves_codec", None)
    monkeypatch.undo()
    checkpoint = bcp.open(tmp_path / "x")  # its metadata can be read
    assert checkpoint["s.a"].shape == (1000,)
    for use in (lambda: checkpoint["s.a"].load(), lambda: bcp.load(tmp_path / "x", state), checkpoint.verify):
        with pytest.raises(UnsupportedVersionError, match=r"no codec is named 'halves'.* Install the package"):
            use()


def _data_of(checkpoint: Path) -> dict[str, bytes]:
    """The data files by name, without the name of the attempt, which is new in a copy."""
    return {key.partition("/")[2]: (checkpoint / key).read_bytes() for key in keys_of(checkpoint) if "/" in key}


def test_the_tools(saved: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="bcp")
        assert result.exit_code == 0, result.output
        return result.stdout

    codec = bcp.open(saved).manifest.files.codec[0]
    assert re.search(rf"codec {codec}: 0\.\d\d of", run("inspect", saved))
    assert f'"codec": "{codec}"' in run("inspect", saved, "--files", "--json")
    assert "intact" in run("verify", saved)
    run("copy", saved, tmp_path / "copy")
    assert _data_of(saved) == _data_of(tmp_path / "copy")
    run("reshard", saved, tmp_path / "raw", "--files", 2)
    assert set(bcp.open(tmp_path / "raw").manifest.files.codec) == {"raw"}
    for other in ("copy", "raw"):
        run("diff", saved, tmp_path / other)
        found = {name: torch.zeros_like(tensor) for name, tensor in tree().items()}
        bcp.load(tmp_path / other, {"tree": found})
        assert _same(found, tree())


def test_a_damaged_frame_is_not_copied(saved: Path, tmp_path: Path) -> None:
    file = frames_file(saved)
    with flipped(file, file.stat().st_size - 5), pytest.raises(CorruptionError, match="checksum mismatch in tensor"):
        copy(bcp.open(saved), str(tmp_path / "copy"))
    assert keys_of(tmp_path) == []


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "lzma9"}, r"codec must be None, 'auto' or one of .*zstd, zstd-planes.*no codec is named 'lzma9'"),
        ({"codec": 3}, "codec must be a string"),
        ({"codec": "raw"}, "codec must be None"),
        ({"codec": "zstd", "layout": "whole"}, "needs layout='shards'"),
        ({"codec": "zstd", "chunk_size": 64 << 20}, "chunk_size must be at most 16777216"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        bcp.save(tmp_path / "x", {"tree": tree()}, **saving(**options))
    assert keys_of(tmp_path) == []


def test_auto_encodes_where_the_store_was_slower_than_the_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_encoded(name: str) -> bool:
        own.save(tmp_path / name, {"s": {"a": torch.zeros(1000, 1000)}}, options=bcp.SaveOptions(codec="auto")).result()
        return bcp.open(tmp_path / name).manifest.files.frames is not None

    with bcp.Checkpointer() as own:
        rates = own._session.engine.store_rates
        rates["://"] = rates["file://"] = 1e6
        assert not is_encoded("local")
        monkeypatch.setattr(LocalBackend, "is_remote", True)
        assert is_encoded("slow")
        for store in rates:
            rates[store] = 1e12
        assert not is_encoded("fast")
        rates.clear()
        assert not is_encoded("unknown")
        own.save(tmp_path / "large", {"s": torch.zeros(20_000_000)}, options=bcp.SaveOptions(codec="auto")).result()
        assert len(rates) == 1
        assert all(rate > 0 for rate in rates.values())
