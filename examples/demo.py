"""Train on four processes, kill one during a save, resume on two, preempt them, and resume on one.

    python examples/demo.py [--s3]

Every stage runs ``train_gpt.py``. FSDP-2 runs on 4 processes until one of them is killed while it writes a checkpoint.
Tensor parallelism resumes on 2 processes from the newest complete checkpoint, until SIGTERM makes both save and exit. A
single process resumes from that step. The loss curve must equal that of an uninterrupted run. With ``--s3``, the
checkpoints are in a bucket of an S3 server that runs on this machine. The exit code is nonzero if a check fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import fsspec
import matplotlib
from rich.console import Console
from rich.table import Table

import bytecheckpoint as bcp

matplotlib.use("Agg")

TRAIN = Path(__file__).with_name("train_gpt.py")
STEPS, SAVE_EVERY, KILL_AT, COMPARE_AT, TERMINATE_AT = 120, 8, 48, 64, 73
TOLERANCE = 1e-4  # for a loss of about 3: the order of sums differs, over 120 steps of Adam
STAGE_DEADLINE_S = 300
S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""

console = Console()


@dataclass(frozen=True)
class Stage:
    """One run of the training script."""

    name: str
    title: str
    processes: int
    arguments: tuple[str, ...]
    dies: bool = False
    terminate_at: int | None = None

    def command(self, out: Path, root: str) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        common = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--journal", str(self.journal(out))]
        launcher = [sys.executable, *(launch if self.processes > 1 else [])]
        return [*launcher, str(TRAIN), *common, "--root", root, *self.arguments]

    def journal(self, out: Path) -> Path:
        return out / f"{self.name}.jsonl"

    def events(self, out: Path, kind: str) -> list[dict[str, Any]]:
        """Return the events of the run's journal, without a line that a killed process left incomplete."""
        path = self.journal(out)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def losses(self, out: Path) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events(out, "step")}


REFERENCE = Stage("reference", "The reference: 1 process, never interrupted", 1, ("--no-save",))
FSDP2 = Stage(
    "fsdp2",
    f"FSDP-2 on 4 processes; rank 2 gets SIGKILL while it writes step {KILL_AT}",
    4,
    (
        "--parallel",
        "fsdp2",
        "--compare-at",
        "20",
        "--kill-rank",
        "2",
        "--kill-at-step",
        str(KILL_AT),
        "--kill-phase",
        "write.complete",
    ),
    dies=True,
)
TP = Stage(
    "tp",
    f"Resumed with tensor parallelism on 2 processes; SIGTERM after step {TERMINATE_AT}",
    2,
    ("--parallel", "tp", "--compare-at", str(COMPARE_AT)),
    dies=True,
    terminate_at=TERMINATE_AT,
)
SINGLE = Stage("single", "Resumed on 1 process", 1, ())


class DemoError(Exception):
    """A check of the demo failed."""


def expect(fact: bool, message: str) -> None:
    if not fact:
        raise DemoError(message)


def run(stage: Stage, out: Path, root: str) -> None:
    """Run one stage. Its output goes to a log file; the error of a failed stage shows the end of it."""
    console.print(f"[bold]{stage.title}[/bold]")
    log = out / f"{stage.name}.log"
    begin = time.perf_counter()
    with log.open("w") as file, console.status("starting ...") as status:
        process = subprocess.Popen(stage.command(out, root), stdout=file, stderr=subprocess.STDOUT)
        is_terminated = False
        try:
            while process.poll() is None:
                if time.perf_counter() - begin > STAGE_DEADLINE_S:
                    raise DemoError(f"{stage.name} took more than {STAGE_DEADLINE_S} s; see {log}")
                for event in stage.events(out, "step")[-1:]:
                    status.update(f"step {event['step']}  loss {event['loss']:.4f}")
                    if not is_terminated and stage.terminate_at is not None and event["step"] >= stage.terminate_at:
                        process.terminate()
                        is_terminated = True
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if (process.returncode != 0) != stage.dies:
        tail = "\n".join(log.read_text().splitlines()[-40:])
        ended = (
            "exited normally although it should have been killed"
            if stage.dies
            else f"failed with exit code {process.returncode}"
        )
        raise DemoError(f"{stage.name} {ended}; the end of {log}:\n{tail}")
    steps = sorted(stage.losses(out))
    expect(bool(steps), f"{stage.name} made no steps; see {log}")
    console.print(f"  steps {steps[0]} to {steps[-1]} in {time.perf_counter() - begin:.0f} s", highlight=False)


