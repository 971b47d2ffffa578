"""Bounds of what a pickle describes, so that code that walks through the result cannot hang or overflow a stack."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ...errors import FormatError
from ...format.values.types import check_hashes
from ...tensors.dtypes import DType
from .records import Global, Instance, Storage, TensorRef

MAX_DEPTH = 200
"""How deep plain containers may be nested."""

_MAPPINGS = frozenset([dict, OrderedDict, Counter])
_CONTAINERS = frozenset([*_MAPPINGS, list, tuple, deque])
_SIMPLE = frozenset([str, int, bytes, float, bool, type(None), complex, DType, Global, PurePosixPath, PureWindowsPath])
_IDENTITY = frozenset([Instance, TensorRef, Storage])


def check_keys(keys: Sequence[Any]) -> None:
    """Check keys of a dict or members of a set before they are inserted. Raises ``FormatError``."""
    others = [key for key in keys if type(key) is not str]
    for key in others:
        _check_key(key)
    check_hashes(others)


def is_predictable(key: Any) -> bool:
    """Whether the hash of a valid key depends on several numbers in it only, so that many keys may have the same."""
    if type(key) is tuple:
        return all(type(part) not in (str, bytes) for part in key)
    return isinstance(key, complex | np.complexfloating)


def _check_key(key: Any, depth: int = 0) -> None:
    """Check one key.

    Tuples may not be nested deeply: hashing them takes as long as the number of paths through them, on the stack of C.
    Integers may not be long: all multiples of ``2**61 - 1`` have the same hash.
    """
    kind = type(key)
    if kind is tuple:
        if depth == 2 or len(key) > 64:
            raise FormatError("a tuple that is a key of a dict, or in a set, is nested too deeply or too long")
        for part in key:
            _check_key(part, depth + 1)
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
    walk = _Walk(limit)
    walk.visit((root,), 0)
    while walk.instances:
        _, one = walk.instances.popitem()
        walk.checked[id(one)] = None
        walk.visit((one.args, one.state), 0)


class _Walk:
    """A walk that visits every container once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.instances: dict[int, Instance] = {}  # still to check
        self.checked: dict[int, None] = {}
        self._found: dict[int, tuple[int, int]] = {}  # of each container: how many values it stands for, its height
        self._inside: set[int] = set()

    def visit(self, node: Any, depth: int) -> tuple[int, int]:
        """Return the number of values that a container stands for, and the levels of containers in it."""
        if depth > MAX_DEPTH:
            raise FormatError(f"objects are nested deeper than {MAX_DEPTH}")
        size, height, found = len(node), 0, self._found
        if type(node) in _MAPPINGS:
            for key in node:
                if type(key) is Instance and id(key) not in self.checked:
                    self.instances[id(key)] = key
            node_values = node.values()
        else:
            node_values = node
        for child in node_values:
            kind = type(child)
            if kind in _SIMPLE:
                continue
            if kind is Instance:
                if id(child) not in self.checked:
                    self.instances[id(child)] = child
            elif kind in _CONTAINERS and child:
                inner = found.get(id(child))
                if inner is None:
                    if id(child) in self._inside:
                        raise FormatError("an object contains itself")
                    self._inside.add(id(child))
                    inner = self.visit(child, depth + 1)
                    self._inside.discard(id(child))
                    found[id(child)] = inner
                size += inner[0]
                height = max(height, inner[1])
        if size > self.limit:
            raise FormatError(f"objects are shared so often that they stand for more than {self.limit} values")
        if height + depth > MAX_DEPTH:
            raise FormatError(f"objects are nested deeper than {MAX_DEPTH}")
        return size, height + 1
