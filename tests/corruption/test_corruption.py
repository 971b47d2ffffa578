"""Any damage to the bytes of a checkpoint raises an error that names the place; no load returns wrong values."""

from __future__ import annotations

import functools
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import MANIFEST, data_begin, flipped, keys_of, regions, replaced, swapped, tensor_at
from small_training import differing, memory, training
from sorted_arguments import loading

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint.checkpoint import Checkpoint
from bytecheckpoint.checkpoint.index import Index
from bytecheckpoint.engine.resources import IOEngine
from bytecheckpoint.errors import AccessDeniedError, CheckpointError, CorruptionError, FormatError
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import FaultRule, FaultyBackend
from bytecheckpoint.testing.ranks import RankPool

WORLD = 4
CHUNK = 64  # gives a tensor of a few hundred bytes several checksums
FLIPS = 7  # per region of each file


def _save(rank: int, world_size: int, path: str, value: float) -> None:
    state = training(value, shard=world_size > 1)
    bcp.save(path, state, step=int(value), options=bcp.SaveOptions(chunk_size=CHUNK))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corruption") / "checkpoint"
    pool.run(_save, str(path), 1.0)
    return path


@pytest.fixture
def checkpoint(saved: Path) -> Iterator[Path]:
    """The shared checkpoint. A test that leaves it damaged fails."""
    yield saved
    assert _loads_correctly(saved)


def _load(path: Path, **options: Any) -> dict[str, Any]:
    state = training(9.0)
    bcp.load(path, state, **loading(**options))
    return memory(state)


@functools.cache
def _target() -> dict[str, Any]:
    """Return the target of loads that fail."""
    return training(9.0)


def _loads_correctly(path: Path) -> bool:
    return not differing(_load(path), memory(training(1.0)))


def _load_error(path: Path) -> str:
    """Load everything, which must fail, and return the message."""
    with pytest.raises(CheckpointError) as caught:
        bcp.load(path, _target())
    return str(caught.value)


def _problems(path: Path) -> str:
    """Return the problems that ``verify`` finds, or the error if the checkpoint cannot be opened."""
    try:
        report = bcp.open(path).verify()
    except CheckpointError as error:
        return str(error)
    assert not report.ok
    assert report.problems
    return "\n".join(report.problems)


def _data_files(path: Path) -> list[str]:
    return [key for key in keys_of(path) if key != MANIFEST]


def test_the_undamaged_checkpoint(checkpoint: Path) -> None:
    """It has every kind of file, and is valid."""
    keys = keys_of(checkpoint)
    assert MANIFEST in keys
    for section in ("model", "optimizer"):
        assert sum(f"/{section}-" in key and key.endswith(".safetensors") for key in keys) == WORLD
    assert any("/extra_state-" in key and key.endswith(".msgpack") for key in keys)
    report = bcp.open(checkpoint).verify()
    assert report.ok
    assert report.files == len(keys) - 1
    assert report.bytes_checked == sum((checkpoint / key).stat().st_size for key in keys if key != MANIFEST)


def test_a_flipped_bit_anywhere(checkpoint: Path) -> None:
    chance = random.Random(20240701)
    flips = 0
    for key in keys_of(checkpoint):
        file = checkpoint / key
        for low, high in regions(file):
            for _ in range(FLIPS):
                offset = chance.randrange(low, high)
                with flipped(file, offset, chance.randrange(8)):
                    error, found = _load_error(checkpoint), _problems(checkpoint)
                where = f"byte {offset} of {key}"
                assert str(file) in error, where
                assert str(file) in found, where
                tensor = tensor_at(file, offset)
                if tensor:
                    for message in (error, found):
                        _check_place(message, tensor, offset)
                flips += 1
    assert flips >= 200


def _check_place(message: str, tensor: str, offset: int) -> None:
    """Check that the message names the tensor and a range of at most one chunk around the damage."""
    assert tensor in message
    ranges = [(int(low), int(high)) for low, high in re.findall(r"bytes \[(\d+), (\d+)\)", message)]
    assert any(low <= offset < high and high - low <= CHUNK for low, high in ranges), message


