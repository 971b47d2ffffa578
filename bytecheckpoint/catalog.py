"""What a checkpoint offers one rank: names after renaming and rank selection, and who has claimed which of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoint import encoded_values
from .errors import StateError
from .frameworks.per_rank import choose_rank
from .manifest import Manifest
from .matching import Fault, Rules
from .metadata import BasicMeta
from .sections import split_rank_name
from .shards import Path, StoredSection
from .storage_backends.base import StorageBackend
from .values import decode_value, path_name

__all__ = ["Catalog"]

Bits = npt.NDArray[np.bool_]

_ATOMS = (bool, int, float, str, type(None))


class Catalog:
    """One rank's view of a manifest during one load.

    Tensors and shared values that no rank claims are unexpected; claims travel as one bit per stored name.
    """

    def __init__(
        self, backend: StorageBackend, manifest: Manifest, rules: Rules, rank: int, world_size: int, allow_pickle: bool
    ) -> None:
        self.manifest = manifest
        self.faults: list[Fault] = []
        self._backend, self._rules = backend, rules
        self._rank, self._world_size, self._allow_pickle = rank, world_size, allow_pickle
        self._sections: dict[str, StoredSection] = {}
        self._rows: dict[str, dict[str, int]] = {}
        self._skipped: dict[str, set[str | Path]] = {}
        self._claimed: Bits = np.zeros(len(manifest.tensors), np.bool_)
        self._values: list[tuple[str, Path]] = []
        self._claimed_values: set[tuple[str, Path]] = set()
        self._own_values: set[tuple[str, Path]] = set()
        self._own_tensors: dict[str, int] = {}

    def open_section(self, name: str, policies: Mapping[Path, str], default_policy: str) -> StoredSection:
        """Read the section's values and name everything as the target knows it.

        A section that is not stored is one ``missing`` fault and an empty ``StoredSection``; so is, with no fault and
        nothing read, one that the patterns leave out.
        """
        selected = self._rules.selects_some_of(name)
        if not self.has(name):
            stored = ", ".join(section.name for section in self.manifest.sections)
            if self._rules.strictness(name) != "lenient" and selected:
                self.faults.append(("missing", name, f"no such section; the checkpoint has {stored}"))
        self._skipped[name] = set()
        if not (selected and self.has(name)):
            self._sections[name], self._rows[name] = StoredSection({}, {}, {}), {}
            return self._sections[name]
        choose = _RankChoice(self.manifest.world_size, self._rank, self._world_size, policies, default_policy)
        metas, rows = self._tensors(name, choose)
        values = self._section_values(name, choose)
        aliases = self._aliases(name, metas, rows)
        self._rows[name] = rows
        self._sections[name] = StoredSection(metas, values, aliases)
        return self._sections[name]

    def stored(self, section: str) -> StoredSection:
        return self._sections[section]

    def has(self, section: str) -> bool:
        """Whether the section is stored at all."""
        return self.manifest.section_index(section) is not None

    def row(self, section: str, fqn: str) -> int | None:
        """The manifest's tensor row that the target calls ``fqn``; None where nothing is stored for it."""
        return self._rows[section].get(fqn)

    def skips(self, section: str, name: str | Path) -> bool:
        """Whether this name is left alone because of a per-rank policy."""
        return name in self._skipped[section]

    def names(self) -> list[str]:
        """Every stored name, as the target would call it; for suggestions."""
        return [f"{s}.{fqn}" for s, rows in self._rows.items() for fqn in rows] + [
            f"{s}.{path_name(path)}" for s, stored in self._sections.items() for path in stored.values
        ]

    # -- claims --------------------------------------------------------------------------------------------------

    def claim_tensors(self, section: str, names: Iterable[str]) -> None:
        rows = self._rows[section]
        self._claimed[[rows[name] for name in names if name in rows]] = True

    def claim_values(self, section: str, paths: Iterable[Path]) -> None:
        self._claimed_values.update((section, path) for path in paths)

    def claims(self) -> list[Any]:
        """This rank's claims as plain data for rank 0."""
        values = np.array([value in self._claimed_values for value in self._values], np.bool_)
        own = [f"{s}.{path_name(p)}" for s, p in self._own_values - self._claimed_values]
        own += [name for name, row in self._own_tensors.items() if not self._claimed[row]]
        return [np.packbits(self._claimed).tobytes(), np.packbits(values).tobytes(), sorted(own)]

    def unclaimed(self, claims: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
        """``(section, full name)`` of what was stored but claimed by no rank, among the sections asked for."""
        tensors = _anyone([claim[0] for claim in claims], len(self._claimed)) | ~self._offered()
        values = _anyone([claim[1] for claim in claims], len(self._values))
        left: list[tuple[str, str]] = []
        for row in np.flatnonzero(~tensors).tolist():
            section = self.manifest.tensors.section_of(row)
            name = f"{section}.{self._renamed(section, self.manifest.tensors.fqn_of(row))}"
            if self._rules.selects(name):
                left.append((section, name))
        left += [(s, f"{s}.{path_name(p)}") for (s, p), taken in zip(self._values, values.tolist()) if not taken]
        left += sorted({(name.partition(".")[0], name) for claim in claims for name in claim[2]})
        return left

    def _offered(self) -> Bits:
        """Tensors that some rank should want: shared ones of the sections asked for."""
        asked = np.array([section.name in self._sections for section in self.manifest.sections], np.bool_)
        if not len(asked):
            return np.zeros(len(self._claimed), np.bool_)
        return asked[self.manifest.tensors.section] & (self.manifest.scope < 0)

    # -- names ---------------------------------------------------------------------------------------------------

    def _tensors(self, section: str, choose: _RankChoice) -> tuple[dict[str, BasicMeta], dict[str, int]]:
        tensors = self.manifest.tensors
        stored = self.manifest.section_tensors(section)
        fqns = [tensors.names[row][len(section) + 1 :] for row in stored.tolist()]
        scopes = self.manifest.scope[stored]
        if self._rules.rename is None and self._rules.selects_all and not (scopes >= 0).any():
            return dict(zip(fqns, tensors.metas(stored))), dict(zip(fqns, stored.tolist()))
        metas: dict[str, BasicMeta] = {}
        rows: dict[str, int] = {}
        for row, fqn, scope, meta in zip(stored.tolist(), fqns, scopes.tolist(), tensors.metas(stored)):
            if scope >= 0:
                plain, _ = split_rank_name(fqn)
                if self._chosen_rank(section, plain, tuple(plain.split(".")), choose) != scope:
                    continue
                fqn = plain
            name = self._renamed(section, fqn)
            if self._rules.selects(f"{section}.{name}"):
                if name in rows:
                    raise _both_renamed(section, tensors.fqn_of(rows[name]), tensors.fqn_of(row), name)
                metas[name], rows[name] = meta, row
                if scope >= 0:
                    self._own_tensors[f"{section}.{name}"] = row
        return metas, rows

    def _aliases(self, section: str, metas: dict[str, BasicMeta], rows: dict[str, int]) -> dict[str, str]:
        aliases: dict[str, str] = {}
        prefix = f"{section}."
        for full_alias, full_name in self.manifest.aliases:
            if not full_alias.startswith(prefix):
                continue
            alias, name = full_alias[len(prefix) :], full_name[len(prefix) :]
            alias, name = self._renamed(section, alias), self._renamed(section, name)
            row = self.manifest.tensor_row(full_name)
            if row is not None and self._rules.selects(prefix + alias):
                metas.setdefault(alias, self.manifest.tensors.meta_of(row))
                rows.setdefault(alias, row)
                aliases[alias] = name
        return aliases

    def _section_values(self, section: str, choose: _RankChoice) -> dict[Path, Any]:
        shared, _ = encoded_values(self._backend, self.manifest, section, -1)
        stored_as: dict[Path, Path] = {}
        for path in shared:
            name = self._renamed_path(section, path)
            if self._selects(section, name) and stored_as.setdefault(name, path) != path:
                raise _both_renamed(section, path_name(stored_as[name]), path_name(path), path_name(name))
        raw = {name: shared[path] for name, path in stored_as.items()}
        self._values += [(section, path) for path in sorted(raw, key=_path_key)]
        for path, data in self._own(section, choose).items():
            raw[path] = data
            self._own_values.add((section, path))
        return self._decoded(section, raw)

    def _decoded(self, section: str, raw: Mapping[Path, bytes]) -> dict[Path, Any]:
        values: dict[Path, Any] = {}
        seen: dict[bytes, dict[Any, Any]] = {}
        for path, data in raw.items():
            # The parameters of a group were stored with its options each: what reads alike is read once.
            if data in seen:
                values[path] = dict(seen[data])
                continue
            value = decode_value(data, allow_pickle=self._allow_pickle, where=f"{section}.{path_name(path)}")
            values[path] = value
            if _copies_whole(value):
                seen[data] = value
        return values

    def _own(self, section: str, choose: _RankChoice) -> dict[Path, bytes]:
        """Values stored for single ranks, each from the rank that the policy in force chooses."""
        own: dict[Path, bytes] = {}
        for rank in sorted({int(r) for r in self.manifest.files.rank}):
            if rank not in choose.ranks:
                continue
            for path, data in encoded_values(self._backend, self.manifest, section, rank)[1].items():
                name = self._renamed_path(section, path)
                if self._selects(section, name) and self._chosen_rank(section, path, path, choose) == rank:
                    own[name] = data
        return own

    def _chosen_rank(self, section: str, name: str | Path, path: Path, choose: _RankChoice) -> int | None:
        """The saved rank whose ``name`` is taken; None where it is left alone or is a fault, which is then noted."""
        rank, policy = choose(path)
        if rank is None:
            self._skipped[section].add(name)
        if policy == "error" and rank is None:
            full = f"{section}.{name if isinstance(name, str) else path_name(name)}"
            detail = f"saved by {self.manifest.world_size} rank(s), loaded by {self._world_size}"
            if ("per_rank", full, detail) not in self.faults and self._rules.selects(full):
                self.faults.append(("per_rank", full, detail))
        return rank

    def _selects(self, section: str, path: Path) -> bool:
        return self._rules.selects_all or self._rules.selects(f"{section}.{path_name(path)}")

    def _renamed(self, section: str, fqn: str) -> str:
        """A stored tensor name as the target calls it; optimizer state follows its parameter's renaming."""
        if self._rules.rename is None:
            return fqn
        if self._is_optimizer(section) and fqn.startswith("state."):
            parameter, key = self._split_state(fqn[len("state.") :])
            return f"state.{self._renamed_parameter(parameter)}.{key}"
        return _within(section, self._rules.renamed(f"{section}.{fqn}"))

    def _renamed_path(self, section: str, path: Path) -> Path:
        if self._rules.rename is None:
            return path
        if self._is_optimizer(section) and len(path) > 1 and path[0] in ("state", "param_groups", "order"):
            return (path[0], self._renamed_parameter(str(path[1])), *path[2:])
        old = path_name(path)
        new = _within(section, self._rules.renamed(f"{section}.{old}"))
        return path if new == old else _path_like(path, new.split("."))

    def _split_state(self, name: str) -> tuple[str, str]:
        """A parameter's name and the key of its state, which has dots of its own where the state is nested."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            parameter = ".".join(parts[:length])
            if self._stores(parameter) or any(self._stores(f"{s}.{parameter}") for s in self._module_sections()):
                return parameter, ".".join(parts[length:])
        parameter, _, key = name.rpartition(".")
        return parameter, key

    def _renamed_parameter(self, fqn: str) -> str:
        """The new name of a parameter that an optimizer knows as ``fqn``, or as ``<section>.<fqn>`` if it has the
        parameters of several modules."""
        if self._stores(fqn):
            return self._rules.renamed(fqn)
        section = next((s for s in self._module_sections() if self._stores(f"{s}.{fqn}")), "model")
        return _within(section, self._rules.renamed(f"{section}.{fqn}"))

    def _module_sections(self) -> Iterable[str]:
        """Sections that may own an optimizer's parameters, the usual one first."""
        names = [section.name for section in self.manifest.sections if not self._is_optimizer(section.name)]
        return sorted(names, key=lambda name: name != "model")

    def _stores(self, full_name: str) -> bool:
        return self.manifest.tensor_row(self.manifest.resolve(full_name)) is not None

    def _is_optimizer(self, section: str) -> bool:
        index = self.manifest.section_index(section)
        return index is not None and self.manifest.sections[index].kind == "optimizer"


class _RankChoice:
    """Which saved rank's values this rank takes, by the policy nearest above each path."""

    def __init__(
        self, saved_world: int, rank: int, world_size: int, policies: Mapping[Path, str], default: str
    ) -> None:
        self._policies = {(): default, **policies}
        self._chosen = {p: choose_rank(saved_world, rank, world_size, p) for p in self._policies.values()}
        self.ranks = {rank for rank in self._chosen.values() if rank is not None}
        if saved_world != world_size:
            self.ranks.add(0)  # under "error" rank 0's are looked at, only to name what would have been lost

    def __call__(self, path: Path) -> tuple[int | None, str]:
        """The saved rank (None: none) and the policy that says so."""
        policy = next(self._policies[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._policies)
        return self._chosen[policy], policy


def _copies_whole(value: object) -> bool:
    """Whether a shallow copy of a mapping shares nothing with it that could change."""
    return type(value) is dict and all(
        type(part) in _ATOMS for item in value.values() for part in (item if type(item) is tuple else (item,))
    )


def _within(section: str, full: str) -> str:
    """The name inside the section; a rename cannot move a name to another section."""
    return full[len(section) + 1 :] if full.startswith(f"{section}.") else full


def _path_like(old: Path, parts: Sequence[str]) -> Path:
    """A renamed path; where it has as many components as before, its numbers stay numbers."""
    if len(parts) != len(old):
        return tuple(parts)
    return tuple(int(new) if isinstance(was, int) and new.isdecimal() else new for was, new in zip(old, parts))


def _both_renamed(section: str, one: str, other: str, name: str) -> StateError:
    return StateError(
        f"rename takes two stored names, {section}.{one} and {section}.{other}, to {section}.{name}; rename or exclude "
        f"one of them so that it is clear which is meant"
    )


def _anyone(packed: Sequence[bytes], count: int) -> Bits:
    taken = np.zeros(count, np.bool_)
    for bits in packed:
        taken |= np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
    return taken


def _path_key(path: Path) -> tuple[tuple[str, str], ...]:
    return tuple((type(part).__name__, str(part)) for part in path)
