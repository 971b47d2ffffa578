"""Compare saves of trainers through this library with those of the trainers themselves.

    .venv-huggingface/bin/python -m benchmarks.trainers [--rounds 2] [--json benchmarks/results/trainers.json]

Each training runs in a new process, on one rank and the CPU: the Trainer of transformers, that of Lightning, and
torchtitan with its debug model, made deeper. In each round, all ways of saving take turns. The stall of a save is the
time from the optimizer's step to the next forward pass, less the median of those times where nothing is saved. The
total is from the first forward pass until all saves are durable for this library, and written for the others, which do
not sync.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import results
from benchmarks.tables import Grid, show

__all__ = ["CASES", "main", "measure", "table"]

CASES = {
    "transformers": ("Trainer", "bytecheckpoint"),
    "lightning": ("ModelCheckpoint", "bytecheckpoint"),
    "torchtitan": ("disabled", "async", "bytecheckpoint"),
}
"""The ways of saving by trainer; those of torchtitan are values of its ``async_mode``."""

STEPS, EVERY = 32, 8
_SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"


class _Clock:
    """Notes how long each step of the optimizer waits for the next forward pass."""

    def __init__(self) -> None:
        self.began = 0.0
        self.gaps: list[float] = []
        self._stepped: float | None = None
        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_post_hook(self._step)

    def _forward(self, *_: Any) -> None:
        if not self.began:
            self.began = time.perf_counter()
        if self._stepped is not None:
            self.gaps.append(time.perf_counter() - self._stepped)
            self._stepped = None

    def _step(self, *_: Any) -> None:
        self._stepped = time.perf_counter()


def _transformers(folder: str, way: str, scale: float) -> Callable[[], object]:
    import transformers

    from bytecheckpoint.integrations.transformers import BcpTrainer

    model = _llama(scale)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (STEPS, 16))]
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind: Any = BcpTrainer if way == "bytecheckpoint" else transformers.Trainer
    return lambda: kind(model, arguments, train_dataset=rows).train()


def _llama(scale: float) -> Any:
    """24.7 million parameters at scale 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = max(int(8 * scale**0.5), 1) * 64
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 8, "num_hidden_layers": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16 * width, tie_word_embeddings=True, **sizes))


def _lightning(folder: str, way: str, scale: float) -> Callable[[], object]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from bytecheckpoint.integrations.lightning import BcpSingleDeviceStrategy

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = _llama(scale)

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            return self.net(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    saves = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=BcpSingleDeviceStrategy(device="cpu") if way == "bytecheckpoint" else "auto",
        max_steps=STEPS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = torch.utils.data.DataLoader(torch.randint(0, 512, (STEPS, 16)), batch_size=1)  # type: ignore[arg-type]
    return lambda: trainer.fit(Module(), loader)


def _torchtitan(folder: str, way: str, scale: float) -> Callable[[], object]:
    sys.path.append(str(_SUPPORT))  # torchtitan expects an accelerator
    support = importlib.import_module("torchtitan_training")
    from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    config = support.debug_model()
    layers = config.model_spec.model.layers
    layers += layers[1:] * int(5 * scale)
    config.dump_folder, config.training.steps = folder, STEPS
    is_own = way == "bytecheckpoint"
    kind: Any = BcpCheckpointManager.Config if is_own else support.CheckpointManager.Config
    mode: dict[str, Any] = {} if is_own else {"async_mode": way}
    config.checkpoint = kind(enable=True, interval=EVERY, last_save_model_only=False, **mode)
    trainer = config.build()

    def train() -> None:
        trainer.train()
        trainer.close()

    return train


_TRAININGS = {"transformers": _transformers, "lightning": _lightning, "torchtitan": _torchtitan}


def _run(trainer: str, way: str, scale: float, folder: str) -> dict[str, Any]:
    """One training in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = _TRAININGS[trainer](folder, way, scale)
    clock = _Clock()
    train()
    total = time.perf_counter() - clock.began
    saved = [gap for step, gap in enumerate(clock.gaps, 1) if step % EVERY == 0]
    ordinary = statistics.median(gap for step, gap in enumerate(clock.gaps, 1) if step % EVERY)
    nbytes = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file())
    return {"total": total, "stalls": [gap - ordinary for gap in saved], "bytes": nbytes * EVERY // STEPS}


def measure(
    rounds: int, folder: Path, scale: float = 1.0, say: Callable[[str], None] = print
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return samples by trainer and way of saving, one for each round."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for trainer, ways in CASES.items():
        found[trainer] = {way: [] for way in ways}
        for turn in range(rounds):
            for way in ways:
                say(f"{trainer}: {way}, round {turn + 1} of {rounds}")
                with tempfile.TemporaryDirectory(prefix="trainers-", dir=folder) as work:
                    command = [sys.executable, "-m", __spec__.name, "--one", trainer, way, "--folder", work]
                    command += ["--scale", str(scale)]
                    done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{trainer} with {way} failed:\n{done.stderr[-4000:]}")
                found[trainer][way].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def table(result: dict[str, dict[str, list[dict[str, Any]]]]) -> Grid:
    """Show medians, least and most: the stall of a save, and the whole training."""
    rows: list[tuple[str, ...]] = []
    for trainer, ways in result.items():
        for way, samples in ways.items():
            stalls = [stall for sample in samples for stall in sample["stalls"]]
            totals = [sample["total"] for sample in samples]
            rows.append(
                (
                    trainer,
                    way,
                    f"{statistics.median(sample['bytes'] for sample in samples) / 1e6:.0f}",
                    f"{statistics.median(stalls):.3f} ({min(stalls):.3f} to {max(stalls):.3f})",
                    f"{statistics.median(totals):.1f} ({min(totals):.1f} to {max(totals):.1f})",
                )
            )
    columns = ("trainer", "saved by", "MB", "stall of a save, s", "training, s")
    return Grid(f"Trainings of {STEPS} steps with {STEPS // EVERY} saves", columns, rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the bytes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("TRAINER", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        trainer, way = options.one
        sample = _run(trainer, way, options.scale, str(options.folder))
        print(json.dumps(sample), flush=True)
        os._exit(0)  # torchtitan leaves process groups
    command = f"python -m benchmarks.trainers --scale {options.scale:g} --rounds {options.rounds}"
    document = results.header(command, {"scale": options.scale, "rounds": options.rounds}, options.folder)
    document["result"] = measure(options.rounds, options.folder, options.scale)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, [options.folder]), indent=1) + "\n")


if __name__ == "__main__":
    main()
