"""The child side of the rank harness: serve the calls of one rank process.

Messages are pickled. They go through a pipe between a test process and its own children, never through a disk or a
network, and only in tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

THIRD_PARTY_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # FSDP-1 and some of its strategies are deprecated by torch; this library still supports them.
    (FutureWarning, r"The `NO_SHARD` sharding strategy is deprecated"),
    (FutureWarning, r"FSDP\.state_dict_type\(\) and FSDP\.set_state_dict_type\(\) are being deprecated"),
    # FSDP-1 on one rank of a mesh dimension: some tests use this fallback on purpose.
    (UserWarning, r"FSDP is switching to use `NO_SHARD`"),
    # FSDP-1's state dicts cause these inside torch.
    (UserWarning, r"`_get_pg_default_device` will be deprecated"),
    (UserWarning, r"Multiple backends are registered with this ProcessGroup"),
    (FutureWarning, r"Please use DTensor instead and we are deprecating ShardedTensor"),
    # Raised by torch's checkpoint reader and by tensors that share storage, which some tests compare with.
    (UserWarning, r"TypedStorage is deprecated"),
    (UserWarning, r"torch\.distributed is disabled, unavailable or uninitialized"),
    # Raised for a barrier on a group without a device.
    (UserWarning, r"No device id is provided via `init_process_group`"),
)
"""Warnings of third-party code that tests do not turn into errors: (category, regular expression)."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class FunctionReference:
    """A module-level function by name and file: test files cannot be imported by name alone."""

    module: str
    file: str | None
    qualname: str


@dataclass(frozen=True)
class RankCall:
    """One call of a function on one rank. ``arguments`` is a pickled tuple, unpickled after the module is loaded."""

    function: FunctionReference
    arguments: bytes
    rank: int
    world_size: int
    backend: str | None
    store_file: str
    timeout_s: float
    env: dict[str, str]


def serve(connection: Connection, output_file: str, stack_file: str, import_path: list[str]) -> None:
    """Serve calls until the parent process ends.

    For each ``RankCall`` the rank sends ``("returned" | "raised", payload, text, at)`` and then, after it has destroyed
    its process group, ``("idle", b"", "", at)``; ``at`` is ``time.monotonic()``, which all processes of a host share.
    A rank that has returned keeps its group until the parent reports that all other ranks have returned.
    """
    _prepare_process(output_file, stack_file, import_path)
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):
            return
        if call is None:
            return
        os.truncate(output_file, 0)
        with _fresh_surroundings(call):
            _answer(connection, call)
        _flush()
        gc.collect()
        connection.send(("idle", b"", "", time.monotonic()))


def load_function(reference: FunctionReference) -> Callable[..., Any]:
    """Return the function, and load its module from the file if the name cannot be imported."""
    target: Any = _load_module(reference.module, reference.file)
    for part in reference.qualname.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise TypeError(f"{reference.module}.{reference.qualname} is not callable")
    return target  # type: ignore[no-any-return]


def _load_module(name: str, file: str | None) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is not None and (file is None or _same_file(getattr(loaded, "__file__", None), file)):
        return loaded
    if file is None:
        return importlib.import_module(name)
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(name)
        if found is not None and _same_file(found.origin, file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file} as module {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def _prepare_process(output_file: str, stack_file: str, import_path: list[str]) -> None:
    # A new session and process group, so that the parent can kill a rank together with its children.
    with contextlib.suppress(OSError):
        os.setsid()
    if sys.platform == "linux":
        # The fork server ends when the test process does, even if that is killed; ranks must not outlive it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # The handlers may write at any time, so this descriptor stays open until the process ends.
    stacks = os.open(stack_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    sys.path[:] = [*import_path, *(entry for entry in sys.path if entry not in import_path)]


@contextlib.contextmanager
def _fresh_surroundings(call: RankCall) -> Iterator[None]:
    """Set up the same environment for each call, and restore the process afterwards."""
    environment = dict(os.environ)
    folder = os.getcwd()
    os.environ.update(call.env)
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("default", module=r"torch\.")  # what torch warns of itself differs between releases
            for category, message in THIRD_PARTY_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def _answer(connection: Connection, call: RankCall) -> None:
    import torch

    _reset_defaults()
    try:
        # The bytes come from this process's own parent.
        function = load_function(call.function)
        arguments = pickle.loads(call.arguments)  # noqa: S301
        _init_process_group(call)
        result = function(call.rank, call.world_size, *arguments)
        answer = pickle.dumps(result)
    except BaseException:  # noqa: BLE001 - the parent gets everything as text, SystemExit too
        # Taken first: no other rank has failed because of this one yet, since its group still exists.
        at = time.monotonic()
        _flush()
        connection.send(("raised", b"", traceback.format_exc(), at))
    else:
        _flush()
        connection.send(("returned", answer, "", time.monotonic()))
        # Peers may still be in a collective with this rank, so the group must exist until all have returned.
        connection.recv()
    finally:
        if torch.distributed.is_initialized():
            groups = list(torch.distributed.distributed_c10d._world.pg_map)
            with contextlib.suppress(RuntimeError, ValueError):
                torch.distributed.destroy_process_group()
            # A DDP module in a reference cycle holds its group. Were it the last to do so, collecting it would destroy
            # the group without releasing the GIL, for which gloo's thread may wait: a deadlock (torch 2.13).
            gc.collect()
            del groups


def _reset_defaults() -> None:
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _init_process_group(call: RankCall) -> None:
    import torch.distributed
    from torch._C._distributed_c10d import FileStore

    if call.backend is None:
        return
    Path(call.store_file).parent.mkdir(parents=True, exist_ok=True)
    store = FileStore(call.store_file, call.world_size)
    torch.distributed.init_process_group(
        call.backend,
        store=store,
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout_s),
    )
    # A rank that fails at once would close its connections while others still connect, and they would fail of that.
    store.set(f"connected-{call.rank}", "")
    store.wait([f"connected-{rank}" for rank in range(call.world_size)], timedelta(seconds=call.timeout_s))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
