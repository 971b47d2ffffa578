"""LoRA adapters pushed into real worker processes: successful pushes, refusals, and failures."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from toy_adapters import digest_of
from toy_engine import HIDDEN, ToyEngine, ToyTrainee, expected_digests, toy_engine

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import BytecheckpointError, EngineError, StateError, UsageError
from bytecheckpoint.inference.push import AdapterEngine, HttpEngine, Pusher, adapter_config, adapter_state
from bytecheckpoint.inference.push.transports.shared_memory import SharedMemoryTransport
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(9, of=__name__)

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"], "bias": "none"}
_PREFIX = "base_model.model."


class _LoraLinear(nn.Module):
    """A layer with PEFT's names."""

    def __init__(self, base: nn.Linear, rank: int, adapters: list[str]) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(HIDDEN, rank, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, HIDDEN, bias=False) for name in adapters})


class _Peft(nn.Module):
    """A trained model as PEFT wraps it."""

    def __init__(self, version: int, rank: int = 4, adapters: list[str] | None = None) -> None:
        super().__init__()
        trainee = ToyTrainee(0)
        torch.manual_seed(version)
        for name in ("q", "v"):
            setattr(trainee, name, _LoraLinear(getattr(trainee, name), rank, adapters or ["default"]))
        self.base_model = nn.Module()
        self.base_model.model = trainee


def _tensors(version: int, rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in adapter_state(_Peft(version, rank)).items()}


def _digest(version: int, **config: Any) -> str:
    return digest_of(_tensors(version), {**CONFIG, **config})


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2) as started:
        yield started


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


def _adapter(engine: ToyEngine | str, name: str = "policy", **config: Any) -> AdapterEngine:
    url = engine if isinstance(engine, str) else engine.url
    return AdapterEngine(HttpEngine(url), name, {**CONFIG, **config})


def _push(engine: ToyEngine, version: int, name: str = "policy", **config: Any) -> None:
    with Pusher(_adapter(engine, name, **config), deadline_s=time_limit(30)) as pusher:
        pusher.push({"model": _tensors(version)}, version=version)


def _served(engine: ToyEngine, name: str = "policy") -> list[str | None]:
    return [one.get(name) for one in engine.look()["adapters"]]


def test_adapter_state_uses_the_names_of_the_stored_adapter() -> None:
    state = adapter_state(_Peft(1))
    names = [f"{_PREFIX}{module}.lora_{part}.weight" for module in "qv" for part in "AB"]
    assert sorted(state) == names
    assert state[names[0]].shape == (4, HIDDEN)
    two = _Peft(1, adapters=["actor", "critic"])
    assert sorted(adapter_state(two, "critic")) == names
    assert adapter_state(two, "critic")[names[0]] is not adapter_state(two, "actor")[names[0]]
    with pytest.raises(StateError, match="no LoRA adapter 'default'; it has 'actor', 'critic'"):
        adapter_state(two)
    two.base_model.model.head = nn.Module()
    two.base_model.model.head.modules_to_save = nn.ModuleDict({"actor": nn.Linear(2, 2)})
    with pytest.raises(StateError, match="complete modules"):
        adapter_state(two, "actor")


def _under_fsdp1(rank: int, world_size: int) -> str:
    with pytest.raises(StateError, match="use FSDP-2") as raised:
        adapter_state(FullyShardedDataParallel(_Peft(1), use_orig_params=True, device_id=torch.device("cpu")))
    return str(raised.value)


def test_fsdp1_is_refused(pool: RankPool) -> None:
    pool.run(_under_fsdp1)


def _push_sharded(rank: int, world_size: int, url: str, versions: list[int]) -> list[Any]:
    found = []
    with Pusher(_adapter(url), deadline_s=time_limit(30)) as pusher:
        for version in versions:
            model = fully_shard(_Peft(version))
            report = pusher.push({"model": adapter_state(model)}, version=version)
            found.append((report, ToyEngine(url).look()["adapters"] if rank == 0 else None))
    return found


