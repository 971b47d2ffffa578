"""Samplers and datasets whose position can be split over another number of data-parallel ranks.

Example:
    >>> sampler = ElasticSampler(dataset, rank=dp_rank, world_size=dp_size, seed=7)
    >>> loader = StatefulDataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4)
    >>> state = {"model": model, "dataloader": bcp.DataLoaderState(loader, on_resize=sampler)}
"""

from __future__ import annotations

from .dataset import ElasticDataset
from .sampler import ElasticSampler

__all__ = ["ElasticDataset", "ElasticSampler"]
