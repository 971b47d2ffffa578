"""Run everything that one GPU can prove, within minutes, and write one JSON file and one page.

    make gpu                                              on a machine with a GPU; needs no network and installs nothing
    python -m benchmarks.gpu --device cpu --mebibytes 8   a dry run of the same code

First all of ``tests/gpu``. Then rounds of floors, this library, ``torch.distributed.checkpoint`` and safetensors in one
process, which take turns; a push into engines on the same GPU; and the method of checkpoint-engine, written out here,
because it is the floor of a push through host memory. What is missing is printed in one line, and the rest runs. A
part that fails is reported, and the others run.

The state is a stack of linear layers with AdamW: three tensors of float32 for each parameter.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("numpy", "fsspec", "msgpack", "xxhash", "zstandard", "aiofiles", "click", "typing_extensions")
USEFUL = ("pytest", "pytest_timeout", "xdist", "hypothesis", "psutil", "rich", "safetensors", "vllm")

FLOORS = {
    "device to pinned memory": "copy of the state to pinned memory over PCIe",
    "pinned memory to device": "copy of the state from pinned memory over PCIe",
    "device to device": "copy of the state within the device's memory",
    "direct write": "the same bytes from host memory, O_DIRECT, durable",
    "direct read": "the same bytes into host memory, cold",
}
FLOOR_OF = {
    "stall, asynchronous": "device to pinned memory",
    "stall, gated": "device to pinned memory",
    "save, durable": "direct write",
    "load, cold": "direct read",
    "push": "device to device",
}

_LAYER = 1024
_BUCKET_BYTES = 64 << 20
_TEST_LIMIT_S = 300.0

Seconds = dict[str, list[float]]


class Training:
    """Linear layers of about ``nbytes`` together with the state of their optimizer, after one step."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        width = min(_LAYER * 4, max(16, int((nbytes / 36) ** 0.5)))
        count = max(1, nbytes // (12 * width * width))
        self.device = device
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, foreach=False, fused=False)
        self._batch = torch.ones(8, width, device=device)
        self.step()

    def step(self) -> float:
        """Train one step; return its seconds."""
        self.sync()
        begin = time.perf_counter()
        self.model(self._batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return time.perf_counter() - begin

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state but the optimizer's steps, by name."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        for index, parameter in enumerate(self.model.parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{index}.{name}"] = self.optimizer.state[parameter][name]
        return found

    def forget(self) -> None:
        """Overwrite the state, so that a load must restore it."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def digest(self) -> list[float]:
        return [float(tensor.double().sum()) for tensor in self.tensors().values()]


class Timer:
    """Collects seconds by name."""

    def __init__(self, training: Training) -> None:
        self.seconds: Seconds = {}
        self._training = training

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        self._training.sync()
        begin = time.perf_counter()
        yield
        self._training.sync()
        self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def run_tests(paths: list[str], limit_s: float) -> dict[str, Any]:
    """Run tests in another process; return the counts and the last lines of the output if some failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"failure": f"no end after {limit_s:.0f} s", "output": output[-4000:]}
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin, **counts}
    if done.returncode not in (0, 5):
        found |= {"failure": f"pytest ended with {done.returncode}", "output": (done.stdout + done.stderr)[-4000:]}
    return found


def floors(training: Training, timer: Timer, folder: str) -> None:
    """Measure the floors once."""
    from benchmarks.floors import Floors

    tensors = list(training.tensors().values())
    is_cuda = training.device.type == "cuda"
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    there = [torch.empty_like(tensor) for tensor in tensors]
    for warm in (True, False):
        scratch = Timer(training) if warm else timer
        for name, targets, sources in (
            ("device to pinned memory", host, tensors),
            ("pinned memory to device", there, host),
            ("device to device", there, tensors),
        ):
            with scratch.time(name):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
    del host, there
    disk = Floors(sum(tensor.nbytes for tensor in tensors))
    try:
        measured = disk.measure(os.path.join(folder, "floors"))
    finally:
        disk.close()
    for name in ("direct_write", "direct_read"):
        if (seconds := measured[name] or measured[name.replace("direct", "buffered")]) is not None:
            timer.add(name.replace("_", " "), seconds)


