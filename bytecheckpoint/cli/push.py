"""``bcp push``: push the weights of a checkpoint, or of another engine, into running inference engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..errors import (
    BytecheckpointError,
    DeadlineError,
    EngineError,
    MismatchError,
    NameNotFoundError,
    StateError,
    UsageError,
)
from ..inference.push import (
    AdapterEngine,
    Engine,
    HttpEngine,
    IpcEngine,
    Pusher,
    PushReport,
    adapter_config,
)
from ..inference.push.engines.rpc import PauseMode
from ..inference.push.engines.vllm import TOKEN_VARIABLE
from ..inference.push.transports.group import GroupBackend
from ..runtime import DEFAULT_DEADLINE_S
from .options import Locate, checked, command, rename_option
from .output import Output, printable, size_text

_POLL_S = 2.0
_LOOK_S = 10.0  # between two looks at what the engines serve, and two tries of a push


@dataclass(frozen=True)
class _PushOptions:
    """The options of ``bcp push`` that describe the weights and the engines."""

    version: str | None
    section: str
    rename: Mapping[str, str] | None
    pause: PauseMode
    adapter: str | None
    exclude: tuple[str, ...]
    quorum: int | None
    group: GroupBackend | None
    cuda_ipc: bool
    protocol: str | None
    devices: tuple[str, ...]
    deadline_s: float
    token: str | None
    headers: Mapping[str, str]
    allow_nonfinite: bool
    partial: bool

    def check_engine(self) -> None:
        """Raise ``click.UsageError`` for options that do not apply to weights that an engine sends."""
        if self.rename or self.exclude or self.adapter is not None or self.group is not None or self.cuda_ipc:
            raise click.UsageError(
                "--rename, --exclude, --adapter, --group and --cuda-ipc apply to checkpoints; an engine sends what it "
                "received"
            )

    def engine(self, url: str) -> Engine:
        """Return the engine with bytecheckpoint at this address."""
        return HttpEngine(url, pause=self.pause, **self._access())

    def pusher(self, urls: Sequence[str], adapter: Mapping[str, Any] | None = None) -> Pusher:
        """Return the pusher to the engines at these addresses; ``adapter`` is the configuration of an adapter."""
        engines = [self._target(url, adapter) for url in urls]
        options: dict[str, Any] = {"quorum": self.quorum, "group": self.group, "cuda_ipc": self.cuda_ipc}
        return Pusher(engines, deadline_s=self.deadline_s, **options)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of every ``Pusher.push``."""
        return {
            "section": self.section,
            "rename": self.rename,
            "exclude": self.exclude,
            "strict": not self.partial,
            "check_finite": not self.allow_nonfinite,
        }

    def _target(self, url: str, adapter: Mapping[str, Any] | None) -> Engine:
        if self.protocol is not None:
            return IpcEngine(url, devices=self.devices or None, pause=self.pause, **self._access())
        engine = self.engine(url)
        return engine if self.adapter is None else AdapterEngine(engine, self.adapter, adapter)

    def _access(self) -> dict[str, Any]:
        return {"token": self.token, "headers": self.headers}


def _parse_headers(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition(":") for text in given]
    if any(not name.strip() or not colon for name, colon, _ in pairs):
        raise click.BadParameter("a header is NAME:VALUE")  # without the text, which may be a secret
    return {name.strip(): value.strip() for name, _, value in pairs}


