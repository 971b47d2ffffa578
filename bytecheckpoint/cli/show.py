"""``bcp show``: one tensor with statistics of its elements, or one plain value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import click
import numpy as np
import torch

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import SimilarNames
from ..convert.rewriter import OutputTensor, Progress, Rewriter
from ..tensors.geometry import Box
from .options import Locate, command
from .output import Output, count_text, size_text
from .values import print_values, values_of

_BINS = 10
_BAR = 40  # characters
_PART = 1 << 18  # elements that are converted at once

_Parts: TypeAlias = Callable[[], Iterator[np.ndarray[Any, Any]]]


@command("show")
@click.argument("checkpoint")
@click.argument("name")
def show_command(out: Output, at: Locate, checkpoint: str, name: str) -> None:
    """Show the tensor or the plain value NAME of CHECKPOINT.

    Of a tensor: shape, dtype, the least, largest and mean element, how many are NaN or infinite, and a histogram. It is
    read twice, in bounded memory, and every byte is verified. Elements that are not finite count for nothing else. Of
    complex numbers, absolute values are shown. A plain value is printed in full; NAME@RANK is that of a single rank.
    """
    found = api.open(at(checkpoint))
    row = found.manifest.tensor_row(found.aliases.get(name, name))
    if row is not None:
        _show_tensor(out, found, name, row)
        return
    values = values_of(found)
    named = [one for one in values if name in (one["name"], one["name"].removesuffix(f"@{one['rank']}"))]
    if not named:
        hint = SimilarNames([*found, *(one["name"] for one in values)]).nearest(name)
        raise click.BadParameter(
            f"there is no tensor or value {name!r} in {found.index.backend.display_url}{hint}", param_hint="NAME"
        )
    out.document({"url": found.url, "name": name, "values": named})
    print_values(out, named)


def _show_tensor(out: Output, found: Checkpoint, name: str, row: int) -> None:
    meta = found.manifest.tensors.meta_of(row)
    figures: dict[str, Any] = {}
    if meta.dtype.kind != "bits":
        with out.progress("show", 2 * meta.nbytes) as progress:
            figures = _statistics(lambda: _parts(found, row, progress), is_exact=meta.dtype.kind in _EXACT)
    shown = {"dtype": str(meta.dtype), "shape": list(meta.shape), "elements": meta.numel, "bytes": meta.nbytes}
    out.document({"url": found.url, "name": name, **shown, **figures})
    out.line(name)
    out.line(f"  {meta}, {count_text(meta.numel)} elements, {size_text(meta.nbytes)}")
    if not figures:
        out.line("  opaque bits, which have no numeric values")
        return
    out.line(f"  {figures['nan']} NaN, {figures['infinite']} infinite")
    if figures["histogram"]:
        out.line("  " + ", ".join(f"{key} {_number(figures[key])}" for key in ("min", "max", "mean")))
        out.line()
        most = max(one["count"] for one in figures["histogram"])
        rows = [
            (_number(one["from"]), one["count"], "#" * -(-_BAR * one["count"] // most)) for one in figures["histogram"]
        ]
        out.table((">FROM", ">COUNT", ""), rows)


_EXACT = ("bool", "int", "uint")
"""The kinds of dtypes whose values a float64 may not represent."""


def _parts(found: Checkpoint, row: int, progress: Progress) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the elements as numbers in float64, or as they are if they are integers."""
    meta = found.manifest.tensors.meta_of(row)
    with Rewriter(found.index) as reader:
        for piece in reader.pieces([OutputTensor("", row, Box.whole(meta.shape), meta.dtype)]):
            for part in torch.split(piece.reshape(-1), _PART):
                if meta.dtype.kind == "complex":
                    yield part.to(torch.complex128).abs().numpy()
                elif meta.dtype.kind == "bool":
                    yield part.to(torch.uint8).numpy()
                else:
                    yield part.numpy() if meta.dtype.kind in _EXACT else part.double().numpy()
            progress(piece.nbytes)


def _statistics(parts: _Parts, *, is_exact: bool) -> dict[str, Any]:
    """Compute the figures: in a first pass all but the histogram, in a second pass that."""
    count = nans = infinite = 0
    total, low, high = 0.0, None, None
    for part in parts():
        nans += 0 if is_exact else int(np.isnan(part).sum())
        infinite += 0 if is_exact else int(np.isinf(part).sum())
        finite = part if is_exact else part[np.isfinite(part)]
        if finite.size:
            count += finite.size
            total += float(finite.sum(dtype=np.float64))
            least, largest = finite.min().item(), finite.max().item()
            low = least if low is None else min(low, least)
            high = largest if high is None else max(high, largest)
    found = {"min": low, "max": high, "mean": total / count if count else None, "nan": nans, "infinite": infinite}
    if low is None or high is None:
        return {**found, "histogram": []}
    return {**found, "histogram": _histogram(parts, low, high, is_exact=is_exact)}


def _histogram(parts: _Parts, low: float, high: float, *, is_exact: bool) -> list[dict[str, Any]]:
    """Count the finite elements in intervals of equal width; few integers have an interval each."""
    if is_exact:
        span = int(high) - int(low) + 1
        bins = min(_BINS, span)
        edges: list[float] = [int(low) - (-number * span // bins) for number in range(bins)]
    else:
        scale = max(abs(low), abs(high)) or 1.0  # so that no difference of large floats overflows
        start, width = low / scale, high / scale - low / scale
        bins = _BINS if width else 1
        edges = [low, *((start + width * number / bins) * scale for number in range(1, bins))]
    counts = np.zeros(bins, np.int64)
    for part in parts():
        finite = part if is_exact else part[np.isfinite(part)]
        counts += np.bincount(np.searchsorted(np.array(edges, part.dtype), finite, "right") - 1, minlength=bins)
    return [{"from": edge, "count": count} for edge, count in zip(edges, counts.tolist(), strict=True)]


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