def check_after_the_kill(root: str) -> None:
    """Check that the save in which a rank died does not exist, and that the one before is complete."""
    interrupted = f"{root}/step-{KILL_AT}"
    try:
        bcp.open(interrupted)
    except bcp.errors.CheckpointError as error:
        console.print(f"  step-{KILL_AT}: [green]not a checkpoint[/green], as expected ({type(error).__name__})")
    else:
        raise DemoError(f"{interrupted} can be opened although a rank died while writing it")
    newest = bcp.latest(root)
    expect(newest is not None and newest.step == KILL_AT - SAVE_EVERY, f"newest checkpoint is {newest}")
    assert newest is not None
    report = newest.verify()
    expect(report.ok, f"{newest.url} is damaged: {report}")
    console.print(f"  step-{newest.step}: [green]complete[/green], all checksums match; training resumes from here")


def check_after_the_signal(out: Path, root: str) -> int:
    """Check that all ranks saved the current step on SIGTERM, between two regular saves, and return that step."""
    newest = bcp.latest(root)
    assert newest is not None
    steps = TP.losses(out)
    last = max(steps)
    expect(
        newest.step == last, f"the newest checkpoint is of step {newest.step}, but training continued to step {last}"
    )
    expect(newest.verify().ok, f"{newest.url} is damaged")
    console.print(f"  step-{last}: [green]saved on SIGTERM[/green] by both ranks; no work is lost")
    return last


def check_resumed(stage: Stage, step: int, out: Path) -> None:
    resumed = [event["step"] for event in stage.events(out, "resume")]
    expect(resumed == [step], f"{stage.name} should have resumed once, from step {step}, but resumed from {resumed}")