@pytest.mark.parametrize("suffix", [".safetensors", ".msgpack"])
def test_a_file_truncated_anywhere(checkpoint: Path, suffix: str) -> None:
    chance = random.Random(7)
    for key in keys_of(checkpoint):
        file = checkpoint / key
        if file.suffix != suffix:
            continue
        content = file.read_bytes()
        begin = data_begin(file)
        lengths = {0, 1, 7, 8, 9, begin - 1, begin, begin + 1, len(content) - 1}
        lengths |= {chance.randrange(len(content)) for _ in range(4)}
        for length in sorted(n for n in lengths if 0 <= n < len(content)):
            with replaced(file, content[:length]):
                assert str(file) in _load_error(checkpoint), f"{key} truncated to {length}"
                assert str(file) in _problems(checkpoint), f"{key} truncated to {length}"


def test_a_missing_file(checkpoint: Path) -> None:
    for key in _data_files(checkpoint):
        file = checkpoint / key
        with replaced(file, None):
            for message in (_load_error(checkpoint), _problems(checkpoint)):
                assert str(file) in message
                assert "missing" in message
    with replaced(checkpoint / MANIFEST, None):
        assert "none was committed" in _load_error(checkpoint)


def test_any_two_files_swapped(checkpoint: Path) -> None:
    """Only the headers distinguish files of the same size."""
    keys = _data_files(checkpoint)
    sizes = {key: (checkpoint / key).stat().st_size for key in keys}
    equal = 0
    for index, one in enumerate(keys):
        for other in keys[index + 1 :]:
            with swapped(checkpoint / one, checkpoint / other):
                error, found = _load_error(checkpoint), _problems(checkpoint)
            assert one in error or other in error
            assert one in found
            assert other in found
            equal += sizes[one] == sizes[other]
    assert equal, "no two files have the same size, so the hard case was not tested"


def test_a_file_of_another_save_of_the_same_shape(pool: RankPool, checkpoint: Path, tmp_path: Path) -> None:
    """Names, shapes and sizes are equal; only the checksums differ."""
    other = tmp_path / "other"
    pool.run(_save, str(other), 2.0)
    others = {Path(key).name: other / key for key in _data_files(other)}
    for key in _data_files(checkpoint):
        content = others[Path(key).name].read_bytes()
        if content == (checkpoint / key).read_bytes():
            continue
        with replaced(checkpoint / key, content):
            assert key in _load_error(checkpoint)
            assert key in _problems(checkpoint)


def test_bytes_appended_to_a_file(checkpoint: Path) -> None:
    """They are in no checksum."""
    for key in _data_files(checkpoint):
        file = checkpoint / key
        with replaced(file, file.read_bytes() + b"more"):
            for found in (_load_error(checkpoint), _problems(checkpoint)):
                assert str(file) in found
                assert "the manifest states" in found
    file = checkpoint / MANIFEST
    with replaced(file, file.read_bytes() + b"more"):
        assert str(file) in _load_error(checkpoint)


def test_verify_lists_every_fault(checkpoint: Path) -> None:
    keys = [key for key in _data_files(checkpoint) if key.endswith(".safetensors")]
    first, second = checkpoint / keys[0], checkpoint / keys[1]
    with replaced(checkpoint / keys[2], None), flipped(first, data_begin(first)), flipped(second, 9):
        problems = bcp.open(checkpoint).verify().problems
    assert len(problems) == 3
    for key in keys[:3]:
        assert sum(key in problem for problem in problems) == 1


def test_slices_are_checked_too(checkpoint: Path) -> None:
    """A damaged chunk fails the slices that touch it, and only those."""
    key = next(key for key in _data_files(checkpoint) if "model-00000" in key)
    file = checkpoint / key
    offset = data_begin(file)
    name = f"model.{tensor_at(file, offset)}"
    with flipped(file, offset, 3):
        opened = bcp.open(checkpoint)
        with pytest.raises(CorruptionError, match=re.escape(name)):
            opened[name].load()
        for other in opened:
            if other != name and not other.startswith("model.0"):
                opened[other].load()


