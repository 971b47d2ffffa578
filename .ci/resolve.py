"""Resolve each extra on each Python that the metadata name, also together with what users install: ``resolve.py UV``.

Only metadata are downloaded. What cannot be resolved is printed with the reason.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPANIONS = ("", "transformers datasets peft", "lightning", "deepspeed", "vllm", "ray[train]", "torchtitan")
NO_WHEELS = "deepspeed"  # has source distributions only
FOR_DEVELOPERS = ("test", "dev")


def main(uv: str) -> int:
    """Resolve every combination. Returns an exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    failed = 0
    for python, extra, companions in itertools.product(pythons, ["", *project["optional-dependencies"]], COMPANIONS):
        if extra in FOR_DEVELOPERS and companions:
            continue
        command = [uv, "pip", "compile", "--quiet", "--python-version", python, "pyproject.toml", "-"]
        command += ["--extra", extra] if extra else []
        command += [] if companions == NO_WHEELS else ["--only-binary", ":all:"]
        requirements = companions.replace(" ", "\n")
        done = subprocess.run(command, input=requirements, capture_output=True, text=True, cwd=ROOT)
        outcome = "resolved" if done.returncode == 0 else f"FAILED\n{done.stderr.rstrip()}"
        failed += done.returncode != 0
        print(f"Python {python}, [{extra}] with {companions or 'nothing'}: {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