def test_only_the_adapter_is_sent(engine: ToyEngine, pool: RankPool) -> None:
    found = pool.run(_push_sharded, engine.url, [1, 2, 3])[0]
    assert [adapters for _, adapters in found] == [[{"policy": _digest(version)}] * 2 for version in (1, 2, 3)]
    nbytes = sum(tensor.nbytes for tensor in _tensors(1).values())
    for report, _ in found:
        assert report.engine_bytes == nbytes
        assert [worker.requested for worker in report.workers] == [nbytes] * 2
        assert min(report.written) > 0
    assert engine.look()["digests"] == expected_digests(0, 2)
    assert "/update_weight_version" not in engine.look()["log"]
    assert not engine.paused


def test_adapters_and_the_base_model_are_independent(engine: ToyEngine) -> None:
    with (
        Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as base,
        Pusher(_adapter(engine, "a"), deadline_s=time_limit(30)) as first,
        Pusher(_adapter(engine, "b"), deadline_s=time_limit(30)) as second,
    ):
        first.push({"model": _tensors(1)})
        second.push({"model": _tensors(2)})
        base.push(ToyTrainee(5), version=5)
        first.push({"model": _tensors(3)})
        assert _served(engine, "a") == [_digest(3)] * 2
        assert _served(engine, "b") == [_digest(2)] * 2
        assert engine.look()["digests"] == expected_digests(5, 2)
        assert [first.state()[0][0]["version"], second.state()[0][0]["version"]] == [1, 0]
        again = first.push({"model": _tensors(3)})
        assert [worker.sent for worker in again.workers] == [0, 0]


def test_an_engine_whose_model_is_inconsistent_stays_paused() -> None:
    with toy_engine(2) as engine, Pusher(_adapter(engine), deadline_s=time_limit(30)) as adapters:
        adapters.push({"model": _tensors(1)}, version=1)
        with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30)) as models:
            engine.fault(1, "fail", 1)
            with pytest.raises(EngineError, match="is left paused"):
                models.push(ToyTrainee(1), version=1)
            for pusher in (adapters, Pusher(_adapter(engine, "other"), deadline_s=time_limit(30))):
                with pytest.raises(StateError, match="the engine's model serves no consistent version"):
                    pusher.push({"model": _tensors(2)}, version=2)
                with pytest.raises(EngineError, match="serves no consistent version"):
                    pusher.resume()
                assert engine.paused
            assert _served(engine) == [_digest(1)] * 2
            models.push(ToyTrainee(1), version=1)
        assert not engine.paused
        adapters.push({"model": _tensors(2)}, version=2)
        assert _served(engine) == [_digest(2)] * 2


def test_tensors_are_cast_to_the_engines_adapter_dtype() -> None:
    with toy_engine(1, "bfloat16") as engine:
        with Pusher(_adapter(engine), deadline_s=time_limit(30)) as pusher:
            report = pusher.push({"model": _tensors(1)})
        assert report.workers[0].sent == report.engine_bytes // 2
        assert _served(engine) == [digest_of(_tensors(1, dtype=torch.bfloat16), CONFIG)]


