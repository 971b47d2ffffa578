"""The tensors that a sender pushes: the live weights of a training job, or those of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.renaming import NameMap, Rename
from ...checkpoint.selection import Exclusion
from ...engine.tensor_bytes import box_view
from ...errors import NameNotFoundError, PlanError, StateError, UsageError
from ...frameworks.sections import resolve_sections
from ...tensors.geometry import Box
from ...tensors.shards import Shard, torch_dtype
from .layout import Write
from .messages import Table, pack


class PushSource(ABC):
    """One sender's tensors.

    ``table`` lists all tensors, and ``held`` the boxes that this sender can ``fetch``. Replicas of ``pinned`` tensors
    may differ, so all of their elements must come from one sender.
    """

    table: Table
    held: list[tuple[str, Box]]
    pinned: frozenset[str] = frozenset()
    version: int | str | None = None
    """What an engine that is the source calls these tensors."""
    checked_late = False
    """Whether values are checked when they are sent, and not before a stream begins."""
    unmatched: Sequence[str] = ()
    """What of a rename matches none of this sender's names."""
    unused: Sequence[str] = ()
    """The patterns of ``exclude`` that match none of this sender's names."""

    @abstractmethod
    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Return boxes, each of which lies inside a held one, in their own dtypes. They may be views of live memory."""

    def check_exact(self, writes: Sequence[Write]) -> None:  # noqa: B027 - most have the values that they describe
        """Raise ``MismatchError`` for writes of values that were rounded before."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the source holds."""

    def describe(self) -> bytes:
        """Return a description for the coordinator. Equal descriptions lead to equal plans."""
        held = [(name, *box) for name, box in self.held]
        return pack([self.table.packed, held, sorted(self.pinned)])

    def fingerprint(self) -> bytes:
        return xxhash.xxh3_128_digest(self.describe())


class StateSource(PushSource):
    """A section of a live state. Every rank pushes its own shards; nothing is gathered."""

    def __init__(
        self,
        state: Mapping[str, Any],
        section: str,
        *,
        framework: str | None,
        rank: int,
        world_size: int,
        rename: Rename | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        if section not in state:
            raise NameNotFoundError(f"the state has no section {section!r}; it has {', '.join(map(str, state))}")
        (found,) = resolve_sections(
            {section: state[section]}, framework=framework, rank=rank, world_size=world_size, allow_pickle=False
        )
        captured = found.capture()
        change, excluded = NameMap(rename or {}), Exclusion(exclude)
        renamed = {fqn: change(f"{section}.{fqn}") for fqn in (*captured.metas, *captured.aliases)}
        away = [fqn for fqn, (new, _) in renamed.items() if new != section]
        if away:
            raise UsageError(f"rename moves {section}.{away[0]} out of the section {section!r}, which is pushed")
        self.unmatched = sorted(change.unused)
        named = {
            fqn: new
            for fqn, (_, new) in renamed.items()
            if fqn not in captured.per_rank and not excluded(f"{section}.{new}")
        }
        self.unused = excluded.unused
        names = list(named.values())
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise StateError(f"two tensors have the same name after renaming: {', '.join(twice[:5])}")
        stored = {new: captured.aliases.get(fqn, fqn) for fqn, new in named.items()}
        self.table = Table(tuple((name, captured.metas[fqn]) for name, fqn in stored.items()))
        shards: dict[str, list[Shard]] = {}
        for shard in captured.shards:
            shards.setdefault(shard.fqn, []).append(shard)
        self._shards = {name: shards.get(fqn, []) for name, fqn in stored.items()}
        self.held = [(name, shard.box) for name, held in self._shards.items() for shard in held]
        self.pinned = frozenset(name for name, fqn in stored.items() if fqn in captured.pinned)

    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        return [self._view(name, box) for name, box in boxes]

    def _view(self, name: str, box: Box) -> torch.Tensor:
        for shard in self._shards.get(name, ()):
            if shard.box == box or shard.box.contains(box):
                return box_view(shard.tensor.detach(), box, shard.box)
        raise PlanError(f"{name} {box} is not held here; the plan belongs to another state")


class CheckpointSectionSource(PushSource):
    """A section of an open checkpoint. Senders that have opened the same checkpoint read a share each."""

    checked_late = True  # they would be read twice

    def __init__(self, checkpoint: Checkpoint, section: str, exclude: Sequence[str] = ()) -> None:
        excluded, found = Exclusion(exclude), checkpoint.section_rows(section, -1)
        self._checkpoint = checkpoint
        self._rows = {name: row for name, row in found.items() if not excluded(f"{section}.{name}")}
        self.unused = excluded.unused
        meta_of = checkpoint.manifest.tensors.meta_of
        self.table = Table(tuple((name, meta_of(row)) for name, row in self._rows.items()))
        self.held = [(name, Box.whole(meta.shape)) for name, meta in self.table.rows]

    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        meta_of = self._checkpoint.manifest.tensors.meta_of
        parts = []
        for name, box in boxes:
            row = self._rows[name]
            parts.append((row, box, torch.empty(box.lengths, dtype=torch_dtype(meta_of(row)))))
        self._checkpoint.read(parts)
        return [out for _, _, out in parts]


def source_of(
    what: Any,
    section: str,
    *,
    framework: str | None,
    rank: int,
    world_size: int,
    rename: Rename | None,
    exclude: Sequence[str] = (),
) -> PushSource:
    """Return the source for a module, a state (sections by name), or a checkpoint."""
    if isinstance(what, Checkpoint):
        return CheckpointSectionSource(what if rename is None else what.renamed(rename), section, exclude)
    state = {section: what} if isinstance(what, nn.Module) else what
    if not isinstance(state, Mapping):
        raise UsageError(f"a push needs a module, a state or a checkpoint, not {type(what).__name__}")
    of_rank: dict[str, Any] = {"framework": framework, "rank": rank, "world_size": world_size}
    return StateSource(state, section, **of_rank, rename=rename, exclude=exclude)
