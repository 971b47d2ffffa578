"""Use a store before and after a fork, in a separate process."""

from __future__ import annotations

import os
from typing import Any

from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["use_in_forked_child"]


def _use(rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    backend = FsspecBackend(url, **options)
    backend.put("object", b"from the parent")
    child = os.fork()
    if child == 0:
        try:
            assert backend.get("object") == b"from the parent"
            backend.put("child", b"from the child")
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert backend.get("object") == b"from the parent"
    if not url.startswith("memory"):
        assert backend.get("child") == b"from the child"
    backend.close()


def use_in_forked_child(url: str, options: dict[str, Any]) -> None:
    """Use a backend, fork, and use it in both processes."""
    with RankPool(1) as pool:
        pool.run(_use, url, {name: value for name, value in options.items() if name != "client"}, backend=None)
