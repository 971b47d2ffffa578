"""Skip the tests of frameworks that this environment lacks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = {"deepspeed": "deepspeed", "megatron": "megatron", "huggingface": "peft", "bytecheckpoint": "mmh3"}
"""The package that the environment of each must have."""

if any(map(find_spec, FRAMEWORKS.values())):
    # Ranks are forked from a process that has imported the frameworks: each would need three seconds for Megatron.
    os.environ["BCP_TEST_PRELOAD"] = str(Path(__file__).parents[1] / "support" / "preload_frameworks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name, package in FRAMEWORKS.items():
        if find_spec(package) is None:
            missing = pytest.mark.skip(reason=f"make test-{name} installs it")
            for item in items:
                if item.get_closest_marker(name) is not None:
                    item.add_marker(missing)
