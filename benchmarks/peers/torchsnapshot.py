"""``torchsnapshot``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from torchsnapshot import Snapshot, StateDict

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["TorchSnapshot"]


class TorchSnapshot(Contestant):
    """Uses the defaults: tensors are chunked and batched, and restored in place."""

    def __init__(self, *, background: bool = False) -> None:
        self._background = background

    def save(self, path: str, state: Tensors) -> Pending | None:
        if self._background:
            return Pending(Snapshot.async_take(path=path, app_state=_app_state(state)).wait)
        Snapshot.take(path=path, app_state=_app_state(state))
        return None

    def load(self, path: str, state: Tensors) -> None:
        Snapshot(path).restore(app_state=_app_state(state))

    def versions(self) -> Mapping[str, str]:
        return {"torchsnapshot": version("torchsnapshot")}


def _app_state(state: Tensors) -> dict[str, StateDict]:
    return {section: StateDict(**tensors) for section, tensors in state.sections.items()}
