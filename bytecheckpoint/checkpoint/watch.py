"""Wait for new checkpoints below a root, for processes such as evaluators that do not take part in training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedVersionError
from ..runtime.arguments import check_arguments
from ..storage_backends.base import StorageBackend
from .checkpoint import Checkpoint
from .discovery import CompleteCheckpoint, check_is_root, committed_names, is_exception_save, open_complete
from .lineage import abandoned_in
from .location import Location

_log = logging.getLogger(__name__)


def watch(
    root: Location,
    opened: Callable[[CompleteCheckpoint], Checkpoint],
    *,
    poll_s: float,
    timeout_s: float | None,
    stop: Callable[[], bool],
    include_existing: bool,
) -> Iterator[Checkpoint]:
    """See ``Checkpointer.watch``. ``opened`` opens what was found."""
    options = check_arguments({"poll_s": poll_s, "timeout_s": timeout_s})
    backend = root.open()
    children = check_is_root(backend)
    seen = {} if include_existing else dict.fromkeys(committed_names(backend, children), "")
    return (opened(one) for one in _new_checkpoints(root, backend, seen, options, stop))


def _new_checkpoints(
    root: Location, backend: StorageBackend, seen: dict[str, str], options: Mapping[str, Any], stop: Callable[[], bool]
) -> Iterator[CompleteCheckpoint]:
    """``seen`` maps the names of checkpoints that are not new to their attempts; to "" if these are not known yet."""
    timeout_s, never = options["timeout_s"], threading.Event()
    last = time.monotonic()
    while not stop():
        children = backend.list_children("")
        abandoned, names = abandoned_in(backend, children).attempts, committed_names(backend, children)
        # A checkpoint that was removed and saved again is a new one, and so is one that replaces an abandoned one.
        seen = {name: attempt for name, attempt in seen.items() if name in names}
        unknown = [name for name in names if seen.get(name) is None or (abandoned and seen[name] in {"", *abandoned})]
        found = [one for name in unknown if (one := _open(root, name, backend.deadline_s)) is not None]
        for one in sorted(found, key=lambda one: one.order_key()):
            before = seen.get(one.name)
            seen[one.name] = one.manifest.attempt
            if before == "" or one.manifest.attempt in abandoned or is_exception_save(one.manifest):
                continue
            yield one
            last = time.monotonic()
            if stop():
                return
        if timeout_s is not None and time.monotonic() - last >= timeout_s:
            return
        never.wait(options["poll_s"])


def _open(root: Location, name: str, deadline_s: float) -> CompleteCheckpoint | None:
    """The checkpoint, or None if it cannot be read yet or was removed; it is then tried again."""
    try:
        return open_complete(root, name, deadline_s)
    except UnsupportedVersionError:
        raise
    except CheckpointError as error:
        _log.info("%s/%s is not read yet: %s", root, name, error)
        return None
