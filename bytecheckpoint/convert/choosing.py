"""Choose a part of a checkpoint, under new names, for a new checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..checkpoint.index import Index
from ..errors import NameCollisionError
from ..format.manifest import SectionInfo
from ..frameworks.sections import split_rank_name
from ..tensors.tables import TensorTable

__all__ = ["chosen_part"]


def chosen_part(
    index: Index, sections: Mapping[str, str], rename: Callable[[str], str], exclude: Sequence[str]
) -> Index:
    """Return the index of some sections, by their new names, without what is excluded, and under the new names.

    It has no checksums, and no values of a checkpoint of this library. Raises ``NameCollisionError``.
    """
    old = index.manifest

    def is_kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in exclude)

    names: dict[str, str] = {}  # the new full name of each kept tensor
    rows: list[tuple[str, str, Any]] = []
    for row, full in enumerate(old.tensors.names):
        fqn = rename(old.tensors.fqn_of(row))
        if is_kept(full) and old.tensors.section_of(row) in sections:
            names[full] = _full_name(sections[old.tensors.section_of(row)], fqn)
            rows.append((sections[old.tensors.section_of(row)], fqn, old.tensors.meta_of(row)))
    _refuse_collisions(names)
    kept = np.array([full in names for full in old.tensors.names], bool)
    shards = np.flatnonzero(kept[old.shards.tensor])
    moved = old.shards.take(shards)
    moved.tensor = (np.cumsum(kept) - 1)[moved.tensor]
    aliases = [
        (_full_name(sections[one], rename(alias[len(one) + 1 :])), names[full])
        for alias, full in old.aliases
        if (one := alias.partition(".")[0]) and full in names and is_kept(alias)
    ]
    tensors = TensorTable.build(rows)
    infos = [SectionInfo(sections[one.name], one.kind) for one in old.sections if one.name in sections]
    manifest, order = old.with_tensors(
        infos, tensors, old.scope[kept], moved, old.shard_file[shards], old.shard_offset[shards], aliases
    )
    views = None if index.views is None else index.views.take(shards[order])
    values = tuple(
        one._replace(section=sections[one.section])
        for one in index.foreign_values
        if one.section in sections and is_kept(one.name)
    )
    return replace(index, manifest=manifest, foreign_values=values, views=views)


def _full_name(section: str, fqn: str) -> str:
    if not fqn or split_rank_name(fqn)[1] is not None:
        raise NameCollisionError(f"{fqn!r:.200}: a name cannot be empty or end in @<number>; rename it")
    return f"{section}.{fqn}"


def _refuse_collisions(names: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, new in names.items():
        if new in seen:
            raise NameCollisionError(f"{seen[new]!r:.200} and {old!r:.200} would both become {new!r:.200}")
        seen[new] = old
