"""Save a second time with ``base``: only what changed is written, and every checkpoint keeps its own content."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from independent_reader import read_checkpoint
from sampling import examples
from sorted_arguments import loading, saving
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.convert.copy import copy, remove
from bytecheckpoint.convert.diff import diff
from bytecheckpoint.convert.reshard import reshard
from bytecheckpoint.engine import unchanged
from bytecheckpoint.engine.checksums import ChunkHasher
from bytecheckpoint.engine.staging import arena
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.errors import CorruptionError, UsageError
from bytecheckpoint.saving import incremental
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.local.backend import LocalBackend

pytestmark = pytest.mark.sampled(16, of=__name__)

CHUNK = 1024


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests() -> None:
    session_of().engine.shared.last_commit = None


def tensors(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "frozen": torch.randn(100, 33, generator=generator),
        "half": torch.randn(701, generator=generator).bfloat16(),
        "step": torch.tensor(seed),
        "table": torch.arange(5000),
        "empty": torch.zeros(0, 4),
    }


def save(path: Path | str, tree: dict[str, Any], **options: Any) -> int:
    options = {"base": "auto", "chunk_size": CHUNK, **options}
    return bcp.save(path, {"tree": tree, "extra_state": {"n": 1}}, **saving(**options)).result().bytes_written


def check(path: Path | str, tree: dict[str, Any], **storage: Any) -> None:
    checkpoint = bcp.open(path, **storage)
    assert checkpoint.verify().problems == ()
    assert {f"tree.{name}" for name in tree} == set(checkpoint)
    for name, tensor in tree.items():
        assert torch.equal(checkpoint[f"tree.{name}"].load(), tensor), name
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    bcp.load(path, {"tree": loaded}, **loading(**storage))
    assert all(torch.equal(loaded[name], tree[name]) for name in tree)


def clone(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in tree.items()}


def head_length(path: Path) -> int:
    manifest = bcp.open(path).manifest
    return int(manifest.files.head_length[manifest.files.kind.index("tensors")])


def test_the_first_save_writes_plain_safetensors_files(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    manifest = bcp.open(tmp_path / "step-1").manifest
    assert manifest.is_shared
    assert set(manifest.files.codec) == {"raw"}
    assert next(tmp_path.rglob("*.safetensors"))
    at = 0
    for row in range(len(manifest.shards)):
        name = manifest.tensors.names[int(manifest.shards.tensor[row])].partition(".")[2]
        data = tree[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        for begin in range(0, len(data), CHUNK):
            chunk = data[begin : begin + CHUNK]
            assert manifest.checksums[at].item() == xxhash.xxh3_128_digest(chunk)
            at += 1
    assert at == len(manifest.checksums)
    check(tmp_path / "step-1", tree)


@pytest.mark.parametrize("length", [1, 16, 17, 128, 129, 240, 241, 256, 1024, 100_003])
def test_a_checksum_does_not_depend_on_the_pieces_in_which_a_chunk_arrives(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    for cut in {length, 1, length // 2}:
        hasher = ChunkHasher([0], [length], length)
        for begin, part in ((0, data[:cut]), (cut, data[cut:])):
            if part:
                hasher.update(begin, memoryview(part))
        assert hasher.checksums().tolist() == [xxhash.xxh3_128_digest(data)]


@pytest.mark.parametrize("use_async", [False, True])
def test_an_unchanged_state_writes_heads_and_values_only(tmp_path: Path, use_async: bool) -> None:
    tree = tensors()
    full = save(tmp_path / "step-1", tree, async_save=use_async)
    nbytes = save(tmp_path / "step-2", tree, async_save=use_async)
    assert nbytes - head_length(tmp_path / "step-2") < 200 < full // 100, "values only"
    check(tmp_path / "step-2", tree)


def test_only_changed_chunks_are_written(tmp_path: Path) -> None:
    first = tensors()
    save(tmp_path / "step-1", first)
    unchanged = save(tmp_path / "step-2", first)
    second = clone(first)
    second["table"][::1000] += 1  # of 128 in a chunk
    assert save(tmp_path / "step-3", second) == unchanged + 5 * CHUNK
    third = clone(second)
    third["frozen"] += 1
    assert save(tmp_path / "step-4", third) > unchanged + third["frozen"].nbytes - CHUNK
    for step, tree in ((1, first), (2, first), (3, second), (4, third)):
        check(tmp_path / f"step-{step}", tree)


@settings(max_examples=examples(25, 25), deadline=None)
@given(data=st.data())
def test_random_changes(data: st.DataObject) -> None:
    """Gaps of any length between changed chunks, which begin and end anywhere in the blocks of staging memory."""
    sizes = data.draw(st.lists(st.integers(0, 9 * CHUNK), min_size=1, max_size=6))
    first = {f"t{number}": torch.arange(size).to(torch.uint8) for number, size in enumerate(sizes)}
    second = clone(first)
    for tensor in second.values():
        if len(tensor):
            for at in data.draw(st.lists(st.integers(0, len(tensor) - 1), max_size=4)):
                tensor[at] += 1
    min_gap, block = data.draw(st.integers(1, 4)) * CHUNK, data.draw(st.sampled_from([4096, 8192]))
    budget = data.draw(st.sampled_from([None, 4 * block]))
    options = data.draw(st.sampled_from([{}, {"async_save": True}, {"async_save": True, "gate": True}]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.object(unchanged, "_MIN_GAP", min_gap))
        stack.enter_context(mock.patch.object(arena, "BLOCK", block))
        checkpointer = stack.enter_context(bcp.Checkpointer(memory_budget=budget))
        # The third one writes again what is left of a file of which less than half is needed.
        for step, tree in enumerate((first, second, second, second)):
            path = folder / f"step-{step}"
            handle = checkpointer.save(path, {"tree": tree}, **saving(base="auto", chunk_size=CHUNK, **options))
            written = handle.result().bytes_written
        assert written <= 5 * CHUNK + 241 * len(sizes), "an unchanged state: heads and short chunks"
        for step, tree in enumerate((first, second, second, second)):
            check(folder / f"step-{step}", tree)


@pytest.mark.parametrize("use_async", [False, True])
def test_long_unchanged_parts_are_not_staged(tmp_path: Path, use_async: bool) -> None:
    chunk = 64 << 10
    first = {"weight": torch.arange((40 << 20) // 4), "adapter": torch.zeros(chunk // 4)}
    second = {"weight": first["weight"].clone(), "adapter": torch.ones(chunk // 4)}
    second["weight"][5 << 20] += 1
    staged = []
    for step, tree in enumerate((first, second)):
        with mock.patch.object(Staging, "_copy", autospec=True, side_effect=Staging._copy) as copies:
            save(tmp_path / f"step-{step}", tree, chunk_size=chunk, async_save=use_async)
        staged.append(sum(call.args[1].nbytes for call in copies.call_args_list))
        check(tmp_path / f"step-{step}", tree)
    assert staged[0] > 80 << 20
    assert staged[1] < 3 * chunk


def test_references_are_never_chains(tmp_path: Path) -> None:
    tree = tensors()
    for step in range(1, 6):
        tree["step"] += 1
        save(tmp_path / f"step-{step}", tree)
    (only,) = bcp.open(tmp_path / "step-5").manifest.references.name
    assert only.startswith(bcp.open(tmp_path / "step-1").manifest.attempt)
    for step in (1, 2, 3, 4):
        shutil.rmtree(tmp_path / f"step-{step}")
    check(tmp_path / "step-5", tree)


def test_a_base_with_files_of_many_saves_is_written_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save lists the files of each of them."""
    monkeypatch.setattr(incremental, "MAX_ATTEMPTS", 2)
    tree = tensors()
    for step in range(3):
        tree["table"][1000 * step] = -1
        save(tmp_path / f"step-{step}", tree)
    assert bcp.open(tmp_path / "step-1").manifest.references.name
    assert bcp.open(tmp_path / "step-2").manifest.references.name
    tree["table"][4000] = -1
    save(tmp_path / "step-3", tree)
    assert bcp.open(tmp_path / "step-3").manifest.references.name == []
    check(tmp_path / "step-3", tree)


