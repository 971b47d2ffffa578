"""What a worker wants of the senders' tensors, learned by running its engine's own loader on a model made for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...dtypes import DType, casts_losslessly
from ...errors import MismatchError
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import basic_meta
from ..coverage import OwnWrites, uncovered
from ..parts import Part, each_once
from ..recording import Copy, Recorder, storage_identity, taken_when
from ..strided import StridedView, box_of
from .messages import Table
from .narrowing import check_quantizable
from .quantizing import Blocks

__all__ = ["EngineModel", "Learned", "learn_parts", "part_with", "wire_dtype"]


class EngineModel(Protocol):
    """What the receiver needs of an engine's worker. Called from the thread that runs the model, and none else."""

    quantized: bool
    """Whether it has parameters that no tensor of the senders goes to."""

    blocks: Blocks | None
    """Where its checkpoints have weights as float8_e4m3fn with a scale for each block, the block; else None."""

    def make(self) -> nn.Module:
        """Another model like the one that serves; its parameters need no memory."""

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """The engine's own way from tensors to the parameters of ``model``, which is one that ``make`` made."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Put weights into the model that serves. Where it raises, ``load`` can be called again with others; until
        then the model must not be used."""

    def restore(self) -> bool:
        """Put in again what was served before the last ``load``, with no help; False where it has no way to."""


@dataclass(frozen=True)
class Learned:
    """``parts`` in the order in which a load will want them, nothing twice; ``takes``: ``(part, box)`` for each copy
    out of one into a parameter."""

    parts: list[Part]
    takes: list[tuple[int, Box]]


def learn_parts(model: EngineModel, table: Table, *, strict: bool = True) -> Learned:
    """What a load of ``table`` will want: layer by layer, each when its last tensor has come, as engines that reload
    in layers copy nothing before.

    Each in the type that costs least: the stored one where the parameter's holds all of its values, else the
    parameter's. Whole tensors where the loader computes with values, or wants what is no box. Raises ``MismatchError``
    for what does not fit, before anything was sent; with ``strict``, also for parameters of which elements get nothing,
    unless a part is of 8 bits and its tensor is not: that has to be quantised, and then learned anew.
    """
    recorder = Recorder(_no_values)
    metas = dict(table.rows)
    made = model.make()
    try:
        with torch.no_grad(), OwnWrites() as own:
            model.run_loader(made, recorder.tensors(table.metas()))
    except Exception as error:
        name = taken_when(error)
        where = f"\n  at {name}, which is {metas[name]}" if name else ""
        raise MismatchError(
            f"the engine's model does not take these tensors: {type(error).__name__}: {error}{where}\n  nothing was "
            "sent; compare names and shapes with the engine's configuration"
        ) from error
    seen = frozenset(name for name, _ in recorder.seen)
    quantize = check_quantizable(model.blocks, metas, recorder.copies, seen)
    if strict and not model.quantized and not quantize:  # else it is asked again, about what it is to get
        _check_complete(made, recorder, own)
    return _learned(recorder, metas, _by_layer(made, recorder.copies))


def _no_values(name: str, view: StridedView) -> torch.Tensor:
    # The recorder notes that they were wanted, and the tensor is sent whole.
    return torch.zeros(view.shape)


def _by_layer(made: nn.Module, copies: Sequence[Copy]) -> list[Copy]:
    owner = {
        storage_identity(tensor): number
        for number, layer in enumerate(made.modules())
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    }
    layers = [owner.get(storage_identity(copy.target), -1) for copy in copies]
    complete = dict(zip(layers, range(len(layers))))
    order = sorted(range(len(layers)), key=lambda number: (complete[layers[number]], number))
    return [copies[number] for number in order]


def _learned(recorder: Recorder, metas: dict[str, BasicMeta], copies: Sequence[Copy]) -> Learned:
    seen = {name for name, _ in recorder.seen}
    wanted = []
    for copy in copies:
        meta = metas[copy.name]
        found = box_of(meta.shape, copy.view)
        if copy.name not in seen and copy.view.numel:
            box = Box.whole(meta.shape) if found is None else found.box
            wanted.append(Part(copy.name, meta.shape, box, wire_dtype(meta.dtype, copy.target)))
    whole = [Part(name, meta.shape, Box.whole(meta.shape), meta.dtype) for name, meta in metas.items()]
    parts = each_once([*wanted, *(part for part in whole if part.name in seen and part.nbytes)])
    by_name: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        by_name.setdefault(part.name, []).append(number)
    takes = [(part_with(parts, by_name[one.name], one.box, one.dtype), one.box) for one in wanted]
    return Learned(parts, [(number, box) for number, box in takes if number is not None])


def part_with(parts: Sequence[Part], numbers: Iterable[int], box: Box, dtype: DType) -> int | None:
    """The first of those ``numbers`` whose part is of ``dtype`` and has all of ``box``."""
    return next((n for n in numbers if parts[n].dtype == dtype and parts[n].box.contains(box)), None)


def wire_dtype(stored: DType, target: torch.Tensor) -> DType:
    """The type in which elements for ``target`` are sent: casting at the source gives what its loader would give."""
    held = basic_meta(target.dtype, target.shape).dtype
    return stored if casts_losslessly(stored, held) else held


def _check_complete(made: nn.Module, recorder: Recorder, own: OwnWrites) -> None:
    holes = uncovered(made.named_parameters(), recorder.copies, own.targets)
    if holes:
        listed = "\n  ".join(f"{name}: {range_text}" for name, range_text in holes[:10])
        more = f"\n  and {len(holes) - 10} more" if len(holes) > 10 else ""
        raise MismatchError(
            f"the senders have nothing for all or a part of {len(holes)} parameter(s) of the engine's model:\n  "
            f"{listed}{more}\n  nothing was sent; with strict=False, these keep no value that anybody gave them",
            [("missing", name, range_text) for name, range_text in holes],
        )
