"""Convert between trees and flat names.

A tensor is stored under ``".".join(path)``. This name does not always determine the path, because keys may contain dots
or be numbers. So every nested container that holds a tensor stores a ``Container`` among the values; so does every
mapping of several keys, for their order. A name belongs to the longest container path with which it begins, and the
rest of it is one key. If that rule yields another path, a ``Container("tensor")`` is stored under the tensor's path.

The types of enum members, named tuples, dataclasses and subclasses of plain values are not stored. They come only from
the objects of the caller.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch

from ..errors import MismatchError, UnserializableError
from ..format.values.types import MAX_DEPTH, Container, is_number, path_name
from ..tensors.metadata import Path
from .per_rank import PerRank

_KEPT_MAPPINGS = (dict, OrderedDict, defaultdict)


def is_stateful(obj: object) -> bool:
    """Whether this instance has ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(obj, type)
        and callable(getattr(obj, "state_dict", None))
        and callable(getattr(obj, "load_state_dict", None))
    )


def kind_of(node: Any, where: str, *, root: bool = False) -> str:
    """The kind of a node: ``per_rank``, ``tensor``, ``stateful``, ``mapping``, ``list``, ``tuple`` or ``leaf``.

    Raises ``UnserializableError`` for a mapping type that could not be rebuilt. The root may have any type, since it is
    always filled in place.
    """
    if isinstance(node, PerRank):
        return "per_rank"
    if isinstance(node, torch.Tensor):
        return "tensor"
    if is_stateful(node):
        return "stateful"
    if isinstance(node, Mapping) and type(node) is not Counter:
        if not root and type(node) not in _KEPT_MAPPINGS:
            raise UnserializableError(
                f"{where} is a mapping of type {type(node).__module__}.{type(node).__qualname__}, whose type would be "
                f"lost; convert it to a dict (or OrderedDict) before saving or loading"
            )
        if not node or not all(type(key) is str or type(key) is int for key in node):
            return "leaf"
        if type(node) is OrderedDict and not root and not _holds_objects(node.values(), where, 1, mappings=False):
            # Flattening would lose its order.
            return "leaf"
        return "mapping"
    if is_sequence(node) and _holds_objects(node, where, 0, mappings=True):
        return "list" if isinstance(node, list) else "tuple"
    return "leaf"


def is_sequence(node: object) -> bool:
    """Whether a node is a list, a tuple or a named tuple."""
    return type(node) in (list, tuple) or (isinstance(node, tuple) and hasattr(type(node), "_fields"))


