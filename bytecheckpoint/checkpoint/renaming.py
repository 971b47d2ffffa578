"""Rename what a checkpoint stores: the one mechanism behind every ``rename`` argument.

Names are full (``<section>.<name>``), before and after. The result is a manifest with the same rows, so that nothing is
copied, reads and checksums stay as they are, and ranks may rename differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ..errors import MismatchError, NameCollisionError, UsageError
from ..format.manifest.document import Manifest, SectionInfo
from ..format.values.types import is_number, path_name
from ..frameworks.sections import is_section_name, split_rank_name
from ..tensors.shards import Path
from ..tensors.tables import TensorTable
from .selection import SimilarNames
from .values import StoredValue

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""Maps stored full names to new ones. A mapping's key is a name, or with a dot at its end the beginning of names, and
the longest one decides. Names that a mapping does not contain stay as they are."""

ReadValues: TypeAlias = Callable[[str, Collection[int] | None], Iterable[StoredValue]]
"""Reads the plain values of a section, of single ranks only those of the given ranks."""

_OF_MODULES = ("_extra_state", "_metadata", "__wrapper__")  # what docs/sections.md defines for a module or a wrapper

_Name: TypeAlias = tuple[str, str | tuple[Path, int | None]]
"""A section, and in it the name of a tensor, or the path of a value and the rank that owns it."""


class NameMap:
    """A ``rename`` argument as a function of full names. ``unused`` is what of it has matched no name so far."""

    def __init__(self, rename: Rename) -> None:
        self._function = None if isinstance(rename, Mapping) else rename
        mapping = rename if isinstance(rename, Mapping) else {}
        self._names = {old: new for old, new in mapping.items() if not old.endswith(".")}
        self._prefixes = sorted(mapping.keys() - self._names.keys(), key=len, reverse=True)
        self._mapping = mapping
        self._label = f"the function {getattr(rename, '__qualname__', type(rename).__name__)}"
        self.unused = set(mapping) if self._function is None else {self._label}

    def __call__(self, full: str, *, whole_sections: bool = False) -> tuple[str, str]:
        """The section and the name in it for a full name. With ``whole_sections``, keys that are names do not count.

        Raises ``UsageError`` if the function does not return a full name.
        """
        new: object = full
        if self._function is not None:
            new, key = self._function(full), self._label
            if not isinstance(new, str):
                raise UsageError(f"rename returned {new!r} for {full!r}; return the name itself to leave it as is")
        elif full in self._names and not whole_sections:
            new, key = self._names[full], full
        else:
            key = next((prefix for prefix in self._prefixes if full.startswith(prefix)), "")
            new = f"{self._mapping[key]}{full[len(key) :]}" if key else full
        if key and (new != full or self._function is None):
            self.unused.discard(key)
        section, dot, name = str(new).partition(".")
        if new != full and not (dot and is_section_name(section)):
            raise UsageError(
                f"rename maps {full!r} to {new!r}, which is no full name; full names begin with a section "
                f"({full.partition('.')[0] + '.' + str(new)!r:.200}?)"
            )
        return section, name

    def leads_to(self, section: str) -> set[str] | None:
        """The sections from which names may move to this one; None if that may be any."""
        if self._function is not None:
            return None
        return {old.partition(".")[0] for old, new in self._mapping.items() if new.partition(".")[0] == section}

    def lacks(self, section: str) -> bool:
        """Whether a name of this section may match something that no other name has matched."""
        return any(key == self._label or key.partition(".")[0] == section for key in self.unused)


