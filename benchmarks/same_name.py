"""Compare with the ByteCheckpoint package 0.0.2 over two ranks: stall and end of an asynchronous save, and a load.

    make environments   # creates .venv-bytecheckpoint
    python -m benchmarks.same_name [--rounds 3] [--json benchmarks/results/same_name.json]

That package has the same import name, so every turn is a new job of two ranks (``same_name_job.py``), with the
interpreter of one of the two environments; the packages take turns. The model and its AdamW state are sharded with
FSDP-2, which both know. The package does not sync its files; the time until that is done is added.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import results
from benchmarks.tables import Grid, show

__all__ = ["main", "measure", "table"]

_JOB = Path(__file__).with_name("same_name_job.py")
_REPOSITORY = _JOB.parent.parent
_FIGURES = ("stall_s", "written_s", "load_s")


def measure(folder: Path, rounds: int, layers: int) -> dict[str, Any]:
    """Return the samples by package, without the warm-up round."""
    interpreters = {"bytecheckpoint": Path(sys.executable), "ByteCheckpoint 0.0.2": _theirs()}
    found: dict[str, Any] = {name: [] for name in interpreters}
    for turn in range(rounds + 1):
        for name, python in interpreters.items():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                sample = _run(python, Path(work), layers)
            if turn:
                found[name].append(sample)
    return found


def _theirs() -> Path:
    python = _REPOSITORY / ".venv-bytecheckpoint" / "bin" / "python"
    if not python.exists():
        raise SystemExit("run make environments first: it creates .venv-bytecheckpoint")
    return python


def _run(python: Path, work: Path, layers: int) -> dict[str, Any]:
    answer = work / "answer.json"
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(_JOB), str(work / "checkpoint"), str(answer), str(layers)]
    # In another folder, where the repository's package does not come first.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    subprocess.run(command, check=True, cwd=work, env=environment, timeout=600, stdout=null, stderr=null)
    sample: dict[str, Any] = json.loads(answer.read_text())
    return sample


def table(found: dict[str, Any]) -> Grid:
    """Return medians in seconds, of the slowest rank."""
    nbytes = next(iter(found.values()))[0]["nbytes"]
    rows = [
        (name, *(f"{statistics.median(one[key] for one in samples):.2f}" for key in _FIGURES))
        for name, samples in found.items()
    ]
    columns = ("", "stall of an asynchronous save, s", "until written and synced, s", "load, s")
    return Grid(f"FSDP-2 with AdamW on two ranks, {nbytes / 1e9:.2f} GB", columns, rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=48, help="of 1,024 x 1,024 parameters")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = f"python -m benchmarks.same_name --rounds {options.rounds}"
    document = results.header(command, {"rounds": options.rounds, "threads": 1}, options.folder)
    document["result"] = measure(options.folder, options.rounds, options.layers)
    show(table(document["result"]), Console(width=160))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, [options.folder]), indent=1) + "\n")


if __name__ == "__main__":
    main()
