"""Files of ``torch.save`` read without torch: the object and every tensor equal what ``torch.load`` returns."""

from __future__ import annotations

import io
import random
import tracemalloc
import zlib
from collections import OrderedDict, deque
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples
from torch_values import assert_equal, fill

from bytecheckpoint.errors import CorruptionError, FormatError
from bytecheckpoint.foreign.archives import embedded
from bytecheckpoint.foreign.archives.embedded import read_embedded
from bytecheckpoint.foreign.archives.torch_archive import read_archive, read_parts
from bytecheckpoint.foreign.pickles.records import TensorRef
from bytecheckpoint.frameworks.tree_paths import find_all
from bytecheckpoint.storage_backends import open_backend

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


def load(folder: Path, value: Any, **options: Any) -> tuple[Any, Any]:
    """Return what this library and torch read of a saved value."""
    torch.save(value, folder / "value.pt", **options)
    found = read_archive(open_backend(str(folder)), "value.pt")
    return found, torch.load(folder / "value.pt", weights_only=False)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = random_tensor(draw(st.sampled_from(DTYPES)), *shape)
    for _ in range(draw(st.integers(0, 2))):
        if tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            first = draw(st.integers(0, max(tensor.shape[dim] - 1, 0)))
            views = [tensor.transpose(0, dim), tensor.narrow(dim, first, tensor.shape[dim] - first)]
            views.append(tensor.unsqueeze(dim).expand(*tensor.shape[:dim], 3, *tensor.shape[dim:]))
            tensor = draw(st.sampled_from(views))
    return tensor


keys = st.one_of(st.text(max_size=8), st.integers(-(2**40), 2**40), st.tuples(st.integers(0, 99), st.text(max_size=3)))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(max_size=20), st.binary(max_size=20),
    st.complex_numbers(allow_nan=False), tensors(),
    st.sampled_from([torch.bfloat16, torch.Size([2, 3]), PurePosixPath("a/b"), np.float32(1.5), np.int64(3)]),
    st.sets(st.integers(0, 99), max_size=4), st.frozensets(st.text(max_size=3), max_size=3),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.lists(children, max_size=4).map(deque),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(st.text(max_size=4), children, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=trees, protocol=st.sampled_from([2, 2, 3, 4, 5]))
def test_any_value_equals_what_torch_loads(tmp_path: Path, value: Any, protocol: int) -> None:
    found, expected = load(tmp_path, value, pickle_protocol=protocol)
    assert_equal(found, expected, tmp_path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 3, 5)
    value = {"whole": tensor, "view": tensor[1:, ::2], "none": tensor[:0], "scalar": tensor[0, 0].clone()}
    found, expected = load(tmp_path, value)
    assert_equal(found, expected, tmp_path)
    assert found["whole"].storage is found["view"].storage
    assert found["whole"].is_whole
    assert not found["view"].is_whole


def test_optimizers_and_schedulers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    value: dict[str, Any] = {"model": model.state_dict(), "rng": torch.get_rng_state(), "python": random.getstate()}
    value["numpy"] = np.random.get_state()
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS, torch.optim.SGD, torch.optim.Adafactor):
        optimizer = kind(model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])  # has a Counter
        value[kind.__name__] = [optimizer.state_dict(), scheduler.state_dict()]
    found, expected = load(tmp_path, value)
    assert_equal(found, expected, tmp_path)


