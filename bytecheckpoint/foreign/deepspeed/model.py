"""Present the model of a DeepSpeed checkpoint as the adapter of live engines stores it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ...errors import FormatError
from ...frameworks.deepspeed.model import COUNTERS
from ...frameworks.module import ENGINE_COUNTERS
from ...frameworks.module_tree import EXTRA_STATE, clean_name
from ...tensors.geometry import decompose
from ...tensors.metadata import BasicMeta
from ..building import IndexBuilder, StoredBox, StoredLeaf
from ..naming import MODEL_SECTION
from ..pickles.records import TensorRef
from ..torch_values import TorchValues
from .folder import DeepSpeedFiles
from .partitions import shapes_of


class ModelWriter:
    """Collects the tensors of a model, which ``add`` adds to an index.

    ZeRO-3 stores trained parameters only as parts of the optimizer's partitions, and frozen ones as fragments in the
    model files of all ranks. MoE layers have one file for each expert.
    """

    def __init__(self, builder: IndexBuilder, values: TorchValues, files: DeepSpeedFiles) -> None:
        """Read the model files. Raises ``FormatError`` and ``CorruptionError``."""
        self._builder, self._values, self._files = builder, values, files
        self._where = files.where(files.model[0])
        self._shared = self._shared_names()
        module: dict[str, Any] = dict(files.first["module"])
        for found in files.folder.objects(files.experts):
            module.update(found if isinstance(found, dict) else {})
        self.tensors: dict[str, TensorRef] = {}
        self._leaves: dict[str, StoredLeaf] = {}
        self._others: dict[str, Any] = {}
        placeholders = self._placeholders()
        for name, value in module.items():
            fqn = clean_name(name)
            if type(value) is not TensorRef:
                self._others[fqn] = value
            elif fqn not in placeholders:
                self.tensors[fqn] = value
                self._leaves[fqn] = values.leaf(value)
        self._leaves.update(self._frozen())

    @property
    def trained(self) -> dict[str, TensorRef]:
        """The tensors that are no buffers, each under its first name."""
        buffers = {clean_name(name) for name in self._files.first.get("buffer_names") or ()}
        found: dict[int, str] = {}
        for fqn in self.tensors:
            if fqn not in buffers:
                found.setdefault(id(self._leaves[fqn]), fqn)
        return {fqn: self.tensors[fqn] for fqn in found.values()}

    def is_complete(self, fqn: str, weights: StoredLeaf) -> bool:
        """Whether the model has a tensor in the precision in which the optimizer steps it.

        The model gets the optimizer's weights if it has no tensor of this name. Raises ``FormatError`` for a tensor of
        another shape.
        """
        held = self._leaves.setdefault(fqn, weights)
        if held.meta.shape != weights.meta.shape:
            raise FormatError(
                f"{self._where}: {fqn!r:.200} has the shape {list(held.meta.shape)}, but the optimizer's files have "
                f"{list(weights.meta.shape)}"
            )
        return held.meta.dtype == weights.meta.dtype

    def add(self) -> None:
        """Add the tensors, tied names, extra states and counters."""
        self._builder.add_section(MODEL_SECTION, "module")
        for fqn, leaf in self._leaves.items():
            self._builder.add_tensor(MODEL_SECTION, fqn, leaf)
        for alias, fqn in self._shared.items():
            if alias not in self._leaves and fqn in self._leaves:
                self._builder.add_alias(MODEL_SECTION, alias, fqn)
        extra: dict[str, Any] = {}
        for fqn, value in self._others.items():
            owner, _, last = fqn.rpartition(".")
            if last == EXTRA_STATE:
                extra[owner] = self._values.tree(value)
            else:
                self._builder.add_value(MODEL_SECTION, (fqn,), self._values.tree(value))
        if extra:
            self._builder.add_tree(MODEL_SECTION, {EXTRA_STATE: extra})
        counters = {key: self._files.first[key] for key in COUNTERS if type(self._files.first.get(key)) is int}
        self._builder.add_value(MODEL_SECTION, (ENGINE_COUNTERS, 0), counters)

    # ---------------------------------------------------------------------------------------------------------- ZeRO-3

    def _shared_names(self) -> dict[str, str]:
        """The other names of tied parameters."""
        found = self._files.first.get("shared_params") or {}
        if not isinstance(found, dict) or not all(type(name) is str for pair in found.items() for name in pair):
            raise FormatError(f"{self._where}: its shared_params are {found!r:.80}")
        return {clean_name(alias): clean_name(fqn) for alias, fqn in found.items()}

    def _placeholders(self) -> set[str]:
        """The names of parameters that the module shows as empty tensors, because their parts are elsewhere."""
        if not self._files.is_partitioned:
            return set()
        groups = [shapes_of(group, self._where) for group in self._files.first.get("param_shapes") or ()]
        return {*self._shared, *self._frozen_shapes(), *(name for group in groups for name in group)}

    def _frozen_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return shapes_of(self._files.first.get("frozen_param_shapes") or {}, self._where)

    def _frozen(self) -> dict[str, StoredLeaf]:
        """The frozen parameters of ZeRO-3, of which every rank has stored an equal part."""
        shapes = self._frozen_shapes() if self._files.is_partitioned else {}
        if not shapes:
            return {}
        names = self._files.of_all_ranks(self._files.model)
        documents = [self._files.first, *self._files.folder.objects(names[1:])]
        parts: dict[str, list[StoredBox]] = {fqn: [] for fqn in shapes}
        metas: dict[str, BasicMeta] = {}
        for rank, (name, document) in enumerate(zip(names, documents, strict=True)):
            found = document.get("frozen_param_fragments") if isinstance(document, dict) else None
            fragments = {clean_name(fqn): part for fqn, part in found.items()} if isinstance(found, dict) else {}
            for fqn, shape in shapes.items():
                part, numel = fragments.get(fqn), prod(shape)
                width = -(-numel // len(names))
                begin = min(rank * width, numel)
                length = min(width, numel - begin)
                if type(part) is not TensorRef or not part.is_contiguous or part.numel < length:
                    raise FormatError(f"{self._files.where(name)}: it has no part of the frozen parameter {fqn!r:.200}")
                metas.setdefault(fqn, BasicMeta(part.dtype, shape))
                parts[fqn] += self._values.flat_part(part, 0, decompose(begin, length, shape))
        return {fqn: StoredLeaf(metas[fqn], boxes) for fqn, boxes in parts.items()}
