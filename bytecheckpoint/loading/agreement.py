"""Let all ranks agree on the faults of a load, on stored names that no rank requests, and on shared reads.

Every rank sends rank 0 one message with its faults, one bit for each stored name that it claims, and the reads that it
could share. Rank 0 answers all ranks with the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ..control.base import Operation
from ..errors import MismatchError
from ..format.values.types import Container, path_name
from ..storage_backends.base import StorageBackend
from ..tensors.shards import Path
from .matching import Match, Target, mismatch_error
from .options import Fault, LoadRequest
from .shared_reads.negotiation import Answer, ReadOffer, answer_offers
from .stored import OpenCheckpoint, OpenSection

_Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on.

    ``mismatch`` is the error to raise, if any rank found a fault. ``unexpected`` are the names that no rank requested
    and that ``strict`` tolerates.
    """

    mismatch: MismatchError | None
    unexpected: list[str]
    shared_reads: Answer


def _claim_names(
    checkpoint: OpenCheckpoint, targets: Iterable[Target], options: LoadRequest, match: Match
) -> tuple[bytes, bytes, list[str]]:
    """Return which stored names this rank's targets use, or may ignore.

    These are one packed bit for each tensor of the manifest, one for each shared value of the opened sections, and the
    full names that are stored for the saved rank that this rank loads, and that it does not use.
    """
    tensors: _Bits = np.zeros(len(checkpoint.manifest.tensors), np.bool_)
    tensors[match.rows] = True  # some fill tensors of other names
    values: list[bool] = []
    unused: list[str] = []
    for one in targets:
        stored, target = one.stored, one.target
        names: set[str] = {*target.metas, *target.aliases}
        paths: set[Path] = set(target.requested_values)
        # Markers of structure, whose content is compared separately.
        paths.update(path for path, value in stored.contents.values.items() if type(value) is Container)
        if options.strictness(stored.name) != "exact":
            names.update(name for name in target.ignorable if isinstance(name, str))
            paths.update(path for path in target.ignorable if not isinstance(path, str))
        rows = stored.tensor_rows
        tensors[[rows[name] for name in names if name in rows]] = True
        values += [path in paths for path in stored.shared_values]
        unused += [f"{stored.name}.{path_name(path)}" for path in stored.own_values - paths]
        unused += [f"{stored.name}.{name}" for name, row in stored.own_tensors.items() if not tensors[row]]
    return np.packbits(tensors).tobytes(), np.packbits(np.array(values, np.bool_)).tobytes(), sorted(unused)


def _known_names(checkpoint: OpenCheckpoint, targets: Iterable[Target], options: LoadRequest) -> list[str]:
    """All names that patterns may match on this rank; none if there are no patterns."""
    if options.selection.selects_all:
        return []
    known = [*checkpoint.listed]
    for one in targets:
        target, section = one.target, one.stored.name
        known += [f"{section}.{name}" for name in (*target.metas, *target.aliases)]
        known += [f"{section}.{path_name(path)}" for path in target.requested_values]
    return known


def _unmatched(checkpoint: OpenCheckpoint, options: LoadRequest, known: Sequence[str]) -> list[Fault]:
    """The patterns and renames that match nothing on this rank. They are faults if they match nothing on any rank."""
    sections = checkpoint.sections.values()
    unlisted = [section.name for section in sections if section.is_stored and not section.is_read]
    patterns = options.selection.unmatched(checkpoint.sections, known, unlisted)
    faults = [Fault("pattern", pattern, argument) for argument, pattern in patterns]
    names = checkpoint.index.names if options.rename is not None else None
    return faults + [Fault("rename", key, "") for key in ([] if names is None else names.unmatched())]


def agree(
    op: Operation,
    backend: StorageBackend,
    checkpoint: OpenCheckpoint,
    options: LoadRequest,
    targets: Sequence[Target],
    *,
    match: Match,
    offer: ReadOffer,
) -> Verdict:
    """Exchange faults, claims and offers. Every rank gets the same verdict; only suggestions in its message differ."""
    claims = _claim_names(checkpoint, targets, options, match)
    known = _known_names(checkpoint, targets, options)
    unmatched = _unmatched(checkpoint, options, known)
    message = msgpack.packb([match.faults, *claims, offer.message, unmatched])
    received = op.gather("claims", message)
    packed = None
    if received is not None:
        packed = msgpack.packb(_decide(backend, checkpoint, options, [msgpack.unpackb(one) for one in received]))
    found, unclaimed, shared_reads = msgpack.unpackb(op.broadcast("verdict", packed), strict_map_key=False)
    all_faults = [Fault(*fault) for fault in found]
    of_other_kind = {fault.name for fault in all_faults if fault.kind == "kind"}
    unexpected: list[str] = []
    for section, full in unclaimed:
        if full in of_other_kind:
            continue
        if options.strictness(section) == "lenient":
            unexpected.append(full)
        else:
            all_faults.append(Fault("unexpected", full, ""))
    mismatch = None
    if all_faults:
        stored_names = [name for section in checkpoint.sections.values() for name in section.full_names]
        mismatch = mismatch_error(checkpoint.index.url, all_faults, stored_names, [*known, *stored_names])
    return Verdict(mismatch, unexpected, shared_reads if mismatch is None else {})


def _decide(
    backend: StorageBackend, checkpoint: OpenCheckpoint, options: LoadRequest, messages: Sequence[Sequence[Any]]
) -> list[Any]:
    """Rank 0's verdict as plain data, from the messages of all ranks."""
    faults, tensors, values, unused, offers, unmatched = zip(*messages, strict=True)
    useless = set.intersection(*({tuple(fault) for fault in of_rank} for of_rank in unmatched))
    found = sorted({tuple(fault) for of_rank in faults for fault in of_rank} | useless)
    unclaimed = [
        *_unclaimed_tensors(checkpoint, options, tensors),
        *_unclaimed_values(checkpoint.sections, values),
        *sorted({(name.partition(".")[0], name) for of_rank in unused for name in of_rank}),
    ]
    return [found, unclaimed, answer_offers(backend, checkpoint.manifest, offers)]


def _unclaimed_tensors(
    checkpoint: OpenCheckpoint, options: LoadRequest, claims: Sequence[bytes]
) -> Iterable[tuple[str, str]]:
    """``(section, full name)`` of the requested sections' shared tensors that no rank claims."""
    manifest = checkpoint.manifest
    requested = np.array([name in checkpoint.sections for name in manifest.tensors.sections], np.bool_)
    is_shared = requested[manifest.tensors.section] & (manifest.scope < 0)
    for row in np.flatnonzero(is_shared & ~_any(claims, len(manifest.tensors))).tolist():
        section = manifest.tensors.section_of(row)
        name = manifest.tensors.names[row]
        if options.selection.selects(name):
            yield section, name


def _unclaimed_values(sections: Mapping[str, OpenSection], claims: Sequence[bytes]) -> Iterable[tuple[str, str]]:
    paths = [(section.name, path) for section in sections.values() for path in section.shared_values]
    for (section, path), is_claimed in zip(paths, _any(claims, len(paths)).tolist(), strict=True):
        if not is_claimed:
            yield section, f"{section}.{path_name(path)}"


def _any(packed: Sequence[bytes], count: int) -> _Bits:
    """The union of packed bits."""
    found = np.zeros(count, np.bool_)
    for bits in packed:
        found |= np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
    return found