class Renames:
    """The names of a checkpoint after a rename. What does not change its name gives way to what enters its section.

    Optimizer state follows its parameter, and what belongs to a module follows the beginning of its names: renaming
    ``model.a`` to ``model.b`` also renames ``optimizer.state.a.step``.
    ``manifest`` has the new names, and the rows of the stored one. Of a tensor that gives way, the name and the section
    are empty. ``stored_names`` are the names in the checkpoint, by row.
    Raises ``NameCollisionError`` if two names become one, and as ``NameMap``.
    """

    def __init__(
        self, stored: Manifest, rename: Rename, read_values: ReadValues, stored_names: Sequence[str] | None = None
    ) -> None:
        self._stored, self._map, self._read_values = stored, NameMap(rename), read_values
        self.stored_names = stored.tensors.names if stored_names is None else stored_names
        self._optimizers = {section.name for section in stored.sections if section.kind == "optimizer"}
        # Sections that may own an optimizer's parameters. The usual one comes first.
        modules = [section.name for section in stored.sections if section.name not in self._optimizers]
        self._modules = sorted(modules, key=lambda name: name != "model")
        self._read: set[str] = set()
        self._moved: dict[str, set[str]] = {}  # by section: those from which tensors come
        self.manifest = self._renamed()

    def unmatched(self) -> list[str]:
        """What of the rename matches no stored name. Reads the values of sections of which none was read so far."""
        for section in self._stored.sections:
            if section.name not in self._read and self._map.lacks(section.name):
                for value in self._read_values(section.name, None):
                    self._of_value(value)
        return sorted(self._map.unused)

    def require_matches(self, url: str, names: Iterable[str]) -> None:
        """Raise ``MismatchError`` if something of the rename is unmatched. ``names`` are suggested."""
        if unmatched := self.unmatched():
            raise unmatched_renames(url, unmatched, names)

    def values(self, section: str | None, ranks: Collection[int] | None) -> Iterator[StoredValue]:
        """Yield the values of one section, or all, as ``Index.values`` does."""
        names = [one.name for one in self._stored.sections]
        if section is not None:
            leading = self._map.leads_to(section)
            leading = set(names) - self._optimizers if leading is None else leading
            leading = leading | self._moved.get(section, set()) | {section}
            names = [name for name in names if name in leading]
        values = [value for name in names for value in self._read_values(name, ranks)]
        self._read.update(names)
        pairs = [(self._key(value), self._key(self._of_value(value))) for value in values]
        replaced = _replaced(pairs)
        for position, value in enumerate(values):
            new = self._of_value(value)
            if position not in replaced and section in (None, new.section):
                yield new

    @staticmethod
    def _key(value: StoredValue) -> _Name:
        return value.section, (value.path, value.rank)

    def _renamed(self) -> Manifest:
        stored, tensors = self._stored, self._stored.tensors
        entries: list[tuple[int, tuple[str, str], tuple[str, str]]] = []
        for row, full in enumerate(tensors.names):
            if full:  # or else an earlier rename has put another tensor in its place
                section, fqn = tensors.section_of(row), tensors.fqn_of(row)
                entries.append((row, (section, fqn), self._of_tensor(section, fqn)))
        for alias, full in stored.aliases:
            tied = stored.tensor_row(full)
            if tied is not None:
                section, _, fqn = alias.partition(".")
                entries.append((tied, (section, fqn), self._of_tensor(section, fqn)))
        replaced = _replaced([(old, new) for _, old, new in entries])
        sections = {one.name: one for one in stored.sections}
        kinds = {one.name: one.kind for one in stored.sections}
        names, section_of = [""] * len(tensors), [""] * len(tensors)
        aliases: list[tuple[str, str]] = []
        for position, (row, (source, _), (section, fqn)) in enumerate(entries):
            if position in replaced:
                continue
            sections.setdefault(section, SectionInfo(section, kinds[source]))
            if section != source:
                self._moved.setdefault(section, set()).add(source)
            if names[row]:
                aliases.append((f"{section}.{fqn}", names[row]))
            else:
                names[row], section_of[row] = f"{section}.{fqn}", section
        for one in stored.sections:
            if len(stored.section_tensors(one.name)) == 0:  # it has plain values only, which are not read here
                section, _ = self._map(f"{one.name}.", whole_sections=True)
                if section != one.name:
                    sections.setdefault(section, SectionInfo(section, one.kind))
                    self._moved.setdefault(section, set()).add(one.name)
        numbers = {name: number for number, name in enumerate([*sections, ""])}
        numbered = np.array([numbers[name] for name in section_of], np.int64)
        return replace(
            stored,
            sections=list(sections.values()),
            tensors=TensorTable(names, list(numbers), numbered, tensors.dtype, tensors.ndim, tensors.shape),
            aliases=sorted(aliases),
            row_of={name: row for row, name in enumerate(names) if name},
        )

    def _of_tensor(self, section: str, fqn: str) -> tuple[str, str]:
        """The new section and name of a stored tensor."""
        name, rank = split_rank_name(fqn)
        suffix = "" if rank is None else f"@{rank}"
        if section in self._optimizers and name.startswith("state."):
            parameter, key = self._split_state(name.removeprefix("state."))
            moved, _ = self._map(f"{section}.{name}", whole_sections=True)
            return moved, f"state.{self._parameter(parameter)}.{key}{suffix}"
        head, _, owner = name.partition(".")
        moved, new = self._map(f"{section}.{name}")
        if new == name and head in _OF_MODULES:
            moved, owner = self._of_module(section, owner)
            new = f"{head}.{owner}"
        return moved, new + suffix

    def _of_value(self, value: StoredValue) -> StoredValue:
        section, path = self._of_path(value.section, value.path)
        return value._replace(section=section, path=path)

    def _of_path(self, section: str, path: Path) -> tuple[str, Path]:
        """The new section and path of a stored value."""
        old = path_name(path)
        if section in self._optimizers and len(path) > 1 and path[0] in ("state", "param_groups", "class", "order"):
            moved, _ = self._map(f"{section}.{old}", whole_sections=True)
            return moved, (path[0], self._parameter(str(path[1])), *path[2:])
        if len(path) == 1 and section in self._optimizers and old.startswith("state."):
            moved, new = self._of_tensor(section, old)  # a tensor that was left out
            return moved, (new,)
        moved, new = self._map(f"{section}.{old}")
        if new == old and len(path) > 1 and path[0] in _OF_MODULES and isinstance(path[1], str):
            moved, owner = self._of_module(section, path[1])
            return moved, (path[0], owner, *path[2:])
        return moved, path if new == old else _path_like(path, new.split(".") if new else ())

    def _of_module(self, section: str, name: str) -> tuple[str, str]:
        """The new section and name of a module, whose own entries follow a prefix of its tensors."""
        moved, new = self._map(f"{section}.{name}." if name else f"{section}.")
        return moved, new.removesuffix(".")

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
            return ".".join(self._map(fqn))
        section = next((s for s in self._modules if self._is_stored(f"{s}.{fqn}")), "model")
        return self._map(f"{section}.{fqn}")[1]

    def _is_stored(self, full_name: str) -> bool:
        return self._stored.tensor_row(self._stored.resolve(full_name)) is not None


