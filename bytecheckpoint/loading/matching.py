"""Match requested names against stored ones, and describe everything that does not fit in one error."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from ..checkpoint.selection import SimilarNames
from ..errors import MismatchError
from ..format.values.types import MAPPINGS, UnreadObject, path_name
from ..format.values.types import Container as StoredContainer
from ..frameworks.sections import Section
from ..planners.request_classes import BoxRequest
from ..tensors.derived import is_derived
from ..tensors.dtypes import is_lossless_cast, is_meaningful_cast
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, SectionTarget, Shard
from .options import Cast, Fault, LoadRequest
from .overlaps import overlapping_shards
from .stored import OpenCheckpoint, OpenSection, TensorSources

_MAX_SHOWN_FAULTS = 40  # per kind; a message with thousands of names cannot be read


@dataclass(frozen=True)
class Target:
    """A section of the state, what the checkpoint stores of it, and where that goes."""

    section: Section
    stored: OpenSection
    target: SectionTarget


@dataclass(frozen=True)
class Match:
    """What one rank's targets request from the checkpoint, and every fault found.

    ``rows`` are the manifest's tensor rows of ``shards``. ``mismatched`` maps each tensor that stays unchanged because
    of its shape to the stored shape and the shape in memory, ``resized`` each that was stored with another padding.
    ``sources`` maps names to the full name of the stored tensor that fills them, if it has another name.
    """

    shards: list[Shard] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    lazy: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def requests(self) -> list[BoxRequest]:
        """The requests as the planner of shared reads needs them; derived tensors are read alone, one after another."""
        pairs = [pair for pair in zip(self.rows, self.shards, strict=True) if not is_derived(pair[1].tensor)]
        return [BoxRequest(row, shard.box, str(shard.tensor.dtype)) for row, shard in pairs]


def match_targets(checkpoint: OpenCheckpoint, targets: Sequence[Target], options: LoadRequest) -> Match:
    """Compare what the targets request with what is stored."""
    match = Match()
    sources = TensorSources(checkpoint)
    derived = {origin for one in targets for origin in one.target.derived}
    for one in targets:
        match.faults.extend(one.stored.faults)
        if one.stored.is_stored:
            matching = _SectionMatching(match, one.stored, one.target, options, sources, derived)
            matching.match_tensors()
            matching.match_values()
        elif options.selection.selects_section(one.stored.name):
            match.missing.append(one.stored.name)
    return match


@dataclass(frozen=True)
class _SectionMatching:
    match: Match
    stored: OpenSection
    target: SectionTarget
    options: LoadRequest
    sources: TensorSources
    derived: Container[tuple[str, str]]

    def match_tensors(self) -> None:
        rows: dict[str, int] = {}
        section, stored_rows, stored_metas = self.stored.name, self.stored.tensor_rows, self.stored.contents.metas
        selects_all = self.options.selection.selects_all and not self.stored.skipped
        has_own_names = self.sources.has_own_names
        # This loop runs once for each of many thousand small tensors.
        for fqn, meta in self.target.metas.items():
            full = f"{section}.{fqn}"
            if not selects_all and self._is_deselected(full, fqn):
                continue
            row, stored = stored_rows.get(fqn), stored_metas.get(fqn)
            if stored == meta and row is not None and has_own_names:
                rows[fqn] = row
                self.match.loaded.append(full)
                continue
            if stored != meta:
                row, stored = self._other_source(full, fqn, meta, row, stored)
            if row is None or stored is None:
                value = self._values_by_name.get(fqn)
                self._add_missing(
                    full, fqn, "" if value is None else f"stored as {value}, requested as {_tensor(meta)}"
                )
            elif self._fits(full, fqn, stored, meta):
                rows[fqn] = row
                if (source := self.sources.renamed_from(row)) is not None:
                    self.match.sources.setdefault(full, source)
        shards = [shard for shard in self.target.shards if shard.fqn in rows]
        if self.match.resized:
            shards = self._without_padding(shards)
        self.match.shards.extend(shards)
        self.match.rows.extend(rows[shard.fqn] for shard in shards)
        for fqn, other in overlapping_shards(shards):
            detail = "its own elements share memory" if fqn == other else f"shares memory with {other}"
            self.match.faults.append(Fault("overlap", f"{self.stored.name}.{fqn}", detail))

    def match_values(self) -> None:
        for path in self.target.requested_values:
            full = f"{self.stored.name}.{path_name(path)}"
            if self._is_deselected(full, path):
                continue
            if path in self.stored.unread:
                detail = f"{self.stored.unread[path]}, which this library does not read; exclude it"
                self.match.faults.append(Fault("value", full, detail))
            elif path in self.stored.contents.values:
                value = self.stored.contents.values[path]
                if (
                    type(value) is not StoredContainer or value.kind not in MAPPINGS
                ):  # these only describe what is below
                    self.match.loaded.append(full)
            else:
                found = self.stored.contents.metas.get(path_name(path))
                detail = "" if found is None else f"stored as {_tensor(found)}, requested as a plain value"
                self._add_missing(full, path, detail)

    @cached_property
    def _values_by_name(self) -> dict[str, str]:
        """What the section's plain values are, by their dotted names."""
        return {path_name(path): _value(value) for path, value in self.stored.contents.values.items()}

    def _is_deselected(self, full: str, name: str | Path) -> bool:
        return not self.options.selection.selects(full) or name in self.stored.skipped

    def _other_source(
        self, full: str, fqn: str, requested: BasicMeta, row: int | None, stored: BasicMeta | None
    ) -> tuple[int | None, BasicMeta | None]:
        """The stored tensor that fills ``fqn`` best: a master weight, or what the target falls back on."""
        if stored is not None:
            # The dtype in memory shows that the caller expects more precision than this tensor was stored with. A copy
            # of a master weight is rounded from the stored master, as the next step would round it.
            is_finer = stored.dtype != requested.dtype and is_lossless_cast(stored.dtype, requested.dtype)
            is_copy = stored.dtype != requested.dtype and (self.stored.name, fqn) in self.derived
            master = self.sources.master_of(self.stored.name, fqn) if is_finer or is_copy else None
            found = (
                master
                if master is not None and (is_copy or is_lossless_cast(master.meta.dtype, requested.dtype))
                else None
            )
        elif fqn in self.target.fallbacks and self.options.strictness(self.stored.name) != "exact":
            found = self.sources.best_of(*self.target.fallbacks[fqn])
        else:
            found = None
        if found is None:
            return row, stored
        self.match.sources[full] = found.name
        return found.row, found.meta

    def _without_padding(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards without what lies behind the end of the stored tensor."""
        kept: list[Shard] = []
        for shard in shards:
            resized = self.match.resized.get(f"{self.stored.name}.{shard.fqn}")
            if resized is None:
                kept.append(shard)
                continue
            dim = self.target.resizable[shard.fqn]
            stored = BasicMeta(shard.meta.dtype, resized[0])
            start, length = shard.box.offsets[dim], shard.box.lengths[dim]
            length = min(length, stored.shape[dim] - start)
            if length > 0:
                lengths = (*shard.box.lengths[:dim], length, *shard.box.lengths[dim + 1 :])
                box = Box(shard.box.offsets, lengths)
                cut = partial(torch.narrow, dim=dim, start=0, length=length)
                tensor = shard.tensor
                kept.append(
                    Shard(shard.fqn, stored, box, tensor.part(lengths, cut) if is_derived(tensor) else cut(tensor))
                )
        return kept

    def _fits(self, full: str, fqn: str, stored: BasicMeta, requested: BasicMeta) -> bool:
        """Whether a tensor can be loaded; records the fault or the name and cast."""
        if stored == requested:
            self.match.loaded.append(full)
            return True
        if stored.shape != requested.shape and _differ_only_in(self.target.resizable.get(fqn), stored, requested):
            self.match.resized[full] = (stored.shape, requested.shape)
        elif stored.shape != requested.shape:
            if self.options.strictness(self.stored.name) == "skip_mismatched":
                self.match.mismatched[full] = (stored.shape, requested.shape)
                return False
            detail = f"stored {list(stored.shape)}, requested {list(requested.shape)}"
            self.match.faults.append(Fault("shape", full, detail))
            return False
        cast: Cast = "any" if (self.stored.name, fqn) in self.derived else self.options.cast
        refusal = refuse_cast(stored, requested, cast)
        if refusal is not None:
            self.match.faults.append(Fault("dtype", full, refusal))
            return False
        self.match.loaded.append(full)
        if stored.dtype != requested.dtype:
            self.match.cast[full] = (stored.dtype.name, requested.dtype.name)
        return True

    def _add_missing(self, full: str, name: str | Path, other_kind: str) -> None:
        strictness = self.options.strictness(self.stored.name)
        is_left_out = (name if isinstance(name, str) else path_name(name)) in self.stored.left_out
        if is_left_out and strictness != "exact":
            self.match.left_out.append(full)
        elif name in self.target.optional and strictness != "exact":
            self.match.lazy.append(full)
        elif strictness == "lenient":
            self.match.missing.append(full)
        elif other_kind:
            self.match.faults.append(Fault("kind", full, other_kind))
        else:
            self.match.faults.append(
                Fault("missing", full, "the save was asked to leave it out" if is_left_out else "")
            )


def _tensor(meta: BasicMeta) -> str:
    return f"a tensor {meta.dtype} {list(meta.shape)}"


def _value(value: object) -> str:
    if isinstance(value, StoredContainer):
        return f"a {value.kind}"
    if isinstance(value, UnreadObject):
        return f"{value.what}, which is not read"
    return "None" if value is None else f"a plain value ({type(value).__name__})"


def _differ_only_in(dim: int | None, stored: BasicMeta, requested: BasicMeta) -> bool:
    if dim is None or len(stored.shape) != len(requested.shape):
        return False
    return all(a == b for d, (a, b) in enumerate(zip(stored.shape, requested.shape, strict=True)) if d != dim)


def refuse_cast(stored: BasicMeta, requested: BasicMeta, cast: Cast) -> str | None:
    """The reason why the policy does not allow this cast; None if it does."""
    a, b = stored.dtype, requested.dtype
    if a == b or (cast != "exact" and is_lossless_cast(a, b)) or (cast == "any" and is_meaningful_cast(a, b)):
        return None
    if not is_meaningful_cast(a, b):
        return f"stored as {a}, requested as {b}: no meaningful cast exists"
    policy = "any" if not is_lossless_cast(a, b) else "widen"
    return f"stored as {a}, requested as {b}: cast={policy!r} allows it"


_ADVICE = {
    "pattern": "select nothing; include= and exclude= refer to names of the state (after rename=) or its sections",
    "rename": "match no name in the checkpoint; rename= maps stored full names, or with a dot at the end the beginning "
    "of such names, to those of the state",
    "missing": "not in the checkpoint; strict=False (for one section: strict={'model': False}) or exclude=[...] leaves "
    "them as they are, rename= maps other names",
    "unexpected": "stored, but not in the state; strict=False (for one section: strict={'model': False}) or "
    "exclude=[...] leaves them unread",
    "kind": "stored as something else; exclude=[...] leaves them as they are, or give the state what is stored",
    "shape": "stored with another shape; strict={'model': 'skip_mismatched'} leaves them as they are",
    "dtype": "stored with another dtype",
    "value": "a stored value does not fit",
    "per_rank": "stored for each rank of another world size; choose with per_rank='lowest', 'modulo' or 'skip'",
    "coverage": "not fully stored",
    "overlap": "to load into memory that is written twice; exclude=[...] leaves one of two tensors unread, .clone() "
    "gives each its own memory",
}

_FOR_MODEL = re.compile(r"'model': ([\w']+)")

_EXPERTS = ".experts."
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_JOINED_EXPERTS = (
    "  each expert is stored by itself, and transformers joins them in memory; a load does the same for a tensor of "
    "which all parts are stored, under the names of save_pretrained"
)


def mismatch_error(
    url: str, faults: Sequence[Fault], stored_names: Iterable[str], known_names: Iterable[str] = ()
) -> MismatchError:
    """One error that lists every fault by kind, with similar names for missing ones and for patterns.

    Patterns are compared with ``known_names``, all others with ``stored_names``.
    """
    head = f"{url} does not fit the state ({len(faults)} fault(s)); nothing was changed:"
    lines = fault_lines(faults, stored_names, {kind: _advice(kind, faults) for kind in _ADVICE}, known_names)
    if any(kind == "missing" and _EXPERTS in name for kind, name, _ in faults) and any(
        kind == "unexpected" and _ONE_EXPERT.search(name) for kind, name, _ in faults
    ):
        lines.append(_JOINED_EXPERTS)
    return MismatchError("\n".join([head, *lines]), list(faults))


def _advice(kind: str, faults: Iterable[Fault]) -> str:
    """What to do about faults of a kind, for the sections that they are in."""
    sections = sorted({name.partition(".")[0] for of_kind, name, _ in faults if of_kind == kind})
    return _FOR_MODEL.sub(lambda one: ", ".join(f"{section!r}: {one[1]}" for section in sections), _ADVICE[kind])


def fault_lines(
    faults: Sequence[tuple[str, str, str]],
    names: Iterable[str],
    advice: Mapping[str, str],
    known_names: Iterable[str] = (),
) -> list[str]:
    """The lines of a message, by kind in the order of ``advice``. A missing name comes with the most similar name."""
    stored, known = SimilarNames(names), SimilarNames(known_names)
    hints = {"missing": stored.suggestion, "rename": stored.nearest, "pattern": known.nearest}
    lines: list[str] = []
    for kind, what_to_do in advice.items():
        found: dict[str, list[str]] = {}  # ranks may find several faults of one name
        for name, detail in sorted({(name, detail) for k, name, detail in faults if k == kind}):
            found.setdefault(name, []).append(detail)
        if not found:
            continue
        lines.append(f"  {kind}: {len(found)} {what_to_do}".rstrip())
        for name, details in list(found.items())[:_MAX_SHOWN_FAULTS]:
            hint = hints[kind](name) if kind in hints else ""
            detail = "; and ".join(filter(None, details))
            lines.append(f"    {name}{': ' + detail if detail else ''}{hint}")
        if len(found) > _MAX_SHOWN_FAULTS:
            lines.append(f"    ... and {len(found) - _MAX_SHOWN_FAULTS} more (the error's .faults lists all)")
    return lines
