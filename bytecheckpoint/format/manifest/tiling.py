"""Check that shards tile their tensors, for all tensors at once."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ...errors import FormatError, PlanError
from ...tensors.geometry import find_overlap, inseparable
from ...tensors.tables import Int64, ragged_positions
from .document import Manifest


def reject(what: str) -> NoReturn:
    """Raise ``FormatError`` for a rule that the manifest breaks."""
    raise FormatError(f"manifest: {what}")


def first_row(where: npt.NDArray[np.bool_]) -> int | None:
    """Return the first row of which this holds, if any."""
    return int(np.argmax(where)) if where.any() else None


def tensor_of_shard(manifest: Manifest, row: int) -> str:
    """Return name and shape of the tensor of shard ``row``, for messages."""
    tensor = int(manifest.shards.tensor[row])
    return f"{manifest.tensors.names[tensor]!r:.200} of shape {manifest.tensors.shape_of(tensor)}"


def check_tilings(manifest: Manifest) -> None:
    """Check that shards are disjoint and that their volumes add up, so that they cover each tensor exactly."""
    tensors, shards = manifest.tensors, manifest.shards
    if not len(tensors):
        return
    volume, numel = shards.numel(), tensors.numel()
    first = np.searchsorted(shards.tensor, np.arange(len(tensors)))
    per_tensor = np.bincount(shards.tensor, minlength=len(tensors))
    empty = volume == 0
    if empty.any() and ((per_tensor > 1) & np.logical_or.reduceat(empty, first)).any():
        row = int(np.argmax(empty & (per_tensor > 1)[shards.tensor]))
        reject(f"tensor {tensor_of_shard(manifest, row)} has several shards and one of them is empty")
    # Sums can wrap around only for overlapping shards, which are rejected below.
    wrong = np.add.reduceat(volume, first) != numel
    if (tensor := first_row(wrong)) is not None:
        reject(
            f"shards of tensor {tensors.names[tensor]!r:.200} of shape {tensors.shape_of(tensor)} do not cover it "
            f"exactly: they have {np.add.reduceat(volume, first)[tensor]} of {numel[tensor]} elements"
        )
    alone = (per_tensor == 1) & (numel == 0)
    if alone.any():
        rows = first[alone]
        moved = shards.take(rows)
        whole = tensors.shape[ragged_positions(tensors.starts[:-1][alone], tensors.ndim[alone])]
        if moved.offsets.any() or not np.array_equal(moved.lengths, whole):
            reject("the one shard of a tensor without elements must be all of it")
    is_split = per_tensor[shards.tensor] > 1
    for ndim in np.unique(tensors.ndim[per_tensor > 1]).tolist():
        _check_disjoint(manifest, np.flatnonzero(is_split & (tensors.ndim[shards.tensor] == ndim)), ndim)


def _check_disjoint(manifest: Manifest, rows: Int64, ndim: int) -> None:
    """Check that shards ``rows`` are in order and disjoint.

    All are non-empty, of tensors with ``ndim`` >= 1 dimensions.
    """
    shards = manifest.shards
    at = shards.starts[:-1][rows][:, None] + np.arange(ndim)
    offsets, lengths = shards.offsets[at], shards.lengths[at]
    group = shards.tensor[rows]
    _check_order(manifest, rows, offsets, group)
    for members in inseparable(offsets, lengths, group):
        try:
            pair = find_overlap(offsets[members], lengths[members])
        except PlanError as error:
            reject(f"tensor {tensor_of_shard(manifest, int(rows[members[0]]))}: {error}")
        if pair is not None:
            one, two = (shards.box_of(int(rows[members[i]])) for i in pair)
            reject(f"shards {one} and {two} of tensor {tensor_of_shard(manifest, int(rows[members[0]]))} overlap")


def _check_order(manifest: Manifest, rows: Int64, offsets: Int64, tensor: Int64) -> None:
    step = np.diff(offsets, axis=0)
    lead = np.argmax(step != 0, axis=1)
    back = (np.take_along_axis(step, lead[:, None], axis=1)[:, 0] <= 0) & (tensor[1:] == tensor[:-1])
    if back.any():
        row = int(rows[int(np.argmax(back))])
        reject(f"shards of tensor {tensor_of_shard(manifest, row)} overlap or are not in the order of their offsets")