@pytest.mark.parametrize("has_crcs", [True, False])
def test_crc_of_each_storage(tmp_path: Path, has_crcs: bool) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_crcs)
    try:
        torch.save({str(size): torch.randn(size) for size in (0, 1, 100, 5000)}, tmp_path / "value.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    found = read_archive(open_backend(str(tmp_path)), "value.pt")
    assert len(found) == 4
    for ref in found.values():
        assert type(ref) is TensorRef
        raw = fill(ref, tmp_path).numpy().tobytes()
        assert ref.storage.crc32 == (zlib.crc32(raw) if has_crcs else None)


@pytest.mark.parametrize("has_crcs", [True, False])
def test_many_archives_in_one_file_equal_single_ones(
    tmp_path: Path, has_crcs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[Any] = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"a": torch.ones(3), "b": [torch.arange(9)]}]
    shapes = [(), (0,), (8, 6), (6, 8), (48,), (300, 200)]
    for _ in range(4):
        values += [random_tensor(dtype, *shape) for dtype in DTYPES[9:13] for shape in shapes]
        values += [{"lr": 0.1, "betas": (0.9, 0.99)}, random_tensor(torch.int8, 7, 5).t()]
    random.Random(1).shuffle(values)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_crcs)
    offsets, lengths = [], []
    with (tmp_path / "items").open("wb") as file:
        for index, value in enumerate(values):
            item = io.BytesIO()
            torch.save(value, item)
            file.write(b"-" * (index % 3))  # any alignment
            offsets.append(file.seek(0, 1))
            lengths.append(len(item.getvalue()))
            file.write(item.getvalue())
    torch.serialization.set_crc32_options(before)
    backend = open_backend(str(tmp_path))
    parsed: list[int] = []
    monkeypatch.setattr(embedded, "read_parts", lambda *args: (parsed.append(args[1]), read_parts(*args))[1])
    found = read_embedded(backend, "items", offsets, lengths)
    assert len(parsed) < len(values) / 2
    for index, (value, one) in enumerate(zip(values, found)):
        assert_equal(one, value, tmp_path)
        (single,) = read_embedded(backend, "items", [offsets[index]], [lengths[index]])
        storages, of_single = ([asdict(ref.storage) for ref in find_all(tree, TensorRef)] for tree in (one, single))
        assert storages == of_single
        assert all((storage["crc32"] is not None) == has_crcs for storage in storages)


def test_archives_of_many_tensors_take_little_memory(tmp_path: Path) -> None:
    """Such as objects that DCP does not divide: no bytes between their tensors are compared."""
    values = [{f"{name}{n}": torch.full((1200,), float(n)) for n in range(400)} for name in "ab"]
    items = []
    for value in values:
        item = io.BytesIO()
        torch.save(value, item)
        items.append(item.getvalue())
    length = len(items[0])
    assert length == len(items[1])
    (tmp_path / "items").write_bytes(b"".join(items))
    tracemalloc.start()
    try:
        found = read_embedded(open_backend(str(tmp_path)), "items", [0, length], [length] * 2)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    for value, one in zip(values, found):
        assert_equal(one, value, tmp_path)


def test_damage_in_one_of_many_archives_is_found(tmp_path: Path) -> None:
    items = []
    for _ in range(20):
        item = io.BytesIO()
        torch.save(torch.randn(16), item)
        items.append(item.getvalue())
    length = len(items[0])
    entry = items[7].index(b"data.pkl") + 40
    damaged = items[7][:entry] + bytes([items[7][entry] ^ 1]) + items[7][entry + 1 :]
    (tmp_path / "items").write_bytes(b"".join([*items[:7], damaged, *items[8:]]))
    offsets = [length * index for index in range(20)]
    with pytest.raises(CorruptionError, match=rf"items at byte {7 * length}: .*data.pkl.*CRC-32"):
        read_embedded(open_backend(str(tmp_path)), "items", offsets, [length] * 20)
    with pytest.raises(FormatError, match="not inside"):
        read_embedded(open_backend(str(tmp_path)), "items", [*offsets[:6], 20 * length - 1], [length] * 7)


def test_archive_inside_a_file(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10), "b": [1, 2]}, tmp_path / "inner.pt")
    inner = (tmp_path / "inner.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 1001 + inner + b"y" * 99)
    (found,) = read_embedded(open_backend(str(tmp_path)), "outer", [1001], [len(inner)])
    assert_equal(found, {"a": torch.arange(10), "b": [1, 2]}, tmp_path)
