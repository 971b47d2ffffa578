"""``BcpTrainer``: a Trainer is killed, resumes, and equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.errors import FormatError, NoValidCheckpointError, UsageError
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

pytest.importorskip("peft")

import transformers
from trainer_training import CountingTrainer, free_port, make_model, settings, train, train_on_ranks

from bytecheckpoint.integrations.transformers import BcpTrainer, BcpTrainerMixin

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore"), pytest.mark.sampled(7, of=__name__)]

_OVERRIDDEN = (
    "train",
    "save_model",
    "_get_output_dir",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_save_scaler",
)
"""The methods of ``transformers.Trainer`` that the library overrides."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _train_alone(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    train(**arguments)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("uninterrupted"))


def test_a_killed_training_resumes_bit_equal(pool: RankPool, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"root": tmp_path, "signalled": (8, signal.SIGKILL), "kind": CountingTrainer}
    pool.run(_train_alone, arguments, world_size=1, backend=None, expect_death={0: signal.SIGKILL})
    assert bcp.latest(tmp_path).step in (3, 6)
    resumed = train(tmp_path, kind=CountingTrainer)
    assert resumed.pop("counter") == 10, "the subclass reads its own file"
    assert resumed == {name: one for name, one in uninterrupted.items() if name != "counter"}
    assert bcp.latest(tmp_path).step == 10


def test_sigterm_saves_the_step_and_exits(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, signalled=(5, signal.SIGTERM))
    assert ended.value.code == 128 + signal.SIGTERM
    assert bcp.latest(tmp_path).step == 5
    assert train(tmp_path) == uninterrupted