@command(
    "push",
    needs={"--watch-timeout": "--watch", "--device": "--protocol"},
    excludes={
        "--resume": [
            *("--to", "--watch", "--version", "--section", "--rename", "--pause", "--adapter", "--group", "--cuda-ipc"),
            *("--protocol", "--allow-nonfinite", "--partial", "--exclude", "--quorum"),
        ],
        "--version": ["--watch"],
        "--adapter": ["--watch", "--protocol"],
        "--group": ["--cuda-ipc", "--protocol"],  # a group receives into its own memory
        "--cuda-ipc": ["--protocol"],
    },
)
@click.argument("source", required=False)
@click.option("--to", "urls", multiple=True, metavar="URL", help="The address of an engine. Repeatable.")
@click.option("--watch", "root", metavar="ROOT", help="Push the newest checkpoint below ROOT, and each newer one.")
@click.option(
    "--watch-timeout",
    "timeout_s",
    type=float,
    callback=checked,
    metavar="SECONDS",
    help="With --watch, end when no new checkpoint has come for this long.",
)
@click.option(
    "--resume",
    "resumed",
    multiple=True,
    metavar="URL",
    help="Push nothing: resume an engine that a killed sender left paused. Repeatable.",
)
@click.option(
    "--version",
    "version",
    help="The engines' name for the weights; by default the checkpoint's step, or the version of SOURCE.",
)
@click.option("--section", default="model", show_default=True, help="The section of the checkpoint.")
@rename_option
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Tensors that the engines lack. Repeatable.")
@click.option("--quorum", type=click.IntRange(1), help="How many engines must take the weights, by default all.")
@click.option(
    "--pause",
    type=click.Choice(["wait", "abort", "keep"]),
    default="wait",
    show_default=True,
    help="Running requests: answer them with the old weights, abort them, or continue with the new ones.",
)
@click.option(
    "--adapter",
    metavar="NAME",
    help="SOURCE is a folder that PEFT stored; push it as the LoRA adapter NAME.",
)
@click.option(
    "--group",
    type=click.Choice(["gloo", "nccl"]),
    help="Form a group with all workers, which broadcast shared chunks. Weights are streamed. nccl is untested.",
)
@click.option("--cuda-ipc", is_flag=True, help="Write into the GPUs of workers on this host. Weights are streamed.")
@click.option(
    "--protocol",
    type=click.Choice(["checkpoint-engine"]),
    help="The engines are on this host, and run without bytecheckpoint.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="GPU-UUID",
    help="A worker's GPU, with --protocol checkpoint-engine; by default all. Repeatable.",
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
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help=f"Sent to engines as Authorization: Bearer. By default, the environment's {TOKEN_VARIABLE}, which other users "
    "of this host do not see.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME:VALUE",
    callback=_parse_headers,
    help="Sent to engines, for a proxy that authenticates. Repeatable.",
)
@click.option("--allow-nonfinite", is_flag=True, help="Push even if values are NaN or infinite.")
@click.option("--partial", is_flag=True, help="Push even if SOURCE does not fill all parameters of the engine.")
def push_command(
    out: Output,
    at: Locate,
    source: str | None,
    *,
    urls: tuple[str, ...],
    root: str | None,
    timeout_s: float | None,
    resumed: tuple[str, ...],
    **given: Any,
) -> None:
    """Push the weights of SOURCE into running engines. Each worker receives only its own part of them.

    SOURCE is a checkpoint, or the address (http://, https://) of an engine that was pushed to. What the workers of that
    engine serve is then read and pushed to the other engines, while they keep answering requests.

    Every byte is verified before weights change, and after a failure the engines keep serving the previous weights.
    If weights are streamed, a failure can leave an engine paused until the next push.

    --watch ROOT follows a training job: it pushes the newest checkpoint below ROOT, and each newer one when it is
    committed. If an engine fails or is down, the push is tried again, also when an engine has restarted with other
    weights. Of a damaged checkpoint, the next one is pushed; only one that does not fit the engines ends the command.

    --token and --header apply to all engines, --resume too.

    --resume URL ends a push whose sender was killed, and resumes the engine if it serves one complete version.

    Start vLLM with VLLM_SERVER_DEV_MODE=1, and with --worker-extension-cls
    bytecheckpoint.inference.vllm.worker.WorkerExtension. For --protocol checkpoint-engine, use checkpoint-engine's own
    extension.
    """
    push = _PushOptions(**given)
    if resumed:
        if source is not None:
            raise click.UsageError("--resume pushes nothing; use it without SOURCE")
        _resume(out, [push.engine(url) for url in resumed], push.deadline_s)
        return
    if (source is None) == (root is None) or not urls:
        raise click.UsageError("name what to push (SOURCE or --watch ROOT) and the engines (--to URL)")
    if source is not None and _is_engine(source):
        push.check_engine()
    if root is not None:
        _follow(out, at(root), timeout_s, urls, push)
    elif source is not None:
        _push(out, at(source), urls, push)


