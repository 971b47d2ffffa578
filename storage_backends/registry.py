"""Open a backend by its URL.

Paths and the schemes ``file`` and ``local`` are served by local files, ``memory`` by this process's memory. Another
package serves a scheme through the entry point group ``bytecheckpoint.storage_backends`` (name: the scheme; value: a
class with ``from_url``). ``s3`` and ``s3a`` have a backend on s3fs's client, ``http`` and ``https`` a read-only one.
``gs`` and ``az`` have one on obstore, if it is installed. All other schemes, and every chain (``dir::s3://...``), are
passed to fsspec.
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedURLError
from ..version import install_command
from .base import StorageBackend
from .keys import check_key, is_object_key
from .obstore.roots import SCHEMES, NotServedError, store_root_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "bytecheckpoint.storage_backends"

_log = logging.getLogger(__name__)

_S3 = frozenset({"s3", "s3a"})
_HDFS = "pip install hdfs-native"  # with pyarrow's client, which fsspec proposes, nothing is conditional
_GCS, _AZURE = "pip install gcsfs", "pip install adlfs"
_COMMANDS = {"hdfs": _HDFS, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
"""What to install for a scheme, where fsspec's own hint is not a command."""

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
    backend = _open(url_text(url), options)
    backend.options = options
    return backend


def open_like(backend: StorageBackend, url: str) -> StorageBackend:
    """Open another root in the same way as a backend: with its options and its deadline.

    Args:
        backend: A backend that ``open_backend`` has opened.
        url: The root to open, on the same kind of store.

    Returns:
        The backend.

    Raises:
        UnsupportedURLError: The URL, or an option for it, is not valid.
    """
    other = backend.open_other(url) or open_backend(url, **backend.options)
    other.deadline_s = backend.deadline_s
    return other


def folder_name(backend: StorageBackend) -> str:
    """Return the name of the root of a backend within its parent, links resolved.

    Args:
        backend: The backend.

    Returns:
        The last component of its path; empty if it has no parent, or the component cannot be part of a key.
    """
    return _split_folder(backend)[1]


def parent_url(backend: StorageBackend) -> str:
    """Return the URL of the folder that the root of a backend is in, links resolved.

    Args:
        backend: The backend.

    Returns:
        The URL; empty if the root has no parent, or is a chain.
    """
    return _split_folder(backend)[0]


def _split_folder(backend: StorageBackend) -> tuple[str, str]:
    """Split the URL of a backend into that of its parent and its name; both are empty if there is no parent."""
    if _CHAIN.match(backend.url):
        return "", ""
    before, path, _ = _split_at_path(backend.url)
    if not before:
        path = os.path.realpath(path)
    parent, slash, name = path.rstrip("/").rpartition("/")
    parent = parent or ("" if before else slash)
    return (before + parent, name) if parent and is_object_key(name) else ("", "")


def _open(text: str, options: dict[str, Any]) -> StorageBackend:
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
        from .http import HttpBackend

        return HttpBackend(text, **options)
    if scheme in SCHEMES:
        return _open_cloud(scheme, text, options)
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


def absolute_url(url: object) -> str:
    """Return a URL or path that means the same in every working directory and for every user.

    Args:
        url: A path or a URL.

    Returns:
        The URL; of a path or a file URL, the absolute path.

    Raises:
        StorageError: The path is relative, and the working directory was removed.
        UnsupportedURLError: As ``url_text``, and for a file URL that is not valid.
    """
    from .local.backend import LocalBackend, absolute_path, local_path

    text = url_text(url)
    if _CHAIN.match(text) or _scheme_of(text) not in ("", *LocalBackend.schemes):
        return text
    path = absolute_path(local_path(text))
    return f"{path}/" if text.endswith("/") and path != "/" else path  # a slash at the end names a folder


@cache
def plugin_schemes() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by scheme. They are looked up once and not imported."""
    from importlib.metadata import entry_points  # not above: most roots are local, and need none

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


def _open_cloud(scheme: str, url: str, options: dict[str, Any]) -> StorageBackend:
    """Open a root in GCS or Azure with obstore, if it serves the URL and the options, and otherwise with fsspec."""
    client, rest = options.get("client"), {name: value for name, value in options.items() if name != "client"}
    if client not in (None, "fsspec", "obstore"):
        raise UnsupportedURLError(f"{url!r}: client={client!r} is not known; pass 'obstore' or 'fsspec'")
    if client == "fsspec":
        return _open_with_fsspec(scheme, url, rest)
    if find_spec("obstore") is None:
        if client == "obstore":
            raise UnsupportedURLError(f"client='obstore' ({url!r}) needs obstore: {install_command('fast')}")
        return _open_with_fsspec(scheme, url, rest, command=install_command("fast"))
    try:
        root = store_root_of(url, rest, is_chosen=client == "obstore")
        from .obstore.backend import ObstoreBackend, is_inherited

        if is_inherited():
            raise NotServedError("this process was forked from one that has used it; start it with 'spawn'")
        return ObstoreBackend(url, root)
    except NotServedError as error:
        reason = str(error)
    if client == "obstore":
        raise UnsupportedURLError(f"obstore cannot serve {url!r}: {reason}")
    _log_choice(scheme, reason)
    try:
        return _open_with_fsspec(scheme, url, rest)
    except UnsupportedURLError as error:
        raise UnsupportedURLError(f"{error}. obstore is installed, but cannot serve it: {reason}") from None


@cache
def _log_choice(scheme: str, reason: str) -> None:
    """Say once why fsspec serves a scheme."""
    _log.info("%s://: fsspec is used instead of obstore, which is faster: %s", scheme, reason)


def _open_with_fsspec(scheme: str, url: str, options: dict[str, Any], *, command: str = "") -> StorageBackend:
    """Open a root with fsspec, or with our own client for S3. ``command`` installs what is missing."""
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
        if scheme == "hdfs" and find_spec("hdfs_native") is None and find_spec("pyarrow") is None:
            raise ImportError("no client for HDFS")  # which fsspec's class would import later
    except ImportError as error:
        hint = known_implementations.get(scheme, {}).get("err", f"install the fsspec package for {scheme!r}")
        command = command or (install_command("s3") if scheme in _S3 else _COMMANDS.get(scheme, hint))
        raise UnsupportedURLError(f"{scheme}:// ({url!r}) needs a package that is not installed: {command}") from error
    if scheme in _S3 and "::" not in url:
        from .s3.backend import S3Backend

        return S3Backend(url, **options)
    return FsspecBackend(url, **options)


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
