"""Apply rules to an index: other names, tensors that are split, joined or stacked, and tensors put together from ranks.

The result is an index again. Its boxes are boxes of the stored tensors (``StoredViews``), so that nothing is copied,
and every read is checked as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..checkpoint.index import Index
from ..engine.reading.views import StoredViews
from ..errors import BytecheckpointError, RuleError
from ..format.checksums import empty_checksums
from ..format.manifest.document import Manifest, SectionInfo
from ..format.manifest.validation import validate_foreign
from ..rules import GlobalTensor, Region, Resolution, Rules, Source
from ..tensors.geometry import Box, row_major_strides
from ..tensors.metadata import BasicMeta
from ..tensors.tables import BoxTable, Int64, TensorTable
from .comparing import Comparison, distinct
from .naming import EXTRA_SECTION, MODEL_SECTION, OPTIMIZER_SECTION


def rule_name(section: str, fqn: str, plain: str | None) -> str:
    """Return the name of a stored tensor as rules see it: without the name of the section that holds the model."""
    return fqn if section == plain else f"{section}.{fqn}"


@dataclass(frozen=True)
class Stored:
    """What rules explain: the tensors of an index.

    Attributes:
        index: The index, which describes the files.
        sources: The tensors, under the names that rules see.
        rows: The row of each of them in the index.
        mesh: The number of ranks along each axis.
        plain: The section whose names have no prefix.
        sections: The sections of the result.
        kept: Rows of tensors that stay as they are.
        aliases: The positions in ``sources`` of tied names.
    """

    index: Index
    sources: Sequence[Source]
    rows: Sequence[int]
    mesh: dict[str, int]
    plain: str | None
    sections: Sequence[SectionInfo]
    kept: Int64
    aliases: frozenset[int] = frozenset()

    @classmethod
    def of_index(cls, index: Index, rules: Rules) -> Stored:
        """Return what rules say something about: the section with the model, and others of which they match a name.

        Tensors of single ranks stay as they are.
        """
        manifest = index.manifest
        plain = _plain_section(manifest)
        tensors, scope = manifest.tensors, manifest.scope
        names = [rule_name(tensors.section_of(row), tensors.fqn_of(row), plain) for row in range(len(tensors))]
        described = {plain} - {None}
        for row, name in enumerate(names):
            section = tensors.section_of(row)
            if section not in described and scope[row] < 0 and rules.rule_of(name) is not None:
                described.add(section)
        is_described = np.array([section.name in described for section in manifest.sections], bool)
        chosen = is_described[tensors.section] & (scope < 0)
        rows = np.flatnonzero(chosen).tolist()
        metas = tensors.metas(np.array(rows, np.int64))
        sources = [Source(names[row], meta.shape, meta.dtype) for row, meta in zip(rows, metas, strict=True)]
        aliases = []
        for alias, full in manifest.aliases:
            tied = manifest.tensor_row(full)
            if tied is not None and chosen[tied]:
                section, meta = tensors.section_of(tied), tensors.meta_of(tied)
                aliases.append(len(sources))
                sources.append(Source(rule_name(section, alias[len(section) + 1 :], plain), meta.shape, meta.dtype))
                rows.append(tied)
        kept = np.flatnonzero(~chosen)
        return cls(index, sources, rows, {}, plain, manifest.sections, kept, frozenset(aliases))

    def resolve(self, rules: Rules, average: Literal["mean"] | None = None) -> Resolution:
        """Apply the rules. Raises ``RuleError``, which lists everything that is wrong."""
        try:
            return rules.resolve(self.sources, self.mesh, average=average)
        except RuleError as error:
            raise RuleError(f"{self.index.url}: {error}", error.faults) from error

    def reindexed(self, resolution: Resolution) -> tuple[Index, list[Comparison]]:
        """Return the index of the global tensors, and the copies that must be compared before it is used.

        Raises ``RuleError`` for flat buffers that cannot be read in place.
        """
        return _Reindexing(self, resolution).build()


def _plain_section(manifest: Manifest) -> str | None:
    if manifest.section_index(MODEL_SECTION) is not None:
        return MODEL_SECTION
    modules = [section.name for section in manifest.sections if section.kind == "module"]
    return modules[0] if len(modules) == 1 else None


_Piece = tuple[Box, int, Box]
"""A box of a global tensor, the row of a stored shard, and the same elements as a box of the stored tensor."""


class _Reindexing:
    """Builds the tables of one index."""

    def __init__(self, stored: Stored, resolution: Resolution) -> None:
        self._stored, self._resolution = stored, resolution
        self._manifest = stored.index.manifest
        self._boxes = list(self._manifest.shards)
        self._views: dict[tuple[int, int, tuple[int, ...]], int] = {}  # by source, start and shape: the new shard row
        self._faults: list[tuple[str, str, str]] = []
        self._pieces: list[tuple[int, _Piece]] = []  # the new shards, by the number of the tensor
        self._others: dict[int, list[tuple[int, Box]]] = {}  # by position in them: the copies of a mean but one
        self._other_sections = {section.name for section in stored.sections} | {OPTIMIZER_SECTION, EXTRA_SECTION}
        self._other_sections -= {stored.plain or ""}

    def build(self) -> tuple[Index, list[Comparison]]:
        names: list[tuple[str, str, BasicMeta]] = []
        aliases: list[tuple[str, str]] = []
        comparisons: list[Comparison] = []
        seen: dict[Any, str] = {}
        for name, tensor in self._in_order():
            section, fqn = self._section_of(name)
            regions, copies = distinct(tensor)
            key = self._key(section, tensor.meta, regions)
            if key is not None and (first := seen.setdefault(key, fqn)) != fqn:
                aliases.append((f"{section}.{fqn}", f"{section}.{first}"))
                continue
            if tensor.copies == "compare":
                comparisons += [self._comparison(name, tensor, *pair) for pair in copies]
            row = None if tensor.copies == "mean" else self._same_tensor(tensor.meta, regions)
            if row is not None:
                self._add_whole(len(names), row)
            elif not tensor.meta.numel:
                empty = Box.whole(tensor.meta.shape)
                self._pieces.append((len(names), (empty, 0, empty)))
            elif tensor.copies == "mean":
                self._add_mean(len(names), name, tensor.meta, regions, copies)
            else:
                self._pieces += [(len(names), piece) for one in regions for piece in self._pieces_of(name, one)]
            names.append((section, fqn, tensor.meta))
        if self._faults:
            head = f"{self._stored.index.url}: these rules cannot be used in place:"
            raise RuleError("\n  ".join([head, *(f"{name}: {why}" for _, name, why in self._faults)]), self._faults)
        aliases += self._kept(names)
        return self._index(names, aliases), comparisons

    def _in_order(self) -> list[tuple[str, GlobalTensor]]:
        """The global tensors; those that consist of tied names come last."""

        def is_tied(item: tuple[str, GlobalTensor]) -> bool:
            return any(region.source in self._stored.aliases for region in item[1].regions)

        found = list(self._resolution.tensors.items())
        return sorted(found, key=is_tied) if self._stored.aliases else found

    def _section_of(self, name: str) -> tuple[str, str]:
        head, _, rest = name.partition(".")
        if rest and head in self._other_sections:
            return head, rest
        if self._stored.plain is None:
            sections = ", ".join(sorted(self._other_sections))
            self._faults.append(("rename", name, f"does not begin with a section; sections: {sections}"))
        return self._stored.plain or "", name

    def _key(self, section: str, meta: BasicMeta, regions: Iterable[Region]) -> object:
        """What determines the bytes of a tensor; None if no tied names are stored."""
        if not self._stored.aliases:
            return None
        rows = self._stored.rows
        return section, meta, tuple((one.box, rows[one.source], one.within, one.shape, one.start) for one in regions)

    def _comparison(self, name: str, tensor: GlobalTensor, one: Region, other: Region) -> Comparison:
        sources = self._resolution.sources
        places = (sources[one.source].place, sources[other.source].place)
        return Comparison(name, tensor, one.box, places, (self._pieces_of(name, one), self._pieces_of(name, other)))

    def _same_tensor(self, meta: BasicMeta, regions: Sequence[Region]) -> int | None:
        """The row of the stored tensor that has the same elements in the same shape, if there is one."""
        if len(regions) != 1:
            return None
        (region,) = regions
        box = Box.whole(meta.shape)
        is_same = region.shape == self._resolution.sources[region.source].shape == meta.shape and region.start == 0
        return self._stored.rows[region.source] if is_same and region.box == region.within == box else None

    def _add_mean(
        self,
        number: int,
        name: str,
        meta: BasicMeta,
        regions: Sequence[Region],
        copies: Sequence[tuple[Region, Region]],
    ) -> None:
        """Add a tensor whose value is the mean of copies."""
        if meta.dtype.kind != "float" or meta.dtype.itemsize < 2:
            self._faults.append(("average", name, f"has the dtype {meta.dtype}, which has no mean"))
        same = {region.box: [region] for region in regions}
        for first, other in copies:
            same.get(first.box, []).append(other)
        found = [[self._pieces_of(name, one) for one in ones] for ones in same.values()]
        is_regular = all(first.box == other.box in same for first, other in copies)
        if not is_regular or any(len(pieces) != 1 for ones in found for pieces in ones):
            self._faults.append(("average", name, "is not stored in the same boxes by all ranks"))
            return
        for (piece,), *others in found:
            self._others[len(self._pieces)] = [(row, within) for ((_, row, within),) in others]
            self._pieces.append((number, piece))

    def _pieces_of(self, name: str, region: Region) -> list[_Piece]:
        """The parts of a region that are in one stored shard each."""
        shards = self._manifest.shards_of(self._stored.rows[region.source])
        if region.shape != self._resolution.sources[region.source].shape or region.start:
            view = self._view(name, region, shards)
            return [(region.box, view, region.within)]
        if shards.stop - shards.start == 1:
            return [(region.box, shards.start, region.within)]
        parts = ((row, region.held_in(self._boxes[row])) for row in range(shards.start, shards.stop))
        return [(part.box, row, part.within) for row, part in parts if part is not None]

    def _view(self, name: str, region: Region, shards: slice) -> int:
        """The row of the shard that shows a flat buffer in another shape."""
        if self._stored.index.is_own or shards.stop - shards.start != 1:
            how = "with checksums" if self._stored.index.is_own else "in several pieces"
            detail = f"is in a flat buffer that is stored {how}, which rules cannot divide"
            self._faults.append(("shape", name, detail))
        key = (region.source, region.start, region.shape)
        return self._views.setdefault(key, len(self._boxes) + len(self._views))

    def _kept(self, names: list[tuple[str, str, BasicMeta]]) -> list[tuple[str, str]]:
        """Add the tensors that stay as they are; returns their tied names."""
        tensors = self._manifest.tensors
        kept = set(self._stored.kept.tolist())
        for row in sorted(kept):
            self._add_whole(len(names), row)
            names.append((tensors.section_of(row), tensors.fqn_of(row), tensors.meta_of(row)))
        return [(alias, full) for alias, full in self._manifest.aliases if self._manifest.tensor_row(full) in kept]

    def _add_whole(self, number: int, row: int) -> None:
        """Add a tensor with the shards of the stored one in a row."""
        shards = self._manifest.shards_of(row)
        boxes = self._boxes[shards]
        self._pieces += [(number, (box, shard, box)) for shard, box in enumerate(boxes, shards.start)]

    def _index(self, names: Sequence[tuple[str, str, BasicMeta]], aliases: list[tuple[str, str]]) -> Index:
        old, index = self._manifest, self._stored.index
        stored = self._extended()
        scope = np.full(len(names), -1, np.int64)
        scope[len(names) - len(self._stored.kept) :] = old.scope[np.sort(self._stored.kept)]
        shards = BoxTable.build([(number, box) for number, (box, _, _) in self._pieces])
        within = BoxTable.build([(row, box) for _, (_, row, box) in self._pieces])
        row = within.tensor
        sections = {section.name: section for section in self._stored.sections}
        for section, _, _ in names:
            sections.setdefault(section, SectionInfo(section, "tree"))
        file = stored.shard_file[row] if len(row) else row
        offset = stored.shard_offset[row] + self._starts(stored, row, within) if len(row) else row
        tensors = TensorTable.build(names)
        manifest, order = old.with_tensors(list(sections.values()), tensors, scope, shards, file, offset, aliases)
        try:
            validate_foreign(manifest)
        except BytecheckpointError as error:
            raise type(error)(f"{index.url}: {error}") from error
        views = StoredViews(stored, row, within).take(order)
        means = {shard: self._others[at] for shard, at in enumerate(order.tolist()) if at in self._others}
        return replace(index, manifest=manifest, views=views, foreign_values=tuple(self._values()), means=means)

    def _values(self) -> Iterable[Any]:
        described = {section.name for section in self._stored.sections}
        described -= {self._manifest.tensors.section_of(row) for row in self._stored.kept.tolist()}
        for value in self._stored.index.foreign_values:
            if not (value.section in described and value.only_orders_keys):
                yield value

    def _starts(self, stored: Manifest, row: Int64, within: BoxTable) -> Int64:
        """The bytes between the beginnings of the stored shards and of the boxes in them."""
        starts = np.zeros(len(row), np.int64)
        itemsize = stored.tensors.itemsize()[stored.shards.tensor[row]]
        numel = within.numel()
        moved = np.flatnonzero((numel > 0) & (numel != stored.shards.numel()[row]))
        for number in moved.tolist():
            box, shard = within.box_of(number), stored.shards.box_of(int(row[number]))
            steps = row_major_strides(shard.lengths)
            starts[number] = sum((a - b) * step for a, b, step in zip(box.offsets, shard.offsets, steps, strict=True))
        return starts * itemsize

    def _extended(self) -> Manifest:
        """The tables of the files, with the flat buffers in the shapes of their members."""
        old = self._manifest
        if not self._views:
            return old
        sources, rows = self._resolution.sources, self._stored.rows
        added = [(source, start, shape, old.shards_of(rows[source]).start) for source, start, shape in self._views]
        more = TensorTable.build(
            [
                ("", f"{sources[source].name} as {list(shape)}", BasicMeta(sources[source].dtype, shape))
                for source, _, shape, _ in added
            ]
        )
        shard = np.array([one[3] for one in added], np.int64)
        section = old.tensors.section[old.shards.tensor[shard]]
        names = [f"{old.section_name(int(one))}{name}" for one, name in zip(section, more.names, strict=True)]
        tensors = TensorTable(
            old.tensors.names + names,
            old.tensors.sections,
            np.concatenate([old.tensors.section, section]),
            *(
                np.concatenate([getattr(old.tensors, column), getattr(more, column)])
                for column in ("dtype", "ndim", "shape")
            ),
        )
        boxes = BoxTable.build([(len(old.tensors) + n, Box.whole(shape)) for n, (_, _, shape, _) in enumerate(added)])
        starts = np.array([start * sources[source].dtype.itemsize for source, start, _, _ in added], np.int64)
        shards = BoxTable(
            np.concatenate([old.shards.tensor, boxes.tensor]),
            np.concatenate([old.shards.offsets, boxes.offsets]),
            np.concatenate([old.shards.lengths, boxes.lengths]),
            np.concatenate([old.shards.starts, old.shards.starts[-1] + boxes.starts[1:]]),
        )
        file = np.concatenate([old.shard_file, old.shard_file[shard]])
        chunks = -(-shards.nbytes(tensors) // old.files.chunk_size[file])
        return replace(
            old,
            tensors=tensors,
            scope=np.concatenate([old.scope, old.scope[old.shards.tensor[shard]]]),
            shards=shards,
            shard_file=file,
            shard_offset=np.concatenate([old.shard_offset, old.shard_offset[shard] + starts]),
            checksums=empty_checksums(int(chunks.sum())),
        )
