"""``SaveOptions``, ``LoadOptions`` and ``JobOptions``: as objects, and as mappings from a configuration file."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, DisagreementError, UsageError
from bytecheckpoint.testing import RankPool, time_limit

KINDS: tuple[Any, ...] = (bcp.SaveOptions, bcp.LoadOptions, bcp.JobOptions)


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_frozen_and_have_names_and_defaults(kind: Any) -> None:
    options = kind()
    assert {one.kind for one in inspect.signature(kind).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.deadline_s = 1


def test_a_mapping_stands_for_options(tmp_path: Path) -> None:
    state = {"extra_state": {"weight": torch.arange(1000.0)}}
    bcp.save(tmp_path / "a", state, options={"codec": "zstd", "chunk_size": 1024})
    bcp.save(tmp_path / "b", state, options=bcp.SaveOptions(codec="zstd", chunk_size=1024))
    a, b = (bcp.open(tmp_path / name, options={"verify": False}) for name in "ab")
    assert a.manifest.files.codec == b.manifest.files.codec
    report = bcp.load(tmp_path / "a", state, options={"share_reads": "never"})
    assert report.step is None
    job = {"name_template": "checkpoint-{step}"}
    with bcp.CheckpointManager(tmp_path, cadence=1, save={"codec": "zstd"}, load={"verify": True}, job=job) as manager:
        manager.save(1, state)
    assert (tmp_path / "checkpoint-1" / "manifest.msgpack").exists()


def test_unknown_options_are_all_listed_with_what_is_similar(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        bcp.save(tmp_path, {}, options={"codecs": "zstd", "xyz": 1})
    assert "options has no 'codecs' (did you mean 'codec'?), 'xyz'; SaveOptions has layout, codec, " in str(error.value)
    for name in ("save", "load", "job"):
        with pytest.raises(UsageError, match=f"{name} has no 'deadline' \\(did you mean 'deadline_s'\\?\\)"):
            bcp.CheckpointManager(tmp_path, **{name: {"deadline": 5}})
    assert not list(tmp_path.iterdir())


def test_dcp_refuses_options_that_have_no_effect(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="codec, gate of options would have no effect here"):
        bcp.dcp.Writer(tmp_path, options={"gate": True, "codec": "zstd"})
    with pytest.raises(UsageError, match="per_rank of options would have no effect here"):
        bcp.dcp.Reader(tmp_path, options=bcp.LoadOptions(per_rank="lowest"))


def _save_with_a_misspelt_option(rank: int, world_size: int, path: str) -> str:
    options = {"deadline_s": time_limit(30), **({"layuot": "whole"} if rank == 1 else {})}
    with pytest.raises(UsageError) as error:
        bcp.save(path, {"extra_state": {"a": 1}}, options=options)
    return str(error.value)


def test_all_ranks_raise_the_error_of_one(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(_save_with_a_misspelt_option, str(tmp_path / "c"), world_size=2)
    assert "did you mean 'layout'?" in first
    assert "did you mean 'layout'?" in second


def _load_open_checkpoints(rank: int, world_size: int, root: str) -> list[float]:
    options = {"deadline_s": time_limit(30), "share_reads": "always"}
    value = torch.zeros(10)
    bcp.load(bcp.open(f"{root}/1"), {"extra_state": {"value": value}}, options=options)
    with pytest.raises(DisagreementError, match="open checkpoint"):
        bcp.load(bcp.open(f"{root}/{rank + 1}"), {"extra_state": {"value": value}}, options=options)
    checkpoint, storage_options = bcp.open(f"{root}/1"), {"key": "x"} if rank else None
    with pytest.raises(BytecheckpointError, match="storage_options do not apply"):
        bcp.load(checkpoint, {"extra_state": {"value": value}}, options=options, storage_options=storage_options)
    return value.tolist()


def test_an_open_checkpoint_is_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    for step in (1, 2):
        bcp.save(tmp_path / str(step), {"extra_state": {"value": torch.full((10,), float(step))}}, step=step)
    value = torch.zeros(10)
    checkpoint = bcp.open(tmp_path / "2")
    assert bcp.load(checkpoint, {"extra_state": {"value": value}}).step == 2
    assert value.tolist() == [2.0] * 10
    with pytest.raises(UsageError, match="storage_options do not apply"):
        bcp.load(checkpoint, {"extra_state": {"value": value}}, storage_options={"key": "x"})
    with pytest.raises(UsageError, match="rules do not apply"):
        bcp.load(checkpoint, {"extra_state": {"value": value}}, options={"rules": "llama"})
    assert rank_pool.run(_load_open_checkpoints, str(tmp_path), world_size=2) == [[1.0] * 10] * 2
