"""Stored tensors without bytes, which note where a weight loader puts them.

An inference engine knows by its own code which part of which stored tensor each of its parameters is: fused
projections, padded vocabularies, experts, replicated heads. That code is run once with tensors that have shape, strides
and type but no memory. Cutting and turning them gives others of the kind; copying one into a parameter is noted.

A loader that wants to see values gets them: where an operation is anything else, the part that it touches is read, and
the operation goes on with real numbers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .strided import StridedView

__all__ = ["Copy", "Recorder", "storage_identity", "taken_when"]

_aten = torch.ops.aten

# What gives a view of the same elements; ``reshape`` comes here as ``view`` where it is one.
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.diagonal.default,
        _aten.expand.default,
        _aten.narrow.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unfold.default,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._reshape_alias.default,
        _aten._unsafe_view.default,
    }
)
_SPLITS = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.chunk.default})
_CASTS = frozenset({_aten._to_copy.default})
_SAME = frozenset({_aten.clone.default, _aten.contiguous.default})

ReadView = Callable[[str, StridedView], torch.Tensor]
"""Reads a view of a stored tensor, in its own type and the view's shape."""


@dataclass(frozen=True)
class Copy:
    """``target``, a view of a parameter, becomes ``view`` of the stored tensor ``name``, cast to its type."""

    name: str
    view: StridedView
    target: torch.Tensor


class Recorder:
    """Hands out recorded tensors and keeps what became of them: ``copies`` in the order in which they were made, and
    ``seen``, the views whose values a loader wanted. For one thread."""

    def __init__(self, read: ReadView) -> None:
        self.copies: list[Copy] = []
        self.seen: list[tuple[str, StridedView]] = []
        self._read = read

    def tensors(self, metas: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of each stored tensor, as ``load_weights`` of an engine's models takes them."""
        for name, shape, dtype in metas:
            yield name, _Recorded(self, name, torch.empty(shape, dtype=dtype, device="meta"), dtype)

    def note(self, copy: Copy) -> None:
        """Called for each copy as the loader makes it."""
        self.copies.append(copy)

    def values(self, recorded: _Recorded) -> torch.Tensor:
        view = recorded.strided
        self.seen.append((recorded.fqn, view))
        # Contiguous, as a copy is that a loader believes to have made.
        return self._read(recorded.fqn, view).to(recorded.dtype).contiguous()


def storage_identity(tensor: torch.Tensor) -> int:
    """The same for all views of one memory, while it lives. Tensors on the meta device have no address, but views
    share the storage object."""
    return int(tensor.untyped_storage()._cdata)


def taken_when(error: BaseException) -> str:
    """The name of the stored tensor that a loader had in hand when it failed, as its assertions may say nothing; empty
    where there was none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    held = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((value.fqn for value in held if isinstance(value, _Recorded)), "")


class _Recorded(torch.Tensor):
    """``twin`` is a view of a meta tensor: it has the offset and strides that this one would have. ``stored`` is the
    type of the bytes; the tensor's own is what the loader has cast it to."""

    fqn: str
    recorder: Recorder
    twin: torch.Tensor
    stored: torch.dtype

    @staticmethod
    def __new__(
        cls, recorder: Recorder, fqn: str, twin: torch.Tensor, stored: torch.dtype, dtype: torch.dtype | None = None
    ) -> _Recorded:
        device = torch.device("cpu")
        made = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=dtype or twin.dtype, device=device
        )
        made.recorder, made.fqn, made.twin, made.stored = recorder, fqn, twin, stored
        return made

    @property
    def strided(self) -> StridedView:
        return _strided(self.twin)

    def of(self, twin: torch.Tensor, dtype: torch.dtype | None = None) -> _Recorded:
        return _Recorded(self.recorder, self.fqn, twin, self.stored, dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.fqn} {self.strided} {self.dtype}>"

    def tolist(self) -> Any:
        return self.recorder.values(self).tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, _Recorded):
            if func in _VIEWS:
                # What a copy (``reshape``, ``contiguous``) was to make possible fails here: it was not made.
                with suppress(RuntimeError):
                    return first.of(func(first.twin, *args[1:], **kwargs))
            if func in _SPLITS:
                return [first.of(twin) for twin in func(first.twin, *args[1:], **kwargs)]
            if func in _SAME:
                # A copy has the same values; that it has other strides is nothing to a loader.
                return first
            if func in _CASTS and _is_cast_only(kwargs) and _keeps_values(first.dtype, kwargs.get("dtype")):
                return first.of(first.twin, kwargs.get("dtype"))
        if func is _aten.copy_.default and isinstance(args[1], _Recorded) and not isinstance(first, _Recorded):
            return _note(*args[:2])
        return func(*_with_values(args), **{key: _with_values(value) for key, value in kwargs.items()})


def _note(target: torch.Tensor, source: _Recorded) -> torch.Tensor:
    # copy_ broadcasts; a view with strides of 0 says so to whoever reads it.
    twin = source.twin.expand(target.shape)
    source.recorder.note(Copy(source.fqn, _strided(twin), target.detach()))
    return target


def _strided(twin: torch.Tensor) -> StridedView:
    return StridedView(int(twin.storage_offset()), tuple(twin.shape), tuple(twin.stride()))


def _is_cast_only(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (device is None or torch.device(device).type == "cpu") and kwargs.get("layout") in (None, torch.strided)


def _keeps_values(before: torch.dtype, after: torch.dtype | None) -> bool:
    """Whether a cast on the way changes nothing that the last one, into the parameter, would not."""
    return after is None or torch.promote_types(before, after) == after


def _with_values(value: Any) -> Any:
    if isinstance(value, _Recorded):
        return value.recorder.values(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_values(item) for item in value)
    return value