def test_an_unverified_load_skips_only_checksums(checkpoint: Path) -> None:
    """With ``verify=False`` a load accepts a flipped bit, but not a lost or truncated file."""
    key = next(key for key in _data_files(checkpoint) if "model-00000" in key)
    file = checkpoint / key
    with flipped(file, data_begin(file), 1):
        loaded = _load(checkpoint, verify=False)
        assert differing(loaded, memory(training(1.0)))
        with pytest.raises(CorruptionError):
            _load(checkpoint, verify=True)
    with replaced(file, file.read_bytes()[:-1]), pytest.raises(CorruptionError, match=re.escape(str(file))):
        _load(checkpoint, verify=False)
    with replaced(file, None), pytest.raises(CorruptionError, match="missing"):
        _load(checkpoint, verify=False)
    with flipped(checkpoint / MANIFEST, 200), pytest.raises((CorruptionError, FormatError)):
        _load(checkpoint, verify=False)


def _read_everything(opened: Checkpoint) -> None:
    for name in opened:
        opened[name].load()
    for section in opened.sections:
        opened.section_values(section)


@pytest.mark.parametrize("key", ["*.safetensors", "*.msgpack"])
def test_a_failing_store_is_not_reported_as_corruption(checkpoint: Path, key: str) -> None:
    """The checkpoint may be intact; an unavailable network must not make a user delete it."""
    refusal = FaultRule("*", f"attempt-*{key}", times=None, error=lambda: AccessDeniedError("refused by test"))
    with closing(IOEngine()) as engine:
        opened = Checkpoint(Index.read(FaultyBackend(LocalBackend(checkpoint), [refusal])), engine)
        with pytest.raises(AccessDeniedError, match=rf"{re.escape(str(checkpoint))}.*refused by test"):
            _read_everything(opened)
        problems = opened.verify().problems
    assert problems
    assert all("refused by test" in problem for problem in problems)


def test_a_failed_load_does_not_change_plain_values(checkpoint: Path) -> None:
    key = next(key for key in _data_files(checkpoint) if "optimizer-00003" in key and key.endswith(".safetensors"))
    file = checkpoint / key
    state = training(9.0)
    state["extra_state"]["step"] = 77
    with flipped(file, file.stat().st_size - 1), pytest.raises(CorruptionError):
        bcp.load(checkpoint, state)
    assert state["extra_state"]["step"] == 77


def _load_on_ranks(rank: int, world_size: int, path: str) -> tuple[str, str, bool]:
    state = training(9.0, shard=True)
    try:
        bcp.load(path, state, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    except bcp.errors.BytecheckpointError as error:
        failed = type(error).__name__, str(error)
    else:
        failed = "none", ""
    # The ranks can still communicate.
    bcp.save(path + "-next", {"extra_state": {"after": 1}}, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    return (*failed, torch.is_tensor(state["extra_state"]["table"]))


def test_every_rank_raises_the_same_error(pool: RankPool, checkpoint: Path, tmp_path: Path) -> None:
    """This includes ranks whose own bytes are intact."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    keys = [key for key in _data_files(copy) if "model-" in key]
    file = copy / keys[-1]
    with flipped(file, file.stat().st_size - 1):
        errors = pool.run(_load_on_ranks, str(copy), world_size=2)
    assert {kind for kind, _, _ in errors} == {"CorruptionError"}
    assert all(str(file) in message for _, message, _ in errors)
    with replaced(copy / MANIFEST, (copy / MANIFEST).read_bytes()[:-5]):
        errors = pool.run(_load_on_ranks, str(copy), world_size=2)
    assert len({(kind, message) for kind, message, _ in errors}) == 1
    assert errors[0][0] in ("CorruptionError", "FormatError")
    assert MANIFEST in errors[0][1]
