"""Faults of the store behind a tier: it fails uploads, or does not answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bytecheckpoint import telemetry
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends.local.backend import LocalBackend

__all__ = ["failing_uploads", "opens_silent_store"]


@contextmanager
def failing_uploads(at: str = "transfer") -> Iterator[None]:
    """Let the uploads of this process fail in a step until the block ends."""

    def observe(name: str, event: str) -> None:
        if (name, event) == (f"upload.{at}", "enter"):
            raise StorageError("the store is broken")

    stop = telemetry.observe(observe)
    try:
        yield
    finally:
        stop()


def opens_silent_store(store: str, limits: list[float]) -> Callable[..., LocalBackend]:
    """Return a function in place of ``open_backend``: what is below ``store`` does not answer.

    ``limits`` receives the deadlines with which it is asked.
    """

    def silent(self: LocalBackend, *_: object, **__: object) -> Any:
        limits.append(self.deadline_s)
        error = StorageError("the store did not answer")
        error.is_late = True
        raise error

    class Silent(LocalBackend):
        get = list = list_children = silent

    return lambda path, **_: (Silent if os.fspath(path).startswith(store) else LocalBackend)(path)
