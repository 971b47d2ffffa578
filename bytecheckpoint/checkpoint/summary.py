"""Summarize a checkpoint as an HTML table."""

from __future__ import annotations

from html import escape

import numpy as np

from ..format.manifest import Manifest

__all__ = ["summary_html"]


def summary_html(url: str, manifest: Manifest) -> str:
    """Return the table: one row for each section, with its kind, number of tensors and bytes of them."""
    tensors = manifest.tensors
    section_of_shard = tensors.section[manifest.shards.tensor]
    nbytes = np.bincount(section_of_shard, manifest.shard_nbytes, minlength=len(manifest.sections))
    counts = np.bincount(tensors.section, minlength=len(manifest.sections))
    rows = [
        f"<tr><td>{escape(section.name)}</td><td>{escape(section.kind)}</td>"
        f"<td style='text-align:right'>{count:,}</td><td style='text-align:right'>{int(size):,}</td></tr>"
        for section, count, size in zip(manifest.sections, counts.tolist(), nbytes.tolist(), strict=True)
    ]
    saved = f"step {manifest.step}, saved {escape(manifest.created)} by {manifest.world_size} rank(s)"
    return (
        f"<table><caption><b>{escape(url)}</b><br>{saved}</caption>"
        "<tr><th>section</th><th>kind</th><th>tensors</th><th>bytes</th></tr>"
        f"{''.join(rows)}</table>"
    )
