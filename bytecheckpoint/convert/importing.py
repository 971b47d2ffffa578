"""Import another system's checkpoint: write its tensors and plain values as a checkpoint, with checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..checkpoint.attempts import new_attempt, remove_attempt
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.index import Index
from ..checkpoint.manifest_file import commit
from ..errors import NameCollisionError, UsageError
from ..foreign.naming import MODEL_SECTION
from ..format.manifest import COMPANION, Manifest, SectionInfo, timestamp
from ..frameworks.sections import check_state, split_rank_name
from ..load.options import Rename, renaming
from ..storage_backends import open_backend
from ..tensors.tables import TensorTable
from .related import kept_files
from .reshard import plan_files, values_of
from .rewriter import Progress, Rewriter, ValuesFile, cleanup_on_failure, refuse_checkpoint

__all__ = ["ImportReport", "import_checkpoint"]


@dataclass(frozen=True)
class ImportReport:
    """The result of ``import_checkpoint``.

    Attributes:
        url: URL of the new checkpoint.
        system: The system that wrote the source.
        sections: Names of the imported sections.
        files: Names of the source's files.
        tensors: Number of tensors.
        total_size: Bytes of all tensors.
    """

    url: str
    system: str
    sections: tuple[str, ...]
    files: tuple[str, ...]
    tensors: int
    total_size: int


def import_checkpoint(
    source: Checkpoint,
    target_url: str,
    *,
    section: str | None = None,
    step: int | None = None,
    rename: Rename | None = None,
    exclude: Sequence[str] = (),
    progress: Progress = lambda nbytes: None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Commit a checkpoint that holds what another system stored. Holds a few MiB at a time.

    A model's configuration, its tokenizer and so on are kept as companions. The checkpoint appears when all files
    are durable. After a failure nothing remains at the target.

    Args:
        source: The other system's checkpoint, from ``bcp.open``.
        target_url: Where to put the checkpoint.
        section: The name of the section, if the source has one only.
        step: The step to store with the checkpoint; by default the source's.
        rename: Maps a tensor's name in its section to the new one.
        exclude: Shell patterns; tensors and values whose full names match one are left out.
        progress: Called with the number of bytes imported since the last call.
        storage_options: Options for the target's storage backend.

    Returns:
        A report.

    Raises:
        UsageError: ``step`` is negative, ``section`` is not a valid name, or the source is a checkpoint of this
            library.
        StateError: The source holds an object that this library does not read.
        NameCollisionError: Two tensors would have the same name.
        KeyExistsError: The target already holds a checkpoint.
        CorruptionError: Stored bytes differ from their CRC-32.
        StorageError: A store failed.
    """
    index = source.index
    if index.has_checksums:
        raise UsageError(f"{source.url} is a checkpoint of this library already; use bcp copy or bcp reshard")
    if step is not None and step < 0:
        raise UsageError(f"step must not be negative: {step}")
    if section is not None:
        check_state({section: None})
        if len(source.sections) > 1:
            raise UsageError(f"{source.url} has the sections {', '.join(source.sections)}; section= needs a single one")
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, source.url)
    chosen = _chosen(index, section, renaming(rename), exclude)
    manifest = chosen.manifest
    manifest = replace(manifest, step=manifest.step if step is None else step, created=timestamp())
    attempt = new_attempt()
    outputs = list(plan_files(manifest, max(len(index.manifest.files), 1), "whole", attempt))
    values = values_of(chosen, attempt)
    # The configuration and the like belong to the model, or to the only section.
    owner = MODEL_SECTION if manifest.section_index(MODEL_SECTION) is not None else manifest.sections[0].name
    values += [
        ValuesFile(f"{attempt}/{name}", owner, COMPANION, 0, document) for name, document in kept_files(source).items()
    ]
    with cleanup_on_failure(lambda: remove_attempt(target, attempt)):
        with Rewriter(replace(chosen, manifest=manifest)) as rewriter:
            new = rewriter.write_all(target, attempt, outputs, progress, values)
        commit(target, new)
    names = tuple(one.name for one in manifest.sections)
    files = tuple(index.manifest.files.name)
    return ImportReport(target.url, index.system, names, files, len(manifest.tensors), manifest.nbytes)


def _chosen(index: Index, section: str | None, rename: Callable[[str], str], exclude: Sequence[str]) -> Index:
    """The index without what is excluded, and under the new names."""
    old = index.manifest
    sections = {one.name: section or one.name for one in old.sections}

    def is_kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in exclude)

    names: dict[str, str] = {}  # the new full name of each kept tensor
    rows: list[tuple[str, str, Any]] = []
    for row, full in enumerate(old.tensors.names):
        fqn = rename(old.tensors.fqn_of(row))
        if is_kept(full):
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
    tensors = TensorTable.build(rows) if rows else old.tensors
    infos = [SectionInfo(sections[one.name], one.kind) for one in old.sections]
    manifest = Manifest.assemble(
        library_version=old.library_version,
        step=old.step,
        created=old.created,
        world_size=old.world_size,
        attempt=old.attempt,
        metadata=old.metadata,
        sections=infos,
        files=old.files,
        tensors=tensors,
        scope=old.scope[kept],
        shards=moved,
        shard_file=old.shard_file[shards],
        shard_offset=shards,
        checksums=np.zeros(
            int((-(-old.shard_nbytes[shards] // old.files.chunk_size[old.shard_file[shards]])).sum()), np.uint64
        ),
        aliases=aliases,
    )
    order = manifest.shard_offset  # of the old shards, which assemble has sorted
    manifest.shard_offset = old.shard_offset[order]
    views = None if index.views is None else index.views.take(order)
    values = tuple(one._replace(section=sections[one.section]) for one in index.foreign_values if is_kept(one.name))
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
