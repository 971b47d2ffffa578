"""Read what a checkpoint stores of each requested section, under the names that the caller's state uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..checkpoint.index import Index
from ..checkpoint.values import StoredValue
from ..errors import MismatchError, NameCollisionError
from ..format.manifest.document import Manifest
from ..format.values.decoding import decode_value
from ..format.values.types import is_left_out, path_name, unread_in
from ..frameworks.optimizer_state import MASTER, MASTERS_OF, state_name
from ..frameworks.sections import split_rank_name
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, StoredSection
from .options import Fault, LoadRequest, RankChoices

_ATOMS = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class OpenSection:
    """One section of a checkpoint as one rank loads it, under the target's names.

    ``is_stored`` is False if the section is not stored, or if it is one object that this library does not read.
    ``is_read`` is False then, and if the patterns select nothing in it.
    ``contents`` is what the adapter sees, ``tensor_rows`` the manifest's row of each tensor and alias.
    ``shared_values`` lists the values that all ranks share, in the same order on every rank. ``own_tensors`` and
    ``own_values`` belong to the saved rank that this rank loads. ``skipped`` names stay unchanged by a per-rank policy.
    The save was asked to leave out the dotted names ``left_out``. ``unread`` describes the objects in values of another
    system's checkpoint that this library does not read.
    """

    name: str
    is_stored: bool
    is_read: bool = False
    contents: StoredSection = field(default_factory=lambda: StoredSection({}, {}, {}))
    tensor_rows: Mapping[str, int] = field(default_factory=dict)
    shared_values: tuple[Path, ...] = ()
    own_tensors: Mapping[str, int] = field(default_factory=dict)
    own_values: frozenset[Path] = frozenset()
    skipped: frozenset[str | Path] = frozenset()
    left_out: frozenset[str] = frozenset()
    unread: Mapping[Path, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @property
    def full_names(self) -> list[str]:
        """Every stored name, to suggest in error messages."""
        names = [*self.tensor_rows, *map(path_name, self.contents.values)]
        return [f"{self.name}.{name}" for name in names]


@dataclass(frozen=True)
class OpenCheckpoint:
    """What is stored, and the sections that the caller requested.

    ``listed`` are the full names of everything stored in the sections that were read, under the target's names, if
    patterns select among them.
    """

    index: Index
    sections: Mapping[str, OpenSection]
    listed: Sequence[str] = ()

    @property
    def manifest(self) -> Manifest:
        return self.index.manifest


@dataclass(frozen=True)
class _Tensors:
    """Tensors of a section by the target's names."""

    metas: dict[str, BasicMeta]
    rows: dict[str, int]
    own: dict[str, int] = field(default_factory=dict)


