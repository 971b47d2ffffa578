"""Whole checkpoints on a real store: saved, loaded, overwritten, killed, and stalled."""

from __future__ import annotations

import os
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import pytest
import torch
from forked_store import use_in_forked_child
from s3_faults import fault_proxy
from store_servers import Store
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, CheckpointError, CorruptionError, RankFailedError, StorageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["CheckpointRows", "HttpRows"]

WORLD = 2
_ROWS, _COLUMNS = 1400, 3001  # a multipart upload, of two parts
_KILLED_AT = ("save.write.file", "save.write.complete", "save.commit.before", "save.commit.after")


def _weight(step: int) -> torch.Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(step))


def _save(
    rank: int, world_size: int, url: str, options: Mapping[str, Any], step: int, killed_at: str, deadline_s: float
) -> None:
    def kill(name: str, event: str) -> None:
        if rank == 0 and name == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)  # of aiohttp, to its client
    telemetry.observe(kill)
    model = {f"part{rank}": _weight(10 * step + rank), "same": torch.full((5,), float(step))}
    state = {"model": model, "extra_state": {"step": step}}
    with suppress(RankFailedError) if killed_at else nullcontext():
        bcp.save(
            url,
            state,
            step=step,
            storage_options=dict(options),
            options=bcp.SaveOptions(layout="shards", deadline_s=deadline_s),
        )


def _check(url: str, options: Mapping[str, Any], *steps: int) -> int:
    """Return the step of the checkpoint, one of ``steps``, whose tensors all equal those that were saved."""
    checkpoint = bcp.open(url, storage_options=dict(options))
    assert checkpoint.step in steps
    names = [f"part{rank}" for rank in range(WORLD)]
    model = {name: torch.empty(_ROWS, _COLUMNS) for name in names} | {"same": torch.empty(5)}
    extra = {"step": 0}
    bcp.load(url, {"model": model, "extra_state": extra}, storage_options=dict(options))
    assert extra["step"] == checkpoint.step
    for rank, name in enumerate(names):
        assert torch.equal(model[name], _weight(10 * extra["step"] + rank))
    assert torch.equal(checkpoint["model.part1"][100:200, 7:9], model["part1"][100:200, 7:9])
    return extra["step"]


