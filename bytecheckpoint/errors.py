"""Every error this library raises, in one hierarchy.

Builtin base classes are in parentheses: ``except FileNotFoundError`` also catches a missing checkpoint::

    BytecheckpointError
    ├── UsageError (ValueError)         an argument is invalid, or the call is not allowed at this point
    │   ├── StateError                    the given objects cannot be saved, loaded or pushed as they are
    │   │   ├── UnknownObjectError (TypeError)      no adapter supports this object
    │   │   ├── UnserializableError (TypeError)     a value or a key has no stored form
    │   │   ├── NameCollisionError                  two entries have the same name
    │   │   ├── ReplicaMismatchError                ranks hold different copies of what must be one tensor
    │   │   └── UnsupportedTensorError (TypeError)  a tensor has no dense bytes (sparse, quantized, partial)
    │   └── RuleError                     rules for stored tensors contradict themselves or what is stored
    ├── PlanError (ValueError)          boxes overlap, leave holes, or exceed their tensor
    ├── MismatchError                   the state and the checkpoint do not fit together; lists every name
    ├── NameNotFoundError (KeyError)    the checkpoint has no tensor or section of this name
    ├── TensorIndexError (IndexError)   an index does not fit a stored tensor
    ├── CheckpointError                 the stored bytes cannot be read as a checkpoint
    │   ├── CheckpointNotFoundError (FileNotFoundError)  nothing is stored at this path
    │   ├── NotACheckpointError           something is stored there, but no committed checkpoint
    │   ├── NoValidCheckpointError        saves were made below this root, but none can be loaded
    │   ├── UnsupportedVersionError       a newer or unknown format version
    │   ├── FormatError                   a file violates docs/format.md; refused before any large allocation
    │   └── CorruptionError               bytes differ from the manifest (flipped, truncated, missing, swapped)
    ├── StorageError (OSError)          a storage operation failed
    │   ├── KeyNotFoundError (FileNotFoundError)  the key does not exist
    │   ├── KeyExistsError (FileExistsError)      a conditional put found that the key exists
    │   ├── KeyChangedError               a conditional put found that the object was replaced or deleted
    │   ├── UnansweredError               the store did not reply: the operation may take effect, also later
    │   ├── UploadSkippedError            a checkpoint in a tier was not uploaded, as retention would have removed it
    │   ├── StorageFullError              no space or quota is left
    │   ├── AccessDeniedError (PermissionError)   no permission, or the storage is read-only
    │   └── UnsupportedURLError (ValueError)      no backend serves this URL scheme
    ├── ThreadError (RuntimeError)      the process cannot start another thread
    ├── RootInUseError                  another job saves below this root
    ├── SavePendingError (TimeoutError) SaveHandle.result(timeout) timed out; the save continues
    ├── CommitUnknownError              the checkpoint may or may not be committed; read it before you retry
    └── ControlError                    the ranks could not work together
        ├── RankFailedError               one rank failed; every rank raises this same cause
        ├── DisagreementError             the ranks passed different arguments
        ├── EngineError                   an inference engine failed or sent an invalid response
        └── DeadlineError (TimeoutError)  a wait exceeded its deadline; names the ranks that did not arrive

    SaveFailedWarning (UserWarning)   an earlier asynchronous save failed, and no one asked its handle for the outcome

Did a failed save commit? ``error.may_have_committed`` answers it for every error in the tree:

- False: the checkpoint is certainly not committed. What was at the path before is still there. It is safe to remove
  the attempt's files and to save again.
- True (``CommitUnknownError``, ``SavePendingError``): the checkpoint may exist. Nothing was deleted. Open the path to
  find out.

A message states what happened, where (rank, file, tensor, range), and what to do.
"""

from __future__ import annotations

import re
from typing import ClassVar

HIDDEN_PASSWORD = "***@"
"""What messages have instead of the user and password of a URL."""

_USERINFO = re.compile(r"(?<=://)[^/\s]+@")


def without_userinfo(text: str) -> str:
    """Return a URL, or a text with URLs, without user and password."""
    return _USERINFO.sub(HIDDEN_PASSWORD, text)


