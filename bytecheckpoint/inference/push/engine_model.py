"""The model of an engine's worker: find out what its loader requests, and load from chunks.

``record_load`` runs the engine's own loader on tensors without bytes and records which boxes it copies.
``ChunkedTensors`` runs the same loader again, and each copy then reads the bytes of the chunks; ``replay.py`` does
without the loader where the record states everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ...engine.tensor_bytes import copy_elements
from ...errors import BytecheckpointError, MismatchError
from ...tensors.dtypes import DType, is_lossless_cast
from ...tensors.geometry import Box
from ...tensors.metadata import BasicMeta
from ...tensors.shards import basic_meta
from ..layouts.parts import StridedView, TensorBox, box_to_read, torch_dtype_of, without_duplicates
from ..layouts.recording import Copy, Recorder, UnrecordedWrites, tensor_in_use, uncovered
from .block_quantization import Blocks, check_quantizable
from .layout import ChunkStore, Layout
from .messages import Table, check_faults
from .replay import Fill, RecordedLayers, Replay


class EngineModel(Protocol):
    """What a ``Receiver`` needs of an engine's worker. Called only from the thread that runs the model."""

    quantized: bool = False
    """Whether the model has parameters that no pushed tensor fills."""

    blocks: Blocks | None = None
    """The block size (rows, columns), if the engine's checkpoints hold float8_e4m3fn weights with a scale per block."""

    is_remote: bool = False
    """Whether the weights are in another process, which may have restarted since the last load."""

    start_version: int | str | None = None
    """The name of the weights with which the engine started, where it is known."""

    def make(self) -> nn.Module:
        """Make another model like the serving one; its parameters need no memory."""

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Run the engine's own loader on ``model``, a result of ``make``."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights into the serving model. After an exception the model must not be used until another ``load``
        succeeds."""

    def can_replay(self, name: str, layer: nn.Module) -> bool:
        """Return whether ``replay`` may fill a layer of a result of ``make``. By default, it may not."""
        return False

    def replay(self, replay: Replay, memory: torch.Tensor, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load ``weights`` as ``load`` does, but fill the layers of ``replay`` from ``memory``. Called only if
        ``can_replay`` has returned True."""
        self.load(weights)

    def restore(self) -> bool:
        """Load what was served before the last ``load``, without pushed bytes. Return False if that is impossible. By
        default, it is."""
        return False

    def clear_caches(self) -> None:
        """Overwrite the caches of keys and values, if there are any. Called after weights that may not have been finite
        were replaced: kernels read unused parts of a cache, where NaN from before would spoil new results."""
        return

    def asleep(self) -> Collection[str]:
        """Return what of the engine is in memory that is not mapped now, "weights" or "kv_cache", which nothing may
        access. By default, nothing is."""
        return ()

    def was_replaced(self) -> bool:
        """Return whether the engine itself has loaded other weights since the last ``load`` or ``restore``. By default,
        it never does."""
        return False


@dataclass(frozen=True)
class LoadRecord:
    """The ``parts`` that a load requests, in its order and without duplicates, and its ``copies``: ``(part, box)`` for
    each copy from a part into a parameter. The tensors in ``wide`` must be quantized before they are loaded. ``fills``
    states all that is written into some layers, and ``others`` are the tensors of which the loader fills the other
    layers."""

    parts: list[TensorBox]
    copies: list[tuple[int, Box]]
    wide: list[str]
    fills: dict[str, dict[str, list[Fill]]] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    _replays: dict[bytes, Replay] = field(default_factory=dict)

    def replay(self, layout: Layout) -> Replay | None:
        """Return the replay of a load from memory in this layout, if there is anything to replay."""
        if self.fills and layout.digest not in self._replays:
            self._replays.clear()
            self._replays[layout.digest] = Replay(self.fills, self.others, layout)
        return self._replays.get(layout.digest)


