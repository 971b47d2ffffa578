"""The failure matrix as data: the fault, its point in the protocol, the failing rank, and the kind of call.

Combinations that make no sense are omitted:

- Only rank 0 checks the path, the free space and the checkpoint to overwrite, and writes the manifest. So only rank 0
  has the points inside these steps.
- An error of the file system occurs only in calls that can raise it: a read cannot fill a disk, and a write to an open
  file is not denied. A torn write needs bytes to write.
- A call on some ranks only, or with different arguments, has no step. If the two ranks differ from each other, one of
  them counts as the victim.
- A load is never asynchronous and overwrites nothing. A manager determines the path itself, so its ranks cannot pass
  different paths to a load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.telemetry import LOAD_STEPS, SAVE_STEPS

STEP_FAULTS = ("raise", "unpicklable", "kill", "stop")
"""An exception, an exception without pickle and text, SIGKILL, and SIGSTOP for longer than the deadline."""

DISK_FAULTS = ("enospc", "eio", "eacces", "torn")
"""A call to the file system fails; with "torn", half of a write reaches the file and the process is killed."""

CALL_FAULTS = ("rank-0-only", "divergent-path", "divergent-keys")

INNER_POINTS = (
    "save.merge.send",
    "save.merge.file",
    "save.merge.complete",
    "save.write.file",
    "save.write.complete",
    "save.commit.before",
    "save.commit.after",
)

POINTS = (
    *(f"save.{step}" for step in SAVE_STEPS),
    *INNER_POINTS,
    *(f"load.{step}" for step in LOAD_STEPS),
)

_WRITING = {
    "create": ("enospc", "eio", "eacces"),
    "write": ("enospc", "eio", "torn"),
    "sync": ("enospc", "eio"),
    "sync-directory": ("eio",),
}

DISK_POINTS: dict[str, tuple[str, ...]] = {
    "save.check:open": ("eio", "eacces"),
    "save.plan:free": ("enospc",),
    **{f"save.merge:{call}": faults for call, faults in _WRITING.items()},
    **{f"save.write:{call}": faults for call, faults in _WRITING.items()},
    "save.commit:open": ("eio", "eacces"),
    **{f"save.commit:{call}": faults for call, faults in _WRITING.items()},
    "save.commit:rename": ("enospc", "eio", "eacces"),
    "save.clean:delete": ("eio", "eacces"),
    "load.open:open": ("eio", "eacces"),
    "load.open:read": ("eio",),
    "load.read:open": ("eio", "eacces"),
    "load.read:read": ("eio",),
}
"""``<step>:<kind of call>`` and its possible faults. The kinds are those of ``crash_disk``."""

_ROOT_POINTS = ("save.commit.before", "save.commit.after")
_ROOT_DISK_STEPS = ("save.check", "save.plan", "save.commit", "save.clean", "load.open")
_OVERWRITING_ONLY = ("save.commit:open", "save.clean:delete")

ONCE_FAILED = (
    # Rank 0 waited ten seconds for a rank that was already late, before it removed the attempt.
    "stop-save.confirm-last-sync-new",
    # Ranks continued with the loaded state although another rank could not apply it.
    "raise-load.apply-last-sync-stored",
    "kill-load.report-first-manager-stored",
    # Rank 0 reported that there was no checkpoint, after it had written the manifest.
    "raise-save.commit.after-first-async-overwrite",
    # A manager did not retry the step.
    "raise-save.check-last-manager-new",
    # A manager's error named the rank that reported it first, not the rank that failed.
    "eio-save.write:write-first-manager-new",
    # A manager raised that rank 0 did not answer, and not that the checkpoint may exist.
    "stop-save.commit.before-first-manager-overwrite",
)
"""Cells that failed once, in every sample."""

SAVE_MODES = ("sync", "async", "manager")
LOAD_MODES = ("sync", "manager")
VICTIMS = ("first", "last")


@dataclass(frozen=True)
class Cell:
    """One failure.

    ``point`` is a step or point of ``telemetry.trace``, a key of ``DISK_POINTS``, or "save" or "load" for a fault of
    the entire call. ``where`` is "new" or "overwrite" for a save, and "stored" for a load.
    """

    fault: str
    point: str
    victim: str
    mode: str
    where: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.point}-{self.victim}-{self.mode}-{self.where}"

    @property
    def operation(self) -> str:
        return self.point.partition(".")[0]

    @property
    def step(self) -> str:
        """The step that contains the point, as traces name it; "" for a fault of the entire call."""
        return ".".join(self.point.partition(":")[0].split(".")[:2]) if "." in self.point else ""

    @property
    def call(self) -> str:
        """The kind of file system call, for a fault of the disk."""
        return self.point.partition(":")[2]

    @property
    def layout(self) -> str:
        """The layout of the save: only one that stores whole tensors has a merge stage."""
        return "whole" if self.step == "save.merge" else "shards"

    @property
    def kills(self) -> bool:
        return self.fault in ("kill", "torn")

    def victim_of(self, world_size: int) -> int:
        return 0 if self.victim == "first" else world_size - 1


def all_cells() -> list[Cell]:
    """Return every cell, always in the same order."""
    return [*_at_steps(), *_at_disk(), *_at_calls()]


def sample(cells: Sequence[Cell], seed: int, count: int) -> list[Cell]:
    """Return ``count`` cells in the order of the matrix, chosen by ``seed``.

    The sample contains the cells of ``ONCE_FAILED`` and, if ``count`` allows, each fault, point, victim, mode and kind
    of path at least once.
    """
    chosen = [cell for cell in cells if str(cell) in ONCE_FAILED]
    shuffled = [cell for cell in cells if cell not in chosen]
    random.Random(seed).shuffle(shuffled)
    missing = {label for cell in shuffled for label in labels_of(cell)}.difference(*map(labels_of, chosen))
    while missing and len(chosen) < count:
        best = max(shuffled, key=lambda cell: len(missing & labels_of(cell)))
        shuffled.remove(best)
        chosen.append(best)
        missing -= labels_of(best)
    selected = {*chosen, *shuffled[: max(0, count - len(chosen))]}
    return [cell for cell in cells if cell in selected]


def labels_of(cell: Cell) -> set[tuple[str, str]]:
    """Return the labels of a cell; every sample has at least one cell of each label."""
    return {
        ("fault", cell.fault),
        ("point", cell.point),
        ("victim", cell.victim),
        ("mode", f"{cell.operation} {cell.mode}"),
        ("where", cell.where),
    }


def _at_steps() -> Iterator[Cell]:
    for fault in STEP_FAULTS:
        for point in POINTS:
            victims = VICTIMS[:1] if point in _ROOT_POINTS else VICTIMS
            yield from _in_all_modes(fault, point, victims)


def _at_disk() -> Iterator[Cell]:
    for fault in DISK_FAULTS:
        for point, faults in DISK_POINTS.items():
            if fault in faults:
                is_root_only = point.partition(":")[0] in _ROOT_DISK_STEPS
                yield from _in_all_modes(fault, point, VICTIMS[:1] if is_root_only else VICTIMS)


def _at_calls() -> Iterator[Cell]:
    for operation in ("save", "load"):
        for fault in CALL_FAULTS:
            for cell in _in_all_modes(fault, operation, VICTIMS[-1:]):
                if (fault, operation, cell.mode) != ("divergent-path", "load", "manager"):
                    yield cell


def _in_all_modes(fault: str, point: str, victims: Sequence[str]) -> Iterator[Cell]:
    is_load = point.startswith("load")
    places = ["stored"] if is_load else ["overwrite"] if point in _OVERWRITING_ONLY else ["new", "overwrite"]
    for victim in victims:
        for mode in LOAD_MODES if is_load else SAVE_MODES:
            for where in places:
                yield Cell(fault, point, victim, mode, where)
