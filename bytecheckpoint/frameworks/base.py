"""The adapter interface, which plug-ins implement to support a framework.

An adapter answers two questions in terms of global boxes: which shards does an object hold, and where do loaded boxes
go. The library calls ``recognizes`` of all adapters to find the one for an object, or the caller names one with
``framework=``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch

from ..tensors.shards import Path, SectionSource, SectionTarget, StoredSection
from .layout import ParamLayout

__all__ = ["Adapter", "Context"]


@dataclass(frozen=True)
class Context:
    """The call that an object is part of, as an adapter sees it.

    The library creates one instance per section and call. The fields cannot be replaced; an adapter only appends to
    ``notes`` and ``undo``.

    Attributes:
        section: The name of the object's section in the state.
        state: The whole state of the call, in which the adapter of an optimizer finds the modules whose parameters the
            optimizer updates.
        rank: This process's rank in the call, from 0 to ``world_size - 1``.
        world_size: The number of ranks in the call.
        allow_pickle: Whether the caller accepts values that only pickle can store.
        trainable_only: Whether ``capture`` leaves out parameters without ``requires_grad``, and their optimizer state.
            It lists them in ``SectionSource.left_out``. An adapter without parameters ignores it.
        device: Where meta tensors get memory; None for the device of each tensor's mesh, or else the CPU.
        layouts_of: A function from another object of the state to its parameter layouts, by ``id`` of the parameter.
            It calls ``Adapter.parameter_layouts`` of that object's adapter. The result is empty for an object that is
            not a model.
        notes: Remarks for the caller, one sentence each, to which the adapter appends. ``LoadReport.notes`` lists
            them. All sections of a call share the list.
        resumed: What the load did with random generators and data loaders, by full name, as in
            ``LoadReport.resumed``. All sections of a call share the mapping.
        undo: Functions, appended by ``Adapter.target``, that revert its changes to the object. The library calls them
            in reverse order if the load finds a fault before it reads any bytes.
    """

    section: str
    state: Mapping[str, Any]
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    allow_pickle: bool = False
    trainable_only: bool = False
    device: torch.device | None = None
    layouts_of: Callable[[Any], Mapping[int, ParamLayout]] = lambda obj: {}
    notes: list[str] = field(default_factory=list)
    resumed: dict[str, tuple[str, str]] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)


class Adapter(ABC):
    """Translates the objects of one framework to and from shards and plain values.

    A save calls ``capture`` for each object. A load calls ``per_rank_policies``, then ``target``, and after it has read
    and verified all bytes, the function ``SectionTarget.apply``. Both run these on the thread of the caller.

    An adapter keeps no state between calls: one instance serves all calls, possibly on several threads at the same
    time. It does no I/O, does not communicate with other ranks, and runs no collectives. If a method raises, the call
    fails on every rank, and nothing is saved or loaded.

    Declare the class as an entry point of the group ``bytecheckpoint.frameworks``, or pass an instance to
    ``bytecheckpoint.register_adapter``. ``bytecheckpoint.testing.AdapterConformance`` checks these rules.

    Example:
        >>> class TableAdapter(Adapter):
        ...     name = "table"
        ...
        ...     def recognizes(self, obj):
        ...         return isinstance(obj, Table)
        ...
        ...     def capture(self, obj, context):
        ...         meta, box = whole_tensor(obj.rows.dtype, obj.rows.shape)
        ...         return SectionSource({"rows": meta}, [Shard("rows", meta, box, obj.rows)])
        ...
        ...     def target(self, obj, context, stored):
        ...         meta, box = whole_tensor(obj.rows.dtype, obj.rows.shape)
        ...         return SectionTarget({"rows": meta}, [Shard("rows", meta, box, obj.rows)])
    """

    name: ClassVar[str]
    """The name that callers pass as ``framework=``."""

    kind: ClassVar[str] = ""
    """What a checkpoint calls sections of this adapter; ``name`` if it is empty. Sections of kind ``optimizer`` follow
    the names of their parameters when a load renames them."""

    priority: ClassVar[int] = 0
    """Of several adapters that recognize an object, the one with the highest priority serves it. An adapter for a
    wrapper needs a higher priority than the adapter for the plain module."""

    @abstractmethod
    def recognizes(self, obj: object) -> bool:
        """Return whether this adapter can save and load ``obj``.

        The library calls this for objects of any type. It must be fast, must not raise, and must not import a
        framework: if ``sys.modules`` lacks the framework, the object cannot be an instance of its classes.

        Args:
            obj: A value of the state, of any type. The method does not change it.

        Returns:
            True if ``capture`` and ``target`` accept ``obj``.
        """

    @abstractmethod
    def capture(self, obj: Any, context: Context) -> SectionSource:
        """Describe what this rank holds of ``obj``, without changing or copying it.

        The result must be deterministic: for an unchanged object, each call returns the same names, boxes and paths in
        the same order. Over all ranks, the shards of a tensor must cover it completely. Shards of different ranks are
        either disjoint or replicas, which means that they have the same box.

        Args:
            obj: An object that ``recognizes`` accepts.
            context: The call that the object is part of.

        Returns:
            The metadata of all tensors, including those of which this rank holds no element; the shards of this rank,
            as views of the object's memory on any device; and plain values.

        Raises:
            StateError: The object holds something that cannot be stored.
            UnsupportedTensorError: A tensor is sparse or quantized.
        """

    @abstractmethod
    def target(self, obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
        """Describe where the stored tensors and values go in ``obj``.

        This method must not change ``obj``, with one exception: it allocates memory for meta tensors, and appends to
        ``context.undo`` a function that reverts this. The library then fills the shards, and calls
        ``SectionTarget.apply``, which may change the object.

        The method does not compare names and shapes with the stored ones. The library does, and reports missing and
        unexpected names according to ``strict``.

        Args:
            obj: An object that ``recognizes`` accepts.
            context: The call that the object is part of.
            stored: What the checkpoint holds of the section.

        Returns:
            The shards to fill, as views of the object's memory; the paths of the values that the object needs; and
            ``apply``, which puts values and newly created state into the object.

        Raises:
            MismatchError: The stored section cannot be loaded into the object.
            StateError: The object cannot be loaded into, for example because it has no memory for a tensor.
        """

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        """Return how the local memory of each of a model's parameters maps to global boxes.

        Optimizer adapters apply these layouts to state tensors that have the shape of the local parameter. Override
        this method in an adapter for models whose parameters are neither plain tensors nor DTensors. The default
        returns an empty dictionary.

        Args:
            obj: An object that ``recognizes`` accepts.

        Returns:
            The layouts by ``id`` of the parameter objects that an optimizer updates. Empty if ``obj`` is not a model.
        """
        return {}

    def per_rank_policies(self, obj: Any) -> dict[Path, str]:
        """Return what a load does with values that were stored for each rank of another world size.

        The library calls this before ``target``, to choose the values in ``StoredSection.values``. Override it if the
        object holds parts like ``PerRank``. The default returns an empty dictionary, with which the ``per_rank``
        argument of the load applies to every value.

        Args:
            obj: An object that ``recognizes`` accepts.

        Returns:
            By path prefix, one of the policies ``error``, ``lowest``, ``modulo`` and ``skip`` (see ``PerRank``), or
            ``reseed``, which loads rank 0's value like ``lowest``. The longest matching prefix applies.
        """
        return {}
