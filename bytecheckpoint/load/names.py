"""Map the names in a checkpoint to the names in the caller's state, and select the values of single ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..format.manifest import Manifest
from ..format.values import path_name
from ..frameworks.per_rank import choose_rank
from ..tensors.shards import Path
from .options import Fault, LoadRequest, renaming


class TargetNames:
    """The target's names for stored ones. A rename keeps every name in its section.

    Optimizer state follows its parameter: renaming ``model.a`` to ``model.b`` also renames ``optimizer.state.a.step``.
    ``unused`` are the keys of a mapping that no name has matched so far.
    """

    def __init__(self, manifest: Manifest, options: LoadRequest) -> None:
        self._manifest = manifest
        self._renames = options.rename is not None
        self._change = renaming(options.rename)
        self.unused = set(options.rename) if isinstance(options.rename, Mapping) else set[str]()
        self._optimizers = {section.name for section in manifest.sections if section.kind == "optimizer"}
        # Sections that may own an optimizer's parameters. The usual one comes first.
        modules = [section.name for section in manifest.sections if section.name not in self._optimizers]
        self._modules = sorted(modules, key=lambda name: name != "model")

    def of_tensor(self, section: str, fqn: str) -> str:
        """The target's name of a stored tensor."""
        if not self._renames:
            return fqn
        if section in self._optimizers and fqn.startswith("state."):
            parameter, key = self._split_state(fqn[len("state.") :])
            return f"state.{self._parameter(parameter)}.{key}"
        return _within(section, self._renamed(f"{section}.{fqn}"))

    def of_path(self, section: str, path: Path) -> Path:
        """The target's path of a stored value."""
        if not self._renames:
            return path
        if section in self._optimizers and len(path) > 1 and path[0] in ("state", "param_groups", "class", "order"):
            return (path[0], self._parameter(str(path[1])), *path[2:])
        old = path_name(path)
        if len(path) == 1 and section in self._optimizers and old.startswith("state."):
            return (self.of_tensor(section, old),)  # a tensor that was left out
        new = _within(section, self._renamed(f"{section}.{old}"))
        return path if new == old else _path_like(path, new.split("."))

    def _renamed(self, full: str) -> str:
        self.unused.discard(full)
        return self._change(full)

    def _split_state(self, name: str) -> tuple[str, str]:
        """Split ``<parameter>.<key>``. Both may contain dots, so the longest stored parameter name decides."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            parameter = ".".join(parts[:length])
            if self._is_stored(parameter) or any(self._is_stored(f"{s}.{parameter}") for s in self._modules):
                return parameter, ".".join(parts[length:])
        parameter, _, key = name.rpartition(".")
        return parameter, key

    def _parameter(self, fqn: str) -> str:
        """The new name of an optimizer's parameter. If it steps several modules, ``fqn`` begins with the section."""
        if self._is_stored(fqn):
            return self._renamed(fqn)
        section = next((s for s in self._modules if self._is_stored(f"{s}.{fqn}")), "model")
        return _within(section, self._renamed(f"{section}.{fqn}"))

    def _is_stored(self, full_name: str) -> bool:
        return self._manifest.tensor_row(self._manifest.resolve(full_name)) is not None


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


def _within(section: str, full: str) -> str:
    """The name inside the section."""
    return full[len(section) + 1 :] if full.startswith(f"{section}.") else full


def _path_like(old: Path, parts: Sequence[str]) -> Path:
    """A renamed path. Its integers stay integers if it has as many components as before."""
    if len(parts) != len(old):
        return tuple(parts)
    return tuple(
        int(new) if isinstance(was, int) and new.isdecimal() else new for was, new in zip(old, parts, strict=True)
    )
