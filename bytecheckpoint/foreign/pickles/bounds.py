"""Bounds of what a pickle describes, so that code that walks through the result cannot hang or overflow a stack."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ...errors import FormatError
from ...tensors.dtypes import DType
from .records import Global, Instance, Storage, TensorRef

__all__ = ["MAX_DEPTH", "check_key", "check_tree"]

MAX_DEPTH = 200
"""How deep plain containers may be nested."""

_MAPPINGS = frozenset([dict, OrderedDict, Counter])
_CONTAINERS = frozenset([*_MAPPINGS, list, tuple, deque])
_SIMPLE = frozenset([str, bytes, float, bool, type(None), complex, DType, Global, PurePosixPath, PureWindowsPath])
_IDENTITY = frozenset([Instance, TensorRef, Storage])


def check_key(key: Any, depth: int = 0) -> None:
    """Check a key of a dict or a member of a set. Raises ``FormatError``.

    Tuples may not be nested deeply: hashing them takes as long as the number of paths through them, on the stack of C.
    Integers may not be long: all multiples of ``2**61 - 1`` have the same hash.
    """
    kind = type(key)
    if kind is tuple:
        if depth == 2 or len(key) > 64:
            raise FormatError("a tuple that is a key of a dict, or in a set, is nested too deeply or too long")
        for part in key:
            check_key(part, depth + 1)
    elif kind is int:
        if not -(1 << 63) <= key < 1 << 64:
            raise FormatError("a key of a dict, or an item of a set, is an integer of more than 64 bits")
    elif kind not in _SIMPLE and kind not in _IDENTITY and not issubclass(kind, np.number):
        raise FormatError(f"a key of a dict, or an item of a set, is a {kind.__name__}")


def check_tree(root: Any, limit: int) -> None:
    """Check what a recursive walk through plain containers would meet. Raises ``FormatError``.

    Refused are a container inside itself, containers nested deeper than ``MAX_DEPTH``, and containers shared so often
    that the walk would meet more than ``limit`` values. An ``Instance`` counts as one value; its contents are checked
    by themselves.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of each container: the values that a walk meets, and the depth
    instances: list[Any] = []
    seen: set[int] = set()
    _measure([root], sizes, instances, limit)
    while instances:
        one = instances.pop()
        if id(one) not in seen:
            seen.add(id(one))
            _measure([one.args, one.kwargs, one.state, one.items, one.pairs], sizes, instances, limit)


def _measure(roots: list[Any], sizes: dict[int, tuple[int, int]], instances: list[Any], limit: int) -> None:
    path: list[tuple[Any, list[Any]]] = [((), _containers(roots, instances))]  # containers, and children to visit
    inside: set[int] = set()
    while path:
        node, children = path[-1]
        if children:
            child = children.pop()
            if id(child) in inside:
                raise FormatError("an object contains itself")
            if id(child) not in sizes:
                if len(path) > MAX_DEPTH:
                    raise FormatError(f"objects are nested deeper than {MAX_DEPTH}")
                inside.add(id(child))
                path.append((child, _containers(child, instances)))
            continue
        path.pop()
        size, depth = len(node), 0
        for child in _values(node):
            if type(child) in _CONTAINERS:
                inner = sizes[id(child)]
                size, depth = size + inner[0], max(depth, inner[1])
        if size > limit:
            raise FormatError(f"objects are shared so often that they stand for more than {limit} values")
        if depth >= MAX_DEPTH:
            raise FormatError(f"objects are nested deeper than {MAX_DEPTH}")
        sizes[id(node)] = (size, depth + 1)
        inside.discard(id(node))


def _containers(node: Any, instances: list[Any]) -> list[Any]:
    found = [child for child in _values(node) if type(child) in _CONTAINERS]
    instances += [child for child in _values(node) if type(child) is Instance]
    if type(node) in _MAPPINGS:
        instances += [key for key in node if type(key) is Instance]
    return found


def _values(node: Any) -> Iterable[Any]:
    found: Iterable[Any] = node.values() if type(node) in _MAPPINGS else node
    return found
