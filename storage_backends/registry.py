"""Open a backend by its URL.

Paths and the schemes ``file`` and ``local`` are served by local files, ``memory`` by this process's memory. Another
package serves a scheme through the entry point group ``bytecheckpoint.storage_backends`` (name: the scheme; value: a
class with ``from_url``). ``s3`` and ``s3a`` have a backend on s3fs's client, ``http`` and ``https`` a read-only one.
All other schemes, and every chain (``dir::s3://...``), are passed to fsspec.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import UnsupportedURLError
from .base import StorageBackend
from .keys import check_key

__all__ = ["ENTRY_POINT_GROUP", "join", "open_backend", "plugin_schemes", "url_text"]

ENTRY_POINT_GROUP = "bytecheckpoint.storage_backends"

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?:://[^:]*)?::")
_ONE_SLASH = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")


def open_backend(url: str | os.PathLike[str], **options: Any) -> StorageBackend:
    """Return the backend whose root is a path or URL.

    Args:
        url: A path, or a URL such as ``s3://bucket/prefix``.
        **options: Options of the backend; for fsspec ``endpoint_url=``, ``key=``, ``token=``, ...

    Returns:
        The backend. Nothing has been read or written yet.

    Raises:
        UnsupportedURLError: No backend serves the scheme, or the URL or an option is not valid. The message lists the
            known schemes.

    Example:
        Read the manifest of a checkpoint::

            backend = open_backend("s3://runs/7b/step-1000", endpoint_url="http://localhost:9000")
            manifest = backend.get("manifest.msgpack")
    """
    text = url_text(url)
    if _CHAIN.match(text):
        return _open_with_fsspec(text.partition("::")[0].partition("://")[0], text, options)
    scheme = _scheme_of(text)
    if scheme in ("", "file", "local"):
        from .local.backend import LocalBackend

        return LocalBackend.from_url(text, **options)
    if scheme == "memory":
        from .memory import MemoryBackend

        return MemoryBackend.from_url(text, **options)
    if scheme in plugin_schemes():
        return _load_plugin(scheme).from_url(text, **options)
    if scheme in ("http", "https"):
        return _open_http(text, options)
    return _open_with_fsspec(scheme, text, options)


def join(url: str | os.PathLike[str], *parts: str) -> str:
    """Append keys to a URL or path.

    Args:
        url: A path, a URL or a chain. In a chain, the first link with a path is extended.
        *parts: Keys: relative, without ``..``.

    Returns:
        The extended URL or path.

    Raises:
        StorageError: A part is not a key.
    """
    text = url_text(url)
    for part in parts:
        check_key(part)
    if not parts:
        return text
    head, grown, tail = _split_at_path(text)
    below = "/".join(parts)
    if not grown:
        return head + below + tail
    return head + grown.rstrip("/") + "/" + below + tail


def url_text(url: object) -> str:
    """Return a URL or path as a string.

    Args:
        url: A path or a URL.

    Returns:
        The string.

    Raises:
        UnsupportedURLError: It is not a string or a ``PathLike`` of one, it is empty, or it contains a zero byte.
    """
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:
        raise UnsupportedURLError(f"not a URL or path: {url!r}")
    return text


@cache
def plugin_schemes() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by scheme. They are looked up once and not imported."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        same_scheme = found.setdefault(entry.name, [])
        # A distribution appears twice if two entries of sys.path lead to it.
        if entry.value not in [other.value for other in same_scheme]:
            same_scheme.append(entry)
    return found


def _load_plugin(scheme: str) -> type[StorageBackend]:
    entry, *others = plugin_schemes()[scheme]
    if others:
        claims = ", ".join(other.value for other in (entry, *others))
        raise UnsupportedURLError(f"several packages serve {scheme}:// ({claims}); uninstall all but one")
    origin = f"the storage backend for {scheme}:// ({entry.value} of {entry.dist.name if entry.dist else 'unknown'})"
    try:
        backend = entry.load()
    except Exception as error:
        raise UnsupportedURLError(f"{origin} cannot be imported: {error}; repair or uninstall that package") from error
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        raise UnsupportedURLError(f"{origin} is not a StorageBackend; repair or uninstall that package")
    return backend


def _open_http(url: str, options: dict[str, Any]) -> StorageBackend:
    try:
        from .http import HttpBackend
    except ImportError as error:
        raise UnsupportedURLError("http:// needs a package that is not installed: pip install urllib3") from error
    return HttpBackend.from_url(url, **options)


def _open_with_fsspec(scheme: str, url: str, options: dict[str, Any]) -> StorageBackend:
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    from .fsspec.backend import FsspecBackend

    if scheme not in available_protocols():
        known = sorted({"file", "memory", *plugin_schemes(), *available_protocols()})
        raise UnsupportedURLError(
            f"no storage backend serves {scheme}:// ({url!r}). Known schemes: {', '.join(known)}. Install a package "
            f"that registers {scheme!r} with fsspec, or one with an entry point in {ENTRY_POINT_GROUP!r}"
        )
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        hint = known_implementations.get(scheme, {}).get("err", f"install the fsspec package for {scheme!r}")
        raise UnsupportedURLError(f"{scheme}:// ({url!r}) needs a package that is not installed: {hint}") from error
    if scheme in ("s3", "s3a") and "::" not in url:
        from .s3.backend import S3Backend

        return S3Backend.from_url(url, **options)
    return FsspecBackend.from_url(url, **options)


def _scheme_of(text: str) -> str:
    found = _SCHEME.match(text)
    if found:
        return found["scheme"].lower()
    slip = _ONE_SLASH.match(text)
    if slip:
        raise UnsupportedURLError(
            f"{text!r} has one slash after the colon, but a URL has two ({slip['scheme']}://...). pathlib.Path removes "
            f"one, so pass URLs as str. For a directory of that name pass ./{text}"
        )
    return ""


def _split_at_path(text: str) -> tuple[str, str, str]:
    """Split ``text`` into what precedes the path that ``join`` extends, that path, and what follows it."""
    links = text.split("::") if _CHAIN.match(text) else [text]
    at = next((index for index, link in enumerate(links) if "://" in link), len(links) - 1)
    found = _SCHEME.match(links[at])
    head = found.group() if found else ""
    before = "".join(link + "::" for link in links[:at])
    after = "".join("::" + link for link in links[at + 1 :])
    return before + head, links[at][len(head) :], after