class SectionReader:
    """Opens sections of one checkpoint for one rank."""

    def __init__(self, index: Index, options: LoadRequest, *, rank: int, world_size: int) -> None:
        self._index, self._options = index, options
        self._manifest = index.manifest
        self._rank, self._world_size = rank, world_size
        self.listed: list[str] = []

    def open(self, section: str, policies: Mapping[Path, str]) -> OpenSection:
        """Read the section's values and name everything as the target does.

        A section that is not stored, or that the patterns exclude, is empty, and nothing is read.
        """
        is_stored = self._manifest.section_index(section) is not None
        if not self._options.selection.selects_section(section):
            return OpenSection(name=section, is_stored=is_stored)
        if not is_stored:
            return OpenSection(name=section, is_stored=False, faults=self._missing_section(section))
        choices = RankChoices(
            section=section,
            options=self._options,
            policies=policies,
            saved_world_size=self._manifest.world_size,
            rank=self._rank,
            world_size=self._world_size,
        )
        tensors = self._tensors(section, choices)
        values = list(self._index.values(section=section, ranks=choices.ranks))
        of_all = (value for value in values if value.rank is None)
        shared = {value.path: value.encoded for value in of_all if self._selects(section, value.path)}
        own = self._own_values(section, choices, values)
        aliases = self._add_aliases(section, tensors)
        decoded = self._decoded(section, {**shared, **own})
        left_out = {path for path, value in decoded.items() if is_left_out(value)}
        kept = {path: value for path, value in decoded.items() if path not in left_out} if left_out else decoded
        unread = {}
        if not self._index.is_own:
            unread = {path: found.what for path, value in kept.items() if (found := unread_in(value))}
        if () in unread:
            return OpenSection(name=section, is_stored=False, faults=self._unread_section(section, unread[()]))
        return OpenSection(
            name=section,
            is_stored=True,
            is_read=True,
            contents=StoredSection(tensors.metas, kept, aliases),
            tensor_rows=tensors.rows,
            shared_values=tuple(path for path in shared if path not in left_out),
            own_tensors=tensors.own,
            own_values=frozenset(own.keys() - left_out),
            skipped=frozenset(choices.skipped),
            left_out=frozenset(map(path_name, left_out)),
            faults=tuple(choices.faults),
            unread=unread,
        )

    def _missing_section(self, section: str) -> tuple[Fault, ...]:
        if self._options.strictness(section) == "lenient" or section in self._options.optional:
            return ()
        stored = ", ".join(section.name for section in self._manifest.sections)
        detail = f"no such section; the checkpoint has {stored}"
        if not self._index.is_own and stored == "model":
            detail = "these files of another library hold only a model; load it as {'model': module}"
        return (Fault("missing", section, detail),)

    def _unread_section(self, section: str, what: str) -> tuple[Fault, ...]:
        if self._options.strictness(section) == "lenient":
            return ()
        return (Fault("value", section, f"{what}, which this library does not read; leave the section out"),)

    def _tensors(self, section: str, choices: RankChoices) -> _Tensors:
        tensors, options = self._manifest.tensors, self._options
        stored = self._manifest.section_tensors(section)
        rows = stored.tolist()
        fqns = [tensors.names[row][len(section) + 1 :] for row in rows]
        scopes = self._manifest.scope[stored]
        if options.selection.selects_all and not (scopes >= 0).any():
            return _Tensors(dict(zip(fqns, tensors.metas(stored), strict=True)), dict(zip(fqns, rows, strict=True)))
        found = _Tensors({}, {})
        for row, name, scope, meta in zip(rows, fqns, scopes.tolist(), tensors.metas(stored), strict=True):
            if scope >= 0:
                name, _ = split_rank_name(name)
            if not self._selects(section, name):
                continue
            if scope >= 0 and choices.choose(name, tuple(name.split("."))) != scope:
                continue
            if name in found.rows:
                names = f"{self._index.stored_name(found.rows[name])} and {self._index.stored_name(row)}"
                raise NameCollisionError(
                    f"rename maps two stored names, {names}, to {section}.{name}; rename or exclude one of them"
                )
            found.metas[name], found.rows[name] = meta, row
            if scope >= 0:
                found.own[name] = row
        return found

    def _add_aliases(self, section: str, tensors: _Tensors) -> dict[str, str]:
        """Add the section's tied names to ``tensors``; returns the name of each one's tensor."""
        aliases: dict[str, str] = {}
        prefix = f"{section}."
        for full_alias, full_name in self._manifest.aliases:
            if not full_alias.startswith(prefix):
                continue
            alias = full_alias[len(prefix) :]
            row = self._manifest.tensor_row(full_name)
            if row is not None and self._selects(section, alias):
                tensors.metas.setdefault(alias, self._manifest.tensors.meta_of(row))
                tensors.rows.setdefault(alias, row)
                if full_name.startswith(prefix):  # a rename may separate the two
                    aliases[alias] = full_name[len(prefix) :]
        return aliases

    def _own_values(self, section: str, choices: RankChoices, values: Sequence[StoredValue]) -> dict[Path, bytes]:
        """Encoded values that were stored for single ranks, each from the rank that its policy selects."""
        own: dict[Path, bytes] = {}
        for rank, value in sorted(((v.rank, v) for v in values if v.rank is not None), key=lambda pair: pair[0]):
            if self._selects(section, value.path) and choices.choose(value.path, value.path) == rank:
                own[value.path] = value.encoded
        return own

    def _decoded(self, section: str, encoded: Mapping[Path, bytes]) -> dict[Path, Any]:
        values: dict[Path, Any] = {}
        # The options and the class of an optimizer are stored for each parameter: equal bytes are decoded once.
        decoded: dict[bytes, dict[Any, Any] | list[Any]] = {}
        for path, data in encoded.items():
            if data in decoded:
                values[path] = decoded[data].copy()
                continue
            where = f"{section}.{path_name(path)}"
            values[path] = decode_value(data, allow_pickle=self._options.allow_pickle, where=where)
            if _is_flat(values[path]):
                decoded[data] = values[path]
        return values

    def _selects(self, section: str, name: str | Path) -> bool:
        selection = self._options.selection
        if selection.selects_all:
            return True
        full = f"{section}.{name if isinstance(name, str) else path_name(name)}"
        self.listed.append(full)
        return selection.selects(full)


