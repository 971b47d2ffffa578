"""Load the buckets of Megatron's distributed optimizer, which its default format ``dp_reshardable`` stores as they are.

A bucket is one flat tensor for each key of the state. Nothing stored names the parameters in it. An optimizer in the
same model parallel layout has each parameter at the same elements, whatever its number of data parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from ...errors import MismatchError
from ...tensors.geometry import Box
from ...tensors.shards import IrregularShard, Path, SectionTarget, StoredSection, basic_meta
from ..base import Context
from ..layout import ParamLayout, ParamPart
from ..optimizer import NAMELESS
from ..optimizer_groups import same_value
from ..optimizer_state import MASTER, state_name
from ..optimizer_wrappers import as_list
from ..tensors import has_no_dense_memory
from .stepped import Stepped

BUCKET_GROUPS = "bucket_groups"
"""The param groups of one model parallel rank have the path ``(BUCKET_GROUPS, <the beginning of its buckets>)``."""

GROUP_MARKS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What distinguishes param groups in Megatron's checkpoints."""

_SAMPLE = 64  # elements of each parameter that are compared
_SMALL = 1e-6  # float16 rounds less to zero


def weights_name(bucket: str) -> str:
    """The name of the weights in a bucket that has no separate master weights."""
    return f"weights.{bucket}.param"


