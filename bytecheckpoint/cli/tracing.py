"""``bcp trace``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..chrome_trace import merge_traces
from ..errors import StateError
from .options import command
from .output import Output

__all__ = ["trace_command"]


@command("trace")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: DIRECTORY/trace.json.")
def trace_command(out: Output, options: Mapping[str, Any], directory: Path, output: Path | None) -> None:
    """Join what the ranks traced into DIRECTORY to one file, for ui.perfetto.dev or chrome://tracing.

    Ranks write there when BYTECHECKPOINT_TRACE=DIRECTORY is set in their environment.
    """
    paths = sorted(directory.glob("rank-*.json"))
    if not paths:
        raise StateError(f"no rank has written a trace into {directory}; was BYTECHECKPOINT_TRACE set for the job?")
    target = output or directory / "trace.json"
    events = merge_traces(paths, target)
    out.document({"trace": str(target), "ranks": len(paths), "events": events})
    out.line(f"{target}: {events} events of {len(paths)} process(es); open it in ui.perfetto.dev")
