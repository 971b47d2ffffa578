"""SGLang servers, through their endpoint ``/update_weights_from_disk``.

Rank 0 receives and verifies the model (see ``relay.py``), writes it as one safetensors file into a folder in memory
that the server's workers see as well, and makes them load it. Nothing of the engine changes before the file is
complete, and the request, unlike those with tensors, needs no pickle and works for quantized models.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError
from urllib.request import Request

import torch
from torch import nn

from ...errors import DeadlineError, EngineError
from ...format.safetensors import HeaderEntry, build_header, parse_header
from ...runtime.threads import run_daemon
from ...tensors.shards import basic_meta
from .engines.vllm import MissingEndpoint
from .messages import check_faults
from .relay import RelayEngine, RelayModel, Step

SglangPause = Literal["retract", "abort", "in_place"]

_UNBOUNDED_S = 7 * 86400.0
_INFO_S = 10.0
_LATE_S = 5.0
_OPTIONAL = {"lm_head.weight"}  # of a model that ties it
_PREFIX = "bcp-sglang-"  # of folders that are removed after a load


class SglangEngine(RelayEngine):
    """An SGLang server. Its workers run without bytecheckpoint, and each of them reads the whole model.

    The server needs no option. It loads with its own loader, also into replicas (``--dp-size``), and then reports the
    folder of the update as its model. Names and shapes are compared with the folder from which it was started, where
    this process sees that; else the first mismatch is found while it loads. When this process is killed while the
    engine loads, a guard process makes it load again and serve the new version; when it is killed before, the engine
    continues with the old one. Tested against a stand-in that implements the endpoints of SGLang 0.5.23, which needs a
    GPU; a real server has never been tested.

    Args:
        url: The address of the server.
        folder: Where the file is written, and removed after each load. It needs as many bytes as the model, and the
            workers must see it at the same path: memory of their host, or a shared file system.
        dtype: Cast wider floating tensors to this dtype; by default none is cast.
        pause: What happens to running requests when weights change. "retract" computes them again and continues them
            with the new weights, "abort" aborts them, and "in_place" continues them with the new weights and the KV
            cache of the old ones.
        headers: Sent with every request, for a proxy that authenticates.
        token: Sent as ``Authorization: Bearer``, for ``--admin-api-key`` or ``--api-key``.
        ssl_context: Verifies a server with https. The guard process gets its certificates of authorities, but not a
            client's.

    Raises:
        UsageError: ``url`` is not an address of HTTP.
    """

    def __init__(
        self,
        url: str,
        *,
        folder: str | os.PathLike[str] = "/dev/shm",
        dtype: torch.dtype | None = None,
        pause: SglangPause = "retract",
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        model = _FileModel(self, Path(folder), dtype)
        super().__init__(url, model, headers=headers, token=token, ssl_context=ssl_context)
        self._mode = pause
        self._running: Future[Any] | None = None

    def pause(self, timeout_s: float) -> None:
        self.on_exit(_CONTINUE)
        self._post("/pause_generation", {"mode": self._mode}, timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and version is not None:
            with suppress(MissingEndpoint):
                self._post(*_renaming(str(version)), timeout_s)
        self._post(*_CONTINUE, timeout_s)
        self.on_exit()

    def load_folder(self, folder: str, version: int | str | None, end: float) -> None:
        """Make all workers load a folder. Returns when they have.

        Args:
            folder: The path, as the workers see it.
            version: The name of the version, if it is known.
            end: The deadline, of ``time.monotonic()``.

        Raises:
            DeadlineError: The engine has not answered until ``end``, of ``time.monotonic()``.
            EngineError: The engine refused, or still handles an earlier update.
        """
        if self._running is not None and not wait([self._running], _LATE_S).done:
            raise EngineError(f"{self.name} has not ended an earlier update; is one of its workers stopped?")
        path, name = "/update_weights_from_disk", "rolled back" if version is None else str(version)
        document = {"model_path": folder, "load_format": "safetensors", "flush_cache": self._mode != "in_place"}
        document["weight_version"] = name
        # The first step returns when the update of this process has ended. Loading again is the only way to be sure
        # that all workers have the version.
        self.on_exit(_renaming(name), (path, document), _CONTINUE)
        # SGLang mixes up the answers of two updates at a time, so this one is not abandoned when time is over.
        self._running = run_daemon(lambda: self._post(path, document, _UNBOUNDED_S), "bcp-push-update")
        if not wait([self._running], max(end - time.monotonic(), 0.0)).done:
            raise DeadlineError(f"{self.name} did not load the weights in time; is one of its workers stopped?")
        try:
            self._running.result()
        except EngineError:
            self.on_exit(is_partial=True)
            raise
        self.on_exit(_CONTINUE)

    @property
    def running(self) -> Future[Any] | None:
        """The last update, answered or not."""
        return self._running

    def start_path(self) -> str:
        """Return the path from which the server has loaded its weights; empty if that is unknown."""
        try:
            with self._opener.open(Request(f"{self.name}/model_info", headers=self._headers), timeout=_INFO_S) as found:
                document = json.loads(found.read())
        except (URLError, OSError, ValueError):
            return ""
        path = document.get("model_path") if isinstance(document, dict) else None
        return path if isinstance(path, str) and not Path(path).name.startswith(_PREFIX) else ""

    def _refused(self, path: str, code: int, text: str) -> EngineError:
        hint = ""
        if code in (404, 405):
            return MissingEndpoint(f"{self.name} has no {path}; is this a server of SGLang 0.5 or later? {text}")
        if code in (401, 403):
            hint = "; pass token=, the server's --admin-api-key or --api-key"
        elif path == "/update_weights_from_disk":
            hint = "; do its workers see the folder (folder=), and are these the names of the model on the hub?"
        return EngineError(f"{self.name}{path} answered {code}: {text}{hint}")


_CONTINUE: Step = ("/continue_generation", {})


def _renaming(version: str) -> Step:
    # By default, SGLang aborts all requests here.
    return "/update_weight_version", {"new_version": version, "abort_all_requests": False}


class _FileModel(RelayModel):
    """Passes tensors on in a file."""

    def __init__(self, engine: SglangEngine, folder: Path, dtype: torch.dtype | None) -> None:
        super().__init__(dtype)
        self._engine, self._folder = engine, folder
        self._start_path = ""
        self._serves_start = self._served_start = True
        self._was_loading = False

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._serves_start and not self._start_path:
            self._start_path = self._engine.start_path()
        given = list(weights)
        _check_names({name: tuple(tensor.shape) for name, tensor in given}, Path(self._start_path or os.devnull))
        super().run_loader(model, iter(given))

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._was_loading = False
        version, self.version = self.version, None
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder)
        except OSError as error:
            raise EngineError(
                f"no folder below {self._folder} for {self._engine.name}: {error}; pass folder="
            ) from error
        self._engine.guard.remove(folder)
        try:
            self._write(Path(folder) / "model.safetensors", weights)
            self._was_loading = True
            self._served_start, self._serves_start = self._serves_start, False
            self._engine.load_folder(folder, version, self.end)
        finally:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        running = self._engine.running
        if self._was_loading and running is not None and not running.done():
            running.add_done_callback(lambda _: self._remove(folder))  # the engine reads it
            return
        shutil.rmtree(folder, ignore_errors=True)
        self._engine.guard.remove(None)

    def _write(self, path: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        named = [(name, tensor, self.sent_as(tensor.dtype)) for name, tensor in weights]
        sizes = [tensor.numel() * dtype.itemsize for _, tensor, dtype in named]
        header = build_header(
            [
                HeaderEntry(name, basic_meta(dtype, tensor.shape).dtype, tuple(tensor.shape), nbytes)
                for (name, tensor, dtype), nbytes in zip(named, sizes, strict=True)
            ],
            {"format": "pt"},
        )
        total, place = len(header) + sum(sizes), len(header)
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, total)  # without it, writing to full memory kills the process
                file.write(header)
        except OSError as error:
            raise EngineError(
                f"no room for {total:,} bytes in {path.parent}: {error}; free it, or pass folder= to SglangEngine"
            ) from error
        memory = torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8)
        for (_, tensor, dtype), nbytes in zip(named, sizes, strict=True):
            if nbytes:
                # A header may end, and a tensor begin, at any multiple of a narrower dtype.
                held = torch.empty(tensor.shape, dtype=dtype) if place % dtype.itemsize else None
                target = memory[place : place + nbytes].view(dtype).view(tensor.shape) if held is None else held
                target.copy_(tensor)
                if held is not None:
                    memory[place : place + nbytes].copy_(held.flatten().view(torch.uint8))
            place += nbytes

    def restore(self) -> bool:
        if not self._was_loading:
            return True  # the engine has not changed
        if not self._served_start or not self._start_path:
            return False
        self._engine.load_folder(self._start_path, None, self.end)
        self._serves_start = True
        return True

    @property
    def is_busy(self) -> bool:
        running = self._engine.running
        return running is not None and not running.done()


def _check_names(given: Mapping[str, tuple[int, ...]], start: Path) -> None:
    """Compare with the checkpoint from which the engine was started. SGLang skips unknown names, and a server whose
    loader raises ends."""
    held: dict[str, tuple[int, ...]] = {}
    for path in start.glob("*.safetensors"):
        with path.open("rb") as file:
            header = parse_header(partial(_read, file.fileno()), path.stat().st_size)
        held |= {record.name: record.shape for record in header.entries}
    if not held:
        return
    faults = [("unexpected", name, "the engine has no such tensor") for name in given.keys() - held.keys() - _OPTIONAL]
    faults += [
        ("shape", name, f"it is {list(given[name])}, and the engine's is {list(held[name])}")
        for name in given.keys() & held.keys()
        if given[name] != held[name]
    ]
    faults += [
        ("missing", name, "the senders do not have it")
        for name in held.keys() - given.keys() - _OPTIONAL
        if "scale" not in name  # of an engine that quantizes
    ]
    check_faults(f"the tensors are not those of {start}", sorted(faults), limit=10)


def _read(descriptor: int, place: int, nbytes: int) -> bytes:
    return os.pread(descriptor, nbytes, place)
