"""Read a folder in which each rank of a custom trainer wrote files, as rules describe them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..checkpoint.index import Index
from ..checkpoint.values import StoredValue
from ..errors import CheckpointNotFoundError, RuleError
from ..format.manifest.document import SectionInfo
from ..format.values.types import path_name
from ..rules import Flat, RankFile, Rules, Source
from ..tensors.shards import Path
from .building import IndexBuilder, StoredBox, StoredLeaf
from .huggingface import read_huggingface
from .naming import MODEL_SECTION
from .reindexing import Stored, rule_name
from .source_path import SourcePath, read_all, read_index
from .torch_values import read_torch_file

_SECTION = "files"  # of the tables that describe the files; only messages show it
_SYSTEM = "files of ranks"

_Members = tuple[tuple[str, tuple[int, ...]], ...]


def stored_by_ranks(source: SourcePath, rules: Rules) -> Stored:
    """Return what the files of all ranks hold. Reads their headers and plain values.

    Raises ``RuleError`` if the patterns do not fit the files, ``CheckpointNotFoundError`` if there are no files, and
    what reading a damaged file raises.
    """
    keys = [one.key for one in source.backend.list()]
    if not keys:
        raise CheckpointNotFoundError(f"nothing is stored at {source.url}; check the path")
    try:
        files = rules.rank_files(keys)
    except RuleError as error:
        raise RuleError(f"{source.url}: {error}", error.faults) from error
    read = read_all(lambda one: _read(source, one), files)
    return _Folder(source, rules, files, read).stored()


def _read(source: SourcePath, file: RankFile) -> Index:
    one = SourcePath(f"{source.url}/{file.key}", source.backend, file.key)
    found = read_index(read_huggingface if file.key.endswith(".safetensors") else read_torch_file, one)
    if found is None:
        detail = "is no safetensors file, and torch.save did not write it"
        raise RuleError(f"{source.url}: {file.key} {detail}; change files", [("file", file.key, detail)])
    return found


class _Folder:
    """Puts the indexes of the files together."""

    def __init__(self, source: SourcePath, rules: Rules, files: Sequence[RankFile], read: Sequence[Index]) -> None:
        self._path, self._rules, self._files, self._read = source, rules, files, read
        self._builder = IndexBuilder(source.backend, _SYSTEM)
        self._lists: set[str] = set()  # the names of the values that list members

    def stored(self) -> Stored:
        self._builder.add_section(_SECTION, "tree")
        sources: list[Source] = []
        names: list[str] = []  # of the tensors that hold the sources
        aliases: list[int] = []
        for file, index in zip(self._files, self._read, strict=True):
            manifest = index.manifest
            self._add_tensors(file, index)
            tied = dict(manifest.aliases)
            for full in (*manifest.tensors.names, *tied):
                if full in tied:
                    aliases.append(len(sources))
                sources.append(self._source(file, index, full, tied.get(full, full)))
                names.append(_stored_name(file, tied.get(full, full)))
        index = self._builder.build(step=self._step(), world_size=self._world_size())
        rows = {name: row for row, name in enumerate(index.manifest.tensors.names)}
        return Stored(
            replace(index, foreign_values=tuple(self._values())),
            sources,
            [rows[f"{_SECTION}.{name}"] for name in names],
            self._mesh(),
            MODEL_SECTION,
            self._sections(),
            np.array([], np.int64),
            frozenset(aliases),
        )

    def _add_tensors(self, file: RankFile, index: Index) -> None:
        """Add the tensors of one file to the tables of all files."""
        manifest = index.manifest
        (size,) = manifest.files.size.tolist()
        number = self._builder.add_file(file.key, size)
        boxes = list(manifest.shards)
        at = (manifest.shard_offset + manifest.files.head_length[manifest.shard_file]).tolist()
        for row, full in enumerate(manifest.tensors.names):
            shards = manifest.shards_of(row)
            pieces = [StoredBox(boxes[n], number, at[n]) for n in range(shards.start, shards.stop)]
            leaf = StoredLeaf(manifest.tensors.meta_of(row), pieces)
            self._builder.add_tensor(_SECTION, _stored_name(file, full), leaf)
        if index.crcs is not None:
            crcs = (index.crcs.begin, index.crcs.end, index.crcs.crc)
            for begin, end, crc in zip(*(column.tolist() for column in crcs), strict=True):
                self._builder.add_crc(number, begin, end, crc)

    def _source(self, file: RankFile, index: Index, full: str, stored: str) -> Source:
        row = index.manifest.tensor_row(stored)
        assert row is not None
        meta = index.manifest.tensors.meta_of(row)
        name = _shown(full)
        rule = self._rules.rule_of(name)
        members = self._members(index, rule.members) if isinstance(rule, Flat) and rule.members else None
        return Source(name, meta.shape, meta.dtype, file.place, members)

    def _members(self, index: Index, listed: str) -> _Members | None:
        """The members of a flat buffer, from a mapping of their names to shapes."""
        self._lists.add(listed)
        found = []
        for value in index.foreign_values:
            parent = _shown(f"{value.section}.{path_name(value.path[:-1])}") if value.path else ""
            if parent == listed:
                shape = value.decode()
                if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
                    detail = f"lists members, but that of {value.path[-1]!r} is {shape!r:.80}, which is no shape"
                    raise RuleError(f"{index.url}: {listed} {detail}", [("shape", listed, detail)])
                found.append((str(value.path[-1]), tuple(shape)))
        return tuple(found) or None

    def _values(self) -> Iterator[StoredValue]:
        """The plain values: those that all files agree on, and the others for each rank."""
        found: dict[tuple[str, Path], dict[tuple[int, int], StoredValue]] = {}
        count: dict[int, int] = {}  # of the files of each pattern
        for file, index in zip(self._files, self._read, strict=True):
            rank = count.get(file.pattern, 0)
            count[file.pattern] = rank + 1
            for value in index.foreign_values:
                parent = _shown(f"{value.section}.{path_name(value.path[:-1])}") if value.path else ""
                if parent not in self._lists and _shown(value.name) not in self._lists and not value.only_orders_keys:
                    found.setdefault((value.section, value.path), {})[file.pattern, rank] = value
        for values in found.values():
            if len({value.encoded for value in values.values()}) == 1:
                yield next(iter(values.values()))
            elif len({pattern for pattern, _ in values}) == 1:
                yield from (value._replace(rank=rank) for (_, rank), value in values.items())
            else:
                (name,) = {value.name for value in values.values()}
                detail = f"has different values in the files of {' and '.join(self._rules.files)}; read one pattern"
                raise RuleError(f"{self._path.url}: {name} {detail}", [("file", name, detail)])

    def _step(self) -> int | None:
        steps = {index.manifest.step for index in self._read}
        return steps.pop() if len(steps) == 1 else None

    def _world_size(self) -> int:
        return max(Counter(file.pattern for file in self._files).values())

    def _mesh(self) -> dict[str, int]:
        mesh: dict[str, int] = {}
        for file in self._files:
            for axis, position in file.place.items():
                mesh[axis] = max(mesh.get(axis, 0), position + 1)
        return mesh

    def _sections(self) -> list[SectionInfo]:
        kinds = {MODEL_SECTION: "module"}
        for index in self._read:
            for section in index.manifest.sections:
                kinds.setdefault(section.name, section.kind)
        return [SectionInfo(name, kind) for name, kind in kinds.items()]


def _stored_name(file: RankFile, full: str) -> str:
    return f"{file.key}:{full}"


def _shown(full: str) -> str:
    """The full name of a tensor or value of one file as rules see it."""
    section, _, rest = full.partition(".")
    return rule_name(section, rest, MODEL_SECTION)