def library(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with this library once; the load must restore the state."""
    import bytecheckpoint as bcp
    from benchmarks.page_cache import evict

    paths = [os.path.join(folder, name) for name in ("asynchronous", "gated", "synchronous")]
    with timer.time("bytecheckpoint: stall, asynchronous"):
        handle = bcp.save(paths[0], training.state, async_save=True)
    handle.result()
    usual = training.step()
    training.sync()
    begin = time.perf_counter()
    handle = bcp.save(paths[1], training.state, async_save=True, gate=True)
    stall = time.perf_counter() - begin
    timer.add("bytecheckpoint: stall, gated", stall + max(0.0, training.step() - usual))
    handle.result()
    expected = training.digest()
    with timer.time("bytecheckpoint: save, durable"):
        bcp.save(paths[2], training.state)
    training.forget()
    for path in Path(paths[2]).rglob("*.safetensors"):
        evict(str(path))
    with timer.time("bytecheckpoint: load, cold"):
        bcp.load(paths[2], training.state)
    if training.digest() != expected:
        raise AssertionError("the load did not restore the state")


def dcp(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with ``torch.distributed.checkpoint`` once, with the staging buffers that it reuses."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    from benchmarks.page_cache import evict, sync_tree

    path = os.path.join(folder, "dcp")
    state = training.tensors()
    with timer.time("torch DCP: stall, asynchronous"):
        stager = _stager(training.device.type == "cuda")
        pending: Any = async_save(state, checkpoint_id=path + "-async", async_stager=stager, no_dist=True)
    getattr(pending, "upload_completion", pending).result()
    with timer.time("torch DCP: save, durable"):
        save(state, checkpoint_id=path, no_dist=True)
        sync_tree(path)
    for one in Path(path).rglob("*"):
        evict(str(one))
    with timer.time("torch DCP: load, cold"):
        load(state, checkpoint_id=path, no_dist=True)


@functools.cache
def _stager(is_cuda: bool) -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_cuda,
        )
    )


def safetensors(training: Training, timer: Timer, folder: str) -> None:
    """Save and load with safetensors once; it has no asynchronous save."""
    from safetensors.torch import load_file, save_file

    from benchmarks.page_cache import evict, sync_tree

    path = os.path.join(folder, "state.safetensors")
    with timer.time("safetensors: save, durable"):
        save_file(training.tensors(), path)
        sync_tree(folder)
    evict(path)
    with timer.time("safetensors: load, cold"):
        loaded = load_file(path, device=str(training.device))
        for name, tensor in training.tensors().items():
            tensor.copy_(loaded[name])


def engine_method(training: Training, timer: Timer, folder: str) -> None:
    """Update weights as checkpoint-engine does: from pinned memory into two buckets in turn, from there to the weights.

    The copy into one bucket overlaps with the copies out of the other. The engine is in this process, so the exchange
    of handles is not counted.
    """
    weights = [parameter.detach() for parameter in training.model.parameters()]
    is_cuda = training.device.type == "cuda"
    pinned = [torch.empty(weight.shape, dtype=weight.dtype, pin_memory=is_cuda).copy_(weight) for weight in weights]
    size = max(_BUCKET_BYTES, max(weight.nbytes for weight in weights))
    buckets = [torch.empty(size, dtype=torch.uint8, device=training.device) for _ in range(2)]
    streams = [torch.cuda.Stream(training.device) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]
    for warm in (True, False):
        with (Timer(training) if warm else timer).time("checkpoint-engine's method: push"):
            for index, (source, weight) in enumerate(zip(pinned, weights, strict=True)):
                bucket = buckets[index % 2][: weight.nbytes].view(weight.dtype).view(weight.shape)
                if is_cuda:
                    with torch.cuda.stream(streams[index % 2]):
                        bucket.copy_(source, non_blocking=True)
                        weight.copy_(bucket, non_blocking=True)
                else:
                    weight.copy_(bucket.copy_(source))


def push(nbytes: int, rounds: int, device: str) -> Seconds:
    """Push with this library into engines on the same device."""
    from benchmarks.push import measure

    found: Seconds = measure(nbytes, rounds, 2, device)["seconds"]
    return {f"bytecheckpoint: push, {name}": seconds for name, seconds in found.items()}


PARTS: tuple[Callable[[Training, Timer, str], None], ...] = (floors, library, dcp, safetensors, engine_method)


def measure(device: torch.device, nbytes: int, rounds: int, folder: Path, end: float) -> dict[str, Any]:
    """Return the seconds of every part, and its failures. Ends early when the clock reaches ``end``."""
    training = Training(nbytes, device)
    timer, failures = Timer(training), {}
    done = 0
    for turn in range(rounds + 1):
        if turn > 1 and time.monotonic() > end:
            break
        for part in PARTS:
            if part.__name__ in failures:
                continue
            with tempfile.TemporaryDirectory(prefix="gpu-", dir=folder) as work:
                try:
                    part(training, timer, work)
                except Exception as error:  # noqa: BLE001 - the other parts are worth measuring
                    failures[part.__name__] = "".join(traceback.format_exception(error))[-3000:]
        if turn == 0:
            timer.seconds.clear()  # memory, pools and plans are new in the first round
        done = turn
    total = sum(tensor.nbytes for tensor in training.tensors().values())
    return {"bytes": total, "rounds": done, "seconds": timer.seconds, "failures": failures}


def page(document: dict[str, Any]) -> str:
    """Return the page of results."""
    machine, tests = document["machine"], document["tests"]
    lines = [
        "# Results on a GPU",
        "",
        "`make gpu` has written this page. Times are medians of rounds in one process, in which all take turns; see "
        "`benchmarks/gpu.py`.",
        "",
        f"- {document['created']}, {machine['device']}, torch {machine['torch']}, {machine['cores']} cores",
        f"- State: {document['bytes'] / 1e9:.2f} GB, {document['rounds']} rounds",
        f"- Missing: {', '.join(document['missing']) or 'nothing'}",
        "- `tests/gpu`: " + ", ".join(f"{count} {what}" for what, count in tests.items() if isinstance(count, int)),
        "",
        "| | seconds | GB/s | x floor |",
        "| --- | ---: | ---: | ---: |",
    ]
    medians = {name: statistics.median(seconds) for name, seconds in document["seconds"].items()}
    for name, seconds in medians.items():
        what = name.partition(": ")[2]
        floor = next((medians.get(floor) for key, floor in FLOOR_OF.items() if what.startswith(key)), None)
        # A push moves the weights, a third of the state.
        nbytes = document["bytes"] / 3 if what.startswith("push") else document["bytes"]
        if floor is not None and what.startswith("push"):
            floor /= 3
        ratio = f"{seconds / floor:.2f}" if floor else ""
        label = f"floor: {name} ({FLOORS[name]})" if name in FLOORS else name
        lines.append(f"| {label} | {seconds:.4f} | {nbytes / seconds / 1e9:.2f} | {ratio} |")
    failures = {**document["failures"], **({"tests": tests["output"]} if "failure" in tests else {})}
    for name, text in failures.items():
        lines += ["", f"## Failed: {name}", "", "```", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the machine, but not which one it is."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else "CPU only (a dry run)"
    return {"device": name, "torch": torch.__version__, "cores": os.cpu_count(), "cuda": torch.version.cuda or ""}


def main() -> int:
    """Return 0 if everything that could run has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cpu for a dry run")
    parser.add_argument("--mebibytes", type=int, default=4096, help="of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="no round begins later")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance/gpu.md")
    parser.add_argument("--tests", nargs="*", default=["tests/gpu"], help="none: run no tests")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    absent = missing(NEEDED + USEFUL)
    print(f"missing: {', '.join(absent) or 'nothing'}", flush=True)
    if needed := [name for name in absent if name in NEEDED]:
        print(f"the library needs {', '.join(needed)}; copy them here and name their folder in PYTHONPATH")
        return 2
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu makes a dry run")
        return 2
    tests: dict[str, Any] = {}
    if options.tests and "pytest" not in absent:
        print("running the tests", flush=True)
        tests = run_tests(options.tests, min(_TEST_LIMIT_S, 30 * options.minutes))
        print(tests.get("failure") or {name: count for name, count in tests.items() if name != "output"}, flush=True)
    shutil.rmtree(options.folder / "gpu-benchmark", ignore_errors=True)
    work = options.folder / "gpu-benchmark"
    work.mkdir(parents=True)
    try:
        found = measure(device, options.mebibytes << 20, options.rounds, work, end - 60)
        try:
            found["seconds"] |= push((options.mebibytes << 20) // 3, min(3, options.rounds), device.type)
        except Exception as error:  # noqa: BLE001 - the other results are worth writing
            found["failures"]["push"] = "".join(traceback.format_exception(error))[-3000:]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    document = {"created": created, "machine": describe(device), "missing": absent, "tests": tests, **found}
    options.json.write_text(json.dumps(document, indent=2) + "\n")
    options.page.write_text(page(document))
    print(page(document))
    return 1 if found["failures"] or "failure" in tests else 0


if __name__ == "__main__":
    sys.exit(main())
