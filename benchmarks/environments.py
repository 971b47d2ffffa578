"""Create separate Python environments for peers that conflict, each on top of the benchmark's environment."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["Environments", "PeerUnavailable"]

_ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENTS = _ROOT / "requirements" / "benchmarks.txt"
_CONSTRAINTS = _ROOT / "requirements" / "constraints.txt"
_TIMEOUT_S = 600


class PeerUnavailable(Exception):
    """A peer cannot take part; the message gives the reason."""


class Environments:
    """Creates environments below ``cache``, and records which could not be created."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._failed: dict[tuple[str, ...], str] = {}

    def python(self, install: tuple[str, ...]) -> str:
        """Return the interpreter of an environment with these distributions. Raises ``PeerUnavailable``."""
        if not install:
            return sys.executable
        if install in self._failed:
            raise PeerUnavailable(self._failed[install])
        folder = self._cache / install[0]
        done, state = folder / "installed", _fingerprint(install)
        python = folder / "bin" / "python"
        try:
            if not done.exists() or done.read_text() != state:
                _make(folder, python, install)
                done.write_text(state)
        except PeerUnavailable as error:
            self._failed[install] = str(error)
            raise
        return str(python)


def _make(folder: Path, python: Path, install: tuple[str, ...]) -> None:
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    base = sysconfig.get_paths()["purelib"]
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(_CONSTRAINTS), "-c", str(_REQUIREMENTS)]
    try:
        done = subprocess.run([*command, *install], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"not installed: pip took more than {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise PeerUnavailable(f"not installed: {errors[-1].removeprefix('ERROR: ')}")


def _fingerprint(install: tuple[str, ...]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for part in (_REQUIREMENTS.read_bytes(), _CONSTRAINTS.read_bytes(), " ".join(install).encode()):
        digest.update(part)
    return digest.hexdigest()