def _is_flat(value: object) -> bool:
    """Whether this is a mapping or a list of which a shallow copy shares nothing mutable with it."""
    items: Iterable[object] = ()
    if type(value) is dict:
        items = value.values()
    elif type(value) is list:
        items = value
    else:
        return False
    return all(type(part) in _ATOMS for item in items for part in (item if type(item) is tuple else (item,)))


class TensorEntry(NamedTuple):
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

    def master_of(self, section: str, fqn: str) -> TensorEntry | None:
        """The master weight of a model's tensor; None if there is none.

        Raises ``MismatchError`` if several optimizers saved one.
        """
        owner = self._stored_section(section, fqn)
        found = self._masters.get((owner, state_name(fqn, MASTER)), [])
        if owner == section:
            found = found + self._masters.get(("", state_name(f"{section}.{fqn}", MASTER)), [])
        if len(found) > 1:
            listed = ", ".join(master.name for master in found)
            raise MismatchError(
                f"{section}.{fqn}: the checkpoint has several master weights of this tensor: {listed}. Load into a "
                f"tensor of the stored dtype, or pass only one module of this name",
                [("value", f"{section}.{fqn}", f"several master weights: {listed}")],
            )
        return found[0] if found else None

    def best_of(self, section: str, fqn: str) -> TensorEntry | None:
        """What is stored of a model's tensor: its master weight, or else the tensor itself; None if neither is."""
        master = self.master_of(section, fqn)
        opened = self._checkpoint.sections.get(section)
        row = None if opened is None else opened.tensor_rows.get(fqn)
        if master is not None or row is None:
            return master
        index = self._checkpoint.index
        return TensorEntry(index.stored_name(row), row, index.manifest.tensors.meta_of(row))

    @property
    def has_own_names(self) -> bool:
        """Whether no tensor was renamed."""
        return self._checkpoint.index.names is None

    def renamed_from(self, row: int) -> str | None:
        """The full name that a tensor has in the checkpoint, if a rename has changed it."""
        stored = self._checkpoint.index.stored_name(row)
        return None if stored == self._checkpoint.manifest.tensors.names[row] else stored

    def _stored_section(self, section: str, fqn: str) -> str:
        """The section that a tensor comes from. A rename may have put it in the place of one that has a master."""
        manifest = self._checkpoint.manifest
        row = manifest.tensor_row(manifest.resolve(f"{section}.{fqn}"))
        return section if row is None else self._checkpoint.index.stored_name(row).partition(".")[0]

    @cached_property
    def _masters(self) -> dict[tuple[str, str], list[TensorEntry]]:
        """All master weights, by the section of the model (empty if the name has it) and by the target's names."""
        index, manifest = self._checkpoint.index, self._checkpoint.manifest
        found: dict[tuple[str, str], list[TensorEntry]] = {}
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
                    master = TensorEntry(index.stored_name(row), row, manifest.tensors.meta_of(row))
                    found.setdefault((owner, manifest.tensors.fqn_of(row)), []).append(master)
        return found

    def _owners(self, section: str) -> set[str]:
        """The model's section to which an optimizer's master weights belong. Other sections may have the same names."""
        opened = self._checkpoint.sections.get(section)
        if opened is not None and MASTERS_OF in opened.contents.values:
            return {str(opened.contents.values[MASTERS_OF])}
        values = self._checkpoint.index.values(section=section)
        return {str(value.decode()) for value in values if value.path == MASTERS_OF}
