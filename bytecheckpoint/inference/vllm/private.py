"""Imports of what this library uses of vLLM in addition to its documented interfaces, which any release may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from ...errors import StateError

TESTED = "0.30 to 0.32"
"""The releases with which the tests run: everything with the newest, load format and pushes with each."""


@contextmanager
def imports_of(part: str) -> Iterator[None]:
    """Import inside of this what one part needs. Raises ``StateError`` when this vLLM lacks a name, and an import's
    error without vLLM."""
    try:
        yield
    except ImportError as error:
        if error.name == "vllm" and isinstance(error, ModuleNotFoundError):
            raise
        try:
            version = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            version = "of this environment"
        raise StateError(
            f"vLLM {version} lacks what {part!r} of this library needs: {error}; it was tested with {TESTED}. Other "
            "parts are not affected"
        ) from error
