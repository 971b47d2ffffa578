"""The index of foreign files: pieces at byte ranges, strided tensors, trees, CRC-32s, and what is refused."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.checkpoint.checkpoint import Checkpoint
from bytecheckpoint.checkpoint.index import Index, decode_index, encode_index
from bytecheckpoint.engine.reading.checks import combine_crc32
from bytecheckpoint.engine.resources import IOEngine
from bytecheckpoint.errors import CorruptionError, FormatError, NameCollisionError, UnsupportedTensorError
from bytecheckpoint.foreign.building import IndexBuilder, StoredBox, StoredLeaf, contiguous_boxes
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import basic_meta


def _written(folder: Path, data: bytes) -> tuple[IndexBuilder, int]:
    (folder / "data.bin").write_bytes(data)
    builder = IndexBuilder(open_backend(str(folder)), "a test")
    return builder, builder.add_file("data.bin", len(data))


def _sent(index: Index) -> Index:
    return decode_index(encode_index(index), index.backend)


def test_pieces_of_several_files_form_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    (tmp_path / "a.bin").write_bytes(b"xx" + tensor[:, :2].contiguous().numpy().tobytes())
    (tmp_path / "b.bin").write_bytes(tensor[:, 2:].contiguous().numpy().tobytes() + b"yyy")
    builder = IndexBuilder(open_backend(str(tmp_path)), "a test")
    first, second = builder.add_file("a.bin", 34), builder.add_file("b.bin", 67)
    meta = basic_meta(tensor.dtype, tensor.shape)
    builder.add_tensor("model", "w", StoredLeaf(meta, [StoredBox(Box((0, 2), (4, 4)), second, 0)]))
    builder.add_tensor("model", "w", StoredLeaf(meta, [StoredBox(Box((0, 0), (4, 2)), first, 2)]))
    builder.add_alias("model", "tied", "w")
    builder.add_value("extra_state", ("step",), 7)
    index = _sent(builder.build(step=7, world_size=2))
    with closing(IOEngine()) as engine:
        found = Checkpoint(index, engine)
        assert torch.equal(found["model.w"].load(), tensor)
        assert torch.equal(found["model.tied"][1:3, 1:5], tensor[1:3, 1:5])
        assert found.tree("extra_state") == {"step": 7}
        assert (found.step, found.world_size, found.sections) == (7, 2, ["model", "extra_state"])
        assert found.reader.stats.checked == 0


@given(data=st.data())
def test_strided_boxes_equal_numpy(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=4))
    order = data.draw(st.permutations(range(len(lengths))))
    strides = [0] * len(lengths)
    step = data.draw(st.integers(1, 2))
    for d in order:
        strides[d] = data.draw(st.sampled_from([step, 0]))
        step *= max(lengths[d], 1) * data.draw(st.sampled_from([1, 1, 2]))
    memory = np.arange(4096)
    expected = np.lib.stride_tricks.as_strided(memory, lengths, [8 * stride for stride in strides])
    seen = np.full(lengths, -1)
    for box, start in contiguous_boxes(lengths, strides):
        part = tuple(slice(low, low + length) for low, length in zip(box.offsets, box.lengths))
        assert (seen[part] == -1).all()
        seen[part] = memory[start : start + box.numel].reshape(box.lengths)
    assert np.array_equal(seen, expected)


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[:, 1:4], lambda t: t[1:].T[::2], lambda t: t[2]])
def test_strided_tensors_are_read(tmp_path: Path, make: Any) -> None:
    memory = torch.randn(6, 5).bfloat16()
    view = make(memory)
    builder, file = _written(tmp_path, b"head" + memory.view(torch.uint8).numpy().tobytes())
    meta = basic_meta(view.dtype, view.shape)
    builder.add_tensor("model", "v", StoredLeaf.whole(meta, file, 4 + 2 * view.storage_offset(), view.stride()))
    with closing(IOEngine()) as engine:
        assert torch.equal(Checkpoint(_sent(builder.build()), engine)["model.v"].load(), view)


def test_scattered_elements_are_refused(tmp_path: Path) -> None:
    builder, file = _written(tmp_path, bytes(8))
    meta = basic_meta(torch.float32, (1 << 11, 1 << 11))
    builder.add_tensor("model", "v", StoredLeaf.whole(meta, file, 0, (1 << 12, 2)))
    with pytest.raises(UnsupportedTensorError, match=r"model\.v: its elements are scattered"):
        builder.build()


def test_a_tree_is_named_as_a_save_names_it(tmp_path: Path) -> None:
    builder, file = _written(tmp_path, torch.arange(6.0).numpy().tobytes())
    leaf = StoredLeaf.whole(basic_meta(torch.float32, (6,)), file, 0)
    tree = {"state": {0: {"avg": leaf, "step": 3}}, "groups": [{"lr": 0.1, "params": [0]}], "a.b": OrderedDict(c=leaf)}
    builder.add_tree("optimizer", tree)
    with closing(IOEngine()) as engine:
        loaded = Checkpoint(_sent(builder.build()), engine).tree("optimizer")
    assert torch.equal(loaded["state"][0].pop("avg"), torch.arange(6.0))
    assert torch.equal(loaded["a.b"]["c"], torch.arange(6.0))
    assert type(loaded.pop("a.b")) is OrderedDict
    assert loaded == {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "params": [0]}]}


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (StoredBox(Box((0,), (4,)), 0, 12), "outside its 16 bytes"),
        (StoredBox(Box((0,), (3,)), 0, 0), "do not cover it exactly"),
        (StoredBox(Box((1,), (4,)), 0, 0), "is not inside tensor"),
    ],
)
def test_wrong_pieces_are_refused(tmp_path: Path, piece: StoredBox, message: str) -> None:
    builder, _ = _written(tmp_path, bytes(16))
    builder.add_tensor("model", "v", StoredLeaf(basic_meta(torch.float32, (4,)), [piece]))
    with pytest.raises(FormatError, match=message):
        builder.build()


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "", "a\\b"])
def test_files_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    builder = IndexBuilder(open_backend(str(tmp_path)), "a test")
    builder.add_file(name, 1)
    with pytest.raises(FormatError, match="is not a plain name inside the folder"):
        builder.build()


def test_one_name_with_two_shapes_is_refused(tmp_path: Path) -> None:
    builder, file = _written(tmp_path, bytes(16))
    builder.add_tensor("model", "v", StoredLeaf.whole(basic_meta(torch.float32, (4,)), file, 0))
    with pytest.raises(NameCollisionError, match=r"model\.v is both"):
        builder.add_tensor("model", "v", StoredLeaf.whole(basic_meta(torch.float32, (2, 2)), file, 0))


# --------------------------------------------------------------------------------------------------------------- CRCs


@given(st.lists(st.binary(max_size=70)))
def test_combined_crcs_equal_zlib(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = combine_crc32(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


def _two_tensors(folder: Path, *, flip: int | None = None) -> tuple[Index, bytes]:
    """One storage with two tensors and a gap, and a second storage."""
    data = bytearray(np.random.default_rng(0).bytes(4096))
    crcs = [zlib.crc32(data[:2048]), zlib.crc32(data[2048:])]
    if flip is not None:
        data[flip] ^= 1
    builder, file = _written(folder, bytes(data))
    for name, offset, count in (("a", 0, 1000), ("b", 1000, 1048), ("c", 2048, 1024)):
        builder.add_tensor("model", name, StoredLeaf.whole(basic_meta(torch.uint8, (count,)), file, offset))
    builder.add_crc(file, 0, 2048, crcs[0])
    builder.add_crc(file, 2048, 4096, crcs[1])
    return _sent(builder.build()), bytes(data)


def test_whole_ranges_are_checked(tmp_path: Path) -> None:
    index, data = _two_tensors(tmp_path)
    with closing(IOEngine()) as engine:
        found = Checkpoint(index, engine)
        parts = found.state_dict("model")  # both tensors of the first range; the second is read only in part
        assert found.reader.stats.checked == 2048
        assert b"".join(bytes(parts[name].numpy()) for name in "abc") == data[: 2048 + 1024]
        assert found["model.a"].load().numel() == 1000
        assert found.reader.stats.checked == 2048


@pytest.mark.parametrize("flip", [0, 999, 1000, 2047])
def test_a_flipped_byte_in_a_whole_range_is_found(tmp_path: Path, flip: int) -> None:
    index, _ = _two_tensors(tmp_path, flip=flip)
    with closing(IOEngine()) as engine:
        with pytest.raises(
            CorruptionError, match=r"data\.bin: CRC-32 mismatch in tensor model\.a .*, bytes \[0, 2048\)"
        ):
            Checkpoint(index, engine).state_dict("model")
        Checkpoint(index, engine, verify=False).state_dict("model")
