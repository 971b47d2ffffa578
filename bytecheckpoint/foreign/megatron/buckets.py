"""Present the buckets of Megatron's distributed optimizer (``dp_reshardable``) as the adapter of live ones loads them.

Each model parallel rank has its own, with a copy of the param groups.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ...frameworks.megatron.buckets import BUCKET_GROUPS, GROUP_MARKS, weights_name
from ...frameworks.optimizer import NAMELESS
from ...frameworks.optimizer_state import MASTER, state_name, state_path
from ..building import IndexBuilder, StoredLeaf
from ..naming import OPTIMIZER_SECTION
from .folder import Contents
from .optimizer import ParamGroup, groups_of

_BUCKET = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.(dp_group_idx_\d+\.gbuf_idx_.+)\.([^.]+)", re.DOTALL)
_OBJECT = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.(dp_group_idx_\d+)\.(optimizer|grad_scaler)")
_MASTER = "param"
_MARKS = {*GROUP_MARKS, *(f"pre_{mark}" for mark in GROUP_MARKS)}


class StoredBuckets(NamedTuple):
    """Tensors by the name of the bucket and the key of the state, and objects by the beginning of such names."""

    tensors: dict[str, dict[str, StoredLeaf]]
    optimizers: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, contents: Contents) -> StoredBuckets:
        """Find the buckets in a folder."""
        found = cls({}, {})
        for name, leaf in contents.tensors.items():
            if match := _BUCKET.fullmatch(name):
                found.tensors.setdefault(match[1] + match[2], {})[match[3]] = leaf
        for one in contents.objects:
            if match := _OBJECT.fullmatch(one.key):
                found.optimizers.setdefault(match[1] + match[2], {})[match[3]] = one.value
        return found

    @property
    def have_remainders(self) -> bool:
        """Whether the master weights are only what rounding left out."""
        masters = [entries[_MASTER] for entries in self.tensors.values() if _MASTER in entries]
        return any(master.meta.dtype.kind != "float" for master in masters)

    def add_to(self, builder: IndexBuilder, where: str) -> None:
        """Add the section."""
        text = (
            f"{where} has the flat buckets of Megatron's distributed optimizer (dp_reshardable), which do not state "
            "where the parameters are. They load together with the model into Megatron's optimizer in the model "
            "parallel layout that saved them, on any number of data parallel ranks"
        )
        builder.add_section(OPTIMIZER_SECTION, "optimizer")
        builder.add_value(OPTIMIZER_SECTION, NAMELESS, text)
        steps: dict[str, float] = {}
        for name, optimizer in self.optimizers.items():
            groups = groups_of(optimizer)
            marks = [{key: group[key] for key in _MARKS if key in group} for group in groups]
            read = [ParamGroup.of(builder, group, optimizer) for group in groups]
            options = [{**mark, **group.options} for mark, group in zip(marks, read, strict=True)]
            builder.add_value(OPTIMIZER_SECTION, (BUCKET_GROUPS, name), options)
            steps.update((name, group.step) for group in read if group.step is not None)
        for bucket, entries in self.tensors.items():
            for key, leaf in entries.items():
                name = state_name(bucket, MASTER if key == _MASTER else key)
                if key == _MASTER and f"dtype_(torch.{leaf.meta.dtype}," in bucket:
                    name = weights_name(bucket)
                builder.add_tensor(OPTIMIZER_SECTION, name, leaf)
            step = steps.get(bucket.partition(".gbuf_idx_")[0])
            if step is not None:
                builder.add_value(OPTIMIZER_SECTION, state_path(bucket, "step"), step)
