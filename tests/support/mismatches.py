"""What a ``MismatchError`` that a test has caught lists."""

from __future__ import annotations

import pytest

from bytecheckpoint.errors import MismatchError


def faults_of(caught: pytest.ExceptionInfo[MismatchError], kind: str) -> list[str]:
    """The names of its faults of one kind, sorted."""
    return sorted(name for found, name, _ in caught.value.faults if found == kind)
