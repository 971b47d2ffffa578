"""``bcp push``: weights of a checkpoint, or of an engine that was pushed to, into inference engines that run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click

from .. import api
from ..inference.push import (
    AdapterEngine,
    Engine,
    HttpEngine,
    IpcEngine,
    NativeEngine,
    Pusher,
    PushReport,
    adapter_config,
)
from ..inference.push.engines import PauseMode
from ..inference.push.group import GroupBackend
from .options import command, options_for, prefix_renaming
from .output import Output, size_text

__all__ = ["push_command"]


@command("push")
@click.argument("source")
@click.option("--to", "urls", multiple=True, required=True, metavar="URL", help="An engine's address. Repeatable.")
@click.option(
    "--version", "version", help="What the engines call it; by default the checkpoint's step, or as SOURCE calls it."
)
@click.option("--section", default="model", show_default=True, help="Which section of the checkpoint.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Prefixes of names, for the engine. Repeatable.")
@click.option(
    "--pause",
    type=click.Choice(["wait", "abort", "keep"]),
    default="wait",
    show_default=True,
    help="Requests under way: answer them with the old weights, abort them, or go on with the new.",
)
@click.option("--adapter", metavar="NAME", help="SOURCE is a folder of PEFT's: the LoRA adapter of that name.")
@click.option("--native", is_flag=True, help="By vLLM's own weight transfer with the backend bcp.")
@click.option(
    "--group",
    type=click.Choice(["gloo", "nccl"]),
    help="Form a group with all workers: what several want is sent once, and passed on. Weights are streamed.",
)
@click.option("--cuda-ipc", is_flag=True, help="Write into the workers' GPUs, where they are on this host. Streamed.")
@click.option(
    "--protocol",
    type=click.Choice(["checkpoint-engine"]),
    help="Of engines on this host that are set up for that, and have nothing of bytecheckpoint.",
)
@click.option("--device", "devices", multiple=True, metavar="GPU-UUID", help="With --protocol; by default all GPUs.")
@click.option("--deadline", type=float, default=600.0, show_default=True, help="Seconds, for each wait.")
@click.option("--partial", is_flag=True, help="Also where the engine's model and SOURCE do not fit wholly.")
def push_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    urls: tuple[str, ...],
    version: str | None,
    section: str,
    rename: tuple[str, ...],
    pause: PauseMode,
    adapter: str | None,
    native: bool,
    group: GroupBackend | None,
    cuda_ipc: bool,
    protocol: str | None,
    devices: tuple[str, ...],
    deadline: float,
    partial: bool,
) -> None:
    """Make running engines serve the weights of SOURCE, each worker getting its own part of them.

    SOURCE is a checkpoint, or the address (http://, https://) of an engine that was pushed to: its workers then give
    what it serves to those of the others, without its ceasing to answer.

    Every byte is proved before weights change; if anything goes wrong, the engines go on with what they served. vLLM
    must have been started with VLLM_SERVER_DEV_MODE=1, and with --worker-extension-cls
    bytecheckpoint.inference.vllm_worker.WorkerExtension, or for --native with --weight-transfer-config
    '{"backend": "bcp"}'. With --protocol checkpoint-engine it is checkpoint-engine's own extension.
    """
    from_engine = source.startswith(("http://", "https://"))
    if from_engine and (rename or adapter is not None or group is not None or cuda_ipc):
        raise click.UsageError(
            "--rename, --adapter, --group and --cuda-ipc are for checkpoints; an engine gives its model as it got it"
        )
    if protocol is not None and (native or adapter is not None or group is not None or cuda_ipc):
        raise click.UsageError(
            f"by --protocol {protocol} an engine takes its model, and not by --native, --group or --cuda-ipc"
        )
    if group is not None and cuda_ipc:
        raise click.UsageError("a group receives into memory of its own; take --group or --cuda-ipc")
    storage_options = options_for(source, options)
    config = None if adapter is None else adapter_config(source, storage_options=storage_options)
    engines: list[Engine] = []
    for url in urls:
        engine = (
            _engine(url, pause, native) if protocol is None else IpcEngine(url, devices=devices or None, pause=pause)
        )
        engines.append(engine if adapter is None else AdapterEngine(engine, adapter, config))
    with ExitStack() as stack:
        pusher = stack.enter_context(Pusher(engines, deadline_s=deadline, group=group, cuda_ipc=cuda_ipc))
        what: Any
        if from_engine:
            what = _engine(source, pause, native)
            stack.callback(what.close)
        else:
            what = api.open(source, storage_options=storage_options)
        renaming, strict = prefix_renaming(rename), not partial
        with out.stages() as told:
            report = pusher.push(what, version=version, section=section, rename=renaming, strict=strict, progress=told)
    out.document({"source": what.name if from_engine else what.url, **report.plain()})
    _show(out, report)


def _engine(url: str, pause: PauseMode, native: bool) -> Engine:
    engine = HttpEngine(url, pause=pause)
    return NativeEngine(engine) if native else engine


def _show(out: Output, report: PushReport) -> None:
    rows = [
        (one.engine, one.worker, one.host, *map(size_text, (one.wanted, one.sent, one.unchanged + one.kept)))
        for one in report.workers
    ]
    out.table(("ENGINE", ">WORKER", "HOST", ">WANTED", ">SENT", ">THERE ALREADY"), rows)
    out.table(("STAGE", ">SECONDS"), [(stage, f"{seconds:.3f}") for stage, seconds in report.seconds.items()])
    out.line(f"version {report.version} is served, after {report.total_s:.2f} s")