def record_load(model: EngineModel, table: Table, *, strict: bool = True) -> LoadRecord:
    """Record what a load of ``table`` requests; see ``record_copies``. With ``strict``, a model that is not quantized
    must be filled completely."""
    recorder, made = Recorder(_zeros), model.make()
    return record_copies(
        lambda: model.run_loader(made, recorder.tensors(table.metas())),
        recorder,
        dict(table.rows),
        made,
        model.blocks,
        strict=strict and not model.quantized,
        can_replay=model.can_replay,
    )


def record_copies(
    load: Callable[[], Any],
    recorder: Recorder,
    metas: Mapping[str, BasicMeta],
    made: nn.Module,
    blocks: Blocks | None,
    *,
    strict: bool,
    can_replay: Callable[[str, nn.Module], bool] = lambda name, layer: False,
) -> LoadRecord:
    """Record what ``load`` copies from tensors of ``recorder`` into the model ``made``.

    The order is layer by layer, each at the position of its last tensor, because engines that reload layer by layer
    copy nothing before. Each part has the cheapest sufficient dtype: the stored one if the parameter can represent all
    of its values, else the parameter's. Where the loader computes with values, or copies what is not a box, the part is
    the entire tensor.

    Raises ``MismatchError`` for tensors that do not fit the model; with ``strict``, also for parameters that are not
    filled completely. That check is skipped for a tensor that must be quantized first, and repeated afterwards.
    """
    layers = RecordedLayers(made)
    try:
        with torch.no_grad(), UnrecordedWrites() as own:
            load()
    except BytecheckpointError:
        raise
    except Exception as error:
        name = tensor_in_use(error)
        where = f"\n  at {name}, which is {metas[name]}" if name else ""
        raise MismatchError(
            f"the engine's model does not accept these tensors: {type(error).__name__}: {error}{where}\n  no weight "
            "was changed; compare names and shapes with the engine's configuration"
        ) from error
    seen = frozenset(name for name, _ in recorder.seen)
    wide = check_quantizable(blocks, metas, recorder.copies, seen)
    if strict and not wide:
        _check_complete(made, recorder, own)
    _check_floats(metas, recorder.copies, seen)
    ordered = layers.by_layer(recorder.copies)
    requested = _requested(metas, ordered, seen)
    whole = [TensorBox(name, meta.shape, Box.whole(meta.shape), meta.dtype) for name, meta in metas.items()]
    parts = without_duplicates([*requested.values(), *(part for part in whole if part.name in seen and part.nbytes)])
    by_name = _by_name(parts)
    numbers = {at: _part_with(parts, by_name[one.name], one.box, one.dtype) for at, one in requested.items()}
    copies = [(number, requested[at].box) for at, number in numbers.items() if number is not None]
    fills = layers.fills(metas, ordered, numbers, own, can_replay)
    others = {copy.name for copy in ordered if layers.of(copy.target) not in fills} | seen
    return LoadRecord(parts, copies, wide, fills, frozenset(others))


def _zeros(name: str, view: StridedView) -> torch.Tensor:
    # The recorder notes that the loader computes with the values; the entire tensor is sent then.
    return torch.zeros(view.shape, dtype=torch.float32)


def _requested(metas: Mapping[str, BasicMeta], copies: Sequence[Copy], seen: Collection[str]) -> dict[int, TensorBox]:
    """Return the part that each copy requests, by its position; none for values that the loader computes with."""
    found = {}
    for at, copy in enumerate(copies):
        meta = metas[copy.name]
        if copy.name not in seen and copy.view.numel:
            box = box_to_read(meta.shape, copy.view).box
            found[at] = TensorBox(copy.name, meta.shape, box, _wire_dtype(meta.dtype, copy.target))
    return found


def _check_floats(metas: Mapping[str, BasicMeta], copies: Sequence[Copy], seen: Collection[str]) -> None:
    """Refuse whole numbers for a parameter of floating point numbers: its scale is missing, or it is another tensor."""
    faults = {
        copy.name: f"it is {metas[copy.name].dtype}, and the engine's parameter is {_held(copy.target)}"
        for copy in copies
        if copy.name not in seen
        and copy.target.is_floating_point()
        and not torch_dtype_of(metas[copy.name].dtype).is_floating_point
    }
    check_faults(
        "there are whole numbers where the engine has floating point numbers; no weight was changed",
        [("dtype", name, text) for name, text in faults.items()],
    )