def _is_engine(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _push(out: Output, source: Location, urls: Sequence[str], push: _PushOptions) -> None:
    """Push a checkpoint, or what an engine serves."""
    config = None if push.adapter is None else adapter_config(source)
    with ExitStack() as stack:
        pusher = stack.enter_context(push.pusher(urls, config))
        what: Any
        if _is_engine(source.url):
            what = push.engine(source.url)
            stack.callback(what.close)
            name = what.name
        else:
            what = api.open(source)
            name = what.url
        with out.stages() as progress:
            report = pusher.push(what, version=push.version, progress=progress, **push.arguments())
    out.document({"source": name, **report.plain(), "total_s": report.total_s})
    _show(out, report)


def _follow(
    out: Output,
    root: Location,
    timeout_s: float | None,
    urls: Sequence[str],
    push: _PushOptions,
) -> None:
    """Push each checkpoint that a training job commits below ``root``."""
    with push.pusher(urls) as pusher:
        following = _Following(out, pusher, push)
        for checkpoint in _newest(root, timeout_s, following.stop):
            following.push(checkpoint)


def _newest(root: Location, timeout_s: float | None, stop: Callable[[], bool]) -> Iterator[Checkpoint]:
    """Yield the newest checkpoint, and then each one that is the newest when it is found."""
    found = api.watch(root, poll_s=_POLL_S, timeout_s=timeout_s, stop=stop)
    pushed = api.latest(root, allow_fresh=True)
    if pushed is not None:
        yield pushed
    for checkpoint in found:
        newest = api.latest(root, allow_fresh=True) or checkpoint
        if pushed is None or newest.manifest.attempt != pushed.manifest.attempt:
            pushed = newest
            yield newest


class _Following:
    """Pushes checkpoints, and the last one again to engines that were down, or that serve what they started with."""

    def __init__(self, out: Output, pusher: Pusher, push: _PushOptions) -> None:
        self._out, self._pusher, self._push = out, pusher, push
        self._last: Checkpoint | None = None  # unless it can never be pushed
        self._reached = 0  # engines that took it
        self._version: int | str | None = None  # their name for it
        self._looked = 0.0

    def push(self, checkpoint: Checkpoint) -> None:
        """Push a checkpoint. If it is damaged, was removed, or has values that are not finite, the next one follows."""
        self._last, self._reached = checkpoint, 0
        try:
            report = self._pusher.push(checkpoint, **self._push.arguments())
        except BytecheckpointError as error:
            is_misuse = isinstance(error, (MismatchError, NameNotFoundError, UsageError))
            if is_misuse and not isinstance(error, StateError):
                raise  # the next one would fail too
            may_pass = isinstance(error, (EngineError, DeadlineError))
            self._last = checkpoint if may_pass else None
            then = f"; trying again every {_LOOK_S:g} s" if may_pass else ""
            click.echo(f"bcp: step {checkpoint.step} was not pushed{then}: {printable(str(error))}", err=True)
        else:
            self._version = report.version
            self._reached = len({worker.engine for worker in report.workers} - report.failed.keys())
            self._out.document({"source": checkpoint.url, **report.plain(), "total_s": report.total_s})
            _warn(report)
            self._out.line(f"the engines serve version {report.version} after {report.total_s:.2f} s")
        self._looked = time.monotonic()

    def stop(self) -> bool:
        """Push the last checkpoint again if an engine lacks it; never stop. ``watch`` calls this before each wait."""
        if self._last is not None and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            if self._is_needed():
                self.push(self._last)
        return False

    def _is_needed(self) -> bool:
        try:
            answering = [engine for engine in self._pusher.state() if engine]
        except BytecheckpointError:
            self._reached = 0  # an engine is down, and gets it again
            return False
        workers = [worker for engine in answering for worker in engine]
        has_restarted = any(not one["pushed"] and one["version"] != self._version for one in workers)
        return has_restarted or len(answering) > self._reached


def _resume(out: Output, engines: list[Engine], deadline_s: float) -> None:
    with Pusher(engines, deadline_s=deadline_s) as pusher:
        served = pusher.resume()
    versions = {engine.name: version for engine, version in zip(engines, served, strict=True)}
    out.document({"resumed": versions})
    for name, version in versions.items():
        out.line(f"{name} serves {'what it started with' if version is None else f'version {version}'}")


def _warn(report: PushReport) -> None:
    for engine, text in report.failed.items():
        click.echo(f"bcp: {engine} was left out: {printable(text)}", err=True)


def _show(out: Output, report: PushReport) -> None:
    _warn(report)
    rows = [
        (one.engine, one.worker, one.host, *map(size_text, (one.requested, one.sent, one.unchanged + one.kept)))
        for one in report.workers
    ]
    out.table(("ENGINE", ">WORKER", "HOST", ">REQUESTED", ">SENT", ">ALREADY THERE"), rows)
    out.table(("STAGE", ">SECONDS"), [(stage, f"{seconds:.3f}") for stage, seconds in report.seconds.items()])
    out.line(f"the engines serve version {report.version} after {report.total_s:.2f} s")