def test_a_new_process_finds_the_newest_checkpoint(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    engine = session_of().engine
    engine.shared.last_commit = None
    assert save(tmp_path / "step-2", tree) < 6000
    with mock.patch.object(LocalBackend, "get", side_effect=AssertionError("the manifest is in memory")):
        assert save(tmp_path / "step-3", tree) < 6000


def test_a_base_in_another_folder_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "a" / "step-1", tensors())
    with pytest.raises(UsageError, match="must be in the same folder"):
        save(tmp_path / "b" / "step-2", tensors(), base=tmp_path / "a" / "step-1")
    with pytest.raises(bcp.errors.CheckpointError, match="nothing is stored there"):
        save(tmp_path / "a" / "step-2", tensors(), base=tmp_path / "a" / "step-9")
    assert not (tmp_path / "b").exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["objects", "step-1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "whole"}, "needs layout='shards'"),
        ({"layout": "merged"}, "needs layout='shards'"),
        ({"chunk_size": 1 << 25}, "chunk_size must be at most 16777216"),
        ({"base": 3}, "base must be a path"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        save(tmp_path / "step-1", tensors(), **options)
    assert not [*tmp_path.iterdir()]


def test_the_base_may_be_named(tmp_path: Path) -> None:
    tree, other = tensors(), tensors(1)
    save(tmp_path / "step-1", tree)
    save(tmp_path / "step-2", other)
    assert save(tmp_path / "step-3", tree, base=str(tmp_path / "step-1")) < 6000
    check(tmp_path / "step-3", tree)


def test_a_base_without_digests_or_with_another_layout_is_written_completely(tmp_path: Path) -> None:
    tree = tensors()
    bcp.save(tmp_path / "step-1", {"tree": tree}, options=bcp.SaveOptions(chunk_size=CHUNK))
    full = sum(tensor.nbytes for tensor in tree.values())
    assert save(tmp_path / "step-2", tree) > full
    assert save(tmp_path / "step-3", tree, chunk_size=2 * CHUNK) > full
    tree["new"] = torch.ones(1)
    assert save(tmp_path / "step-4", tree) > full
    for step in (2, 3, 4):
        assert bcp.open(tmp_path / f"step-{step}").manifest.references.name == []
    assert not [*tmp_path.rglob("*.frames")]


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ("zstd", "zstd", True),
        ("zstd", None, False),
        ("zstd", "zstd-planes", False),
        (None, "zstd", True),
        (None, "zstd-planes", True),
    ],
)
def test_an_encoded_chunk_is_shared_with_the_same_codec_only(
    tmp_path: Path, first: str | None, second: str | None, shares: bool
) -> None:
    tree = {"zeros": torch.zeros(10 * CHUNK)}
    save(tmp_path / "step-1", tree, codec=first)
    save(tmp_path / "step-2", tree, codec=second)
    assert bool(bcp.open(tmp_path / "step-2").manifest.references.name) == shares
    tree["zeros"][0] = 1
    save(tmp_path / "step-3", tree, codec=second)
    check(tmp_path / "step-3", tree)