def test_training_goes_on_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, waits = threading.Event(), []

    class Going(BcpTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                goes_on.set()
            return super().training_step(*args, **kwargs)

    def wait_and_put(self: LocalBackend, key: str, *args: Any, **kwargs: Any) -> Any:
        if key == "manifest.msgpack":
            waits.append(goes_on.wait(time_limit(60)))
        return put(self, key, *args, **kwargs)

    put = LocalBackend.put
    monkeypatch.setattr(LocalBackend, "put", wait_and_put)
    train(tmp_path, kind=Going, max_steps=4)
    assert waits == [True, True], "the step after the first save began before its commit"


def test_the_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    # A rate at which the model becomes worse.
    arguments = {"load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.5, "warmup_steps": 3}
    trained = train(tmp_path, **arguments)
    best = min(trained["evaluations"], key=trained["evaluations"].get)
    assert trained["best"] == str(tmp_path / f"checkpoint-{best}")
    stored = bcp.open(trained["best"])
    assert trained["sums"] == {name: stored[f"model.{name}"][...].double().sum().item() for name in trained["sums"]}


def test_a_limit_keeps_the_newest(tmp_path: Path) -> None:
    train(tmp_path, save_total_limit=2)
    assert {one.name for one in tmp_path.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-10"}


def test_options_as_in_a_file_of_settings(tmp_path: Path) -> None:
    checkpoints = {"root": str(tmp_path / "root"), "save": {"codec": "zstd"}, "async_save": False}
    train(tmp_path / "output", checkpoints=checkpoints, save_only_model=True)
    found = bcp.latest(tmp_path / "root")
    assert {section.name for section in found.manifest.sections} == {"model", "trainer"}
    assert "zstd" in found.manifest.files.codec
    assert not list((tmp_path / "output").glob("checkpoint-*"))


def test_a_root_without_valid_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, max_steps=3)
    assert "there is no checkpoint below" in caplog.text
    (tmp_path / "checkpoint-3" / "manifest.msgpack").write_bytes(b"damaged")
    with pytest.raises(NoValidCheckpointError):
        train(tmp_path, max_steps=4)
    train(tmp_path, max_steps=4, save_steps=4, checkpoints={"allow_fresh": True})
    assert bcp.latest(tmp_path).step == 4


def test_a_folder_that_the_trainer_itself_wrote(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, kind=transformers.Trainer, resume=False, max_steps=6, lr_scheduler_kwargs={})
    native = tmp_path / "checkpoint-6"
    (native / "checkpoint-is-incomplete.txt").write_text("")
    resumed = train(tmp_path, max_steps=6)
    assert resumed["losses"].keys() == {*range(4, 7)} | {1, 2, 3}, "it resumes from checkpoint-3"
    assert bcp.latest(tmp_path).step == 6


def test_a_path(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path / "first")
    resumed = train(tmp_path / "second", resume=tmp_path / "first" / "checkpoint-3")
    assert resumed == uninterrupted
    with pytest.raises(Exception, match="checkpoint-4"):
        train(tmp_path / "second", resume=str(tmp_path / "first" / "checkpoint-4"))


_FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}

# What these two do would need an accelerator.
_NOT_ON_CPUS = {"cpu_ram_efficient_loading": False, "sync_module_states": False}
_FSDP1 = {"fsdp": True, "fsdp_config": {**_FSDP2["fsdp_config"], "version": 1, **_NOT_ON_CPUS}}

_ADAPTER_FILES = {"adapted": True, "checkpoints": {"save": {"layout": "whole"}}}
_DORA_FILES = {**_ADAPTER_FILES, "adapted": {"use_dora": True}}


@pytest.mark.parametrize(
    "changes",
    [{}, _FSDP1, _FSDP2, _ADAPTER_FILES, {**_FSDP2, **_ADAPTER_FILES}, {**_FSDP2, **_DORA_FILES}],
    ids=["ddp", "fsdp-1", "fsdp-2", "adapter-ddp", "adapter-fsdp-2", "dora-fsdp-2"],
)
def test_two_ranks_die_in_a_save_and_resume(pool: RankPool, tmp_path: Path, changes: dict[str, Any]) -> None:
    def run(root: str, killed: int | None, **expected: Any) -> list[Any]:
        return pool.run(train_on_ranks, free_port(), str(tmp_path / root), killed, changes, backend=None, **expected)

    whole = run("uninterrupted", None)
    with pytest.raises(RanksFailed, match="rank 1"):  # the other one raises an error that names it
        run("killed", 6)
    found = bcp.latest(tmp_path / "killed")
    assert found.step == 3
    is_sharded = len(found.manifest.shards) > len(found.manifest.tensors)
    adapter = {name: one for name, one in changes.items() if name in _ADAPTER_FILES}
    assert is_sharded == (bool(changes) and not adapter)
    assert run("killed", None) == whole
    if adapter:
        assert _sums_of_adapter(bcp.latest(tmp_path / "killed")) == whole[0]["sums"]
    alone = train(tmp_path / "killed", resume=tmp_path / "killed" / "checkpoint-9", **adapter)
    assert alone["losses"].keys() == whole[0]["losses"].keys()


def _sums_of_adapter(stored: bcp.Checkpoint) -> dict[str, float]:
    """The sums of the parameters of the model that PEFT loads from a checkpoint."""
    from peft import PeftModel

    folder = str(stored.model_directory)
    assert {"adapter_model.safetensors", "adapter_config.json"} < {one.name for one in Path(folder).iterdir()}
    model = PeftModel.from_pretrained(make_model(), folder)
    return {name: one.double().sum().item() for name, one in model.named_parameters()}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.full)])
