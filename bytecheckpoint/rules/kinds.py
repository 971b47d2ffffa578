"""The kinds of rules, as dataclasses. Each one is one ``[[rule]]`` table of TOML with the same names.

``Rule`` and ``Shaped`` hold what several kinds have in common. The attributes are explained in ``docs/rules.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for the stored tensors whose name matches a pattern.

    Attributes:
        match: The pattern, such as ``"layers.{l:int}.qkv.weight"``.
        optional: Whether the rule may match no tensor.
    """

    kind: ClassVar[str]

    match: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Ignored(Rule):
    """The tensors are not needed.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
    """

    kind = "ignored"


@dataclass(frozen=True, kw_only=True)
class Shaped(Rule):
    """The tensors have a global shape. The dimensions that are numbered here do not include stacked ones.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        rename: The global name as a template over the captures of ``match``. None keeps the name.
        stacked: Captures that are dimensions of the tensor, outermost first, on the side (``match`` or ``rename``)
            whose name lacks them.
        indexed: For each number that counts from 0 on every rank, what it continues over: axes, or other numbers of
            the name, outermost first.
        dim: The dimension that ``parts``, ``groups``, ``padded_from`` and ``axis`` refer to.
        parts: The parts of a fused tensor, with their sizes over all ranks, or only their names if all are equal.
        unit: What the sizes of the parts are multiplied with, such as the size of a head.
        groups: The number of groups, each with its share of every part; 0 for none.
        interleaved: Whether the tensor consists of groups, and they of parts; otherwise it consists of parts.
        shared: Parts of a group that all ranks hold which divide the group, if there are more ranks than groups.
        padded_from: The size of the dimension without the padding at its end; None if there is none.
        pairs: The size of a head that is stored as pairs (0, 1, 2, 3, ...), for rotary embeddings of complex numbers,
            and becomes halves (0, 2, ..., 1, 3, ...); 0 for neither.
        halves: The size of a head that is stored as halves, and becomes pairs.
    """

    rename: str | None = None
    stacked: tuple[str, ...] = ()
    indexed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dim: int = 0
    parts: Mapping[str, int] | tuple[str, ...] = ()
    unit: int = 1
    groups: int = 0
    interleaved: bool = True
    shared: tuple[str, ...] = ()
    padded_from: int | None = None
    pairs: int = 0
    halves: int = 0


@dataclass(frozen=True, kw_only=True)
class Unique(Shaped):
    """One rank holds the tensor.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        rename: As in ``Shaped``, and so are the following.
        stacked: As in ``Shaped``.
        indexed: As in ``Shaped``.
        dim: As in ``Shaped``.
        parts: As in ``Shaped``.
        unit: As in ``Shaped``.
        groups: As in ``Shaped``.
        interleaved: As in ``Shaped``.
        shared: As in ``Shaped``.
        padded_from: As in ``Shaped``.
        pairs: As in ``Shaped``.
        halves: As in ``Shaped``.
    """

    kind = "unique"


@dataclass(frozen=True, kw_only=True)
class Replicated(Shaped):
    """All ranks that hold the tensor hold the same values.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        rename: As in ``Shaped``, and so are the following.
        stacked: As in ``Shaped``.
        indexed: As in ``Shaped``.
        dim: As in ``Shaped``.
        parts: As in ``Shaped``.
        unit: As in ``Shaped``.
        groups: As in ``Shaped``.
        interleaved: As in ``Shaped``.
        shared: As in ``Shaped``.
        padded_from: As in ``Shaped``.
        pairs: As in ``Shaped``.
        halves: As in ``Shaped``.
        compare: Whether the copies must be compared before one of them is used.
    """

    kind = "replicated"

    compare: bool = False


@dataclass(frozen=True, kw_only=True)
class Averaged(Shaped):
    """The ranks of an axis hold different values, from which the tensor must be computed.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        rename: As in ``Shaped``, and so are the following.
        stacked: As in ``Shaped``.
        indexed: As in ``Shaped``.
        dim: As in ``Shaped``.
        parts: As in ``Shaped``.
        unit: As in ``Shaped``.
        groups: As in ``Shaped``.
        interleaved: As in ``Shaped``.
        shared: As in ``Shaped``.
        padded_from: As in ``Shaped``.
        pairs: As in ``Shaped``.
        halves: As in ``Shaped``.
        axis: The axes.
        replicas: Axes whose ranks hold copies.
    """

    kind = "averaged"

    axis: tuple[str, ...]
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Split:
    """A dimension that an axis divides.

    Attributes:
        dim: The dimension.
        axis: The axes that divide it, outermost first.
    """

    dim: int
    axis: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sharded(Shaped):
    """The ranks of an axis hold consecutive indices of a dimension, or of each of its parts.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        rename: As in ``Shaped``, and so are the following.
        stacked: As in ``Shaped``.
        indexed: As in ``Shaped``.
        dim: As in ``Shaped``.
        parts: As in ``Shaped``.
        unit: As in ``Shaped``.
        groups: As in ``Shaped``.
        interleaved: As in ``Shaped``.
        shared: As in ``Shaped``.
        padded_from: As in ``Shaped``.
        pairs: As in ``Shaped``.
        halves: As in ``Shaped``.
        axis: The axes that divide ``dim``, outermost first.
        widths: The size on each rank, or such sizes by part; empty if the stored shapes determine them.
        also: Further dimensions that other axes divide.
        replicas: Axes whose ranks hold copies.
    """

    kind = "sharded"

    axis: tuple[str, ...]
    widths: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    also: tuple[Split, ...] = ()
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flat(Rule):
    """A buffer of several flattened tensors, which the ranks of an axis divide. Its members need rules as well.

    Attributes:
        match: As in ``Rule``.
        optional: As in ``Rule``.
        axis: The axes that divide the buffer, outermost first.
        rename: The global names as a template over ``{member}``, the global name of a member, and the captures.
        order: ``listed``, ``sorted`` or ``reversed`` for the names that the file lists, or the names in order.
        members: The plain value in the same file that lists the members: a mapping of names to shapes, such as
            ``"optimizer.shapes"``. Without it, the shapes of the names in ``order`` are those of the stored tensors of
            these names.
        alignment: Each member begins at a multiple of this many elements.
        padding: Each rank's share is a multiple of this many elements.
        each: Whether the ranks divide each member, instead of the whole buffer.
    """

    kind = "flat"

    axis: tuple[str, ...]
    rename: str = "{member}"
    order: str | tuple[str, ...] = "listed"
    members: str = ""
    alignment: int = 1
    padding: int = 1
    each: bool = False


KINDS: dict[str, type[Rule]] = {one.kind: one for one in (Unique, Replicated, Averaged, Sharded, Flat, Ignored)}
"""The kinds by name."""
