"""``bcp top``: what a running job does with its checkpoints, from what the root shows of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from ..checkpoint.attempts import attempt_time, attempts_among
from ..checkpoint.discovery import Listing, list_checkpoints, newest_listed
from ..checkpoint.lease import holder_of
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import read_manifest
from ..engine.objects import OBJECTS
from ..telemetry.save_times import SaveTimes
from .incomplete import waiting_uploads
from .options import Locate, command
from .output import Output, age_text, size_text

_MOST_SAVES = 9  # whose times the pace is computed from


@command("top")
@click.argument("root")
def top_command(out: Output, at: Locate, root: str) -> None:
    """Show the job that saves below ROOT, its newest save, its pace, and what is in progress."""
    document = _document(at(root))
    out.document({"root": root, **document})
    for line in _lines(document):
        out.line(line)


def _document(root: Location) -> dict[str, Any]:
    backend, found = root.open(), list_checkpoints(root)
    name, holder = newest_listed(root, found), holder_of(backend)
    newest, begun = None, 0.0
    if name is not None:
        manifest = read_manifest((root if name == "." else root.join(name)).open())
        begun = attempt_time(manifest.attempt) or 0.0
        newest = {"name": name, "created": manifest.created, "bytes": manifest.file_bytes}
        times = SaveTimes.from_document(manifest.save_times, manifest.world_size)
        if times is not None:
            slowest = {step: float(seconds.max()) for step, seconds in times.ranks.items()}
            newest |= {"seconds": times.seconds, "stall": times.stall, "slowest": slowest}
    attempts = [(one.name, attempt) for one in found for attempt in one.attempts]
    attempts += [(OBJECTS, attempt) for attempt in attempts_among(backend.list_children(f"{OBJECTS}/"))]
    ages = {name: time.time() - at for name, attempt in attempts if (at := attempt_time(attempt) or 0.0) > begun}
    return {
        "job": holder and {"host": holder.holder.host, "pid": holder.holder.pid, "heartbeat": holder.written},
        "newest": newest,
        **_pace([one for one in found if one.status == "checkpoint" and not one.abandoned]),
        "saving": [{"name": name, "age_s": age_s} for name, age_s in ages.items()],
        "uploads_waiting": waiting_uploads(root),
    }


def _pace(saved: Sequence[Listing]) -> dict[str, float | None]:
    """Return the seconds between the latest saves, and the training steps per second."""
    last = sorted(saved, key=lambda one: one.created)[-_MOST_SAVES:]
    none: dict[str, float | None] = {"every_s": None, "steps_per_s": None}
    if len(last) < 2:
        return none
    seconds = (datetime.fromisoformat(last[-1].created) - datetime.fromisoformat(last[0].created)).total_seconds()
    steps = [one.step for one in (last[0], last[-1]) if one.step is not None]
    if seconds <= 0:
        return none
    return {
        "every_s": seconds / (len(last) - 1),
        "steps_per_s": (steps[1] - steps[0]) / seconds if len(steps) == 2 else None,
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    job, newest = found["job"], found["newest"]
    if job is None:
        yield "job          none holds the root"
    else:
        yield f"job          process {job['pid']} on {job['host']}, heartbeat {age_text(job['heartbeat'])}"
    if newest is None:
        yield "newest       none"
    else:
        yield f"newest       {newest['name']}, {age_text(newest['created'])}, {size_text(newest['bytes'])}"
        if "seconds" in newest:
            seconds, slowest = newest["seconds"], newest["slowest"]
            step = max(slowest, key=slowest.__getitem__, default="")
            rate = size_text(int(newest["bytes"] / seconds)) if seconds else "-"
            yield f"it took      {seconds:.2f} s, {rate}/s; training waited {newest['stall']:.2f} s; longest: {step}"
    if found["every_s"] is not None:
        steps = "" if found["steps_per_s"] is None else f", {found['steps_per_s']:.3g} steps/s"
        yield f"pace         a checkpoint every {found['every_s']:.1f} s{steps}"
    for one in found["saving"]:
        yield f"in progress  {one['name']}, begun {one['age_s']:.0f} s ago, or failed"
    if found["uploads_waiting"]:
        yield f"uploads      {len(found['uploads_waiting'])} waiting: {', '.join(found['uploads_waiting'])}"
