"""Where checkpoints live, as one value: a URL, the options of its store, and a faster tier before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..errors import UsageError, without_userinfo
from ..runtime.arguments import ARGUMENTS, positive_number, whole_number
from ..storage_backends import StorageBackend, absolute_url, join, open_backend


@dataclass
class Silence:
    """Whether a store did not answer when it was last asked: then, a copy in a tier is used without waiting long."""

    is_silent: bool = False


@dataclass(frozen=True)
class Tier:
    """A faster place before the store of a ``Location``: a folder on a local disk of each machine.

    A save commits the checkpoint there first, and uploads it to the location in the background: ``SaveHandle.result``
    waits for the commit in the tier, ``SaveHandle.uploaded`` for the one in the store. An upload that is interrupted is
    continued by ``bcp upload``, or by the ``CheckpointManager`` of the restarted job. Reads use copies of data files in
    the tier where they are undamaged, and the store for what the tier lacks.

    Args:
        path: The folder. Several locations may share it.
        keep: How many checkpoints a ``CheckpointManager`` leaves in the folder; those that are not uploaded yet stay
            anyway. Without a manager, nothing is removed.
        upload_rate: Bytes per second that this rank uploads at most, on average; None for no limit.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> bcp.Tier("/local/nvme", keep=2)
    """

    path: str | os.PathLike[str]
    keep: int = field(default=1, kw_only=True)
    upload_rate: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_url(ARGUMENTS["path"]("Tier.path", self.path)))
        object.__setattr__(self, "keep", whole_number(1)("Tier.keep", self.keep))
        if self.upload_rate is not None:
            object.__setattr__(self, "upload_rate", positive_number("Tier.upload_rate", self.upload_rate))


@dataclass(frozen=True, init=False)
class Location:
    """Where checkpoints live: every function and command of this library accepts it in place of a path.

    Its text and its ``repr`` contain no secrets; a pickle contains all of it.

    Args:
        url: Local path, or URL of any fsspec filesystem: of a checkpoint, or of the folder above some. A relative path
            becomes absolute here, so later changes of the working directory have no effect.
        tier: A faster place before the store.
        storage_options: Options for the storage backend, such as credentials or ``endpoint_url``.

    Raises:
        UsageError: A value has the wrong type.
        UnsupportedURLError: ``url`` is not a path or URL.
        StorageError: The path is relative, and the working directory was removed.

    Example:
        >>> root = bcp.Location("s3://runs/7b", tier=bcp.Tier("/local/nvme", keep=2))
        >>> bcp.save(root.join("step-1000"), state)
    """

    url: str
    tier: Tier | None
    storage_options: Mapping[str, Any] = field(hash=False)
    silence: Silence = field(init=False, compare=False)  # of this location, and of all that `join` made of it

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        tier: Tier | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(tier, (Tier, type(None))):
            raise UsageError(f"Location.tier must be a bytecheckpoint.Tier or None, not {tier!r}")
        values = {
            "url": absolute_url(url),
            "tier": tier,
            "storage_options": ARGUMENTS["storage_options"]("storage_options", storage_options),
            "silence": Silence(),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, path: AnyLocation, storage_options: Mapping[str, Any] | None = None) -> Location:
        """Return a path, a URL or a location as a new location, which has not yet been found to be silent.

        Args:
            path: The path.
            storage_options: Options for the storage backend of a path; a location has its own.

        Returns:
            The location.

        Raises:
            UsageError: There are options in addition to those of a location.
        """
        if not isinstance(path, Location):
            return cls(path, storage_options=storage_options)
        if storage_options:
            raise UsageError("pass storage_options to the Location; they cannot be passed next to it")
        return replace(path)

    def join(self, *parts: str) -> Location:
        """Return the location of what is below this one.

        Args:
            *parts: Keys: relative, without ``..``.

        Returns:
            The location, with the same tier and options.

        Raises:
            StorageError: A part is not a key.
        """
        below = replace(self, url=join(self.url, *parts))
        object.__setattr__(below, "silence", self.silence)
        return below

    def open(self, deadline_s: float | None = None) -> StorageBackend:
        """Open the store, without its tier.

        Args:
            deadline_s: Seconds that each request may take; None for the default of the backend.

        Returns:
            The backend. Nothing has been read or written yet.

        Raises:
            UnsupportedURLError: No backend serves the URL, or an option is not valid.
        """
        backend = open_backend(self.url, **self.storage_options)
        if deadline_s is not None:
            backend.deadline_s = deadline_s
        return backend

    def __str__(self) -> str:
        return without_userinfo(self.url)

    def __repr__(self) -> str:
        tier = "" if self.tier is None else f", tier={self.tier!r}"
        names = ", ".join(sorted(self.storage_options))
        return f"Location({str(self)!r}{tier}{', storage_options: ' if names else ''}{names})"


AnyLocation: TypeAlias = str | os.PathLike[str] | Location
"""What stands for a location: a path, a URL, or the location itself."""