class BytecheckpointError(Exception):
    """Base class of all errors of this library.

    Attributes:
        may_have_committed: Whether a save that raised this error may have committed its checkpoint. If it is False,
            the checkpoint is certainly not committed, and it is safe to clean up and to save again.
        engine: The name of the inference engine that caused the error; empty if none did.
    """

    may_have_committed: ClassVar[bool] = False
    engine: str = ""

    def __init__(self, *args: object) -> None:
        """Create an error. Its message does not show the user and password of URLs in ``args``."""
        super().__init__(*(without_userinfo(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        # KeyError.__str__ would return the message as a quoted repr.
        return Exception.__str__(self)


class UsageError(BytecheckpointError, ValueError):
    """An argument is invalid, or the call is not allowed at this point (for example after ``close``)."""


class StateError(UsageError):
    """The given objects cannot be saved, loaded or pushed as they are. Nothing was changed."""


class UnknownObjectError(StateError, TypeError):
    """No adapter supports an object of the state."""


class UnserializableError(StateError, TypeError):
    """A value or a key of a tree has no stored form; the message contains its path."""


class NameCollisionError(StateError):
    """Two entries of the state have the same name once they are flattened."""


class ReplicaMismatchError(StateError):
    """Several ranks hold a tensor of one name with different contents, where a save would store one copy."""


class UnsupportedTensorError(StateError, TypeError):
    """A tensor has a layout without dense bytes (sparse, quantized, partial sums, ...)."""


class RuleError(UsageError):
    """Rules for stored tensors contradict themselves or what is stored. Nothing was read or changed.

    One error lists everything that is wrong.

    Attributes:
        faults: One ``(kind, name, detail)`` for each fault. ``kind`` is one of ``syntax`` (the rules cannot be read),
            ``rule`` (a rule contradicts itself), ``missing`` (no rule for a tensor), ``ambiguous`` (several rules for a
            tensor), ``unused`` (a rule matches nothing), ``shape``, ``dtype``, ``rank`` (what the ranks hold is
            incomplete, or not explained), ``file`` (a file cannot be assigned to a rank), ``rename`` (two tensors would
            have one name), ``average`` (a value is in no file), ``compare`` (copies differ, which is known only once
            all other faults are excluded and the copies are read). ``name`` is the tensor, the file or the rule.
    """

    def __init__(self, message: str, faults: list[tuple[str, str, str]] | None = None) -> None:
        super().__init__(message)
        self.faults = list(faults or [])


class PlanError(BytecheckpointError, ValueError):
    """Boxes overlap, leave a hole, or reach outside their tensor."""


class MismatchError(BytecheckpointError):
    """The state and the checkpoint do not fit together. Nothing was changed.

    One error lists the faults of all ranks.

    Attributes:
        faults: One ``(kind, name, detail)`` for each fault. ``kind`` is one of ``missing``, ``unexpected``, ``shape``,
            ``dtype``, ``coverage``, ``value``, ``per_rank``, ``pattern`` (it matches no name), ``rename`` (its name is
            not stored), ``overlap`` (its memory would be written twice), ``data_loader`` (saved by another number
            of data-parallel ranks).
    """

    def __init__(self, message: str, faults: list[tuple[str, str, str]] | None = None) -> None:
        super().__init__(message)
        self.faults = list(faults or [])


class NameNotFoundError(BytecheckpointError, KeyError):
    """The checkpoint, or the state, has no tensor or section of this name."""


class TensorIndexError(BytecheckpointError, IndexError):
    """An index expression does not fit the shape of a stored tensor, or is not supported."""


class CheckpointError(BytecheckpointError):
    """The stored bytes cannot be read as a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is stored at this path."""


class NotACheckpointError(CheckpointError):
    """Something is stored at this path, but no checkpoint was ever committed there."""


class NoValidCheckpointError(CheckpointError):
    """Saves were made below a root, but none of them can be loaded; the message states what is wrong with each.

    Not raised for a root where nothing was ever saved: that is a fresh start, this is a loss.
    """


class UnsupportedVersionError(CheckpointError):
    """This library does not read the checkpoint's format version; the message contains both versions."""


class FormatError(CheckpointError):
    """A file violates a rule of ``docs/format.md``. Refused before any large allocation; no stored code was run."""


class CorruptionError(CheckpointError):
    """Stored bytes differ from the manifest; the message contains file, tensor and byte range.

    Attributes:
        key: The key of the file in its store; empty if it is unknown, or the bytes are in no file.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class StorageError(BytecheckpointError, OSError):
    """A storage operation failed; the message contains backend and key. ``errno`` is always None."""

    is_late: bool = False
    """The store was asked until the deadline; asking it again takes as long."""

    key: str = ""
    """The key of the data file of a checkpoint that could not be read; empty in errors of backends."""


class KeyNotFoundError(StorageError, FileNotFoundError):
    """The key does not exist."""


class KeyExistsError(StorageError, FileExistsError):
    """``put(if_absent=True)`` found that the key exists."""


class KeyChangedError(StorageError):
    """``put(if_version=...)`` found that the object has another version, or was deleted."""


class UnansweredError(StorageError):
    """The store did not reply to a put in time. It may have stored the object, or may still do so."""


class UploadSkippedError(StorageError):
    """A checkpoint in a tier was not uploaded: later ones were saved meanwhile, and retention would have removed it."""


class StorageFullError(StorageError):
    """No space, quota or file-size limit is left."""


class AccessDeniedError(StorageError, PermissionError):
    """Permission was denied, or the storage is read-only."""


class UnsupportedURLError(StorageError, ValueError):
    """No storage backend serves this URL scheme."""


class ThreadError(BytecheckpointError, RuntimeError):
    """The process cannot start another thread, because a limit of its user or container is reached."""


class RootInUseError(BytecheckpointError):
    """Another job holds the lease of this root, or took it over; the message contains job, host and process."""


class SavePendingError(BytecheckpointError, TimeoutError):
    """``SaveHandle.result`` or ``exception`` reached its ``timeout``. The save continues in the background."""

    may_have_committed = True


class SaveFailedWarning(UserWarning):
    """An earlier asynchronous save to the same folder failed, and no one asked its handle for the outcome."""


class CommitUnknownError(BytecheckpointError):
    """It is unknown whether the checkpoint is committed. Nothing was deleted; open the path to find out."""

    may_have_committed = True


class ControlError(BytecheckpointError):
    """The ranks could not work together."""


class RankFailedError(ControlError):
    """One rank failed, and every rank raises this same cause.

    On the failing rank, the original exception is also ``__cause__``.

    Attributes:
        rank: The rank that failed, or -1 if it is unknown.
        host: The host of that rank.
        phase: The step in which it failed, such as ``write``.
        error_type: The class name of the original exception; ``ProcessDied`` if the process ended,
            and ``ConnectionLost`` if this is not known of a process on another host.
        traceback_text: The original traceback as text; empty if the process ended.
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
    """The ranks called one function with different arguments (path, step, names); the message lists who passed what."""


class EngineError(ControlError):
    """An inference engine failed or is unreachable; the message contains the version it serves, if that is known."""


class DeadlineError(ControlError, TimeoutError):
    """A wait exceeded its deadline; the message contains the phase and the ranks that did not arrive."""


__all__ = sorted(name for name, found in vars().items() if isinstance(found, type))
