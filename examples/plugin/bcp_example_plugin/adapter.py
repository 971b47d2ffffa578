"""A moving average of a model's weights, and the adapter that saves and loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from bytecheckpoint.frameworks import (
    Adapter,
    Context,
    Path,
    SectionSource,
    SectionTarget,
    Shard,
    StoredSection,
    whole_tensor,
)

__all__ = ["WeightAverage", "WeightAverageAdapter"]


class WeightAverage:
    """An exponential moving average of named tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], decay: float) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.decay = decay
        self.updates = 0

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, average in self.tensors.items():
            average.lerp_(tensors[name].detach(), 1 - self.decay)
        self.updates += 1


class WeightAverageAdapter(Adapter):
    """Every rank holds the complete average, so every shard is a whole tensor."""

    name: ClassVar[str] = "weight-average"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, WeightAverage)

    def capture(self, obj: WeightAverage, context: Context) -> SectionSource:
        source = SectionSource(values={("decay",): obj.decay, ("updates",): obj.updates})
        for shard in _shards(obj):
            source.metas[shard.fqn] = shard.meta
            source.shards.append(shard)
        return source

    def target(self, obj: WeightAverage, context: Context, stored: StoredSection) -> SectionTarget:
        def apply(values: Mapping[Path, Any]) -> None:
            obj.decay, obj.updates = values["decay",], values["updates",]

        target = SectionTarget(requested_values={("decay",), ("updates",)}, apply=apply)
        for shard in _shards(obj):
            target.metas[shard.fqn] = shard.meta
            target.shards.append(shard)
        return target


def _shards(average: WeightAverage) -> list[Shard]:
    return [Shard(name, *whole_tensor(tensor.dtype, tensor.shape), tensor) for name, tensor in average.tensors.items()]