def _sharded(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(*(torch.nn.Linear(701, 699) for _ in range(3)))
    fully_shard(module)
    return module


def _full(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def _save_sharded(rank: int, world_size: int, url: str, options: Mapping[str, Any]) -> None:
    warnings.filterwarnings("ignore", "Sending a large body", ResourceWarning)  # of aiohttp, to its client
    bcp.save(url, {"model": _sharded(1)}, storage_options=dict(options))


def _load_sharded(rank: int, world_size: int, url: str, options: Mapping[str, Any]) -> None:
    module = _sharded(2)
    bcp.load(url, {"model": module}, storage_options=dict(options))
    expected = _full(_sharded(1))
    assert all(torch.equal(value, expected[name]) for name, value in _full(module).items())


class CheckpointRows:
    """A subclass defines the fixture ``store``."""

    keeps_aborted_parts: ClassVar[bool] = False
    """Parts of an upload whose process was killed remain unseen, until the store removes them itself."""

    @pytest.fixture
    def url(self, store: Store) -> str:
        return f"{store.root}/{uuid.uuid4().hex}"

    def test_saved_overwritten_and_loaded(self, rank_pool: RankPool, store: Store, url: str) -> None:
        for step in (1, 2):
            rank_pool.run(_save, url, store.options, step, "", time_limit(60), world_size=WORLD)
            assert _check(url, store.options, step) == step
        checkpoint = bcp.open(url, storage_options=dict(store.options))
        assert checkpoint.verify().ok
        stored = {found.key for found in open_backend(url, **store.options).list()}
        assert stored == {"manifest.msgpack", *checkpoint.manifest.files.name}

    def test_saved_by_fsdp_and_loaded_in_other_layouts(self, rank_pool: RankPool, store: Store, url: str) -> None:
        rank_pool.run(_save_sharded, url, store.options, world_size=WORLD)
        for world_size in (1, 3):
            rank_pool.run(_load_sharded, url, store.options, world_size=world_size)

    def test_bytes_that_changed_in_the_store(self, store: Store, url: str) -> None:
        """A flipped byte, a shorter and a missing file are errors that name the file."""
        options = dict(store.options)
        model = {"a": _weight(1), "b": _weight(2)}
        bcp.save(url, {"model": model}, storage_options=options)
        backend = open_backend(url, **options)
        key = next(name for name in bcp.open(url, storage_options=options).manifest.files.name)
        data = bytearray(backend.get(key))

        def damage(content: bytes | None) -> None:
            backend.delete([key])
            if content is not None:
                backend.put(key, content)

        flipped = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        for content, error in (
            (flipped, CorruptionError),
            (bytes(data[:-1]), CheckpointError),
            (None, CheckpointError),
        ):
            damage(content)
            with pytest.raises(error, match=key.rpartition("/")[2]):
                bcp.load(
                    url,
                    {"model": {name: torch.empty_like(value) for name, value in model.items()}},
                    storage_options=options,
                )
            assert not bcp.open(url, storage_options=options).verify().ok
        damage(bytes(data))
        assert bcp.open(url, storage_options=options).verify().ok

    @pytest.mark.sampled(2, of="long searches")
    def test_killed_at_each_point(self, store: Store, url: str) -> None:
        """The checkpoint is the old or the new one, later saves work, and nothing is left that is not listed."""
        with RankPool(WORLD) as pool:
            pool.run(_save, url, store.options, 1, "", time_limit(60))
        committed = 1
        for step, point in enumerate(_KILLED_AT, 2):
            with RankPool(WORLD) as pool:
                pool.run(_save, url, store.options, step, point, time_limit(20), expect_death={0: signal.SIGKILL})
            expected = step if point == "save.commit.after" else committed
            committed = _check(url, store.options, expected)
        with RankPool(WORLD) as pool:
            pool.run(_save, url, store.options, 9, "", time_limit(60))
        _check(url, store.options, 9)
        backend = open_backend(url, **store.options)
        backend.abort_incomplete([*backend.incomplete()])
        assert [*backend.incomplete()] == []

    def test_a_manager(self, store: Store, url: str) -> None:
        options = dict(store.options)
        with bcp.CheckpointManager(url, cadence=1, keep=2, storage_options=options) as manager:
            for step in range(1, 5):
                manager.save(step, {"extra_state": {"step": step}})
        state = {"extra_state": {"step": 0}}
        with bcp.CheckpointManager(url, storage_options=options) as manager:
            report = manager.resume(state)
        assert report is not None
        assert (report.step, state["extra_state"]["step"]) == (4, 4)
        kept = open_backend(url, **options).list_children("")
        assert [name for name in kept if name.startswith("step-")] == ["step-3/", "step-4/"]

    def test_in_a_forked_child(self, store: Store, url: str) -> None:
        use_in_forked_child(url, dict(store.options))


class HttpRows(CheckpointRows):
    """A subclass also returns the options for another endpoint."""

    def options_at(self, store: Store, endpoint: str) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.mark.parametrize("what", ["stall", "refuse"])
    def test_a_store_that_does_not_answer(self, store: Store, url: str, what: str) -> None:
        """Each operation ends with an error by its deadline, and the checkpoint remains."""
        small = {"extra_state": {"step": 1}}
        bcp.save(url, small, storage_options=dict(store.options))
        deadline_s = time_limit(3)
        with fault_proxy(store.endpoint) as proxy:
            options = self.options_at(store, proxy.url)
            bcp.load(url, small, storage_options=options)
            proxy.rule = lambda exchange: what
            operations: list[Callable[[], object]] = [
                lambda: bcp.save(url, small, storage_options=options, options=bcp.SaveOptions(deadline_s=deadline_s)),
                lambda: bcp.load(url, small, storage_options=options, options=bcp.LoadOptions(deadline_s=deadline_s)),
            ]
            for operation in operations:
                begun = time.monotonic()
                with pytest.raises((StorageError, BytecheckpointError)):
                    operation()
                assert time.monotonic() - begun < deadline_s + time_limit(2)
        assert bcp.open(url, storage_options=dict(store.options)).verify().ok
