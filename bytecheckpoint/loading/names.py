"""Select the values of single ranks."""

from __future__ import annotations

from collections.abc import Mapping

from ..format.values import path_name
from ..frameworks.per_rank import choose_rank
from ..tensors.shards import Path
from .options import Fault, LoadRequest


class RankChoices:
    """Which saved rank's own values this rank loads into one section, by the policy with the longest matching path.

    ``skipped`` collects the names that the policies leave unchanged, ``faults`` those that they refuse to load.
    """

    def __init__(
        self,
        section: str,
        options: LoadRequest,
        policies: Mapping[Path, str],
        *,
        saved_world_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.skipped: set[str | Path] = set()
        self.faults: list[Fault] = []
        self._section, self._options = section, options
        self._sizes = (saved_world_size, world_size)
        self._policies = {(): options.per_rank, **policies}
        self._chosen = {p: choose_rank(saved_world_size, rank, world_size, p) for p in self._policies.values()}

    @property
    def ranks(self) -> set[int]:
        """The saved ranks whose values must be read."""
        ranks = {rank for rank in self._chosen.values() if rank is not None}
        saved_world_size, world_size = self._sizes
        # Under the policy "error", rank 0's values are read to name those that the load would lose.
        return ranks | {0} if saved_world_size != world_size else ranks

    def choose(self, name: str | Path, path: Path) -> int | None:
        """The saved rank whose ``name`` is loaded; None, which is recorded, if its policy selects no rank."""
        policy = next(self._policies[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._policies)
        rank = self._chosen[policy]
        if rank is None:
            self.skipped.add(name)
            if policy == "error":
                self._refuse(name)
        return rank

    def _refuse(self, name: str | Path) -> None:
        full = f"{self._section}.{name if isinstance(name, str) else path_name(name)}"
        saved_world_size, world_size = self._sizes
        fault = Fault("per_rank", full, f"saved by {saved_world_size} rank(s), loaded by {world_size}")
        if fault not in self.faults and self._options.selection.selects(full):
            self.faults.append(fault)