def unmatched_renames(where: str, unmatched: Sequence[str], names: Iterable[str] = ()) -> MismatchError:
    """The error for what of a rename matches none of the full names."""
    similar = SimilarNames(names)
    lines = [f"  {key}{similar.nearest(key)}" for key in unmatched]
    head = f"{where}: rename has keys that match no name (a key is a full name, or ends in a dot):"
    return MismatchError("\n".join([head, *lines]), [("rename", key, "") for key in unmatched])


def _replaced(pairs: Sequence[tuple[_Name, _Name]]) -> set[int]:
    """The positions of stored names that stay as they are although another one from another section takes their place.

    Raises ``NameCollisionError`` if two names become one in any other way.
    """
    first: dict[_Name, int] = {}
    replaced: set[int] = set()
    for position, (old, new) in enumerate(pairs):
        other = first.setdefault(new, position)
        if other == position:
            continue
        other_old = pairs[other][0]
        if other_old == new and old[0] != new[0]:
            replaced.add(other)
            first[new] = position
        elif old == new and other_old[0] != new[0]:
            replaced.add(position)
        else:
            one, two, both = (_text(name) for name in (other_old, old, new))
            raise NameCollisionError(f"rename maps two stored names, {one} and {two}, to {both}; rename one otherwise")
    return replaced


def _text(name: _Name) -> str:
    section, rest = name
    return f"{section}.{rest if isinstance(rest, str) else path_name(rest[0])}"


def _path_like(old: Path, parts: Sequence[str]) -> Path:
    """A renamed path. Its integers stay integers if it has as many components as before."""
    if len(parts) != len(old):
        return tuple(parts)
    return tuple(
        int(new) if isinstance(was, int) and is_number(new) else new for was, new in zip(old, parts, strict=True)
    )
