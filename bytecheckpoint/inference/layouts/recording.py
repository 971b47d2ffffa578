"""Record which views of stored tensors a weight loader copies into a model.

Only the engine's own loader defines which part of which stored tensor goes into each parameter: fused projections,
padded vocabularies, experts, replicated heads. The loader runs once with recorded tensors, which have a shape, strides
and a dtype but no memory. Slicing, transposing and reshaping a recorded tensor gives another one; copying one into a
parameter records a ``Copy``.

Any other operation reads the values that it needs and continues with real numbers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .parts import StridedView

_aten = torch.ops.aten

# Operations that return a view of the same elements. A ``reshape`` that needs no copy is dispatched as ``view``.
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
"""Reads a view of a stored tensor, in its stored dtype and the view's shape."""


@dataclass(frozen=True)
class Copy:
    """A copy from ``view`` of the stored tensor ``name`` to ``target``, a view of a parameter, cast to its dtype."""

    name: str
    view: StridedView
    target: torch.Tensor


class Recorder:
    """Creates recorded tensors and collects what a loader does with them. Not thread-safe.

    ``copies`` lists the copies in order, unless ``on_copy`` is called instead as each is made. ``seen`` lists
    the views whose values the loader computed with.
    """

    def __init__(self, read: ReadView, on_copy: Callable[[Copy], None] | None = None) -> None:
        self.copies: list[Copy] = []
        self.seen: list[tuple[str, StridedView]] = []
        self.on_copy = on_copy or self.copies.append
        self._read = read

    def tensors(self, metas: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` for each stored tensor: the argument of ``load_weights``."""
        for name, shape, dtype in metas:
            yield name, _Recorded(self, name, torch.empty(shape, dtype=dtype, device="meta"))

    def values(self, recorded: _Recorded) -> torch.Tensor:
        """Read the values of a recorded tensor."""
        view = recorded.strided
        self.seen.append((recorded.fqn, view))
        # The loader may believe that it made a copy, which would be contiguous.
        return self._read(recorded.fqn, view).to(recorded.dtype).contiguous()


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that all views of one storage share while it is alive.

    Meta tensors have no address, but their views share the storage object.
    """
    return int(tensor.untyped_storage()._cdata)


def tensor_in_use(error: BaseException) -> str:
    """The name of the stored tensor that a loader processed when it raised ``error``; empty if there was none.

    Many loaders fail with an assertion that has no message.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    local_values = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next((value.fqn for value in local_values if isinstance(value, _Recorded)), "")


class _Recorded(torch.Tensor):
    """A tensor without memory. ``twin``, a view of a meta tensor of the stored dtype, has its offset and strides.

    ``dtype`` is what the loader has cast the tensor to.
    """

    fqn: str
    recorder: Recorder
    twin: torch.Tensor

    @staticmethod
    def __new__(cls, recorder: Recorder, fqn: str, twin: torch.Tensor, dtype: torch.dtype | None = None) -> _Recorded:
        device = torch.device("cpu")
        made = torch.Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=dtype or twin.dtype, device=device
        )
        made.recorder, made.fqn, made.twin = recorder, fqn, twin
        return made

    @property
    def strided(self) -> StridedView:
        twin = self.twin
        return StridedView(int(twin.storage_offset()), tuple(twin.shape), tuple(twin.stride()))

    def _with_twin(self, twin: torch.Tensor, dtype: torch.dtype | None = None) -> _Recorded:
        return _Recorded(self.recorder, self.fqn, twin, dtype or self.dtype)

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
                # Fails for a view that is only possible of a copy (``contiguous``), which was not made.
                with suppress(RuntimeError):
                    return first._with_twin(func(first.twin, *args[1:], **kwargs))
            if func in _SPLITS:
                return [first._with_twin(twin) for twin in func(first.twin, *args[1:], **kwargs)]
            if func in _SAME:
                # A copy has the same values, and loaders do not depend on its strides.
                return first
            if func in _CASTS and _is_cast_only(kwargs) and _keeps_values(first.dtype, kwargs.get("dtype")):
                return first._with_twin(first.twin, kwargs.get("dtype"))
        if func is _aten.copy_.default and isinstance(args[1], _Recorded) and not isinstance(first, _Recorded):
            # copy_ broadcasts; the recorded view then has strides of 0.
            target = args[0]
            source = args[1]._with_twin(args[1].twin.expand(target.shape))
            source.recorder.on_copy(Copy(source.fqn, source.strided, target.detach()))
            return target
        return func(*_with_values(args), **{key: _with_values(value) for key, value in kwargs.items()})


def _is_cast_only(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return (device is None or torch.device(device).type == "cpu") and kwargs.get("layout") in (None, torch.strided)


def _keeps_values(before: torch.dtype, after: torch.dtype | None) -> bool:
    """Whether an intermediate cast loses nothing that the final cast to the parameter's dtype would keep."""
    return after is None or torch.promote_types(before, after) == after


def _with_values(value: Any) -> Any:
    """``value`` with real tensors in place of recorded ones."""
    if isinstance(value, _Recorded):
        return value.recorder.values(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_values(item) for item in value)
    return value


_View = tuple[int, tuple[int, ...], tuple[int, ...]]


class UnrecordedWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects a loader's writes that are not copies of recorded tensors: filled padding, computed values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The recorder notes copies of recorded tensors.
        if not (func is torch.ops.aten.copy_.default and hasattr(args[1], "recorder")):
            given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **(kwargs or {})}
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = given.get(argument.name)
                    written = value if isinstance(value, (list, tuple)) else [value]
                    self.targets += [one.detach() for one in written if isinstance(one, torch.Tensor) and one.numel()]
        return func(*args, **(kwargs or {}))


def uncovered(
    parameters: Iterable[tuple[str, torch.Tensor]], copies: Iterable[Copy], unrecorded: Iterable[torch.Tensor]
) -> list[tuple[str, str]]:
    """``(name, description of the first hole)`` for each parameter with elements that nothing is written to.

    A loader does not notice if one of the tensors that it fuses into a parameter is missing.
    """
    views: dict[int, set[_View]] = {}
    for target in [*(copy.target for copy in copies), *unrecorded]:
        views.setdefault(storage_identity(target), set()).add(_view(target))
    found = []
    for name, parameter in parameters:
        # vLLM marks parameters with padding that no loader fills.
        expected = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
        touched = views.get(storage_identity(parameter), set())
        if sum(int(np.prod(shape)) for _, shape, _ in touched) < expected:
            found.append((name, _first_hole(parameter, touched)))
    return found


def _first_hole(parameter: torch.Tensor, views: Iterable[_View]) -> str:
    begin = int(parameter.storage_offset())
    mask = torch.zeros(int(parameter.untyped_storage().nbytes()) // parameter.itemsize, dtype=torch.bool)
    for offset, shape, strides in views:
        mask.as_strided(shape, strides, offset).fill_(True)
    written = mask.as_strided(tuple(parameter.shape), tuple(parameter.stride()), begin).numpy()
    first = np.unravel_index(int(np.argmin(written)), written.shape)
    return (
        f"{int(written.size - written.sum()):,} of {written.size:,} elements, from {[int(index) for index in first]} on"
    )


def _view(tensor: torch.Tensor) -> _View:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