def _by_name(parts: Sequence[TensorBox]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        found.setdefault(part.name, []).append(number)
    return found


def _part_with(parts: Sequence[TensorBox], numbers: Iterable[int], box: Box, dtype: DType) -> int | None:
    """Return the first of ``numbers`` whose part has ``dtype`` and contains ``box``."""
    return next((n for n in numbers if parts[n].dtype == dtype and parts[n].box.contains(box)), None)


def _wire_dtype(stored: DType, target: torch.Tensor) -> DType:
    """Return the dtype in which elements for ``target`` are sent. A cast by the sender gives the same values as the
    loader's cast."""
    held = _held(target)
    return stored if is_lossless_cast(stored, held) else held


def _held(target: torch.Tensor) -> DType:
    return basic_meta(target.dtype, target.shape).dtype


def _check_complete(made: nn.Module, recorder: Recorder, own: UnrecordedWrites) -> None:
    holes = uncovered(made.named_parameters(), recorder.copies, own.targets)
    check_faults(
        f"the tensors do not completely fill {len(holes)} parameter(s) of the engine's model",
        [("missing", name, range_text) for name, range_text in holes],
        then="\n  no weight was changed; with strict=False, these keep arbitrary values",
        limit=10,
    )


class ChunkedTensors:
    """The tensors of ``table``, of which ``store`` provides the parts of ``layout``."""

    def __init__(self, table: Table, layout: Layout, store: ChunkStore) -> None:
        self._metas = dict(table.rows)
        self._table, self._layout, self._store = table, layout, store
        self._parts = _by_name(layout.parts)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, the argument of an engine's ``load_weights``."""
        return Recorder(self.values, self.copy).tensors(self._table.metas())

    def copy(self, copy: Copy) -> None:
        """Execute a copy of the loader."""
        if copy.target.is_meta or not copy.view.numel:
            return  # the engine only counts elements
        meta = self._metas[copy.name]
        dtype, found = _wire_dtype(meta.dtype, copy.target), box_to_read(meta.shape, copy.view)
        target = found.undo(copy.target)
        if target is None:
            copy_elements(copy.target, self._view(copy.name, copy.view, dtype))
        else:
            self._fill(target, found.box, self._part_with(copy.name, found.box, dtype))

    def values(self, name: str, view: StridedView) -> torch.Tensor:
        """Return a copy of a view of a tensor, in the tensor's own dtype."""
        return self._view(name, view, self._metas[name].dtype)

    def _view(self, name: str, view: StridedView, dtype: DType) -> torch.Tensor:
        found = box_to_read(self._metas[name].shape, view)
        part = self._part_with(name, found.box, dtype)
        out = torch.empty(found.box.lengths, dtype=torch_dtype_of(self._layout.parts[part].dtype))
        self._fill(out, found.box, part)
        return found.apply(out, view)

    def _fill(self, out: torch.Tensor, box: Box, part: int) -> None:
        for number, held, common in self._layout.overlaps(part, box):
            chunk = self._store.get(number).view(torch_dtype_of(self._layout.parts[part].dtype)).view(held.lengths)
            copy_elements(out[common.relative_to(box).slices()], chunk[common.relative_to(held).slices()])
            self._store.release(number)

    def _part_with(self, name: str, box: Box, dtype: DType) -> int:
        for held in (dtype, self._metas[name].dtype):
            number = _part_with(self._layout.parts, self._parts.get(name, ()), box, held)
            if number is not None:
                return number
        raise MismatchError(
            f"the engine's loader requests {name} {box} as {dtype}, which it did not request when it was recorded; "
            "does its use of weights depend on their values?"
        )