def test_a_folder_that_the_trainer_wrote_with_fsdp(pool: RankPool, tmp_path: Path, kind: str) -> None:
    changes = {"fsdp": True, "fsdp_config": {**_FSDP2["fsdp_config"], "state_dict_type": kind}, "max_steps": 3}
    own = {"kind": transformers.Trainer, "checkpoints": None, "resume": False, **changes}
    pool.run(train_on_ranks, free_port(), str(tmp_path), None, own, backend=None)
    folder = tmp_path / "checkpoint-3"
    model_file, optimizer_file = folder / "pytorch_model_fsdp.bin", folder / "optimizer.bin"
    if kind == "SHARDED_STATE_DICT":
        for file in (model_file, optimizer_file):
            source = folder / f"{file.stem}_0"
            dcp_to_torch_save(source, file)
        assert not (folder / "model.safetensors").exists()
    model_state, optimizer_state = (torch.load(file) for file in (model_file, optimizer_file))
    if kind == "SHARDED_STATE_DICT":
        model_file.unlink()
        optimizer_file.unlink()
        model_state, optimizer_state = model_state["model"], optimizer_state["optimizer"]

    model = make_model()
    trainer = transformers.Trainer(model, settings(tmp_path / "other", eval_strategy="no"))
    trainer.create_optimizer_and_scheduler(10)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "extra_state": {}}
    bcp.load(folder, state)
    assert state["extra_state"]["global_step"] == bcp.open(folder).step == 3
    assert scheduler.state_dict() == torch.load(folder / "scheduler.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, model_state[name])
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, optimizer_state["state"][name][key]), (name, key)
    assert bcp.open(folder).manifest.world_size == 2
    bcp.load(folder, {"rng": bcp.RNGState()}, options={"per_rank": "lowest"})


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", ".."])
def test_a_hostile_checkpoint_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    hostile = {"model": make_model(), "trainer": bcp.PerRank({name: b"data"})}
    bcp.save(tmp_path / "checkpoint-3", hostile, step=3)
    with pytest.raises(FormatError, match="not the name of a file"):
        train(tmp_path)


_ALONE, _WHOLE = {"trainable_only": True}, {"layout": "whole"}


@pytest.mark.parametrize(("before", "save"), [(_ALONE, _ALONE), (_WHOLE, _WHOLE), (_ALONE, _WHOLE)])
def test_adapters_alone(tmp_path: Path, before: dict[str, Any], save: dict[str, Any]) -> None:
    from peft import PeftModel
    from trl import SFTTrainer

    class Tuner(BcpTrainerMixin, SFTTrainer):
        pass

    def tune(root: str, save: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return train(tmp_path / root, adapted=True, checkpoints={"save": save}, **changes)

    assert issubclass(Tuner, SFTTrainer)
    expected = tune("uninterrupted", save)
    with pytest.raises(SystemExit):
        tune("killed", before, signalled=(4, signal.SIGTERM))
    names = bcp.latest(tmp_path / "killed").manifest.tensors.names
    assert all("lora" in name for name in names if name.startswith(("model.", "adapter_model.")))
    assert tune("killed", save) == expected
    if save is _WHOLE:
        assert _sums_of_adapter(bcp.latest(tmp_path / "killed")) == expected["sums"]
        return
    exported = ["export", bcp.latest(tmp_path / "killed").url, str(tmp_path / "adapter"), "--lora", "peft"]
    assert CliRunner().invoke(cli, exported).exit_code == 0
    again = PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    assert {name: one.double().sum().item() for name, one in again.named_parameters()} == expected["sums"]


def test_the_best_adapter_is_loaded(tmp_path: Path) -> None:
    arguments = {"load_best_model_at_end": True, "learning_rate": 0.5, "warmup_steps": 3, **_ADAPTER_FILES}
    trained = train(tmp_path, **arguments)
    best = bcp.open(trained["best"])
    assert best.step == min(trained["evaluations"], key=trained["evaluations"].get)
    assert trained["sums"] == _sums_of_adapter(best)


def test_a_push_of_checkpoint_folders_is_refused(tmp_path: Path) -> None:
    arguments = settings(tmp_path, push_to_hub=True, hub_strategy="every_save", hub_model_id="a/b", eval_strategy="no")
    with pytest.raises(UsageError, match="hub_strategy='end'"):
        _without_hub(arguments)


def _without_hub(arguments: Any) -> BcpTrainer:
    class Offline(BcpTrainer):
        def init_hf_repo(self, token: str | None = None) -> None:
            """It would connect to the hub."""

    return Offline(make_model(), arguments)


def test_the_trainer_has_the_methods_that_are_overridden() -> None:
    assert [name for name in _OVERRIDDEN if not hasattr(transformers.Trainer, name)] == []
    own = {name for name in vars(BcpTrainerMixin) if callable(getattr(BcpTrainerMixin, name))}
    overridden = {name for name in own if hasattr(transformers.Trainer, name)} - {"__init__"}
    assert overridden <= {*_OVERRIDDEN}
