"""``bcp push``: push the weights of a checkpoint, or of another engine, into running inference engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from ..inference.push.engines.vllm import PauseMode
from ..inference.push.transports.group import GroupBackend
from ..runtime.limits import DEFAULT_DEADLINE_S
from .options import checked, command, options_for, rename_option
from .output import Output, size_text

__all__ = ["push_command"]


@command("push")
@click.argument("source")
@click.option("--to", "urls", multiple=True, required=True, metavar="URL", help="The address of an engine. Repeatable.")
@click.option(
    "--version",
    "version",
    help="The engines' name for the weights; by default the checkpoint's step, or the version of SOURCE.",
)
@click.option("--section", default="model", show_default=True, help="The section of the checkpoint.")
@rename_option
@click.option(
    "--pause",
    type=click.Choice(["wait", "abort", "keep"]),
    default="wait",
    show_default=True,
    help="Running requests: answer them with the old weights, abort them, or continue with the new ones.",
)
@click.option(
    "--adapter", metavar="NAME", help="SOURCE is a folder that PEFT stored; push it as the LoRA adapter NAME."
)
@click.option("--native", is_flag=True, help="Use vLLM's own weight transfer with the backend bcp.")
@click.option(
    "--group",
    type=click.Choice(["gloo", "nccl"]),
    help="Form a group with all workers, which broadcast shared chunks. Weights are streamed. nccl is untested.",
)
@click.option(
    "--cuda-ipc",
    is_flag=True,
    help="Write into the GPUs of workers on this host. Weights are streamed. Untested on GPUs.",
)
@click.option(
    "--protocol",
    type=click.Choice(["checkpoint-engine"]),
    help="The protocol of engines on this host that run without bytecheckpoint.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="GPU-UUID",
    help="A worker's GPU, with --protocol; by default all. Repeatable.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=float,
    default=DEFAULT_DEADLINE_S,
    show_default=True,
    callback=checked,
    help="Limit of each wait, in seconds.",
)
@click.option("--partial", is_flag=True, help="Push even if SOURCE does not fill all parameters of the engine.")
def push_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    *,
    urls: tuple[str, ...],
    version: str | None,
    section: str,
    rename: Callable[[str], str] | None,
    pause: PauseMode,
    adapter: str | None,
    native: bool,
    group: GroupBackend | None,
    cuda_ipc: bool,
    protocol: str | None,
    devices: tuple[str, ...],
    deadline_s: float,
    partial: bool,
) -> None:
    """Push the weights of SOURCE into running engines. Each worker receives only its own part of them.

    SOURCE is a checkpoint, or the address (http://, https://) of an engine that was pushed to. The workers of that
    engine then send what they serve to the other engines, and keep answering requests.

    Every byte is verified before weights change, and after a failure the engines keep serving the previous weights.
    If weights are streamed, a failure can leave an engine paused until the next push.

    Start vLLM with VLLM_SERVER_DEV_MODE=1, and with --worker-extension-cls
    bytecheckpoint.inference.vllm.worker.WorkerExtension, or for --native with --weight-transfer-config
    '{"backend": "bcp"}'. For --protocol checkpoint-engine, use checkpoint-engine's own extension.
    """
    from_engine = source.startswith(("http://", "https://"))
    if from_engine and (rename or adapter is not None or group is not None or cuda_ipc):
        raise click.UsageError(
            "--rename, --adapter, --group and --cuda-ipc apply to checkpoints; an engine sends what it received"
        )
    if protocol is not None and (native or adapter is not None or group is not None or cuda_ipc):
        raise click.UsageError(
            f"--protocol {protocol} pushes only models, and excludes --native, --adapter, --group and --cuda-ipc"
        )
    if group is not None and cuda_ipc:
        raise click.UsageError("a group receives into its own memory; use --group or --cuda-ipc, not both")
    storage_options = options_for(source, options)
    config = None if adapter is None else adapter_config(source, storage_options=storage_options)
    engines: list[Engine] = []
    for url in urls:
        engine = (
            _engine(url, pause, native=native)
            if protocol is None
            else IpcEngine(url, devices=devices or None, pause=pause)
        )
        engines.append(engine if adapter is None else AdapterEngine(engine, adapter, config))
    with ExitStack() as stack:
        pusher = stack.enter_context(Pusher(engines, deadline_s=deadline_s, group=group, cuda_ipc=cuda_ipc))
        what: Any
        if from_engine:
            what = _engine(source, pause, native=native)
            stack.callback(what.close)
        else:
            what = api.open(source, storage_options=storage_options)
        with out.stages() as progress:
            report = pusher.push(
                what, version=version, section=section, rename=rename, strict=not partial, progress=progress
            )
    out.document({"source": what.name if from_engine else what.url, **report.plain(), "total_s": report.total_s})
    _show(out, report)


def _engine(url: str, pause: PauseMode, *, native: bool) -> Engine:
    engine = HttpEngine(url, pause=pause)
    return NativeEngine(engine) if native else engine


def _show(out: Output, report: PushReport) -> None:
    rows = [
        (one.engine, one.worker, one.host, *map(size_text, (one.requested, one.sent, one.unchanged + one.kept)))
        for one in report.workers
    ]
    out.table(("ENGINE", ">WORKER", "HOST", ">REQUESTED", ">SENT", ">ALREADY THERE"), rows)
    out.table(("STAGE", ">SECONDS"), [(stage, f"{seconds:.3f}") for stage, seconds in report.seconds.items()])
    out.line(f"the engines serve version {report.version} after {report.total_s:.2f} s")