def compare_curves(out: Path) -> float:
    """Compare the losses of all stages with the reference, and return the largest difference."""
    reference = REFERENCE.losses(out)
    worst = 0.0
    table = Table(title="The loss curve, against the run that was never interrupted", title_justify="left")
    for column in ("run", "steps", "first loss", "last loss", "largest difference"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for stage in (REFERENCE, FSDP2, TP, SINGLE):
        losses = stage.losses(out)
        steps = sorted(losses)
        expect(steps == list(range(steps[0], steps[-1] + 1)), f"{stage.name} skipped a step")
        difference = max(abs(loss - reference[step]) for step, loss in losses.items())
        worst = max(worst, difference)
        span, first, last = f"{steps[0]}-{steps[-1]}", f"{losses[steps[0]]:.4f}", f"{losses[steps[-1]]:.4f}"
        table.add_row(f"{stage.name} x{stage.processes}", span, first, last, f"{difference:.1e}")
    console.print(table)
    covered = set().union(*(stage.losses(out) for stage in (FSDP2, TP, SINGLE)))
    expect(covered == set(reference), "the three runs together do not cover every step")
    expect(reference[STEPS] < 0.75 * reference[1], "the model did not learn")
    expect(worst <= TOLERANCE, f"the curves differ by {worst:.1e}, more than {TOLERANCE:.0e}")
    return worst


def show_times(out: Path) -> None:
    """Show the times of both systems, from the same processes, model and optimizer: medians of the slowest rank."""
    table = Table(title="Model + optimizer, milliseconds (median; slowest rank)", title_justify="left")
    for column in ("", "layout", "bytecheckpoint", "torch DCP", "ratio"):
        table.add_column(column, justify="right" if column in ("bytecheckpoint", "torch DCP", "ratio") else "left")
    for stage in (FSDP2, TP):
        (times,) = stage.events(out, "times")
        for name, title in (
            ("stall", "async save: training waits"),
            ("durable", "async save: durable after"),
            ("load", "load in place"),
        ):
            ours, theirs = times[f"bytecheckpoint_{name}_s"], times[f"dcp_{name}_s"]
            table.add_row(title, times["layout"], f"{ours * 1e3:.1f}", f"{theirs * 1e3:.1f}", f"{ours / theirs:.2f}")
        table.add_section()
    console.print(table)
    stalls = [event["stall_s"] for stage in (FSDP2, TP, SINGLE) for event in stage.events(out, "save")]
    console.print(
        f"{len(stalls)} saves while training, median stall {median(stalls) * 1e3:.1f} ms. This model is tiny, so the "
        "times are fixed costs, not bandwidth.",
        highlight=False,
    )


def draw(out: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    reference = REFERENCE.losses(out)
    axes.plot(reference.keys(), reference.values(), color="0.8", linewidth=7, label="uninterrupted, 1 process")
    for stage, label, color in (
        (FSDP2, "FSDP-2 x4, until rank 2 is killed", "tab:blue"),
        (TP, "tensor parallel x2", "tab:orange"),
        (SINGLE, "1 process", "tab:green"),
    ):
        losses = stage.losses(out)
        axes.plot(losses.keys(), losses.values(), color=color, linewidth=1.6, label=label)
    axes.axvline(KILL_AT, color="tab:red", linestyle=":", linewidth=1)
    axes.annotate("SIGKILL in the middle of a save", (KILL_AT, max(reference.values())), color="tab:red", va="top")
    left_at = max(TP.losses(out))
    axes.axvline(left_at, color="tab:purple", linestyle=":", linewidth=1)
    axes.annotate("SIGTERM", (left_at, 0.9 * max(reference.values())), color="tab:purple", va="top")
    for step in (KILL_AT - SAVE_EVERY, left_at):
        axes.plot(step + 1, reference[step + 1], "k^", markersize=7, label=f"resumed from step {step}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="One loss curve, three layouts")
    axes.legend()
    picture = out / "loss.png"
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


def prepare(out: Path) -> None:
    """Remove the files of an earlier demo, and no others."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in ("checkpoints", "compare"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for stage in (REFERENCE, FSDP2, TP, SINGLE):
        stage.journal(out).unlink(missing_ok=True)


@contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3 server on this machine, for this process and those that it starts; yield a URL in an empty bucket."""
    with subprocess.Popen(
        [sys.executable, "-c", S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        endpoint = f"http://127.0.0.1:{port}"
        os.environ.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo", AWS_ENDPOINT_URL=endpoint)
        fsspec.filesystem("s3").mkdir("demo")
        yield "s3://demo/checkpoints"
        server.communicate()  # it stops with its standard input


def demo(out: Path, root: str) -> None:
    begin = time.perf_counter()
    prepare(out)
    run(REFERENCE, out, root)
    run(FSDP2, out, root)
    check_after_the_kill(root)
    run(TP, out, root)
    check_resumed(TP, KILL_AT - SAVE_EVERY, out)
    left_at = check_after_the_signal(out, root)
    run(SINGLE, out, root)
    check_resumed(SINGLE, left_at, out)
    console.print()
    worst = compare_curves(out)
    console.print()
    show_times(out)
    console.print(f"\nLoss curves: {draw(out)}", highlight=False)
    console.print(
        f"[bold green]The interruptions did not change the loss curve[/bold green]: it differs from the "
        f"uninterrupted run by at most {worst:.1e}. ({time.perf_counter() - begin:.0f} s)",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for all output")
    parser.add_argument("--s3", action="store_true", help="save to an S3 server, which runs on this machine")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The demo itself reports which checkpoint it skipped, and why.
    logging.getLogger("bytecheckpoint").setLevel(logging.ERROR)
    try:
        with s3_server() if args.s3 else nullcontext(str(args.out / "checkpoints")) as root:
            demo(args.out, root)
    except DemoError as error:
        console.print("[bold red]The demo failed:[/bold red]", end=" ")
        console.print(str(error), highlight=False, markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
