"""This rank's part of a state in the order in which its plan lists it, and the files it is given to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgpack
import numpy as np
import torch
import xxhash

from .engine.file_layout import FileLayout, data_key, lay_out_file
from .engine.files import FileImage, tensor_image, values_image
from .geometry import Box
from .mesh_layout import MeshPlace
from .metadata import BasicMeta
from .planners import OWN_BOXES, WHOLE, Assignment, Contents, Layout, LocalPlan, ValueEntry, as_contents, mesh_boxes
from .sections import Section, rank_name
from .shards import IrregularShard, MeshShard, Path, SectionSource, Shard, torch_dtype
from .tables import BoxTable, TensorTable
from .values import encode_path, encode_value, encode_values_file, path_name, value_digest
from .version import HEADER_METADATA

__all__ = ["LocalState"]


class LocalState:
    """This rank's shards and encoded values in the order its plan lists them.

    ``fingerprint`` stands for everything that planning looks at, and for nothing else: names, dtypes, shapes, boxes,
    adapters, whose own a tensor is, the paths of values, the rank and the number of ranks, and the ``layout`` (what is
    stored of a tensor that ranks hold in parts); not for what tensors and values contain. States of one process with
    equal fingerprints have the same plan wherever all ranks' contents compare alike. ``contents`` are those of the
    items of which nothing but their names says that they are replicas.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        sources: dict[str, SectionSource],
        *,
        rank: int,
        world_size: int,
        allow_pickle: bool,
        layout: Layout = "shards",
    ) -> None:
        self.layout: Layout = layout
        self.section_names = [section.name for section in sections]
        self._kinds = [(section.name, section.adapter.name) for section in sections]
        self._sources, self._rank = sources, rank
        self.values: list[tuple[str, Path, bytes]] = []
        self._entries: list[ValueEntry] = []
        for name, source in sources.items():
            last: object = self  # the options of an optimizer's group stand there once for each of its parameters
            data = digest = b""
            for path, value in source.values.items():
                if value is not last:
                    data = encode_value(value, f"{name}.{path_name(path)}", allow_pickle=allow_pickle)
                    last, digest = value, value_digest(data)
                own = path in source.per_rank
                self.values.append((name, path, data))
                self._entries.append(ValueEntry(name, encode_path(path), digest, len(data), own))
        self.order: list[int] | None = None
        """Where the plan's shards stand among all sections' shards; None where in the same order."""
        self.fingerprint = self._fingerprint(world_size)

    def _fingerprint(self, world_size: int) -> bytes:
        parts: list[object] = [self._rank, world_size, self.layout, self._kinds]
        for source in self._sources.values():
            metas, shards = source.metas.values(), source.shards
            parts += [
                list(source.metas),
                [meta.dtype.code for meta in metas],
                [meta.shape for meta in metas],
                [shard.fqn for shard in shards],
                [shard.box for shard in shards],
                list(source.aliases.items()),
                [fqn in source.per_rank for fqn in source.metas] if source.per_rank else [],
                sorted(source.pinned),
                list(source.digests),
            ]
        parts += [[entry.section, entry.path, entry.per_rank] for entry in self._entries]
        return xxhash.xxh3_128_digest(msgpack.packb(parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this rank holds."""
        shards = (shard for source in self._sources.values() for shard in source.shards)
        return sum(shard.box.numel * shard.meta.dtype.itemsize for shard in shards)

    @cached_property
    def contents(self) -> Contents:
        """Digests of the items that are compared, in the order of ``PlanTable.compared_items``."""
        digests = [entry.digest for entry in self._entries if not entry.per_rank]
        for source in self._sources.values():
            if source.digests:
                digests += [source.digests[fqn] for fqn in source.metas if fqn in source.digests]
        return as_contents(digests)

    def separate(self, names: Sequence[str]) -> None:
        """Make the tensors of these full names this rank's own; the plan is then another."""
        for full in names:
            section, _, fqn = full.partition(".")
            if fqn in self._sources[section].metas:
                self._sources[section].make_per_rank(fqn)
        for derived in ("plan", "table"):
            self.__dict__.pop(derived, None)

    def follow(self, separated: Sequence[str], order: list[int] | None) -> None:
        """Be as a state of this fingerprint was when it had been planned: ``order`` is what its ``order`` was then."""
        self.separate(separated)
        self.order = order

    @cached_property
    def plan(self) -> LocalPlan:
        """What this rank holds. Sets ``order``."""
        plan, self.order = _Listing(self._sources, self._rank).plan(self._entries, self._kinds)
        return plan

    @cached_property
    def table(self) -> bytes:
        """What other ranks may have in common with the plan, packed."""
        return self.plan.table().to_bytes()

    def _listed(self) -> list[tuple[SectionSource, Shard]]:
        """By row of the plan. Tensors without elements have a row, and no bytes."""
        listed = [
            (source, shard) for source in self._sources.values() for shard in (*source.shards, *_elementless(source))
        ]
        return listed if self.order is None else [listed[at] for at in self.order]

    def lay_out(self, assignment: Assignment) -> list[FileLayout]:
        """The tensor files that this rank was given to write, good for every state of this fingerprint."""
        files, listed = [], self._listed()
        for section, rows in assignment.files:
            shards = []
            for row in rows.tolist():
                source, shard = listed[row]
                own = shard.fqn in source.per_rank
                name = rank_name(shard.fqn, self._rank) if own else shard.fqn
                shards.append(Shard.proved(name, shard.meta, shard.box, shard.tensor))
            files.append(lay_out_file(section, rows, shards, HEADER_METADATA))
        return files

    @property
    def shards(self) -> list[Shard]:
        """By row of the plan, under the names of the state."""
        shards: list[Shard] = []
        for source in self._sources.values():
            shards += source.shards
            shards += _elementless(source)
        return shards if self.order is None else [shards[at] for at in self.order]

    def images(self, files: Sequence[FileLayout], assignment: Assignment, attempt: str) -> list[FileImage]:
        """What this rank was given to write: this state's tensors and values in files that were laid out."""
        images = []
        shards = self.shards
        for file in files:
            key = data_key(attempt, file.section, self._rank, "tensors")
            images.append(tensor_image(key, file, [shards[row] for row in file.rows]))
        for shared, kind in ((True, "values"), (False, "rank_values")):
            by_section: dict[str, list[tuple[Path, bool, bytes]]] = {}
            for index, is_shared in zip(assignment.values.tolist(), assignment.shared.tolist()):
                if is_shared == shared:
                    section, path, data = self.values[index]
                    by_section.setdefault(section, []).append((path, shared, data))
            for section, leaves in by_section.items():
                key = data_key(attempt, section, self._rank, kind)
                images.append(values_image(key, section, kind, encode_values_file(leaves)))
        return images


def _elementless(source: SectionSource) -> Iterator[Shard]:
    """The one empty shard of each tensor without elements: it is what makes the tensor part of a file."""
    empty = [(fqn, meta) for fqn, meta in source.metas.items() if 0 in meta.shape]
    if not empty:
        return
    listed = {shard.fqn for shard in source.shards}
    for fqn, meta in empty:
        if fqn not in listed:
            yield Shard(fqn, meta, Box.whole(meta.shape), torch.empty(meta.shape, dtype=torch_dtype(meta)))


class _Listing:
    """Tensors and shards of all sections as the columns of a ``LocalPlan``."""

    def __init__(self, sources: Mapping[str, SectionSource], rank: int) -> None:
        self._sources, self._rank = sources, rank
        self._layouts: dict[MeshPlace, int] = {}
        self._proved: dict[tuple[int, tuple[int, ...], Box], bool] = {}

    def plan(self, values: list[ValueEntry], kinds: list[tuple[str, str]]) -> tuple[LocalPlan, list[int] | None]:
        """The plan, and for each of its shards where it stands among all sections' shards (None: in that order)."""
        metas: list[tuple[str, str, BasicMeta]] = []
        own: list[bool] = []
        pinned: list[bool] = []
        compared: list[bool] = []
        held: list[int] = []
        common: list[tuple[int, int, Box]] = []
        apart: list[tuple[int, int, Box]] = []
        aliases: list[tuple[str, str]] = []
        at = 0
        for name, source in self._sources.items():
            by_name: dict[str, list[tuple[int, Shard]]] = {}
            for shard in (*source.shards, *_elementless(source)):
                by_name.setdefault(shard.fqn, []).append((at, shard))
                at += 1
            for row, (fqn, meta) in enumerate(source.metas.items(), len(metas)):
                is_own = fqn in source.per_rank
                metas.append((name, rank_name(fqn, self._rank) if is_own else fqn, meta))
                own.append(is_own)
                pinned.append(fqn in source.pinned)
                compared.append(fqn in source.digests)
                shards = by_name.get(fqn, [])
                how = self._how(shards[0][1]) if len(shards) == 1 else OWN_BOXES
                held.append(how)
                (apart if how == OWN_BOXES else common).extend((where, row, shard.box) for where, shard in shards)
            aliases += [(f"{name}.{alias}", f"{name}.{fqn}") for alias, fqn in source.aliases.items()]
        listed = [*common, *apart]
        order = [where for where, _, _ in listed]
        plan = LocalPlan(
            TensorTable.build(metas),
            BoxTable.build([(row, box) for _, row, box in listed]),
            values,
            np.where(np.array(own, np.bool_), self._rank, -1).astype(np.int64, copy=False),
            aliases,
            kinds,
            np.array(pinned, np.bool_),
            np.array(held, np.int64),
            [place.layout for place in self._layouts],
            [place.coordinate for place in self._layouts],
            np.array(compared, np.bool_),
        )
        return plan, None if order == list(range(len(order))) else order

    def _how(self, shard: Shard) -> int:
        """How ranks like this one hold the tensor, of which this is all that this one has."""
        if isinstance(shard, IrregularShard):
            return OWN_BOXES
        if shard.box == Box.whole(shard.meta.shape):
            return WHOLE
        place = shard.find_place() if isinstance(shard, MeshShard) else None
        if place is None:
            return OWN_BOXES
        number = self._layouts.setdefault(place, len(self._layouts) + 1)
        key = (number, shard.meta.shape, shard.box)
        if key not in self._proved:
            # Other ranks will take this rank's word for the place and work out the box by themselves.
            offsets, lengths = mesh_boxes(place.layout, shard.meta.shape, np.array([place.coordinate], np.int64))
            self._proved[key] = Box(tuple(offsets[0].tolist()), tuple(lengths[0].tolist())) == shard.box
        return number if self._proved[key] else OWN_BOXES
