"""Every error this library raises.

    BytecheckpointError
    ├── StateError                  what the caller handed in cannot be saved or filled
    │   ├── UnknownObjectError      no adapter knows this object
    │   ├── UnserializableError     a value that is neither plain nor a tensor, or a key that is not one
    │   ├── NameCollisionError      two entries flatten to one name
    │   └── UnsupportedTensorError  sparse, quantised, partial, or otherwise not a dense tensor
    ├── PlanError                   boxes that overlap, leave holes, or leave their tensor
    ├── MismatchError               the state asked for and the checkpoint do not fit (lists every name)
    ├── CheckpointError             what is on storage is not a checkpoint that can be read
    │   ├── CheckpointNotFoundError   nothing there
    │   ├── NotACheckpointError       something there, but no committed checkpoint
    │   ├── NoValidCheckpointError    saves were made below this root, and none can be loaded
    │   ├── UnsupportedVersionError   written by a newer (or unknown) format version
    │   ├── FormatError               breaks a rule of docs/format.md; refused before any large allocation
    │   └── CorruptionError           bytes differ from what the manifest promises (flipped, cut, missing, swapped)
    ├── StorageError                a storage operation failed
    │   ├── KeyNotFoundError          no such key
    │   ├── KeyExistsError            a conditional put found the key taken
    │   ├── StorageFullError          no space or quota left
    │   ├── AccessDeniedError         permission or read-only
    │   └── UnsupportedURLError       no backend for this scheme
    ├── RootInUseError              another job saves below this root
    ├── SaveSkippedError            the save would have had to wait, and was asked not to
    ├── CommitUnknownError          the commit may or may not have landed; read before retrying
    └── ControlError                the ranks could not work together
        ├── RankFailedError           one rank failed; the same cause is raised on every rank
        ├── DisagreementError         the ranks were called with different arguments
        ├── EngineError               an inference engine failed, or does not answer as it should
        └── DeadlineError             a wait ran out of time; names who was waited for

All are ``Exception``s. A message says what happened, where (rank, file, tensor, range), and what to do.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "BytecheckpointError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CommitUnknownError",
    "ControlError",
    "CorruptionError",
    "DeadlineError",
    "DisagreementError",
    "EngineError",
    "FormatError",
    "KeyExistsError",
    "KeyNotFoundError",
    "MismatchError",
    "NameCollisionError",
    "NoValidCheckpointError",
    "NotACheckpointError",
    "PlanError",
    "RankFailedError",
    "RootInUseError",
    "SaveSkippedError",
    "StateError",
    "StorageError",
    "StorageFullError",
    "UnknownObjectError",
    "UnserializableError",
    "UnsupportedTensorError",
    "UnsupportedURLError",
    "UnsupportedVersionError",
]


class BytecheckpointError(Exception):
    """Root of the tree."""


class StateError(BytecheckpointError):
    """The state handed to ``save`` or ``load`` cannot be used. Nothing was changed."""


class UnknownObjectError(StateError):
    """No adapter recognises an object of the state."""


class UnserializableError(StateError):
    """A leaf (or key) of a tree is not a plain value; the message names its path."""


class NameCollisionError(StateError):
    """Two entries of the state flatten to the same name."""


class UnsupportedTensorError(StateError):
    """A tensor has a layout that has no dense bytes of its own (sparse, quantised, partial sums, ...)."""


class PlanError(BytecheckpointError):
    """Boxes overlap, leave a hole, or reach outside their tensor."""


class MismatchError(BytecheckpointError):
    """What was asked for and what is stored do not fit together. Nothing was changed.

    One error lists every fault. ``faults`` holds them as ``(kind, name, detail)``, ``kind`` being one of
    ``missing``, ``unexpected``, ``shape``, ``dtype``, ``coverage``, ``value``, ``per_rank``.
    """

    def __init__(self, message: str, faults: list[tuple[str, str, str]] | None = None) -> None:
        super().__init__(message)
        self.faults = list(faults or [])

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.faults))


class CheckpointError(BytecheckpointError):
    """What is on storage cannot be read as a checkpoint."""


class CheckpointNotFoundError(CheckpointError):
    """Nothing is stored at this path."""


class NotACheckpointError(CheckpointError):
    """Something is stored at this path, but no checkpoint was ever committed there."""


class NoValidCheckpointError(CheckpointError):
    """There are traces of saves below a root, and no checkpoint that holds; lists what is wrong with each. Not raised
    for a root where nothing was ever saved: that is a fresh start, this is a loss."""


class UnsupportedVersionError(CheckpointError):
    """The checkpoint's format version is not one this library reads; the message names both."""


class FormatError(CheckpointError):
    """A file breaks a rule of ``docs/format.md``. Refused before any large allocation and with no code run."""


class CorruptionError(CheckpointError):
    """Stored bytes are not those the manifest promises; names file, tensor and byte range."""


class StorageError(BytecheckpointError):
    """A storage operation failed; names backend and key."""


class KeyNotFoundError(StorageError):
    """The key does not exist."""


class KeyExistsError(StorageError):
    """``put(if_absent=True)`` found the key taken."""


class StorageFullError(StorageError):
    """No space, quota or file-size limit left."""


class AccessDeniedError(StorageError):
    """Permission denied, or the storage is read-only."""


class UnsupportedURLError(StorageError):
    """No storage backend serves this URL scheme."""


class RootInUseError(BytecheckpointError):
    """Another job holds the lease of this root, or took it away from this one; names job, host and process."""


class SaveSkippedError(BytecheckpointError):
    """A save with ``when_busy="skip"`` was not made: some rank would have had to wait for staging memory."""


class CommitUnknownError(BytecheckpointError):
    """The commit's outcome is not known: it may have landed. Nothing was deleted; open the path to find out."""


class ControlError(BytecheckpointError):
    """The ranks could not work together."""


class RankFailedError(ControlError):
    """One rank failed and every rank raises this same cause.

    ``rank``, ``host``, ``phase`` say where; ``error_type`` and ``traceback_text`` are the original's. On the failing
    rank the original exception is also ``__cause__``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        host: str = "",
        phase: str = "",
        error_type: str = "",
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.phase = phase
        self.error_type = error_type
        self.traceback_text = traceback_text


class DisagreementError(ControlError):
    """The ranks entered one call with different arguments (path, step, names); lists who said what."""


class EngineError(ControlError):
    """An inference engine failed, or cannot be reached; says which version of the weights it serves, where known."""


class DeadlineError(ControlError):
    """A wait ran out of time; names the phase and the ranks that never came."""
