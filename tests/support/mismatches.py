"""Inspect the faults of a caught ``MismatchError``."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import MismatchError


def faults_of(caught: pytest.ExceptionInfo[MismatchError], kind: str) -> list[str]:
    """Return the names of the faults of one kind, sorted."""
    return sorted(name for found, name, _ in caught.value.faults if found == kind)
