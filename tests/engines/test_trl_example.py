"""The example of GRPO with TRL, run as a user runs it, with a stand-in for the vLLM server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from join_probes import until

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytest.importorskip("peft")  # first, because pytest ignores the warnings of what it imports
pytest.importorskip("trl")

from policy_engine import policy_engine
from transformers import LlamaConfig

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_REPOSITORY = Path(__file__).parents[2]
_SCRIPT = _REPOSITORY / "examples" / "trl_grpo.py"


def _start(root: Path, url: str) -> list[subprocess.Popen[str]]:
    """Start two ranks; only the first prints steps."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"}
    common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ("--root", str(root), "--engine", url, "--steps", "8", "--save-every", "4")
    return [
        subprocess.Popen(
            [sys.executable, str(_SCRIPT), *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def _steps(ranks: list[subprocess.Popen[str]], returncode: int = 0) -> dict[int, Any]:
    """Return what each step has printed."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        printed = [text for text, _ in threads.map(lambda rank: rank.communicate(timeout=time_limit(120)), ranks)]
    assert [rank.returncode for rank in ranks] == [returncode] * len(ranks), "\n".join(printed)
    lines = [json.loads(line) for line in printed[0].splitlines() if line.startswith('{"step"')]
    return {line.pop("step"): line for line in lines}


def _write_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("trl_grpo", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["", "--write-start", str(folder)])
    module.main()


@pytest.mark.full
def test_kill_all_ranks_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, root = tmp_path / "start", tmp_path / "run"
    _write_start(start, monkeypatch)
    with policy_engine(LlamaConfig.from_pretrained(start)) as engine:
        first = _start(root, engine.url)

        def kill(version: str) -> None:
            if version == "6" and all(rank.poll() is None for rank in first):
                until(lambda: (root / "checkpoint-4" / "manifest.msgpack").exists(), "the checkpoint of step 4")
                for rank in first:
                    rank.send_signal(signal.SIGKILL)

        engine.on_completion = kill
        before = _steps(first, -signal.SIGKILL)
        assert list(before) == [1, 2, 3, 4, 5, 6]
        after = _steps(_start(root, engine.url))
        assert list(after) == [5, 6, 7, 8]
        assert [after[step] for step in (5, 6)] == [before[step] for step in (5, 6)]
        assert len({line["grad_norm"] for line in before.values()}) == 6
        assert engine.versions == [*"0123456", *"45678"]
        assert not engine.is_paused
        found = bcp.open(root / "checkpoint-8").state_dict("model")
        served = dict(engine.model.named_parameters())
        assert found.keys() == served.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in served.items())
