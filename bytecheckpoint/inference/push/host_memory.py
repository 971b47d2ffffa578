"""How much memory a process may still take without being killed for it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory"]


def free_memory() -> int:
    """Bytes: what the host has available, or what its control group (a container) is still allowed, if that is less."""
    free = _available()
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        allowed, taken = _number(limit), _number(used)
        if allowed is not None and taken is not None:
            # Pages of files count as used, and are given up when needed.
            free = min(free, max(allowed - taken, 0) + _reclaimable(Path(used).parent))
    return free


def _available() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(values.get("inactive_file", 0))


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or "max"
        return None
