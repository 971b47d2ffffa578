"""Tensors whose values an object only hands out as copies, and takes back through a setter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from typing import Self

_DESCRIPTIONS = frozenset(
    getter if callable(getter := getattr(torch.Tensor, name)) else getter.__get__
    for name in (
        *("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_quantized", "itemsize", "layout", "nbytes", "ndim"),
        *(
            "is_nested",
            "requires_grad",
            "shape",
            "dim",
            "element_size",
            "is_conj",
            "is_contiguous",
            "is_neg",
            "numel",
            "size",
            "stride",
        ),
    )
)
"""What code may ask of a derived tensor: everything that does not depend on its values."""


class DerivedTensor(torch.Tensor):
    """Represents, in a ``Shard``, values that the library must request and hand back.

    An example is optimizer state that is kept scaled or in eight bits: what a checkpoint stores is computed from it. A
    save calls ``read`` for one tensor at a time when it copies it, and a load reads the stored bytes of one tensor at a
    time into a buffer and calls ``write``, so that memory for few of them exists at once. Nothing else can be done with
    an instance except asking for its shape, dtype and device, and describing parts of it as other instances.

    Attributes:
        whole: The tensor of which this one is a part, or this one itself. Only a whole can be assigned.
    """

    whole: DerivedTensor
    _read: Callable[[], torch.Tensor]
    _write: Callable[[torch.Tensor], None]
    _view: Callable[[torch.Tensor], torch.Tensor]
    _lock: threading.Lock
    _computed: torch.Tensor | None
    _unreleased: int

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        read: Callable[[], torch.Tensor],
        write: Callable[[torch.Tensor], None],
        device: torch.device | str = "cpu",
    ) -> Self:
        """Describe a tensor.

        Args:
            shape: The shape of the values.
            dtype: Their dtype.
            read: Returns the values; several threads may call it, one at a time.
            write: Puts values of this shape and dtype into the object. It keeps no reference to its argument, and may
                change it.
            device: Where ``read`` returns the values and ``write`` takes them.

        Returns:
            The tensor, which uses no memory for elements.
        """
        made = torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)
        made._read, made._write, made._lock = read, write, threading.Lock()
        made._computed, made._unreleased = None, 0
        made.whole, made._view = made, lambda values: values
        return made

    def part(self, shape: Sequence[int], view: Callable[[torch.Tensor], torch.Tensor]) -> DerivedTensor:
        """Describe a part of this tensor, such as a box of a flat range.

        Args:
            shape: The shape of the part.
            view: Returns the part of a dense, contiguous tensor of this shape, without a copy.

        Returns:
            The part. Its values are computed, and released, independently of those of other parts.
        """
        whole, outer = self.whole, self._view
        made = DerivedTensor.of(
            shape,
            self.dtype,
            read=lambda: made.view_of(whole._read()),
            write=whole._write,
            device=self.device,
        )
        made.whole, made._view, made._lock = whole, lambda values: view(outer(values)), whole._lock
        return made

    def view_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the memory of this part.

        Args:
            values: A dense, contiguous tensor with the shape of ``whole``.

        Returns:
            A view of this tensor's shape.
        """
        return self._view(values)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _DESCRIPTIONS:
            # An operation on the elements in memory, which have no meaning, would lose the values silently.
            raise TypeError(f"{getattr(func, '__name__', func)} needs the values of a derived tensor; call compute()")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"DerivedTensor(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def compute(self) -> torch.Tensor:
        """Return the values, which are kept until all of their bytes are released.

        Returns:
            A dense tensor. The caller must not change it.

        Raises:
            TypeError: ``read`` returned another shape or dtype.
        """
        with self._lock:
            if self._computed is None:
                self._computed, self._unreleased = self._read().detach(), self.nbytes
            if self._computed.shape != self.shape or self._computed.dtype != self.dtype:
                raise TypeError(
                    f"read() of a derived tensor returned {self._computed.dtype} of shape "
                    f"{tuple(self._computed.shape)}, not {self.dtype} of shape {tuple(self.shape)}"
                )
            return self._computed

    def release(self, nbytes: int) -> None:
        """Declare that bytes of the values are not needed again.

        Args:
            nbytes: Their number. Each byte is released once.
        """
        with self._lock:
            self._unreleased -= nbytes
            if self._unreleased <= 0:
                self._computed = None

    def assign(self, values: torch.Tensor) -> None:
        """Hand values back.

        Args:
            values: A contiguous tensor of this shape and dtype, on any device. It may be changed.

        Raises:
            TypeError: This tensor is only a part.
        """
        if self.whole is not self:
            raise TypeError("only a complete derived tensor can be assigned")
        self._write(values.to(self.device))


def is_derived(tensor: torch.Tensor) -> TypeGuard[DerivedTensor]:
    """Return whether a tensor only represents values that must be computed.

    Args:
        tensor: Any tensor.

    Returns:
        True for a ``DerivedTensor``.
    """
    return type(tensor) is DerivedTensor


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be computed with: the values of a derived one, and any other tensor itself.

    Args:
        tensor: Any tensor.

    Returns:
        The values.
    """
    return tensor.compute() if is_derived(tensor) else tensor
