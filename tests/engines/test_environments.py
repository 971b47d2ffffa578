"""Each environment has the version of its framework that the requirements pin."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


@pytest.mark.parametrize(
    ("file", "package"),
    [
        pytest.param("deepspeed.txt", "deepspeed", marks=pytest.mark.deepspeed),
        pytest.param("megatron.txt", "megatron-core", marks=pytest.mark.megatron),
        pytest.param("megatron.txt", "einops", marks=pytest.mark.megatron),
        pytest.param("huggingface.txt", "transformers", marks=pytest.mark.huggingface),
        pytest.param("huggingface.txt", "peft", marks=pytest.mark.huggingface),
        pytest.param("huggingface.txt", "lightning", marks=pytest.mark.huggingface),
        pytest.param("huggingface.txt", "torchtitan", marks=pytest.mark.huggingface),
        pytest.param("huggingface.txt", "torchft", marks=pytest.mark.huggingface),
        pytest.param("bytecheckpoint.txt", "mmh3", marks=pytest.mark.bytecheckpoint),
    ],
)
def test_the_pinned_version_is_installed(file: str, package: str) -> None:
    assert f"{package}=={version(package)}" in (REQUIREMENTS / file).read_text().splitlines()
