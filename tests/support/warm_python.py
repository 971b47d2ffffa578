"""Run scripts in processes that are forked from one that has imported what they need.

An import of torch takes two seconds, one of vLLM ten. Apart from that, they are as in a new interpreter: a script is
``__main__``, has its own arguments, environment and standard streams, and the interpreter ends as it always does.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from typing import IO, Any

__all__ = ["WarmProcess", "WarmPython", "warm_python"]

_PR_SET_PDEATHSIG = 1
_STATUS = struct.Struct("<q")


class WarmProcess:
    """A script that was started, with the methods of ``subprocess.Popen``."""

    def __init__(self, arguments: list[str], pid: int, status: int) -> None:
        self.args, self.pid, self._status = arguments, pid, status
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = _number(self._status)
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmPython:
    """A process that has imported the modules ``preload``, and forks."""

    def __init__(self, preload: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *preload]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **environment}, start_new_session=True
            )
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(
        self,
        arguments: list[str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
    ) -> WarmProcess:
        """Run ``-c CODE``, ``-m MODULE`` or a file, and arguments."""
        job = {
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "own_session": start_new_session,
        }
        job |= {"cwd": os.fspath(cwd or os.getcwd()), "path": sys.path}
        ours, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        streams = [
            nothing if one == subprocess.DEVNULL else one if isinstance(one, int) else one.fileno()
            for one in (stdin, stdout, stderr)
        ]
        data = json.dumps(job).encode()
        with self._lock:
            socket.send_fds(self._socket, [_STATUS.pack(len(data))], [*streams, theirs])
            self._socket.sendall(data)
        os.close(theirs)
        os.close(nothing)
        return WarmProcess(arguments, _number(ours), ours)

    def run(
        self,
        arguments: list[str],
        *,
        timeout: float,
        check: bool = False,
        stdout: IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, and return its code and what it has written."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self.start(arguments, stdout=stdout or output, stderr=errors, env=env, cwd=cwd)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        done = subprocess.CompletedProcess(arguments, code, *texts)
        if check:
            assert not code, f"{code}: {texts[1]}"
        return done


@functools.cache
def warm_python(*preload: str, **environment: str) -> WarmPython:
    """Return a process that has imported these modules, by default the library and the commands."""
    return WarmPython(
        preload or ("bytecheckpoint.api", "bytecheckpoint.manager", "bytecheckpoint.cli.inspection"), environment
    )


def _number(descriptor: int) -> int:
    data = os.read(descriptor, _STATUS.size)
    if len(data) != _STATUS.size:
        raise RuntimeError("the process that forks has ended")
    return int(_STATUS.unpack(data)[0])


# -- in the process that forks ---------------------------------------------------------------------------------------


def _wait_for_job(requests: socket.socket) -> dict[str, Any]:
    """Return in a new process for each job."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for the processes that wait for the scripts
    while True:
        head, descriptors, *_ = socket.recv_fds(requests, _STATUS.size, 4)
        if not head:
            os._exit(0)
        data = b""
        while len(data) < _STATUS.unpack(head)[0]:
            data += requests.recv(_STATUS.unpack(head)[0] - len(data))
        if not os.fork():
            requests.close()
            _fork_and_wait(descriptors)
            return json.loads(data)  # type: ignore[no-any-return]
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_wait(descriptors: list[int]) -> None:
    """Return in a new process, and report how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    *streams, status = descriptors
    pid = os.fork()
    if pid:
        os.write(status, _STATUS.pack(pid))
        for stream in (0, 1, 2, *streams):  # a script closes its output when it ends
            os.close(stream)
        os.write(status, _STATUS.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(status)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in {*streams} - {0, 1, 2}:
        os.close(stream)


def _run(job: dict[str, Any]) -> None:
    if job["own_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    arguments = job["arguments"]
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        arguments = arguments[2:]
    sys.path[:] = job["path"]
    module = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        if arguments[0] == "-m":
            spec = importlib.util.find_spec(arguments[1])
            assert spec is not None
            assert spec.origin is not None
            arguments, module.__spec__ = [spec.origin, *arguments[2:]], None
        sys.argv[:] = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        module.__file__ = arguments[0]
        with open(arguments[0], "rb") as script:
            code = compile(script.read(), arguments[0], "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[2:]:
            importlib.import_module(name)
    _run(_wait_for_job(socket.socket(fileno=int(sys.argv[1]))))
