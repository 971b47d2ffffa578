"""Folders that transformers, its Trainer and PEFT write, in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def _model(seed: int, *, tie: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tie))


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 61, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "lr": 0.01}
    settings |= options
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=settings.pop("lr"),
        **settings,
    )
    return Trainer(model, arguments, train_dataset=_Tokens())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run of a Trainer: steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trainer")
    _trainer(_model(0), folder, weight_decay=0.1).train()
    return folder


def test_a_trainers_run_continues(run: Path, tmp_path: Path) -> None:
    """What two more steps make of the loaded state is what the Trainer stored two steps later."""
    before = sorted(run.rglob("*"))
    trainer = _trainer(_model(1), tmp_path, weight_decay=0.1)
    trainer.create_optimizer_and_scheduler(4)
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
    extra = {"global_step": 0}
    report = bcp.load(
        run / "checkpoint-2",
        {**state, "rng": bcp.RNGState(), "extra_state": extra},
        strict={"extra_state": False},
    )
    assert (extra["global_step"], bcp.open(run / "checkpoint-2").step) == (2, 2)
    assert set(report.resumed.values()) == {("continued", "rank 0 of 1")}
    stored = torch.load(run / "checkpoint-2/optimizer.pt", weights_only=False)
    assert trainer.optimizer.state_dict()["param_groups"] == stored["param_groups"]
    loader = list(_batches())
    for batch in loader[2:4]:
        trainer.optimizer.zero_grad()
        trainer.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    later = torch.load(run / "checkpoint-4/optimizer.pt", weights_only=False)
    found = trainer.optimizer.state_dict()
    assert found["param_groups"] == later["param_groups"]
    for number, entries in later["state"].items():
        for key, value in entries.items():
            assert torch.equal(found["state"][number][key], value), (number, key)
    assert sorted(run.rglob("*")) == before


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    """The order of the Trainer's own data loader."""
    trainer = _trainer(_model(0), Path("unused"))
    torch.manual_seed(42)
    yield from trainer.get_train_dataloader()


def _load_sharded(rank: int, world_size: int, path: str) -> None:
    from safetensors.torch import load_file
    from torch.distributed.fsdp import fully_shard

    model = _model(1)
    names = {id(param): name for name, param in model.named_parameters()}
    trainer = _trainer(model, Path("unused"), weight_decay=0.1)
    decayed = set(trainer.get_decay_parameter_names(model))
    order = [
        *(name for name in names.values() if name in decayed),
        *(name for name in names.values() if name not in decayed),
    ]
    fully_shard(model)
    groups = [
        {
            "params": [
                param for name, param in model.named_parameters() if (name in decayed) == is_decayed and test(name)
            ]
        }
        for is_decayed in (True, False)
        for test in (lambda name: "layers.0" in name, lambda name: "layers.0" not in name)
    ]
    optimizer = torch.optim.AdamW(groups)
    bcp.load(path, {"model": model, "optimizer": optimizer})
    weights = load_file(f"{path}/model.safetensors")
    stored = torch.load(f"{path}/optimizer.pt", weights_only=False)
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), weights[name]), name
        entries = stored["state"][order.index(name)]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key].full_tensor(), entries[key]), (name, key)
    rates = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert rates == {(group["lr"], group["weight_decay"]) for group in stored["param_groups"]}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_two_ranks_with_other_groups(run: Path, pool: RankPool) -> None:
    pool.run(_load_sharded, str(run / "checkpoint-4"))


def test_tied_weights_and_other_kinds_of_files(tmp_path: Path) -> None:
    """Only the embedding is stored; a model that does not tie its head needs both."""
    model = _model(0)
    model.save_pretrained(tmp_path / "tied", max_shard_size="10KB")
    assert "model.lm_head.weight" not in bcp.open(tmp_path / "tied")
    other = _model(1)
    bcp.load(tmp_path / "tied", {"model": other})
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(bcp.errors.MismatchError, match=r"lm_head\.weight"):
        bcp.load(tmp_path / "tied", {"model": _model(1, tie=False)})


def _adapted(seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return get_peft_model(_model(0, tie=False), config)


def test_adapters_and_their_training(tmp_path: Path) -> None:
    """The Trainer stores the adapter only, and the optimizer of its parameters."""
    from peft import get_peft_model_state_dict

    trainer = _trainer(_adapted(2), tmp_path / "run", max_steps=2)
    trainer.train()
    path = tmp_path / "run/checkpoint-2"
    stored = get_peft_model_state_dict(trainer.model)
    assert {f"model.{name}" for name in stored} == {name for name in bcp.open(path) if name.startswith("model.")}
    model = _adapted(3)
    resumed = _trainer(model, tmp_path / "again")
    resumed.create_optimizer_and_scheduler(4)
    bcp.load(path, {"model": model, "optimizer": resumed.optimizer, "lr_scheduler": resumed.lr_scheduler})
    for name, value in get_peft_model_state_dict(model).items():
        assert torch.equal(value, stored[name]), name
    expected, found = trainer.optimizer.state_dict(), resumed.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, entries in expected["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in entries.items())
