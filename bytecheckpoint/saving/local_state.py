"""This rank's part of a state: what adapters report, in the order in which the save plan lists it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import torch
import xxhash

from ..control.base import Operation
from ..engine.files import FileImage, FileLayout, data_key, lay_out_file, tensor_image
from ..format.hf_index import ADAPTER_SECTION
from ..format.values.encoding import encode_value
from ..format.values.files import encode_path, encode_values_file, value_digest
from ..format.values.types import Container, path_name
from ..frameworks.module_tree import modules_of
from ..frameworks.pretrained import under_names_of_peft
from ..frameworks.sections import Section, rank_name, resolve_sections
from ..planners.balance import Assignment
from ..planners.contents import ContentDigests, stack_digests
from ..planners.gather_plan import Layout
from ..planners.local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable, ValueNames
from ..planners.plan_groups import mesh_boxes
from ..tensors.geometry import Box
from ..tensors.mesh_layout import MeshPlace
from ..tensors.metadata import BasicMeta
from ..tensors.shards import IrregularShard, MeshShard, SectionSource, Shard, torch_dtype
from ..tensors.tables import BoxTable, TensorTable
from ..version import HEADER_METADATA
from .companions import has_adapter
from .options import SaveRequest
from .replicas import DeclaredReplicas, add_digests
from .selection import full_names, select_source, unmatched_options


def describe_state(op: Operation, state: Mapping[str, Any], options: SaveRequest, *, seed: str) -> LocalState:
    """Ask the adapters what this rank holds of ``state``. Copies no tensor and does no I/O.

    ``seed`` is equal on all ranks, and chooses the declared replicas that they compare.

    Raises:
        StateError: The state holds something that cannot be stored.
    """
    sections = resolve_sections(
        state,
        framework=options.framework,
        rank=op.rank,
        world_size=op.world_size,
        allow_pickle=options.allow_pickle,
        trainable_only=options.trainable_only,
    )
    sources = {section.name: section.capture() for section in sections}
    if has_adapter(state.get(ADAPTER_SECTION)):
        sources[ADAPTER_SECTION] = under_names_of_peft(modules_of(state[ADAPTER_SECTION]), sources[ADAPTER_SECTION])
    return LocalState(
        sections,
        {name: select_source(name, source, options.selection) for name, source in sources.items()},
        rank=op.rank,
        world_size=op.world_size,
        unmatched=unmatched_options(sections, sources, options),
        names=full_names(sources),
        options=options,
        seed=seed,
    )


class LocalState:
    """This rank's shards and encoded values.

    ``fingerprint`` covers everything that planning looks at and nothing else: names, dtypes, shapes, boxes, adapters,
    which tensors belong to one rank alone, the paths of values, the rank, the world size, the layout and what
    selects names (``selected_by``). It does not cover the contents of tensors and values. Two states of one process
    with equal fingerprints have the same plan, provided that the ranks' contents compare the same way. ``unmatched``
    are arguments of the call that select nothing here; ``names`` are suggested instead.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        sources: dict[str, SectionSource],
        *,
        rank: int,
        world_size: int,
        options: SaveRequest,
        unmatched: Sequence[Sequence[str]] = (),
        names: Iterable[str] = (),
        seed: str = "",
    ) -> None:
        self.layout: Layout = options.layout
        selection = options.selection
        self._selected_by = [list(selection.include), list(selection.exclude), options.trainable_only]
        self.unmatched, self.names = unmatched, names
        self.section_names = [section.name for section in sections]
        self._kinds = [(section.name, section.adapter.kind or section.adapter.name) for section in sections]
        self._sources, self._rank = sources, rank
        self._must_match = options.replicas != "own"
        self.declared = DeclaredReplicas(rank, world_size)
        if options.replicas == "trust":
            for source in sources.values():
                source.unproven.clear()
        else:
            add_digests(sources.values())
            self.declared.add(sources, seed=seed, everything=options.replicas == "check", on_device=not options.gate)
        self.values: list[tuple[str, bytes, bytes]] = []
        self._per_rank_values: list[bool] = []
        self._digests: list[bytes] = []  # of the other values
        for name, source in sources.items():
            # The options of an optimizer's group appear once for each of its parameters: encode each object once.
            last: object = self
            data = digest = b""
            containers: dict[Container, tuple[bytes, bytes]] = {}  # many mappings have the same keys
            for path, value in source.values.items():
                if type(value) is Container:
                    if value not in containers:
                        containers[value] = _encode_container(value, name)
                    last, (data, digest) = value, containers[value]
                elif value is not last:
                    data = encode_value(value, f"{name}.{path_name(path)}", allow_pickle=options.allow_pickle)
                    last, digest = value, value_digest(data)
                encoded = encode_path(path)
                self.values.append((name, encoded, data))
                self._per_rank_values.append(path in source.per_rank)
                if path not in source.per_rank:
                    self._digests.append(digest)
        self.fingerprint = self._compute_fingerprint(world_size)

    def _compute_fingerprint(self, world_size: int) -> bytes:
        parts: list[object] = [self._rank, world_size, self.layout, self._kinds, self._selected_by]
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
                sorted(source.unproven) if self._must_match else [],
            ]
        parts += [[section, path] for section, path, _ in self.values]
        parts.append(self._per_rank_values)
        return xxhash.xxh3_128_digest(msgpack.packb(parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this rank holds."""
        shards = (shard for source in self._sources.values() for shard in source.shards)
        return sum(shard.box.numel * shard.meta.dtype.itemsize for shard in shards)

    @cached_property
    def contents(self) -> ContentDigests:
        """Digests of the items that ranks compare, in the order of ``PlanTable.compared_items``.

        Nothing but their names suggests that these items are replicas.
        """
        digests = list(self._digests)
        for source in self._sources.values():
            if source.digests:
                digests += [source.digests[fqn] for fqn in source.metas if fqn in source.digests]
        return stack_digests(digests)

    def separate(self, names: Sequence[str]) -> None:
        """Mark the tensors with these full names as this rank's own. Call ``build_plan`` again afterwards."""
        for full in names:
            section, _, fqn = full.partition(".")
            if fqn in self._sources[section].metas:
                self._sources[section].make_per_rank(fqn)

    def build_plan(self) -> LocalPlan:
        """Build this rank's local plan."""
        builder = _PlanBuilder(self._sources, must_match=self._must_match)
        values = ValueNames(
            [section for section, _, _ in self.values],
            [path for _, path, _ in self.values],
            np.array(self._per_rank_values, np.bool_),
        )
        return builder.build(values, self._kinds)

    def lay_out(self, assignment: Assignment, order: list[int] | None) -> list[FileLayout]:
        """Lay out the tensor files that this rank writes. The result is valid for every state of this fingerprint."""
        sources = [source for source in self._sources.values() for _ in _shards_of(source)]
        shards = self.shards(order)
        if order is not None:
            sources = [sources[position] for position in order]
        files = []
        for section, rows in assignment.files:
            named = []
            for row in rows.tolist():
                shard = shards[row]
                name = rank_name(shard.fqn, self._rank) if shard.fqn in sources[row].per_rank else shard.fqn
                named.append(Shard.unchecked(name, shard.meta, shard.box, shard.tensor))
            files.append(lay_out_file(section, rows, named, HEADER_METADATA))
        return files

    def shards(self, order: list[int] | None) -> list[Shard]:
        """Return the shards by row of the plan that has this ``order``, under their names in the state."""
        shards = [shard for source in self._sources.values() for shard in _shards_of(source)]
        return shards if order is None else [shards[position] for position in order]

    def images(
        self,
        files: Sequence[FileLayout],
        assignment: Assignment,
        shards: Sequence[Shard],
        attempt: str,
        codec: str = "raw",
    ) -> list[FileImage]:
        """Return the files that this rank writes; ``shards`` are those of the plan, by row."""
        images = []
        for file in files:
            key = data_key(attempt, file.section, self._rank, "tensors", codec)
            images.append(tensor_image(key, file, [shards[row] for row in file.rows], codec))
        by_file: dict[tuple[bool, str], list[tuple[bytes, bool, bytes]]] = {}
        for index, shared in zip(assignment.values.tolist(), assignment.shared.tolist(), strict=True):
            section, path, data = self.values[index]
            by_file.setdefault((not shared, section), []).append((path, shared, data))
        for (is_own, section), leaves in sorted(by_file.items(), key=lambda item: item[0][0]):
            kind = "rank_values" if is_own else "values"
            key = data_key(attempt, section, self._rank, kind)
            images.append(FileImage(key, section, kind, encode_values_file(leaves)))
        return images


def _encode_container(container: Container, where: str) -> tuple[bytes, bytes]:
    """The encoded container, and the digest with which ranks compare it: the keys of one of them suffice."""
    unordered = Container(container.kind, container.length)
    return encode_value(container, where), value_digest(encode_value(unordered, where))


def _shards_of(source: SectionSource) -> Iterator[Shard]:
    """The section's shards, and one empty shard for each tensor without elements, so that a file lists that tensor."""
    yield from source.shards
    empty = [(fqn, meta) for fqn, meta in source.metas.items() if 0 in meta.shape]
    if not empty:
        return
    listed = {shard.fqn for shard in source.shards}
    for fqn, meta in empty:
        if fqn not in listed:
            yield Shard(fqn, meta, Box.whole(meta.shape), torch.empty(meta.shape, dtype=torch_dtype(meta)))


class _PlanBuilder:
    """Turns the tensors and shards of all sections into a ``LocalPlan``."""

    def __init__(self, sources: Mapping[str, SectionSource], *, must_match: bool) -> None:
        self._sources, self._must_match = sources, must_match
        self._layouts: dict[MeshPlace, int] = {}
        self._derivable: dict[tuple[int, tuple[int, ...], tuple[Box, ...]], bool] = {}

    def build(self, values: ValueNames, kinds: list[tuple[str, str]]) -> LocalPlan:
        metas: list[tuple[str, str, BasicMeta]] = []
        own: list[bool] = []
        pinned: list[bool] = []
        compared: list[bool] = []
        must_match: list[bool] = []
        holdings: list[int] = []
        derived: list[tuple[int, int, Box]] = []  # boxes that other ranks can compute
        listed: list[tuple[int, int, Box]] = []  # boxes that other ranks cannot compute
        aliases: list[tuple[str, str]] = []
        position = 0
        for name, source in self._sources.items():
            by_name: dict[str, list[tuple[int, Shard]]] = {}
            for shard in _shards_of(source):
                by_name.setdefault(shard.fqn, []).append((position, shard))
                position += 1
            for row, (fqn, meta) in enumerate(source.metas.items(), len(metas)):
                metas.append((name, fqn, meta))
                own.append(fqn in source.per_rank)
                pinned.append(fqn in source.pinned)
                compared.append(fqn in source.digests)
                must_match.append(self._must_match and fqn in source.unproven)
                shards = by_name.get(fqn, [])
                holding = self._holding([shard for _, shard in shards])
                holdings.append(holding)
                boxes = listed if holding == OWN_BOXES else derived
                boxes.extend((at, row, shard.box) for at, shard in shards)
            aliases += [(f"{name}.{alias}", f"{name}.{fqn}") for alias, fqn in source.aliases.items()]
        rows = [*derived, *listed]
        order = [at for at, _, _ in rows]
        table = PlanTable(
            TensorTable.build(metas),
            np.array(own, np.bool_),
            np.array(pinned, np.bool_),
            np.array(compared, np.bool_),
            np.array(must_match, np.bool_),
            np.array(holdings, np.int64),
            [place.layout for place in self._layouts],
            values,
            aliases,
            kinds,
        )
        return LocalPlan(
            table,
            BoxTable.build([(row, box) for _, row, box in rows]),
            [place.coordinate for place in self._layouts],
            None if order == list(range(len(order))) else order,
        )

    def _holding(self, shards: Sequence[Shard]) -> int:
        """Return how ranks of this layout hold a tensor, given the shards that this rank holds of it."""
        if not shards or isinstance(shards[0], IrregularShard):
            return OWN_BOXES
        first, boxes = shards[0], tuple(shard.box for shard in shards)
        if boxes == (Box.whole(first.meta.shape),):
            return WHOLE
        place = first.find_place() if isinstance(first, MeshShard) else None
        if place is None or place.layout.boxes != len(boxes):
            return OWN_BOXES
        number = self._layouts.setdefault(place, len(self._layouts) + 1)
        key = (number, first.meta.shape, boxes)
        if key not in self._derivable:
            # Rank 0 computes the boxes from the mesh, so this rank checks that the result is its actual boxes.
            offsets, lengths = mesh_boxes(place.layout, first.meta.shape, np.array([place.coordinate], np.int64))
            self._derivable[key] = boxes == tuple(map(Box, map(tuple, offsets.tolist()), map(tuple, lengths.tolist())))
        return number if self._derivable[key] else OWN_BOXES