def replace_all(node: Any, kind: type | tuple[type, ...], replace: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts, lists and tuples with everything of a type replaced."""
    if isinstance(node, kind):
        return replace(node)
    if type(node) in (dict, OrderedDict):
        return type(node)((key, replace_all(item, kind, replace)) for key, item in node.items())
    if type(node) in (list, tuple):
        return type(node)(replace_all(item, kind, replace) for item in node)
    return node


def find_all(node: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return everything of a type in a tree."""
    if isinstance(node, kind):
        return [node]
    items = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
    return [one for item in items for one in find_all(item, kind)]


def with_lists(node: Any) -> Any:
    """Return a nested dict with lists in place of the dicts whose keys are the numbers from 0 on."""
    if type(node) is not dict:
        return node
    children = {key: with_lists(child) for key, child in node.items()}
    if children and all(type(key) is int for key in children) and sorted(children) == list(range(len(children))):
        return [children[index] for index in range(len(children))]
    return children


def _holds_objects(items: Iterable[Any], where: str, depth: int, *, mappings: bool) -> bool:
    """Whether items contain more than plain values: a tensor, a stateful object or a ``PerRank``, at any depth.

    With ``mappings``, a mapping is one of these; otherwise, it counts if it contains one.
    """
    if depth > MAX_DEPTH:
        raise UnserializableError(f"{where} is nested more than {MAX_DEPTH} levels deep, or contains itself")
    for item in items:
        kind = type(item)
        if kind in (int, float, str, bool, bytes, Counter) or item is None:
            continue
        if isinstance(item, (torch.Tensor, PerRank)) or is_stateful(item) or (mappings and isinstance(item, Mapping)):
            return True
        if isinstance(item, Mapping) or is_sequence(item):
            nested = item.values() if isinstance(item, Mapping) else item
            if _holds_objects(nested, where, depth + 1, mappings=mappings):
                return True
    return False


@dataclass
class PathIndex:
    """Finds the paths of tensors from their names, given the containers among a section's values.

    ``at`` is one more container: the place in the target that gets everything stored below it.
    """

    containers: Mapping[Path, Container]
    at: Path = ()
    ambiguous: set[str] = field(init=False)
    """Dotted names that several containers have."""
    _by_name: dict[str, Path] = field(init=False)
    _exact: dict[str, Path] = field(init=False)
    _is_flat: bool = field(init=False)

    def __post_init__(self) -> None:
        # Sorted, so that saving and loading choose the same of two paths with one dotted name.
        branches = sorted((path for path, c in self.containers.items() if c.kind != "tensor"), key=repr)
        self._by_name = {}
        self.ambiguous = set()
        for path in branches:
            if self._by_name.setdefault(path_name(path), path) != path:
                self.ambiguous.add(path_name(path))
        self._by_name.setdefault(path_name(self.at), self.at)
        self._exact = {path_name(path): path for path, c in self.containers.items() if c.kind == "tensor"}
        root = self.containers.get(())
        has_names = root is None or root.kind not in ("list", "tuple")
        self._is_flat = has_names and len(self._by_name) == 1 and not self.at  # every other tensor is in the root

    @classmethod
    def of(cls, values: Mapping[Path, Any], at: Path = ()) -> PathIndex:
        """Make the index from a section's values."""
        return cls({path: value for path, value in values.items() if type(value) is Container}, at)

    def path_of(self, fqn: str) -> Path:
        """The path of the tensor with this name."""
        if fqn in self._exact:
            return self._exact[fqn]
        if self._is_flat:
            return (fqn,)
        end = fqn.rfind(".")
        while end >= 0:
            path = self._by_name.get(fqn[:end])
            if path:
                return self._child(path, fqn[end + 1 :])
            end = fqn.rfind(".", 0, end)
        return self._child((), fqn)

    def _child(self, path: Path, key: str) -> Path:
        container = self.containers.get(path)
        is_index = container is not None and container.kind in ("list", "tuple") and is_number(key)
        return (*path, int(key) if is_index else key)


class _Branch(dict["str | int", Any]):
    """A container that is still being built."""


def build_tree(leaves: Iterable[tuple[Path, Any]], containers: Mapping[Path, Container], at: Path, section: str) -> Any:
    """Build the tree at path ``at`` from its leaves, with its original container types.

    Raises ``MismatchError`` if leaves contradict each other or a list is incomplete.
    """
    top = _Branch()
    count = 0
    for path, leaf in leaves:
        count += 1
        if len(path) == len(at):
            if type(leaf) is dict and not leaf:
                continue
            raise _misfit(section, path, "is stored both as a value and as a container")
        node = top
        for part in path[len(at) : -1]:
            child = node.setdefault(part, _Branch())
            if type(child) is not _Branch:
                raise _misfit(section, path, "is stored below a plain value or tensor")
            node = child
        if path[-1] in node:
            raise _misfit(section, path, "is stored twice")
        node[path[-1]] = leaf
    return _finish(top, at, containers, section)


def _finish(node: Any, path: Path, containers: Mapping[Path, Container], section: str) -> Any:
    if type(node) is not _Branch:
        return node
    children = {key: _finish(child, (*path, key), containers, section) for key, child in node.items()}
    container = containers.get(path, Container("dict"))
    if container.keys:
        first = {key: children[key] for key in container.keys if key in children}
        children = {**first, **children}
    if container.kind == "OrderedDict":
        return OrderedDict(children)
    if container.kind not in ("list", "tuple"):
        return children
    if len(children) != container.length or any(index not in children for index in range(container.length)):
        raise _misfit(section, path, f"is a {container.kind} of {container.length} items, some of which are not loaded")
    items = [children[index] for index in range(container.length)]
    return items if container.kind == "list" else tuple(items)


def _misfit(section: str, path: Path, what: str) -> MismatchError:
    name = f"{section}.{path_name(path)}"
    return MismatchError(f"{name} {what}", [("value", name, what)])


def value_like(template: Any, value: Any, where: str) -> Any:
    """The value as the type of ``template`` if that is such a type and the value fits it; otherwise as it is.

    Raises ``MismatchError`` for an enum without the value, and for a dataclass or named tuple with other fields.
    """
    kind = type(template)
    if type(value) is kind:
        if kind in (list, tuple) and len(value) == len(template):
            return kind(
                value_like(old, new, f"{where}.{i}") for i, (old, new) in enumerate(zip(template, value, strict=True))
            )
        if kind is dict:
            return {k: value_like(template.get(k), item, f"{where}.{k}") for k, item in value.items()}
        return value
    if isinstance(template, Enum) and not isinstance(value, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _unlike(where, f"stored as {value!r:.80}, which is no member of {kind.__qualname__}") from None
    if isinstance(template, tuple) and hasattr(kind, "_fields") and type(value) is tuple:
        if len(value) != len(template):
            raise _unlike(where, f"stored with {len(value)} fields, but {kind.__qualname__} has {len(template)}")
        return tuple_like(template, [value_like(*pair, where) for pair in zip(template, value, strict=True)])
    if dataclasses.is_dataclass(template) and not isinstance(template, type) and type(value) is dict:
        return _dataclass_like(template, value, where)
    if isinstance(template, PurePath) and isinstance(value, (str, PurePath)):
        return kind(value)
    for base in (str, int, float):
        if isinstance(template, base) and kind is not bool and type(value) is base and kind.__module__ != "numpy":
            return base.__new__(kind, value)
    return value


def tuple_like(template: Any, items: Sequence[Any]) -> Any:
    """A tuple or named tuple of these items."""
    make = getattr(type(template), "_make", None)
    return tuple(items) if make is None else make(items)


def _dataclass_like(template: Any, value: Mapping[str, Any], where: str) -> Any:
    names = {one.name for one in dataclasses.fields(template)}
    if names != value.keys():
        raise _unlike(
            where, f"stored with the fields {sorted(value)}, but {type(template).__qualname__} has {sorted(names)}"
        )
    made = copy.copy(template)
    for name, item in value.items():
        # Also for a frozen dataclass; no __init__ runs.
        object.__setattr__(made, name, value_like(getattr(template, name, None), item, f"{where}.{name}"))
    return made


def _unlike(where: str, detail: str) -> MismatchError:
    return MismatchError(f"{where}: {detail}", [("value", where, detail)])
