"""Run everything that one GPU can prove, within ten minutes, and write one JSON file and one page.

    make gpu                                              on a machine with a GPU; needs no network and installs nothing
    python -m benchmarks.gpu --device cpu --mebibytes 8   a dry run of the same code

First all of ``tests/gpu``, file by file. Then rounds of floors, this library, ``torch.distributed.checkpoint``,
safetensors and checkpoint-engine, which take turns; then many small tensors, and pushes into engines on the same GPU
(``gpu_parts``). What is missing is printed in one line, and the rest runs.

Each file of tests and each part runs in a separate process with a time limit: a part that fails, hangs or crashes,
or leaves the device in error, is reported, and the others run. The results are written again after each of them. This
process imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NEEDED: tuple[str, ...] = ("torch", "numpy", "msgpack", "xxhash", "zstandard", "typing_extensions")
"""What the library itself imports."""
USEFUL = {
    "pytest": "no tests",
    "pytest_timeout": "a test that hangs ends its file",
    "fsspec": "no tests",
    "safetensors": "not compared",
    "checkpoint_engine": "a loop instead of its function for workers, and no tests with it",
    "zmq": "nothing with checkpoint_engine",
    "vllm": "no tests with it",
    "transformers": "no tests with vllm",
}
"""What else is used, and the consequence where it is missing."""

FLOORS = {
    "device to pinned memory": "copy of the state to pinned memory over PCIe",
    "pinned memory to device": "copy of the state from pinned memory over PCIe",
    "device to device": "copy of the state within the device's memory",
    "direct write": "the same bytes from host memory, O_DIRECT, durable",
    "direct read": "the same bytes into host memory, cold",
    "small tensors, each to pinned memory": "20,000 copies of 4 to 64 KiB, one after another",
    "small tensors, each from pinned memory": "the same, back",
    "one copy of the weights": "a third of the state, within the device's memory",
    "the weights through one TCP stream": "in host memory",
}
FLOOR_OF = {
    "small tensors, load": "small tensors, each from pinned memory",
    "small tensors": "small tensors, each to pinned memory",
    "stall, asynchronous": "device to pinned memory",
    "stall, gated": "device to pinned memory",
    "save, durable": "direct write",
    "load, cold": "direct read",
    "push": "one copy of the weights",
}

ROUNDS = ("floors", "library", "dcp", "safetensors", "checkpoint_engine")
"""The parts of which every round runs once, in turn."""
ONCE = ("small_tensors", "push", "push_by_cuda_ipc")

_MEBIBYTES = 4096
_TESTS_SHARE, _ROUNDS_SHARE = 0.45, 0.8  # of the time: when tests and rounds end
_PART_LIMIT_S, _FILE_LIMIT_S = 120.0, 180.0
_DUMP_S, _KILL_S = 2.0, 5.0
_TAIL = 4000  # characters of a log


@dataclass(frozen=True)
class Settings:
    """What all parts must know: the device, the bytes of the state, the rounds, and a folder on the disk to measure."""

    device: str
    nbytes: int
    rounds: int
    folder: str


@dataclass
class Run:
    """The results so far, which ``write`` stores, and when the run must end (of ``time.monotonic()``)."""

    json: Path
    page: Path
    begin: float
    end: float
    document: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Replace the file and the page."""
        for path, text in ((self.json, json.dumps(self.document, indent=2) + "\n"), (self.page, page(self.document))):
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_name(f".{path.name}.new")
            written.write_text(text)
            written.replace(path)

    def add(self, found: dict[str, list[float]]) -> None:
        """Add the seconds of a part."""
        for what, seconds in found.items():
            self.document["seconds"].setdefault(what, []).extend(seconds)
        self.write()

    def fail(self, name: str, text: str) -> None:
        """Note the failure of a part or a file."""
        print(f"{name}: {text.strip().splitlines()[-1]}", flush=True)
        self.document["failures"][name] = text
        self.write()

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the time is over."""
        return self.begin + share * (self.end - self.begin) - time.monotonic()


def _serve(*given: Any) -> None:
    from benchmarks.gpu_parts import serve

    serve(*given)


class Part:
    """A part in a separate process, whose function is ``served``. Killed at the end, with what it has started."""

    def __init__(self, name: str, settings: Settings, log: Path, served: Callable[..., None] = _serve) -> None:
        processes = multiprocessing.get_context("forkserver")
        self.name, self._log = name, log
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=served, args=(theirs, name, settings, str(log)))
        self._process.start()
        theirs.close()

    def run(self, limit_s: float) -> Any:
        """Return what the part returns. Raises ``PartFailed``, after which it has ended."""
        limit_s = min(limit_s, _PART_LIMIT_S)
        try:
            self._pipe.send("run")
            if not self._pipe.poll(max(limit_s, 0)):
                raise PartFailed(self._ended(signal.SIGABRT) + f"\nno end after {limit_s:.0f} s")
            state, result = self._pipe.recv()
        except (EOFError, OSError):
            text = self._ended(signal.SIGKILL)
            raise PartFailed(f"{text}\nits process ended with code {self._process.exitcode}") from None
        if state == "failed":
            self.kill()  # the device may be in error
            raise PartFailed(result)
        return result

    def _ended(self, sent: signal.Signals) -> str:
        """End the processes, the first of them by a signal on which it shows its stacks; return the end of the log."""
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # the fork server has noticed its end before this process
                os.kill(self._process.pid, sent)
            self._process.join(_DUMP_S)
        else:
            self._process.join(_KILL_S)
        self.kill()
        return tail(self._log)

    def kill(self) -> None:
        """Kill the processes. May be called again."""
        kill_group(self._process.pid)
        self._process.join(_KILL_S)
        self._pipe.close()


class PartFailed(Exception):
    """A part failed; the text says how."""


def kill_group(pid: int | None) -> None:
    """Kill a process and what it has started, if it leads a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""


