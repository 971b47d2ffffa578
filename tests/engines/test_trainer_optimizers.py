"""``BcpTrainer`` with DeepSpeed's ZeRO and with 8-bit optimizers: killed in a save, it resumes bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

pytest.importorskip("deepspeed", reason="make test-pairs runs this with DeepSpeed and transformers")
pytest.importorskip("transformers", reason="make test-pairs runs this with DeepSpeed and transformers")

from deepspeed_jobs import prepare
from trainer_training import CountingTrainer, free_port, make_model, train, train_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

_AUTOMATIC = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
_SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": _AUTOMATIC}}  # instead of the Trainer's


def _zero(stage: int, **config: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 9, "memory_efficient_linear": False}
    optimizers = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}}
    return {"deepspeed": {"zero_optimization": zero, **optimizers, **sizes, **config}, "bf16": True}


CASES = {
    "zero-0": _zero(0),
    "zero-1": _zero(1, **_SCHEDULER),
    "zero-2": _zero(2),
    "zero-3": _zero(3, **_SCHEDULER),
    "8-bit": {"optim": "adamw_bnb_8bit", "model": make_model(hidden_size=96)},  # fewer elements would have 32 bits
}


def _train(rank: int, world_size: int, *arguments: Any) -> dict[str, Any]:
    prepare()
    return train_on_ranks(rank, world_size, *arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_ranks_die_in_a_save_and_resume(tmp_path: Path, case: str) -> None:
    """The first case waits for the process from which ranks are forked, which imports both frameworks."""
    changes = {**CASES[case], "warmup_steps": 8, "kind": CountingTrainer}
    with RankPool(2) as pool:

        def run(root: str, killed: int | None) -> list[Any]:
            return pool.run(_train, free_port(), str(tmp_path / root), killed, changes, backend=None)

        whole = run("uninterrupted", None)
        with pytest.raises(RanksFailed, match="rank 1"):
            run("killed", 6)
        found = bcp.latest(tmp_path / "killed")
        assert found.step == 3
        assert any(name.endswith(".absmax1") for name in found) == (case == "8-bit")
        assert run("killed", None) == whole
    if case == "zero-2":
        alone = train(tmp_path / "killed", resume=tmp_path / "killed" / "checkpoint-9")
        assert alone["losses"].keys() == whole[0]["losses"].keys()
