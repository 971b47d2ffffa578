"""Find the stored tensor that fills a tensor best: the master weight, where one was saved, or the model's tensor."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ..errors import MismatchError
from ..frameworks.optimizer_state import MASTER, MASTERS_OF, state_name
from ..tensors.metadata import BasicMeta
from .stored import OpenCheckpoint

__all__ = ["StoredTensor", "TensorSources"]


class StoredTensor(NamedTuple):
    """A stored tensor: its full name in the checkpoint, its row, and its metadata."""

    name: str
    row: int
    meta: BasicMeta


class TensorSources:
    """The stored sources of the model's tensors, under the target's names.

    Mixed-precision optimizers save the copies that they step, the *master weights*, as ``state.<fqn>.master`` in the
    optimizer's section. They belong to the model's tensors even if the load does not request that section.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint

    def master_of(self, section: str, fqn: str) -> StoredTensor | None:
        """The master weight of a model's tensor; None if there is none.

        Raises ``MismatchError`` if several optimizers saved one.
        """
        found = self._masters.get((section, state_name(fqn, MASTER)), [])
        found = found + self._masters.get(("", state_name(f"{section}.{fqn}", MASTER)), [])
        if len(found) > 1:
            listed = ", ".join(master.name for master in found)
            raise MismatchError(
                f"{section}.{fqn}: the checkpoint has several master weights of this tensor: {listed}. Load into a "
                f"tensor of the stored dtype, or pass only one module of this name",
                [("value", f"{section}.{fqn}", f"several master weights: {listed}")],
            )
        return found[0] if found else None

    def best_of(self, section: str, fqn: str) -> StoredTensor | None:
        """What is stored of a model's tensor: its master weight, or else the tensor itself; None if neither is."""
        master = self.master_of(section, fqn)
        opened = self._checkpoint.sections.get(section)
        row = None if opened is None else opened.tensor_rows.get(fqn)
        if master is not None or row is None:
            return master
        tensors = self._checkpoint.manifest.tensors
        return StoredTensor(tensors.names[row], row, tensors.meta_of(row))

    @cached_property
    def _masters(self) -> dict[tuple[str, str], list[StoredTensor]]:
        """All master weights, by the section of the model (empty if the name has it) and by the target's names."""
        manifest, names = self._checkpoint.manifest, self._checkpoint.names
        found: dict[tuple[str, str], list[StoredTensor]] = {}
        for section in manifest.sections:
            if section.kind != "optimizer":
                continue
            rows = [
                row
                for row in manifest.section_tensors(section.name).tolist()
                if manifest.tensors.names[row].endswith(f".{MASTER}")
            ]
            for owner in self._owners(section.name) if rows else ():
                for row in rows:
                    full = manifest.tensors.names[row]
                    name = names.of_tensor(section.name, full[len(section.name) + 1 :])
                    master = StoredTensor(full, row, manifest.tensors.meta_of(row))
                    found.setdefault((owner, name), []).append(master)
        return found

    def _owners(self, section: str) -> set[str]:
        """The model's section to which an optimizer's master weights belong. Other sections may have the same names."""
        opened = self._checkpoint.sections.get(section)
        if opened is not None and MASTERS_OF in opened.contents.values:
            return {str(opened.contents.values[MASTERS_OF])}
        values = self._checkpoint.index.values(section=section)
        return {str(value.decode()) for value in values if value.path == MASTERS_OF}