def missing(names: Sequence[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def run_tests(path: str, limit_s: float, log: Path, device: str) -> dict[str, Any]:
    """Run a file or folder of tests in another process; return the counts, the reasons of skips, and its failure."""
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--color=no", "-p", "no:cacheprovider", path]
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "COLUMNS": "400"}
    if device == "cpu":
        environment["BCP_GPU_DRY_RUN"] = "1"
    limit_s = min(limit_s, _FILE_LIMIT_S)
    begin, failure = time.monotonic(), ""
    with log.open("wb") as opened:
        # Into a file: a pipe would stay open in what the tests have started, and reading it would not end.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(limit_s, 0))
        except subprocess.TimeoutExpired:
            failure = f"no end after {limit_s:.0f} s"
            process.send_signal(signal.SIGABRT)  # shows the stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DUMP_S)
        else:
            failure = "" if code in (0, 5) else f"pytest ended with {code}"
        finally:
            kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    output = log.read_text(errors="replace")
    outcomes = re.findall(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", output, re.MULTILINE)
    counts = {what.lower(): outcomes.count(what) for what in dict.fromkeys(outcomes)}
    skips = sorted({reason.strip() for reason in re.findall(r"^SKIPPED \[\d+\] \S+?: (.*)$", output, re.MULTILINE)})
    if skips and "SKIPPED" not in outcomes:
        counts["skipped"] = 1  # the whole file
    found: dict[str, Any] = {"seconds": time.monotonic() - begin, "counts": counts, "skips": skips}
    return found | ({"failure": failure, "output": output[-_TAIL:]} if failure else {})


def test_all(run: Run, paths: Sequence[str], logs: Path, device: str) -> None:
    """Run the tests, file by file."""
    for number, path in enumerate(paths):
        limit_s = run.left(_TESTS_SHARE)
        if limit_s <= 0:
            run.fail(path, "no time was left")
            continue
        found = run.document["tests"][path] = run_tests(path, limit_s, logs / f"tests-{number}.log", device)
        counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
        print(f"{path}: {found.get('failure') or counts} ({found['seconds']:.0f} s)", flush=True)
        if "failure" in found:
            run.document["failures"][path] = f"{found.pop('output')}\n{found['failure']}"
        run.write()


def measure(run: Run, names: Sequence[str], settings: Settings, logs: Path) -> None:
    """Run the rounds, then the parts that run once when the others have freed their memory."""
    measure_rounds(run, [name for name in ROUNDS if name in names], settings, logs)
    left = [name for name in ONCE if name in names]
    while left:
        name, limit_s = left[0], run.left() / len(left)
        print(left.pop(0), flush=True)
        with parts([name], settings, logs) as running:
            try:
                run.add(running[name].run(limit_s))
            except PartFailed as error:
                run.fail(name, str(error))


def measure_rounds(run: Run, names: Sequence[str], settings: Settings, logs: Path) -> None:
    """Run each part once in every round, for as long as there is time. A part that fails is left out from then on."""
    with parts(names, settings, logs) as running:
        for turn in range(settings.rounds + 1):
            for name in list(running):
                if run.left(_ROUNDS_SHARE) <= 0:
                    return
                try:
                    found = running[name].run(run.left(_ROUNDS_SHARE))
                except PartFailed as error:
                    del running[name]
                    run.fail(name, str(error))
                    continue
                run.document["bytes"] = found["bytes"]
                # Memory, pools and plans are new in the first round.
                run.add(found["seconds"] if turn else {})
            run.document["rounds"] = turn
            print(f"round {turn} of {settings.rounds}", flush=True)


@contextlib.contextmanager
def parts(names: Sequence[str], settings: Settings, logs: Path) -> Iterator[dict[str, Part]]:
    """Start parts; kill them at the end."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            found[name] = Part(name, settings, logs / f"{name}.log")
            stack.callback(found[name].kill)
        yield found


def page(document: dict[str, Any]) -> str:
    """Return the page of results."""
    machine, tests = document["machine"], document["tests"]
    totals: dict[str, int] = {}
    for found in tests.values():
        for what, count in found["counts"].items():
            totals[what] = totals.get(what, 0) + count
    skips = sorted({reason for found in tests.values() for reason in found["skips"]})
    lines = [
        "# Results on a GPU",
        "",
        "`make gpu` has written this page. Times are medians of rounds in which all parts take turns, each in its own "
        "process; see `benchmarks/gpu.py`.",
        "",
        f"- {document['created']}, {machine['device']}, torch {machine['torch']}, {machine['cores']} cores",
        f"- State: {document['bytes'] / 1e9:.2f} GB, {document['rounds']} rounds",
        f"- Missing: {', '.join(document['missing']) or 'nothing'}",
        "- `tests/gpu`: " + (", ".join(f"{count} {what}" for what, count in totals.items()) or "not run"),
        *[f"- Skipped: {reason}" for reason in skips],
        *([] if document["is_complete"] else ["- The run has not ended, or was killed: some results are missing."]),
        "",
        "| | seconds | GB/s | x floor |",
        "| --- | ---: | ---: | ---: |",
    ]
    medians = {name: statistics.median(seconds) for name, seconds in document["seconds"].items()}
    for name, seconds in medians.items():
        what = name.partition(": ")[2]
        floor = next((medians.get(floor) for key, floor in FLOOR_OF.items() if what.startswith(key)), None)
        # A push moves the weights, a third of the state.
        nbytes = document["bytes"] / 3 if what.startswith("push") or "weights" in name else document["bytes"]
        has_rate = "nothing has changed" not in what and "small tensors" not in name
        rate = f"{nbytes / seconds / 1e9:.2f}" if has_rate else ""
        ratio = f"{seconds / floor:.2f}" if floor else ""
        label = f"floor: {name} ({FLOORS[name]})" if name in FLOORS else name
        lines.append(f"| {label} | {seconds:.4f} | {rate} | {ratio} |")
    for name, text in document["failures"].items():
        lines += ["", f"## Failed: {name}", "", "```", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return 0 if everything that could run has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cpu for a dry run")
    parser.add_argument("--mebibytes", type=int, help="of the state; by default 4096, if memory suffices")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.5, help="everything ends by then")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/gpu.json; of a dry run, in --folder")
    parser.add_argument("--page", type=Path, help="by default docs/performance/gpu.md; of a dry run, in --folder")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py"))
    parser.add_argument("--tests", nargs="*", default=files, help="files or folders; none: run no tests")
    parser.add_argument("--parts", nargs="*", default=[*ROUNDS, *ONCE], choices=[*ROUNDS, *ONCE], metavar="PART")
    options = parser.parse_args()
    absent = missing([*NEEDED, *USEFUL])
    shown = [f"{name} ({USEFUL[name]})" if name in USEFUL else name for name in absent]
    print(f"missing: {', '.join(shown) or 'nothing'}", flush=True)
    if needed := [name for name in absent if name in NEEDED]:
        print(f"the library needs {', '.join(needed)}: on a machine with a network, `pip download --no-deps` them for")
        print(
            "this Python; here, `pip install --no-index --no-deps` the files, or unzip them into a folder in PYTHONPATH"
        )
        return 2
    return _run(options, absent)


def _run(options: argparse.Namespace, absent: list[str]) -> int:
    begin = time.monotonic()
    is_dry = options.device == "cpu"
    json_path = options.json or (options.folder / "gpu.json" if is_dry else ROOT / "benchmarks/results/gpu.json")
    page_path = options.page or (options.folder / "gpu.md" if is_dry else ROOT / "docs/performance/gpu.md")
    run = Run(json_path, page_path, begin, begin + 60 * options.minutes)
    # Processes begin with what is imported there once; it does not touch the device.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.gpu_parts", "bytecheckpoint"])
    work = Path(tempfile.mkdtemp(prefix="bcp-gpu-", dir=options.folder))
    try:
        settings = Settings(options.device, (options.mebibytes or _MEBIBYTES) << 20, options.rounds, str(work))
        with parts(["describe"], settings, work) as describing:
            try:
                machine = describing["describe"].run(run.left())
            except PartFailed as error:
                print(error)
                print(f"{options.device} cannot be used here; --device cpu makes a dry run")
                return 2
        if options.mebibytes is None and machine["memory"]:
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            # All parts of a round keep their copies of the state, on the device and in pinned memory.
            nbytes = min(settings.nbytes, machine["memory"] // 12, host // 8)
            settings = Settings(options.device, nbytes, options.rounds, str(work))
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run.document |= {"created": created, "is_complete": False, "machine": machine, "missing": absent}
        run.document |= {"tests": {}, "bytes": 0, "rounds": 0, "seconds": {}, "failures": {}}
        run.write()
        test_all(run, options.tests if "pytest" not in absent else [], work, options.device)
        # A part has the name of the package that it compares with. checkpoint_engine has a fallback.
        names = [name for name in options.parts if name != "safetensors" or name not in absent]
        measure(run, names, settings, work)
        run.document["is_complete"] = True
        run.write()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(page(run.document))
    return 1 if run.document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
