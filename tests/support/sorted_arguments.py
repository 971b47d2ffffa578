"""Sort the arguments of a parametrized test into those of a function and those of its options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import bytecheckpoint as bcp
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.saving.options import SaveRequest

__all__ = ["loading", "managing", "save_in_job", "saving"]


def saving(**given: Any) -> dict[str, Any]:
    """Return arguments for ``bytecheckpoint.save``."""
    return _sorted(given, options=bcp.SaveOptions)


def loading(**given: Any) -> dict[str, Any]:
    """Return arguments for ``bytecheckpoint.load``."""
    return _sorted(given, options=bcp.LoadOptions)


def managing(**given: Any) -> dict[str, Any]:
    """Return arguments for ``bytecheckpoint.CheckpointManager``."""
    return _sorted(given, job=bcp.JobOptions, save=bcp.SaveOptions)


def save_in_job(path: Any, state: dict[str, Any], *, use_async: bool = False, **given: Any) -> bcp.SaveHandle:
    """Save with the fields of ``SaveRequest`` that only a manager sets, such as ``job``."""
    arguments = saving(**given)
    request = SaveRequest.of(arguments.pop("options", None), location=bcp.Location.of(path), **arguments)
    return session_of().save(lambda: request, lambda: state, is_async=use_async, deadline_s=None)


def _sorted(given: dict[str, Any], **kinds: type) -> dict[str, Any]:
    for name, kind in kinds.items():
        known = {field.name for field in fields(kind)}
        found = {key: value for key, value in given.items() if key in known}
        given = {key: value for key, value in given.items() if key not in known}
        if found:
            given[name] = kind(**found)
    return given
