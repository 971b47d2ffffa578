"""Choose what an export writes: which tensors, under which names and as which dtypes, and whether any is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.selection import Exclusion
from ..checkpoint.values import StoredValue, refuse_unread
from ..errors import (
    MismatchError,
    NameCollisionError,
    NameNotFoundError,
    UnsupportedTensorError,
    UsageError,
)
from ..format.safetensors import code_and_shape
from ..format.values.types import path_name
from ..frameworks.module_tree import EXTRA_STATE
from ..loading.matching import fault_lines
from ..loading.stored import OpenCheckpoint, TensorSources
from ..runtime.arguments import check_choice
from ..runtime.messages import listed
from ..tensors.dtypes import DTYPES, DType, is_meaningful_cast
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from .lora import LoraPlan, LowRank
from .rewriter import OutputTensor

Expected = Iterable[str] | Mapping[str, Sequence[int] | None]
"""The names that an export must have, no more and no less; a mapping also gives shapes, or None if unknown."""

Tied = Literal["drop", "copy"]


@dataclass(frozen=True)
class ExportedBox:
    """A box of a stored tensor that is exported as a tensor of ``shape``, such as one of stacked experts.

    ``source`` is the tensor's name in the export.
    """

    source: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExportSelection:
    """The arguments of an export that concern names.

    Attributes:
        checkpoint: The checkpoint.
        section: The section to export.
        exclude: The exported names that are left out.
        tied: Whether only one of several tied names is written, or all of them.
        parts: What is written in place of the tensors that are the sources of parts, by exported name.
        lora: What becomes of an adapter.
        masters: Whether master weights of an optimizer are written in place of the tensors that are rounded from them.
    """

    checkpoint: Checkpoint
    section: str
    exclude: Exclusion
    tied: Tied
    parts: Mapping[str, ExportedBox]
    lora: LoraPlan | None = None
    masters: bool = False

    def choose(self, expected: Expected | None, cast: DType | None) -> tuple[list[OutputTensor], dict[str, str]]:
        """Return the tensors to write, sorted by name, and the tied names that are dropped, with those that are kept.

        Raises ``MismatchError`` unless they are the expected ones, and as ``export_safetensors``.
        """
        check_choice("tied", self.tied, Tied)
        manifest = self.checkpoint.manifest
        self.checkpoint.require_section(self.section)
        if not self.checkpoint.index.is_own:
            values = self.checkpoint.index.values(section=self.section)
            refuse_unread(filter(self._is_weight, values), self.checkpoint.url)
        required = None if expected is None else _expected_shapes(expected)
        groups = self._groups()
        chosen = self._parts(groups)
        dropped: dict[str, str] = {}
        for row, names in groups.items():
            kept = [name for name in names if required and name in required] or names[:1]
            if self.tied == "copy" and required is None:
                kept = names
            meta = manifest.tensors.meta_of(row)
            chosen += [
                OutputTensor(name, row, Box.whole(meta.shape), meta.dtype, None, self._added(row)) for name in kept
            ]
            dropped |= {name: kept[0] for name in names if name not in kept}
        if self.masters:
            chosen = self._with_masters(chosen)
        self.exclude.require_matches(self.checkpoint.url, [tensor.name for tensor in chosen])
        _refuse_collisions([tensor.name for tensor in chosen] + list(dropped))
        if required is not None:
            self._check_expected(required, {tensor.name: tensor.shape for tensor in chosen})
        tensors = [replace(tensor, dtype=output_dtype(tensor.dtype, cast)) for tensor in chosen]
        _check_dtypes(tensors)
        return sorted(tensors, key=lambda tensor: tensor.name), dropped

    def _with_masters(self, chosen: list[OutputTensor]) -> list[OutputTensor]:
        tensors = self.checkpoint.manifest.tensors
        sources = TensorSources(OpenCheckpoint(self.checkpoint.index, {}))
        found = {one.row: sources.master_of(self.section, tensors.fqn_of(one.row)) for one in chosen}
        if not any(found.values()):
            raise NameNotFoundError(f"{self.checkpoint.url} has no master weights of section {self.section!r}")
        return [
            replace(one, row=master.row, dtype=master.meta.dtype) if (master := found[one.row]) is not None else one
            for one in chosen
        ]

    def stored(self) -> dict[str, BasicMeta]:
        """Dtype and shape of the stored tensors by exported name, with those that are excluded."""
        tensors, rows = self.checkpoint.manifest.tensors, self.checkpoint.manifest.section_tensors(self.section)
        named = [(self._exported_name(tensors.fqn_of(row)), tensors.meta_of(row)) for row in rows.tolist()]
        return {name: meta for name, meta in named if name is not None}

    def _exported_name(self, fqn: str) -> str | None:
        """The exported name of a stored tensor; None if it is not exported."""
        return fqn if self.lora is None else self.lora.relabel(fqn)

    def _is_weight(self, value: StoredValue) -> bool:
        name = self._exported_name(path_name(value.path))
        return name is not None and EXTRA_STATE not in name and not self.exclude(name)

    def _added(self, row: int) -> LowRank | None:
        return None if self.lora is None else self.lora.added.get(row)

    def _groups(self) -> dict[int, list[str]]:
        """All exported names of each tensor row, the stored name first."""
        manifest = self.checkpoint.manifest
        sources = {part.source for part in self.parts.values()}
        names: dict[int, list[str]] = {}
        per_rank: list[str] = []
        for row in manifest.section_tensors(self.section).tolist():
            name = self._exported_name(manifest.tensors.fqn_of(row))
            if name is None or (name not in sources and self.exclude(name)):
                continue
            if manifest.scope[row] >= 0:
                per_rank.append(name)
            names[row] = [name]
        if per_rank:
            raise MismatchError(
                f"{self.checkpoint.url}: {len(per_rank)} tensor(s) of section {self.section!r} were saved for single "
                f"ranks and are not part of the model: {listed(per_rank)}; leave them out with exclude",
                [("per_rank", name, "saved for a single rank") for name in per_rank],
            )
        for alias, stored in self.checkpoint.aliases.items():
            row, is_alone = manifest.tensor_row(stored), not stored.startswith(f"{self.section}.")
            if row is not None and alias.startswith(f"{self.section}."):
                name = self._exported_name(alias[len(self.section) + 1 :])
                if name is not None and not self.exclude(name) and (row in names or is_alone):
                    names.setdefault(row, []).append(name)
        return names

    def _parts(self, groups: dict[int, list[str]]) -> list[OutputTensor]:
        """The tensors that are parts; takes their sources out of ``groups``."""
        if not self.parts:
            return []
        rows = {names[0]: row for row, names in groups.items()}
        unknown = sorted({part.source for part in self.parts.values()} - rows.keys())
        if unknown:
            raise NameNotFoundError(f"{self.checkpoint.url}: parts of {listed(unknown)}, which are not stored")
        tensors = self.checkpoint.manifest.tensors
        chosen = [
            OutputTensor(name, row, part.box, tensors.meta_of(row).dtype, part.shape, self._added(row))
            for name, part in self.parts.items()
            if not self.exclude(name)
            for row in (rows[part.source],)
        ]
        for part in self.parts.values():
            groups.pop(rows[part.source], None)
        return chosen

    def _check_expected(
        self, required: Mapping[str, tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        faults = [("missing", name, "") for name in required if name not in shapes]
        faults += [("unexpected", name, "") for name in shapes if name not in required]
        faults += [
            ("shape", name, f"{list(shapes[name])} is stored, {list(shape)} is expected")
            for name, shape in required.items()
            if shape is not None and name in shapes and shapes[name] != shape
        ]
        if not faults:
            return
        head = (
            f"{self.checkpoint.url} does not have the expected tensors ({len(faults)} fault(s)); nothing was written:"
        )
        advice = dict.fromkeys(("missing", "unexpected", "shape"), "")
        raise MismatchError("\n".join([head, *fault_lines(faults, sorted(shapes), advice)]), faults)


def _refuse_collisions(names: Iterable[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise NameCollisionError(f"several tensors would be exported under one name: {listed(twice)}; change rename")


def _expected_shapes(expected: Expected) -> dict[str, tuple[int, ...] | None]:
    if isinstance(expected, Mapping):
        return {name: None if shape is None else tuple(shape) for name, shape in expected.items()}
    if isinstance(expected, str):
        raise UsageError(f"expected must be a list of names or a mapping of names to shapes, not {expected!r}")
    return dict.fromkeys(expected)


def _check_dtypes(tensors: Sequence[OutputTensor]) -> None:
    odd = [f"{one.name} ({one.dtype})" for one in tensors if code_and_shape(one.dtype, one.shape) is None]
    if odd:
        raise UnsupportedTensorError(
            f"safetensors has no dtype for {len(odd)} tensor(s): {listed(odd)}; leave them out with exclude"
        )


def parse_cast(cast: str | torch.dtype | None) -> DType | None:
    """Return the dtype to which an export casts. Raises ``UsageError`` unless it is a float of 16 bits or more."""
    if cast is None:
        return None
    dtype = DTYPES.get(str(cast).removeprefix("torch."))
    if dtype is None or dtype.kind != "float" or dtype.itemsize < 2:
        raise UsageError(f"cast must be float16, bfloat16, float32 or float64, not {cast}")
    return dtype


def output_dtype(stored: DType, cast: DType | None) -> DType:
    """Return the dtype in which a tensor is written."""
    # The values of 8-bit floats are meaningless without the scales of the quantized tensor, so they are not cast.
    if cast is None or stored.kind != "float" or stored.itemsize < 2 or not is_meaningful_cast(stored, cast):
        return stored
    return cast
