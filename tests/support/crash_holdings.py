"""Find the processes that others left behind."""

from __future__ import annotations

import os


def processes_of_sessions(sessions: set[int]) -> list[int]:
    """Return the living processes of these sessions: each rank is a session leader, and its children belong to it."""
    return [pid for pid, fields in _processes() if fields[0] not in ("Z", "X") and int(fields[3]) in sessions]


def state_of(pid: int) -> str:
    """Return the state letter from ``/proc``; T means stopped."""
    return next((fields[0] for found, fields in _processes([pid]) if found == pid), "")


def _processes(pids: list[int] | None = None) -> list[tuple[int, list[str]]]:
    found = []
    for pid in pids if pids is not None else [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                # State, parent, process group, session.
                found.append((pid, file.read().rpartition(")")[2].split()[:4]))
        except OSError:
            continue
    return found
