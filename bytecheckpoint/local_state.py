"""This rank's part of a state in the order in which its plan lists it, and the files it is given to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .engine.files import FileImage, shard_nbytes, tensor_image, values_image
from .geometry import Box
from .metadata import BasicMeta
from .planners import Assignment, LocalPlan, ValueEntry, layout
from .sections import Section, rank_name
from .shards import Path, SectionSource, Shard, torch_dtype
from .tables import BoxTable, TensorTable
from .values import encode_path, encode_value, encode_values_file, path_name, value_digest
from .version import HEADER_METADATA

__all__ = ["LocalState"]


def _elementless(source: SectionSource) -> Iterator[Shard]:
    """The one empty shard of each tensor without elements: it is what makes the tensor part of a file."""
    listed = {shard.fqn for shard in source.shards}
    for fqn, meta in source.metas.items():
        if meta.numel == 0 and fqn not in listed:
            yield Shard(fqn, meta, Box.whole(meta.shape), torch.empty(meta.shape, dtype=torch_dtype(meta)))


class LocalState:
    """This rank's shards and encoded values in the order its plan lists them."""

    def __init__(
        self, sections: Sequence[Section], sources: dict[str, SectionSource], rank: int, allow_pickle: bool
    ) -> None:
        self._sections, self._sources, self._rank = sections, sources, rank
        self.values: list[tuple[str, Path, bytes]] = []
        self._entries: list[ValueEntry] = []
        for name, source in sources.items():
            for path, value in source.values.items():
                data = encode_value(value, f"{name}.{path_name(path)}", allow_pickle=allow_pickle)
                own = path in source.per_rank
                self.values.append((name, path, data))
                self._entries.append(ValueEntry(name, encode_path(path), value_digest(data), len(data), own))
        self._list_shards()

    @property
    def digests(self) -> dict[str, bytes]:
        """Content of plain tensors that may turn out to differ between ranks, by full name."""
        return {f"{name}.{fqn}": d for name, source in self._sources.items() for fqn, d in source.digests.items()}

    def separate(self, names: Sequence[str]) -> None:
        """Make the tensors of these full names this rank's own, and plan anew."""
        for full in names:
            section, _, fqn = full.partition(".")
            if fqn in self._sources[section].metas:
                self._sources[section].make_per_rank(fqn)
        self._list_shards()

    def _list_shards(self) -> None:
        self.shards: list[Shard] = []
        metas: list[tuple[str, str, BasicMeta]] = []
        boxes: list[tuple[int, Box]] = []
        scopes: list[int] = []
        pinned: list[bool] = []
        aliases: list[tuple[str, str]] = []
        for name, source in self._sources.items():
            rows: dict[str, int] = {}
            for fqn, meta in source.metas.items():
                own = fqn in source.per_rank
                rows[fqn] = len(metas)
                metas.append((name, rank_name(fqn, self._rank) if own else fqn, meta))
                scopes.append(self._rank if own else -1)
                pinned.append(fqn in source.pinned)
            for shard in [*source.shards, *_elementless(source)]:
                boxes.append((rows[shard.fqn], shard.box))
                self.shards.append(self._renamed(shard) if shard.fqn in source.per_rank else shard)
            aliases += [(f"{name}.{alias}", f"{name}.{fqn}") for alias, fqn in source.aliases.items()]
        self.plan = LocalPlan(
            TensorTable.build(metas),
            BoxTable.build(boxes),
            self._entries,
            np.array(scopes, np.int64),
            aliases,
            [(section.name, section.adapter.name) for section in self._sections],
            np.array(pinned, np.bool_),
        )

    def _renamed(self, shard: Shard) -> Shard:
        return Shard(rank_name(shard.fqn, self._rank), shard.meta, shard.box, shard.tensor)

    def images(self, assignment: Assignment, attempt: str) -> list[FileImage]:
        """What this rank was given to write."""
        images = []
        for section, rows in assignment.files:
            shards = [self.shards[row] for row in rows.tolist()]
            offsets, _ = layout(np.array([shard_nbytes(shard) for shard in shards], np.int64))
            key = f"{attempt}/{section}-{self._rank:05d}.safetensors"
            images.append(tensor_image(key, section, shards, offsets.tolist(), HEADER_METADATA))
        for shared, kind, suffix in ((True, "values", ""), (False, "rank_values", ".rank")):
            by_section: dict[str, list[tuple[Path, bool, bytes]]] = {}
            for index, is_shared in zip(assignment.values.tolist(), assignment.shared.tolist()):
                if is_shared == shared:
                    section, path, data = self.values[index]
                    by_section.setdefault(section, []).append((path, shared, data))
            for section, leaves in by_section.items():
                key = f"{attempt}/{section}-{self._rank:05d}{suffix}.msgpack"
                images.append(values_image(key, section, kind, encode_values_file(leaves)))
        return images
