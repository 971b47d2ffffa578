"""Run the benchmarks: ``python -m benchmarks.run``, or ``make bench``.

    --peers all                     also those that need separate environments (created below --cache)
    --peers bytecheckpoint DCP      only these
    --parts save_load ranks         not the separate scripts
    --scale 0.01 --rounds 1         small and quick: checks that it runs; the figures are meaningless

Writes all samples as JSON (--out) and shows tables. ``--report`` also redraws the plots and docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Libraries read these when they are loaded, in this process and in its children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from benchmarks import ranks, results, save_load, tables
from benchmarks.environments import Environments
from benchmarks.layouts import LAYOUTS
from benchmarks.peers import select
from benchmarks.workloads import WORKLOADS

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
PARTS = ("save_load", "ranks", "first_save", "merge_stage", "local_backend", "manifest_parse", "scale_planning")
_LEAST_ROUNDS = 5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peers", nargs="+", default=["default"], metavar="NAME", help="default, all, or names")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the bytes (default: all)")
    parser.add_argument("--rounds", type=int, default=_LEAST_ROUNDS, help="interleaved rounds after the warm-up round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process, as torchrun sets them")
    parser.add_argument("--folder", type=Path, default=_ROOT / "runs", help="folder on the disk to measure")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".venv-peers", help="folder for the peers' environments")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="folder of the JSON files")
    parser.add_argument("--report", action="store_true", help="write docs/performance.md and its plots")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return the exit status, 1 if the library itself failed."""
    options = _parser().parse_args(arguments)
    options.folder = options.folder.resolve()  # workers have other working directories
    console = Console(width=None if sys.stdout.isatty() else 190)
    entries = select(options.peers)
    for folder in (options.folder, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    settings = {"scale": options.scale, "rounds": options.rounds, "threads": options.threads}
    document = results.header(_command(options), settings, options.folder)

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    path = options.out / "performance.json"

    def keep() -> dict[str, Any]:
        """Write the results so far: a run of hours may be interrupted."""
        found: dict[str, Any] = results.publishable(document, [options.folder, options.cache, options.out, _ROOT])
        path.write_text(json.dumps(found, indent=1) + "\n")
        return found

    if "save_load" in options.parts:
        environments = Environments(options.cache)
        document["save_load"] = {}
        for name in options.workloads:
            document["save_load"][name] = save_load.measure(
                name,
                entries,
                scale=options.scale,
                rounds=options.rounds,
                threads=options.threads,
                folder=options.folder,
                environments=environments,
                say=say,
            )
            keep()
    if "ranks" in options.parts:
        document["ranks"] = ranks.measure(
            options.layouts,
            scale=options.scale,
            rounds=options.rounds,
            folder=options.folder,
            say=say,
            names=[entry.name for entry in entries],
        )
    if "save_load" in document or "ranks" in document:
        document = keep()
        _show(document, console)
        say(f"all samples: {path}")
        _report(path, document, options.report, say)
    failed = _scripts(options, say)
    return 1 if failed or _library_failed(document) else 0


def _command(options: argparse.Namespace) -> str:
    """Return the command that reproduces the run, without this machine's folders."""
    parts = ["python -m benchmarks.run"]
    defaults = _parser().parse_args([])
    for name in ("parts", "peers", "workloads", "layouts", "scale", "rounds", "threads"):
        value, default = (_words(getattr(each, name)) for each in (options, defaults))
        if value != default:
            parts.append(f"--{name} {' '.join(shlex.quote(word) for word in value)}")
    return " ".join(parts)


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]


def _show(document: dict[str, Any], console: Console) -> None:
    by_workload = document.get("save_load", {})
    layouts = document.get("ranks", {}).get("layouts", {})
    tables.show(tables.floor_grid({**by_workload, **{n: r for n, r in layouts.items() if r["floors"]}}), console)
    for result in [*by_workload.values(), *layouts.values()]:
        tables.show(tables.contestants(result), console)
    tables.show(tables.reshard(document.get("ranks", {}).get("reshard", {})), console)
    for name in ("bytecheckpoint", "bytecheckpoint async"):
        tables.show(tables.profile({**by_workload, **layouts}, name), console)


def _report(path: Path, document: dict[str, Any], is_requested: bool, say: Callable[[str], None]) -> None:
    if not is_requested:
        return
    settings = document["settings"]
    if settings["scale"] != 1.0 or settings["rounds"] < _LEAST_ROUNDS:
        say(f"no report: it needs --scale 1 and at least {_LEAST_ROUNDS} rounds")
    else:
        from benchmarks import report  # not at the top: every worker imports this module, and none needs matplotlib

        say(f"report: {report.write(path, _ROOT / 'docs')}")


def _scripts(options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Run the separate scripts, which print their tables. Return whether one failed."""
    scale, failed = options.scale, False
    with tempfile.TemporaryDirectory(prefix="scripts-", dir=options.folder) as work:
        arguments: dict[str, dict[str, object]] = {
            "first_save": {"folder": work, "scale": scale, "rounds": options.rounds},
            "merge_stage": {"folder": work, "scale": scale, "rounds": options.rounds},
            "local_backend": {"folder": work, "bytes": int(1_500_000_000 * scale), "rounds": options.rounds},
            "manifest_parse": {"shards": max(1000, int(1_000_000 * scale)), "repeat": min(options.rounds, 3)},
            "scale_planning": {"ranks": max(256, int(16384 * scale)), "tensors": max(20, int(1000 * scale))},
        }
        for name in ("first_save", "merge_stage", "manifest_parse", "scale_planning"):
            arguments[name]["json"] = options.out.resolve() / f"{name}.json"
        for name, values in arguments.items():
            if name in options.parts:
                say(f"table of {name}:")
                words = [f"--{key}={value}" for key, value in values.items()]
                done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], cwd=_ROOT)
                failed |= done.returncode != 0
    return failed


def _library_failed(document: dict[str, Any]) -> bool:
    results = [*document.get("save_load", {}).values()]
    for group in document.get("ranks", {}).values():
        results += group.values()
    return any(
        result.get("failure")
        or any(one["failure"] for name, one in result["contestants"].items() if name.startswith("bytecheckpoint"))
        for result in results
    )


if __name__ == "__main__":
    sys.exit(main())
