"""The rules for keys.

Every backend checks each key that it receives, so that a hostile name in a manifest is rejected here.
"""

from __future__ import annotations

import re

from ..errors import StorageError

MAX_KEY_BYTES = 1024
"""The longest key in UTF-8 bytes: the limit of S3, GCS and Azure."""

MAX_COMPONENT_BYTES = 255
"""The longest component of a key in UTF-8 bytes: the limit of ext4, XFS, Lustre and HDFS."""

TEMPORARY_PREFIX = ".bcp-tmp-"
"""The prefix of temporary files, on stores where an object is first written under another name."""

_CONTROL = re.compile("[\x00-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_key(key: str) -> None:
    """Raise ``StorageError`` unless a key can name an object below the root on every kind of store.

    A key is relative, has ``/`` between its components, and no component is empty, ``.`` or ``..``. Backslashes and
    control characters are rejected, because some stores and terminals interpret them.

    Args:
        key: The key to check.

    Raises:
        StorageError: The key breaks a rule; the message names it.
    """
    fault = _fault(key)
    if fault:
        raise StorageError(f"{_quoted(key)} is not a storage key: {fault}")


def is_object_key(key: str) -> bool:
    """Whether a key can name an object: ``check_key`` accepts it, and it is not the name of a temporary file."""
    return not _fault(key) and not key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def check_prefix(prefix: str) -> None:
    """Check that keys can start with a prefix.

    Args:
        prefix: A prefix, which may be empty and may end inside a component: ``"runs/step-1"`` is a prefix of
            ``"runs/step-1000/manifest"``.

    Raises:
        StorageError: The prefix breaks a rule; the message names it.
    """
    head, _, tail = prefix.rpartition("/")
    fault = (_fault(head) if "/" in prefix else "") or _character_fault(tail)
    if fault:
        raise StorageError(f"{_quoted(prefix)} is not a prefix of storage keys: {fault}")


def check_children_prefix(prefix: str) -> None:
    """Check that a prefix ends at a component, so that its children can be listed.

    Args:
        prefix: Empty, or a prefix that ends in ``/`` and that ``check_prefix`` accepts.

    Raises:
        StorageError: The prefix breaks a rule; the message names it.
    """
    if prefix and not prefix.endswith("/"):
        raise StorageError(f"{_quoted(prefix)} must be empty or end in '/' to list its children")
    check_prefix(prefix)


def _fault(key: str) -> str:
    if not key:
        return "it is empty"
    if key.startswith("/"):
        return "it is absolute"
    fault = _character_fault(key)
    if fault:
        return fault
    if len(key.encode()) > MAX_KEY_BYTES:
        return f"it is longer than {MAX_KEY_BYTES} bytes"
    for component in key.split("/"):
        if not component:
            return "it has an empty component"
        if component in (".", ".."):
            return f"it has the component {component!r}"
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            return f"a component is longer than {MAX_COMPONENT_BYTES} bytes"
    return ""


def _character_fault(text: str) -> str:
    if "\\" in text:
        return "it has a backslash"
    if _CONTROL.search(text):
        return "it has a NUL or another control character"
    if _SURROGATE.search(text):
        return "it cannot be written as UTF-8"
    return ""


def _quoted(key: str) -> str:
    return ascii(key if len(key) <= 200 else key[:200] + "...")
