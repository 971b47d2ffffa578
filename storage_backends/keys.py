"""Which strings are keys. Every backend checks each key it is given, so a hostile name in a manifest stops here."""

from __future__ import annotations

from ..errors import StorageError

__all__ = [
    "MAX_COMPONENT_BYTES",
    "MAX_KEY_BYTES",
    "TEMPORARY",
    "check_children_prefix",
    "check_key",
    "check_prefix",
    "is_object_key",
]

MAX_KEY_BYTES = 1024
"""UTF-8 bytes of a whole key: what S3, GCS and Azure take."""

MAX_COMPONENT_BYTES = 255
"""UTF-8 bytes between two slashes: what ext4, XFS, Lustre and HDFS take."""


TEMPORARY = ".bcp-tmp-"
"""What the names of temporary files begin with, on stores where an object has to be written under another name."""


def check_key(key: str) -> None:
    """Raise ``StorageError`` unless ``key`` names an object below the root on every kind of store.

    A key is relative, has ``/`` between its components, and no component is empty, ``.`` or ``..``. Backslashes and
    control characters are refused everywhere, because some store or some terminal gives them a meaning.
    """
    fault = _fault(key)
    if fault:
        raise StorageError(f"not a storage key: {_shown(key)}: {fault}")


def is_object_key(key: str) -> bool:
    """Whether an object may be found there: ``check_key`` accepts it, and it is no temporary file's."""
    return not _fault(key) and not key.rpartition("/")[2].startswith(TEMPORARY)


def check_prefix(prefix: str) -> None:
    """Raise ``StorageError`` unless keys could start with ``prefix``. It may end inside a component."""
    head, _, tail = prefix.rpartition("/")
    fault = (_fault(head) if "/" in prefix else "") or _character_fault(tail)
    if fault:
        raise StorageError(f"not a prefix of storage keys: {_shown(prefix)}: {fault}")


def check_children_prefix(prefix: str) -> None:
    """As ``check_prefix``, for a prefix that must be "" or end in "/"."""
    if prefix and not prefix.endswith("/"):
        raise StorageError(f"a prefix whose children are listed is empty or ends in '/': {_shown(prefix)}")
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
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        return "it has a NUL or another control character"
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        return "it cannot be written as UTF-8"
    return ""


def _shown(key: str) -> str:
    return ascii(key if len(key) <= 200 else key[:200] + "...")
