"""Compare what the pickle interpreter read with what torch loads, and fill its tensors from the file."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np
import torch

from bytecheckpoint.foreign.pickles.records import TensorRef
from bytecheckpoint.tensors.dtypes import DTYPES


def fill(ref: TensorRef, folder: Path) -> torch.Tensor:
    """Return the tensor, by seeking in the file and striding by hand."""
    dtype = getattr(torch, ref.dtype.name)
    with (folder / ref.file).open("rb") as file:
        file.seek(ref.storage.offset)
        raw = bytearray(file.read(ref.storage.nbytes))
    assert len(raw) == ref.storage.nbytes
    if not ref.numel:
        return torch.empty(ref.shape, dtype=dtype)
    usable = len(raw) // ref.dtype.itemsize * ref.dtype.itemsize
    return torch.frombuffer(raw[:usable], dtype=dtype).as_strided(ref.shape, ref.strides, ref.start)


def assert_equal(found: Any, expected: Any, folder: Path, path: str = "") -> None:
    """Assert that the interpreter's value is what torch.load returned."""
    if isinstance(expected, torch.Tensor):
        assert type(found) is TensorRef, path
        tensor = fill(found, folder)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), path
        assert found.strides == expected.stride(), path
        assert found.is_contiguous == expected.is_contiguous(), path
        whole = expected.detach().contiguous()
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(whole.view(-1).view(torch.uint8)), path
        return
    if isinstance(expected, torch.dtype):
        expected = DTYPES[str(expected).removeprefix("torch.")]
    elif isinstance(expected, torch.Size):
        expected = tuple(expected)
    elif isinstance(expected, PurePath):
        expected = PurePosixPath(expected)
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            assert_equal(found[key], value, folder, f"{path}.{key}")
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected)):
            assert_equal(one, other, folder, f"{path}[{index}]")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, path
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), path
    else:
        assert found == expected, path