def _without(name: str) -> dict[str, torch.Tensor]:
    tensors = _tensors(2)
    del tensors[_PREFIX + name]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (lambda: _without("q.lora_B.weight"), {}, "lora_B of q is missing"),
        (
            lambda: {n: t for n, t in _tensors(2).items() if ".q." not in n},
            {},
            r"2 parameter\(s\) of the engine's model:\n  q.lora_A: 256 of 256 elements",
        ),
        (lambda: _tensors(2, 2), {}, r"shape \[2, 64\], but rank 4 and the engine's layer require \[4, 64\]"),
        (lambda: _tensors(2, 16), {"r": 16}, "its rank is 16, and the engine was started for 8 at most"),
        (
            lambda: {**_tensors(2), f"{_PREFIX}q.lora_A.weight": torch.zeros(4, 65)},
            {},
            r"q.lora_A.weight: shape \[4, 65\], but rank 4 and the engine's layer require \[4, 64\]",
        ),
        (
            lambda: {n.replace(".v.", ".norm."): t for n, t in _tensors(2).items()},
            {},
            "the engine's model has no module norm that can have LoRA",
        ),
        (lambda: {**_tensors(2), "q.weight": torch.zeros(2)}, {}, "q.weight is not a tensor of a LoRA adapter"),
        (lambda: _tensors(2), {"use_dora": True}, "DoRA is not supported"),
        (lambda: _tensors(2), {"r": None}, "has no rank r"),
    ],
)
def test_mismatches_are_refused(engine: ToyEngine, tensors: Any, config: Any, message: str) -> None:
    _push(engine, 1)
    with Pusher(_adapter(engine, **config), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(BytecheckpointError, match=message):
            pusher.push({"model": tensors()}, version=2)
    assert _served(engine) == [_digest(1)] * 2
    assert not engine.paused
    _push(engine, 3)
    assert _served(engine) == [_digest(3)] * 2


def test_ranks_by_module(engine: ToyEngine) -> None:
    tensors = {name: (_tensors(1) if ".q." in name else _tensors(1, 2))[name] for name in _tensors(1)}
    with Pusher(_adapter(engine, rank_pattern={"v": 2}), deadline_s=time_limit(30)) as pusher:
        pusher.push({"model": tensors})
    assert _served(engine) == [digest_of(tensors, CONFIG)] * 2


def test_a_damaged_chunk(engine: ToyEngine) -> None:
    _push(engine, 1)
    engine.fault(1, "flip")
    with Pusher(_adapter(engine), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(BytecheckpointError, match="1 of 4 chunks of version 2 did not arrive as they were sent"):
            pusher.push({"model": _tensors(2)}, version=2)
        assert _served(engine) == [_digest(1)] * 2
        pusher.push({"model": _tensors(3)}, version=3)
    assert _served(engine) == [_digest(3)] * 2


def _push_and_die(rank: int, world_size: int, url: str) -> str:
    if rank == 1:

        def dying(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        SharedMemoryTransport.write = dying  # type: ignore[method-assign]
    with Pusher(_adapter(url), deadline_s=time_limit(30)) as pusher, pytest.raises(BytecheckpointError) as raised:
        pusher.push({"model": adapter_state(fully_shard(_Peft(2)))}, version=2)
    return str(raised.value)


def test_a_killed_sender(engine: ToyEngine) -> None:
    _push(engine, 1)
    with RankPool(2) as pool:
        message, _ = pool.run(_push_and_die, engine.url, expect_death={1: signal.SIGKILL})
    assert "rank 1" in message
    assert _served(engine) == [_digest(1)] * 2
    _push(engine, 3)
    assert _served(engine) == [_digest(3)] * 2


def test_all_workers_roll_back_when_one_fails(engine: ToyEngine) -> None:
    _push(engine, 1)
    engine.fault(1, "fail adapter", 1)
    with Pusher(_adapter(engine), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(BytecheckpointError, match="the adapter does not fit") as raised:
            pusher.push({"model": _tensors(2)}, version=2)
        assert "serves version 1" in str(raised.value)
    assert _served(engine) == [_digest(1)] * 2


def test_the_first_push_of_an_adapter_fails(engine: ToyEngine) -> None:
    engine.fault(0, "fail adapter", 1)
    with Pusher(_adapter(engine, "new"), deadline_s=time_limit(30)) as pusher:
        with pytest.raises(BytecheckpointError, match="the adapter does not fit"):
            pusher.push({"model": _tensors(2)}, version=2)
        assert _served(engine, "new") == [None, None]
        assert not engine.paused
        pusher.push({"model": _tensors(3)}, version=3)
    assert _served(engine, "new") == [_digest(3)] * 2


def test_a_new_configuration_replaces_the_old_one(engine: ToyEngine) -> None:
    with (
        Pusher(_adapter(engine, "c"), deadline_s=time_limit(30)) as first,
        Pusher(_adapter(engine, "c", lora_alpha=16), deadline_s=time_limit(30)) as second,
    ):
        first.push({"model": _tensors(1)}, version=1)
        engine.fault(1, "fail adapter", 1)
        with pytest.raises(BytecheckpointError, match="the adapter does not fit"):
            second.push({"model": _tensors(1)}, version=2)
        assert _served(engine, "c") == [_digest(1)] * 2
        second.push({"model": _tensors(1)}, version=3)
        assert _served(engine, "c") == [_digest(1, lora_alpha=16)] * 2
        assert first.state()[0][0]["bytes"] == 0
        first.push({"model": _tensors(4)}, version=4)
        assert _served(engine, "c") == [_digest(4)] * 2


def test_a_failed_push_after_release_changes_nothing(engine: ToyEngine) -> None:
    with Pusher(_adapter(engine, "d"), deadline_s=time_limit(30)) as pusher:
        pusher.push({"model": _tensors(1)}, version=1)
        pusher.push({"model": _tensors(2)}, version=2)
        pusher.release()
        assert _served(engine, "d") == [_digest(2)] * 2
        engine.fault(0, "fail adapter", 1)
        with pytest.raises(BytecheckpointError, match="the adapter does not fit"):
            pusher.push({"model": _tensors(3)}, version=3)
    assert _served(engine, "d") == [_digest(2)] * 2


def test_the_command_pushes_a_stored_adapter(engine: ToyEngine, tmp_path: Path) -> None:
    save_file(_tensors(7), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    assert adapter_config(str(tmp_path)) == CONFIG
    command = ["push", str(tmp_path), "--to", engine.url, "--adapter", "e", "--version", "7"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert "the engines serve version 7" in done.output
    assert _served(engine, "e") == [_digest(7)] * 2
    (tmp_path / "adapter_config.json").unlink()
    failed = CliRunner().invoke(cli, command)
    assert failed.exit_code == 6
    assert "is this the folder of an adapter that PEFT stored?" in failed.stderr


@pytest.mark.parametrize("group", [None, "gloo"])
def test_streamed(engine: ToyEngine, group: Any) -> None:
    """The ring buffer holds only a part of the adapter."""
    _push(engine, 1, "g")
    with Pusher(
        _adapter(engine, "g"), deadline_s=time_limit(30), memory_bytes=1500, chunk_bytes=256, group=group
    ) as pusher:
        report = pusher.push({"model": _tensors(2)}, version=2)
        assert report.mode == "streamed"
        assert _served(engine, "g") == [_digest(2)] * 2
        engine.fault(0, "fail adapter", 1)
        with pytest.raises(BytecheckpointError, match="the adapter does not fit"):
            pusher.push({"model": _tensors(3)}, version=3)
        assert _served(engine, "g") == [_digest(2)] * 2
        assert not engine.paused


def test_a_stored_adapter(engine: ToyEngine, tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": adapter_state(_Peft(8))}, step=80)
    with Pusher(_adapter(engine, "f"), deadline_s=time_limit(30)) as pusher:
        assert pusher.push(bcp.open(tmp_path / "c")).version == 80
    assert _served(engine, "f") == [_digest(8)] * 2


def test_an_invalid_configuration() -> None:
    with pytest.raises(UsageError, match="PEFT's LoraConfig or a mapping, not int"):
        AdapterEngine(HttpEngine("http://127.0.0.1:9"), "a", 3)
    with pytest.raises(StateError, match="cannot be expressed in JSON: 'object'"):
        AdapterEngine(HttpEngine("http://127.0.0.1:9"), "a", {"r": object()})