def test_an_independent_reader_reads_the_same(tmp_path: Path) -> None:
    tree = tensors()
    for step, codec in enumerate((None, None, "zstd", "zstd"), 1):
        tree["table"][step * 100] = -1
        save(tmp_path / f"step-{step}", tree, codec=codec)
        found = read_checkpoint(tmp_path / f"step-{step}")
        for name, tensor in tree.items():
            assert found[f"tree.{name}"].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_repeated_saves_to_one_path_keep_what_they_need(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "last", tree)
    for _ in range(4):
        tree["half"] += 1
        assert save(tmp_path / "last", tree) < 9000
        check(tmp_path / "last", tree)
        attempts = {path.parent.name for path in tmp_path.rglob("attempt-*/*")}
        assert len(attempts) == 2, "the first one, and the last one"
    for tensor in tree.values():
        tensor += 1
    save(tmp_path / "last", tree)
    assert len({path.parent.name for path in tmp_path.rglob("attempt-*/*")}) == 1
    check(tmp_path / "last", tree)


def test_a_reference_has_exactly_these_bytes(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    save(tmp_path / "step 2", tree)
    base, referrer = (bcp.open(tmp_path / name).manifest for name in ("step-1", "step 2"))
    assert referrer.references.name == [f"{base.attempt}/tree-00000.safetensors"]
    assert {path.name for path in (tmp_path / "step 2").iterdir()} == {"manifest.msgpack"}
    assert {path.name for path in (tmp_path / "objects").iterdir()} == {base.attempt, referrer.attempt}
    frames = referrer.files.frames
    assert frames is not None
    head = int(base.files.head_length[base.files.kind.index("tensors")])
    shared = np.flatnonzero(frames.source)
    assert frames.position[shared].tolist() == (head + frames.begin[shared]).tolist()
    assert set(frames.source.tolist()) == {1}


def test_a_copied_root_is_equivalent_and_a_copied_folder_says_what_is_missing(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "root" / "step-1", tree)
    save(tmp_path / "root" / "step-2", tree)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    shutil.copytree(tmp_path / "root" / "step-2", tmp_path / "alone" / "step-2")
    (tmp_path / "root" / "step-2").rename(tmp_path / "root" / "best")
    remove(str(tmp_path / "root" / "step-1"))
    check(tmp_path / "root" / "best", tree)
    shutil.rmtree(tmp_path / "root")
    check(tmp_path / "copy" / "step-2", tree)
    path = tmp_path / "alone" / "step-2"
    with pytest.raises(CorruptionError, match=r"objects/attempt-.*: file is missing.*bcp copy"):
        bcp.load(path, {"tree": clone(tree)})
    assert not bcp.open(path).verify().ok
    with pytest.raises(bcp.errors.NoValidCheckpointError, match=r"attempt-.*is missing"):
        bcp.latest(tmp_path / "alone")


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_in_a_referenced_file_names_the_file_the_tensor_and_the_range(tmp_path: Path, damage: str) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    tree["step"] += 1
    save(tmp_path / "step-2", tree)
    file = next((tmp_path / "objects").rglob("*.safetensors"))
    manifest = bcp.open(tmp_path / "step-1").manifest
    row = int(np.flatnonzero(manifest.shards.tensor == manifest.tensor_row("tree.frozen"))[0])
    offset = manifest.byte_meta(row).offset + 3 * CHUNK
    if damage == "flip":
        _flip(file, offset + 5)
    else:
        file.write_bytes(file.read_bytes()[: offset + 5])
    place = rf"objects/attempt-.*/tree-00000.safetensors: (?=.*tree\.frozen).*\[{offset}, {offset + CHUNK}\)"
    with pytest.raises(CorruptionError, match=place):
        bcp.open(tmp_path / "step-2")["tree.frozen"].load()
    with pytest.raises(CorruptionError, match=place):
        copy(bcp.open(tmp_path / "step-2"), str(tmp_path / "copy"))
    assert any("tree.frozen" in problem for problem in bcp.open(tmp_path / "step-2").verify().problems)
    assert not [*(tmp_path / "copy").rglob("*.*")]


def test_bytes_appended_to_a_referenced_file(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    tree["step"] += 1
    save(tmp_path / "step-2", tree)
    file = next((tmp_path / "objects").rglob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content + b"more")
    place = f"{file}: the file has {len(content) + 4} bytes, but the manifest states {len(content)};"
    with pytest.raises(CorruptionError, match=place):
        bcp.open(tmp_path / "step-2")["tree.frozen"].load()
    (problem,) = bcp.open(tmp_path / "step-2").verify().problems
    assert problem.startswith(place)
    bcp.open(tmp_path / "step-2")["tree.step"].load()  # its own file has it


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_copy_is_complete(tmp_path: Path, codec: str | None) -> None:
    tree = tensors()
    for step in range(1, 5):
        tree["table"][step * 777] = -step
        save(tmp_path / "root" / f"step-{step}", tree, codec=codec)
    report = copy(bcp.open(tmp_path / "root" / "step-4"), str(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "root")
    check(tmp_path / "copy", tree)
    assert bcp.open(tmp_path / "copy").manifest.references.name == []
    assert report.size == report.sent == sum(path.stat().st_size for path in (tmp_path / "copy").rglob("attempt*/*"))


def test_other_operations_work_on_incremental_checkpoints(tmp_path: Path) -> None:
    tree = tensors()
    save(tmp_path / "step-1", tree)
    tree["table"][7] = 9
    save(tmp_path / "step-2", tree)
    bcp.save(tmp_path / "full", {"tree": tree, "extra_state": {"n": 1}})
    found = bcp.open(tmp_path / "step-2")
    assert diff(found, bcp.open(tmp_path / "full")).same
    reshard(found, str(tmp_path / "resharded"), files=3, layout="sharded")
    assert diff(bcp.open(tmp_path / "resharded"), found).same
    assert torch.equal(found["tree.table"][5:2000:3], tree["table"][5:2000:3])
    assert bcp.latest(tmp_path).verify().ok  # type: ignore[union-attr]


def test_lora_on_a_frozen_base_writes_the_adapter_and_its_state_only(tmp_path: Path) -> None:
    frozen = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    adapter = nn.ModuleDict({"down": nn.Linear(64, 2, bias=False), "up": nn.Linear(2, 64, bias=False)})
    model = nn.ModuleDict({"base": frozen, "adapter": adapter})
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1)
    sizes = []
    for step in range(3):
        hidden = torch.randn(4, 64)
        (frozen(hidden) + adapter["up"](adapter["down"](hidden))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        sizes.append(
            bcp.save(tmp_path / f"step-{step}", state, options=bcp.SaveOptions(base="auto", chunk_size=CHUNK))
            .result()
            .bytes_written
        )
    trained = 3 * sum(parameter.nbytes for parameter in adapter.parameters())
    heads = 3 * 4096 + 3000  # two heads, and the hyper-parameters
    assert sizes[1] <= trained + heads < sizes[0] / 4
    assert sizes[2] <= trained + heads
    assert bcp.open(tmp_path / "step-2").verify().ok


@pytest.mark.parametrize("make", [lambda tmp_path: "memory://incremental/runs"], ids=["memory"])
def test_other_stores(make: Callable[[Path], str], tmp_path: Path) -> None:
    _save_remove_and_copy(make(tmp_path), {})


@pytest.mark.s3
def test_s3(s3: dict[str, Any], bucket: str) -> None:
    _save_remove_and_copy(f"s3://{bucket}/runs", s3)


@pytest.mark.s3
def test_one_process_saves_to_several_stores(s3: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    """A regression: the checkpoint that it saved last was opened with the other store's options."""
    tree = tensors()
    for step in (1, 2, 3):
        for root, options in ((str(tmp_path), {}), (f"s3://{bucket}/runs", s3)):
            written = save(f"{root}/step-{step}", tree, storage_options=options)
            assert (written < 8000) == (step > 1)
            check(f"{root}/step-{step}", tree, storage_options=options)


def _save_remove_and_copy(root: str, options: dict[str, Any]) -> None:
    tree = tensors()
    save(f"{root}/step-1", tree, storage_options=options)
    tree["table"][7] = -1
    assert save(f"{root}/step-2", tree, storage_options=options) < 8000
    assert save(f"{root}/step-2", tree, storage_options=options) < 8000
    remove(bcp.Location(f"{root}/step-1", storage_options=options))
    check(f"{root}/step-2", tree, storage_options=options)
    copy(bcp.open(f"{root}/step-2", storage_options=options), bcp.Location(f"{root}/full", storage_options=options))
    remove(bcp.Location(f"{root}/step-2", storage_options=options))
    check(f"{root}/full", tree, storage_options=options)
    names = {stat.key.partition("/")[0] for stat in open_backend(root, **options).list()}
    assert names == {"full"}
