"""Load what the hub or ``save_pretrained`` stores into models that transformers fuses in memory: ``hub_rules``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..convert.export import ExportedBox
from ..errors import StateError
from ..inference.layouts.configured import ConfiguredModel
from ..rules import Rule, Rules, Unique
from ..tensors.dtypes import DTYPES
from ..tensors.metadata import BasicMeta

_EXPERT = "e"
_FLOAT32 = DTYPES["float32"]  # any dtype: only shapes matter


def hub_rules(model: Any) -> Rules:
    """Return the rules by which tensors with the hub's names fill a model of transformers.

    From version 5 on, transformers joins the experts of a layer in memory, and some projections. The rules are the
    inverse of its own conversion, for every architecture that it converts by cutting and joining. Folders that have the
    names in memory load with them as well.

    Args:
        model: The model, sharded in any way, or its configuration.

    Returns:
        Rules for ``LoadOptions`` and for the vLLM loader.

    Raises:
        StateError: transformers does not have the architecture, or computes with values to convert it.

    Example:
        >>> bcp.load("Qwen3-30B-A3B", {"model": model}, options=bcp.LoadOptions(rules=hub_rules(model)))
    """
    config = getattr(model, "config", model)
    document = json.loads(config.to_json_string())
    if config is not model:
        document["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    configured = ConfiguredModel.of(document, type(config).__name__)
    stored = {name: BasicMeta(_FLOAT32, shape) for name, shape in configured.memory.items()}
    parts = configured.parts(stored)
    if not parts and configured.hub.keys() != stored.keys():
        raise StateError(f"{document['architectures'][0]}: transformers computes with values to convert it")
    return Rules([*_identities(stored), *_joins(parts, stored)])


def _identities(names: Mapping[str, object]) -> Iterator[Rule]:
    for pattern in sorted({_pattern(name, _captures(name)) for name in names}):
        yield Unique(match=pattern, optional=True)


class _Part(NamedTuple):
    """What one kind of tensor on the hub is: a part of one kind in memory, in all layers and of all experts."""

    match: str
    rename: str
    is_stacked: bool
    dim: int
    begin: int
    size: int


def _joins(parts: Mapping[str, ExportedBox], stored: Mapping[str, BasicMeta]) -> Iterator[Rule]:
    """The rules for all parts, one for each kind of tensor in memory."""
    kinds: defaultdict[str, set[_Part]] = defaultdict(set)
    for name, part in parts.items():
        found = _part(name, part, stored[part.source].shape)
        kinds[found.rename].add(found)
    for rename, of_kind in kinds.items():
        ordered = sorted(of_kind, key=lambda part: part.begin)
        first = ordered[0]
        stacked = (_EXPERT,) if first.is_stacked else ()
        if len(ordered) == 1:
            yield Unique(match=first.match, rename=rename, stacked=stacked, optional=True)
            continue
        columns = list(zip(*(part.match.split(".") for part in ordered), strict=True))
        differing = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        if len(differing) != 1:
            raise StateError(f"{rename}: the parts {[part.match for part in ordered]} differ in several components")
        segments = first.match.split(".")
        segments[differing[0]] = "{part}"
        sizes = dict(zip(columns[differing[0]], (part.size for part in ordered), strict=True))
        yield Unique(
            match=".".join(segments), rename=rename, stacked=stacked, dim=first.dim, parts=sizes, optional=True
        )


def _part(name: str, part: ExportedBox, shape: tuple[int, ...]) -> _Part:
    numbers, captures = _numbers(name), _captures(part.source)
    is_stacked = len(numbers) > len(captures)
    if is_stacked:
        captures.insert(_expert_of(name, part), f"{{{_EXPERT}:int}}")
    first = 1 if is_stacked else 0
    lengths = part.box.lengths[first:]
    cut = [dim for dim, length in enumerate(lengths) if length != shape[first + dim]]
    if len(numbers) != len(captures) or part.shape != lengths or len(cut) > 1:
        raise StateError(f"{name} is no stretch of {part.source} in one dimension")
    dim = cut[0] if cut else 0
    begin, size = (part.box.offsets[first + dim], lengths[dim]) if lengths else (0, 1)
    rename = _pattern(part.source, [capture.replace(":int", "") for capture in _captures(part.source)])
    return _Part(_pattern(name, captures), rename, is_stacked, dim, begin, size)


def _expert_of(name: str, part: ExportedBox) -> int:
    """Which of the numbers in a name is that of the expert: the others are in the name in memory."""
    numbers, others = _numbers(name), _numbers(part.source)
    for at in reversed(range(len(numbers))):
        if numbers[at] == part.box.offsets[0] and numbers[:at] + numbers[at + 1 :] == others:
            return at
    raise StateError(f"{name} has no number of an expert of {part.source}")


def _numbers(name: str) -> list[int]:
    return [int(segment) for segment in name.split(".") if segment.isdecimal()]


def _captures(name: str) -> list[str]:
    return [f"{{n{at}:int}}" for at in range(len(_numbers(name)))]


def _pattern(name: str, captures: list[str]) -> str:
    """The name with captures in place of its numbers."""
    following = iter(captures)
    return ".".join(next(following) if segment.isdecimal() else segment for segment in name.split("."))
