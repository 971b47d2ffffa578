"""The names of GPUs, by which processes find the memory of each other: CUDA's and those of nvidia-smi."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from bytecheckpoint.inference.push.checkpoint_engine import gpus_of
from bytecheckpoint.inference.push.transports.cuda_ipc import visible_gpus

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_cuda_and_nvidia_smi_agree() -> None:
    """Also where a GPU is divided (MIG): its parts must have the same UUIDs in both."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"UUID: ((?:GPU|MIG)-[0-9a-f-]+)", listed)
    visible = visible_gpus()
    assert set(visible) <= {name.replace("MIG-", "GPU-", 1) for name in names}, listed
    seen = [name for name in names if name.replace("MIG-", "GPU-", 1) in visible]
    assert sorted(gpus_of(seen)) == sorted(visible.values())
