"""The failure matrix as data: what goes wrong, where in the protocol, on which rank, in which kind of call.

What makes no sense is left out:

- Only rank 0 looks at the path, at the free space and at what is overwritten, and puts the manifest; only it has the
  points inside these steps.
- An error of the file system strikes where that call is made: reading does not fill a disk, and writing to a file that
  is open is not denied. A write that is torn by a crash needs bytes that are written.
- A call by some ranks only, or with different arguments, has no step. Where both ranks differ from each other there is
  one victim, not two.
- A load is never asynchronous, and there is nothing that it could overwrite. The manager finds the path itself, so that
  ranks cannot bring different ones to its load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.trace import LOAD_STEPS, SAVE_STEPS

STEP_FAULTS = ("raise", "unpicklable", "kill", "stop")
"""An exception; one that cannot be pickled, nor shown; SIGKILL; SIGSTOP for longer than the deadline."""

DISK_FAULTS = ("enospc", "eio", "eacces", "torn")
"""The call to the file system fails; with "torn" half a write reaches the file and SIGKILL the process."""

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
    "save.check:stat": ("eio", "eacces"),
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
"""``<step>:<kind of call>`` and the faults that it may have. The calls are those of ``crash_disk``."""

_ROOT_POINTS = ("save.commit.before", "save.commit.after")
_ROOT_DISK_STEPS = ("save.check", "save.plan", "save.commit", "save.clean", "load.open")
_OVERWRITING_ONLY = ("save.commit:open", "save.clean:delete")

ONCE_FAILED = (
    # Rank 0 waited for ten seconds before it swept, for a rank that was late already.
    "stop-save.confirm-last-sync-new",
    # Ranks went on with what they had loaded, while another could not apply it.
    "raise-load.apply-last-sync-stored",
    "kill-load.report-first-manager-stored",
    # Rank 0 said that there was no checkpoint, after it had put the manifest.
    "raise-save.commit.after-first-async-overwrite",
    # A manager did not try the step again.
    "raise-save.check-last-manager-new",
    # A manager's error named the rank that told of it first.
    "eio-save.write:write-first-manager-new",
)
"""Part of every sample."""

SAVE_MODES = ("sync", "async", "manager")
LOAD_MODES = ("sync", "manager")
VICTIMS = ("first", "last")


@dataclass(frozen=True)
class Cell:
    """One failure. ``point`` is a step or a point of ``bytecheckpoint.trace``, a key of ``DISK_POINTS``, or for a fault
    of the whole call "save" or "load". ``where``: the save is to a "new" path or an "overwrite"; a load is from what
    is "stored"."""

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
        """The step that the point is in, as traces name it; "" for a fault of the whole call."""
        return ".".join(self.point.partition(":")[0].split(".")[:2]) if "." in self.point else ""

    @property
    def call(self) -> str:
        """The kind of call to the file system, for a fault of the disk."""
        return self.point.partition(":")[2]

    @property
    def layout(self) -> str:
        """Saves have a merge stage where tensors are stored whole."""
        return "whole" if self.step == "save.merge" else "shards"

    @property
    def kills(self) -> bool:
        return self.fault in ("kill", "torn")

    def victim_of(self, world_size: int) -> int:
        return 0 if self.victim == "first" else world_size - 1


def all_cells() -> list[Cell]:
    """Every cell that makes sense, always in the same order."""
    return [*_at_steps(), *_at_disk(), *_at_calls()]


def sample(cells: Sequence[Cell], seed: int, count: int) -> list[Cell]:
    """``count`` cells in the order of the matrix, chosen by ``seed``: those of ``ONCE_FAILED``, and each fault, point,
    victim, mode and kind of path at least once, as far as ``count`` allows."""
    chosen = [cell for cell in cells if str(cell) in ONCE_FAILED]
    shuffled = [cell for cell in cells if cell not in chosen]
    random.Random(seed).shuffle(shuffled)
    missing = {label for cell in shuffled for label in labels_of(cell)}.difference(*map(labels_of, chosen))
    while missing and len(chosen) < count:
        best = max(shuffled, key=lambda cell: len(missing & labels_of(cell)))
        shuffled.remove(best)
        chosen.append(best)
        missing -= labels_of(best)
    wanted = {*chosen, *shuffled[: max(0, count - len(chosen))]}
    return [cell for cell in cells if cell in wanted]


def labels_of(cell: Cell) -> set[tuple[str, str]]:
    """What every sample has at least one cell of."""
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
