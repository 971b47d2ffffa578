"""Arrangements of GPUs on which a push would hang or fail late: they are refused before. No GPU is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.push import checkpoint_engine
from bytecheckpoint.inference.push.checkpoint_engine import gpus_of, refuse_expandable_segments
from bytecheckpoint.inference.push.transports.group import refuse_shared_devices
from bytecheckpoint.testing import time_limit


def _errors(devices: list[str]) -> list[BaseException | None]:
    """What each member of a group on these devices raises."""
    store, size = HashStore(), len(devices)
    with ThreadPoolExecutor(size) as pool:
        asked = [
            pool.submit(refuse_shared_devices, store, rank, size, device, time_limit(30))
            for rank, device in enumerate(devices)
        ]
        return [one.exception() for one in asked]


def test_members_of_an_nccl_group_on_one_gpu() -> None:
    assert _errors(["a", "b", "c"]) == [None] * 3
    errors = _errors(["a", "b", "a"])
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "members 0 and 2 share GPU a" in str(error)
        assert 'group="gloo"' in str(error)


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_expandable_segments(monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_refused: bool) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    if not is_refused:
        refuse_expandable_segments()
        return
    with pytest.raises(StateError, match=f"{name} has expandable_segments:True"):
        refuse_expandable_segments()
    with pytest.raises(StateError, match=name):  # before any memory of a GPU is asked for
        checkpoint_engine.Buckets(["GPU-0"], 4096)


def test_parts_of_a_gpu_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names begin with MIG-."""
    monkeypatch.setattr(checkpoint_engine, "visible_gpus", lambda: {"GPU-1a-2b": 0, "GPU-3c-4d": 1})
    assert gpus_of(["MIG-3c-4d", "GPU-1a-2b"]) == [1, 0]
    with pytest.raises(StateError, match="does not see MIG-9"):
        gpus_of(["MIG-9"])