def group_mark(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What distinguishes a param group from others. NeMo has other names for some of it."""
    return tuple(group.get(mark, group.get(f"pre_{mark}")) for mark in GROUP_MARKS)


class _Place(NamedTuple):
    bucket: str
    start: int
    numel: int


@dataclass(eq=False)
class _Sample:
    """Some elements of a weight, and room for what the bucket has of them."""

    fqn: str
    weight: torch.Tensor
    stored: torch.Tensor


class LiveBuckets:
    """Where the parameters of live optimizers are in the stored buckets."""

    def __init__(self, obj: Any, context: Context, stored: StoredSection) -> None:
        """Raises ``MismatchError`` if the stored buckets are not those of these optimizers."""
        self._where = f"section {context.section!r}: {stored.values[NAMELESS]}"
        self.contents = replace(stored, values={path: one for path, one in stored.values.items() if path != NAMELESS})
        self._places: dict[torch.Tensor, _Place] = {}
        self._groups: dict[int, Path] = {}
        self._samples: list[tuple[str, int, int, _Sample]] = []
        sizes: dict[str, int] = {}
        for item in as_list(obj):
            chain = getattr(item, "chained_optimizers", [item])
            for number, leaf in enumerate(chain):
                if leaf.optimizer is not None:
                    sizes.update(self._add(leaf, f"chained_{number}." if len(chain) > 1 else ""))
        self._require_same(sizes)

    def _add(self, leaf: Any, prefix: str) -> Iterator[tuple[str, int]]:
        """Note where the parameters are. Yields the names and sizes of the buckets."""
        if not hasattr(leaf, "gbuf_ranges"):
            raise self._mismatch(f"This optimizer is a {type(leaf).__name__} without such buckets")
        group = f"{prefix}dp_group_idx_{leaf.data_parallel_group_idx}"
        self._groups[id(leaf)] = (BUCKET_GROUPS, group)
        for number, (by_dtype, buffer) in enumerate(zip(leaf.gbuf_ranges, leaf.buffers, strict=True)):
            for dtype, ranges in by_dtype.items():
                for index, (found, bucket) in enumerate(zip(ranges, buffer.buckets, strict=True)):
                    name = f"{group}.gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{index}"
                    numel = int(bucket.numel_unpadded)
                    for param, span in found["param_map"].items():
                        self._places[param] = _Place(name, span["gbuf_world_in_bucket"].start, numel)
                    yield name, numel

    def _require_same(self, sizes: Mapping[str, int]) -> None:
        metas = self.contents.metas.items()
        stored = {name.partition(".")[2].rpartition(".")[0]: prod(meta.shape) for name, meta in metas}
        groups = {path[1] for path in self._groups.values()}
        ours = {name: size for name, size in stored.items() if name.partition(".gbuf_idx_")[0] in groups}
        if stored and ours != sizes:
            differing = sorted(name for name in sizes.keys() | ours.keys() if sizes.get(name) != ours.get(name))
            shown = "; ".join(
                f"{name} has {ours.get(name, 'no')} elements there and {sizes.get(name, 'no')} here"
                for name in differing[:3]
            )
            raise self._mismatch(f"{len(differing)} of {len(sizes)} buckets of this rank differ: {shown}")

    def _mismatch(self, detail: str) -> MismatchError:
        return MismatchError(
            f"{self._where}. {detail}. Load it with the tensor, pipeline, virtual pipeline and expert parallel sizes, "
            "dtypes and bucket_size that saved it, and save it with bytecheckpoint: that loads anywhere",
            [("value", "buckets", detail)],
        )

    # ------------------------------------------------------------------------------------------------------ parameters

    def layout(self, item: Stepped, layout: ParamLayout) -> ParamLayout:
        """The layout in buckets of what an optimizer steps. ``layout`` is that in the model's tensors."""
        place = self._places[item.model_param]
        (length,) = layout.local_shape
        self._add_sample(item, layout, place)
        part = ParamPart(place.bucket, (place.numel,), Box((place.start,), (length,)), 0)
        return ParamLayout((length,), (part,), {place.bucket: (place.numel,)})

    def _add_sample(self, item: Stepped, layout: ParamLayout, place: _Place) -> None:
        """Note elements that the model stores, too: of a padded vocabulary, the padding may not be."""
        master = state_name(place.bucket, MASTER)
        name = master if master in self.contents.metas else weights_name(place.bucket)
        if name not in self.contents.metas or not layout.parts or has_no_dense_memory(item.model_param):
            return
        part = layout.parts[0]
        count = min(_SAMPLE, part.box.numel if part.strides is None else 1)
        first = (item.span or (0, 0))[0] + part.start
        weight = item.model_param.detach().view(-1)[first : first + count]
        sample = _Sample(part.fqn, weight, torch.full((count,), torch.nan, dtype=torch.float32))
        self._samples.append((name, place.start + part.start, place.numel, sample))

    def add_to(self, target: SectionTarget) -> None:
        """Request what ``fill_by_name`` does not know. Raises ``MismatchError``."""
        for name, start, numel, sample in self._samples:
            meta = basic_meta(sample.stored.dtype, (numel,))
            target.metas.setdefault(name, meta)
            box = Box((start,), tuple(sample.stored.shape))
            target.shards.append(IrregularShard(name, meta, box, sample.stored))
        known = {path for path in target.requested_values if path[:1] == ("param_groups",)}
        target.requested_values -= known
        paths = {*self._groups.values()} & self.contents.values.keys()
        target.requested_values.update(paths, [NAMELESS])

    def options(self, leaf: Any, group: Mapping[str, Any]) -> dict[str, Any]:
        """The stored hyper-parameters of a group, as Megatron finds them. Raises ``MismatchError``."""
        stored = self.contents.values.get(self._groups[id(leaf)])
        if stored is None:
            return {}
        found = [one for one in stored if group_mark(one) == group_mark(group)]
        options = [{key: value for key, value in one.items() if key not in GROUP_MARKS} for one in found]
        if not options or not all(same_value(one, options[0]) for one in options):
            marks = dict(zip(GROUP_MARKS, group_mark(group), strict=True))
            raise self._mismatch(f"{len(options)} stored param groups with different values match {marks}")
        return options[0]

    def compare(self) -> None:
        """Compare samples of the buckets with the loaded weights, which are computed from them.

        Buckets of another layout can have the same sizes. Raises ``MismatchError``.
        """
        for *_, sample in self._samples:
            weight = sample.weight.float().cpu()
            limit = max(weight.abs().max().item() / _SAMPLE, _SMALL)  # a step rounds its result
            if ((sample.stored - weight).abs() > limit).any():  # never of NaN: not loaded
                raise self._mismatch(
                    f"The buckets of this rank have other weights than the loaded model: {sample.fqn} is elsewhere in "
                    "them, or the model was not loaded with them. Do not use what was loaded"
                )
