"""Load stored leaves into a tree: fill tensors, and replace plain values in their containers.

Every node of the target becomes a ``Restore`` function: given the stored values, it returns the object for the node's
place, which for a mutable container is the container itself. A node that needs nothing in ``apply``, such as
a tensor that is filled in place, has None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from ..errors import MismatchError, StateError
from ..format.values.types import MAPPINGS, Container, path_name
from ..tensors.shards import Path, SectionTarget, StoredSection, torch_dtype
from .base import Context
from .data_loader import DataLoaderState, needs_all, prepare
from .dtensor import with_memory
from .module_tree import EXTRA_STATE
from .per_rank import PerRank
from .rng import RNGState
from .tensors import describe_plain, tensor_kind, tensor_shards
from .tree_capture import ROOT_TENSOR, Capture, SameMemory, state_of
from .tree_paths import PathIndex, build_tree, is_sequence, kind_of, tuple_like, value_like

Values = Mapping[Path, Any]
Restore = Callable[[Values], Any]


def build_target(obj: Any, context: Context, stored: StoredSection) -> SectionTarget:
    """The ``SectionTarget`` of a tree or stateful object that is a section."""
    target = SectionTarget()
    restore = TreeBuilder(context, stored, target).visit(obj)

    def apply(values: Values) -> None:
        restored = obj if restore is None else restore(values)
        if restored is not obj and isinstance(context.state, MutableMapping):
            context.state[context.section] = restored

    target.apply = apply
    markers = {path for path, value in stored.values.items() if type(value) is Container}
    target.ignorable |= markers - target.requested_values
    _check_replaceable(obj, context)
    return target


def _check_replaceable(obj: Any, context: Context) -> None:
    kind = kind_of(obj, context.section, root=True)
    in_place = isinstance(obj, MutableMapping) or kind in ("per_rank", "stateful", "list")
    if not in_place and not (kind == "tensor" and not obj.is_meta) and not isinstance(context.state, MutableMapping):
        raise StateError(
            f"section {context.section!r} is a {type(obj).__name__}, which a load must replace in the "
            f"state, but the state is an immutable {type(context.state).__name__}; pass a dict"
        )


class TreeBuilder:
    """One walk over a target tree, which adds to ``target``."""

    def __init__(self, context: Context, stored: StoredSection, target: SectionTarget) -> None:
        self.context = context
        self.stored = stored
        self.target = target
        self._found: list[tuple[str, torch.Tensor]] = []  # tensors that are filled where they are

    def visit(self, node: Any, path: Path = (), *, skip: bool = False) -> Restore | None:
        """Make room at and below ``path``. With ``skip``, anything that is not stored stays unchanged."""
        restore = self._visit(node, path, skip=skip)
        self._fill_found()
        return restore

    def _visit(self, node: Any, path: Path, *, skip: bool) -> Restore | None:
        if isinstance(node, torch.Tensor):
            return self._tensor(node, path_name(path or ROOT_TENSOR), skip=skip)
        kind = kind_of(node, self._where(path), root=not path)
        if kind == "per_rank":
            return self._per_rank(node, path)
        if kind == "stateful":
            return self._stateful(node, path, skip=skip or getattr(node, "on_resize", "") == "skip")
        if kind == "mapping":
            return self._mapping(node, path, skip=skip)
        if kind in ("list", "tuple"):
            return self._sequence(node, path, skip=skip)
        if isinstance(node, Mapping) and not node:
            return self._empty_mapping(node, path, skip=skip)
        return self._leaf(node, path, skip=skip)

    def room(self, fqn: str, template: torch.Tensor | None) -> torch.Tensor | None:
        """New memory for a stored tensor, like ``template``; None, and a missing name, if it is not stored."""
        if fqn not in self.stored.metas:
            if template is not None:
                self.target.add(tensor_shards(fqn, template)[0], ())
            return None
        room = self._room(fqn, template, in_place=False)
        self._fill(fqn, room)
        return room

    def _per_rank(self, node: PerRank[Any], path: Path) -> Restore | None:
        inner = self._visit(node.value, path, skip=node.on_resize == "skip")
        if inner is None:
            return None

        def restore(values: Values) -> PerRank[Any]:
            node.value = inner(values)
            return node

        return restore

    def _mapping(self, node: Mapping[Any, Any], path: Path, *, skip: bool) -> Restore | None:
        if not isinstance(node, MutableMapping):
            raise StateError(f"{self._where(path)} is a {type(node).__name__}, which is immutable; pass a dict")
        prefix = f"{path_name(path)}." if path else ""
        children: dict[Any, Restore] = {}
        for key, child in node.items():
            fqn = f"{prefix}{key}"
            extra = self._extra_state_path(fqn) if not path and fqn.endswith(EXTRA_STATE) else None
            if isinstance(child, torch.Tensor):
                inner = self._tensor(child, path_name(extra) if extra else fqn, skip=skip)
            else:
                inner = self._visit(child, extra or (*path, key), skip=skip)
            if inner is not None:
                children[key] = inner
        if not children:
            return None

        def restore(values: Values) -> Any:
            for key, child in children.items():
                restored = child(values)
                if restored is not node[key]:
                    node[key] = restored
            return node

        return restore

    def _extra_state_path(self, key: str) -> Path:
        """Where the extra state of a module is stored: maybe where the module's adapter stores it."""
        own = (EXTRA_STATE, key.removesuffix(EXTRA_STATE).removesuffix("."))
        is_own = own in self.stored.values or path_name(own) in self.stored.metas or self._below(own)
        return own if is_own else (key,)

    def _sequence(self, node: Any, path: Path, *, skip: bool) -> Restore | None:
        before = list(node)  # another object that is loaded may change the length of the list
        children = [self._visit(child, (*path, index), skip=skip) for index, child in enumerate(before)]
        if not any(children):
            return None

        def restore(values: Values) -> Any:
            items = [old if child is None else child(values) for child, old in zip(children, before, strict=True)]
            if len(items) == len(node) and all(map(operator.is_, items, node)):
                return node
            if isinstance(node, MutableSequence):
                node[:] = items
                return node
            return tuple_like(node, items)

        return restore

    def _leaf(self, node: Any, path: Path, *, skip: bool) -> Restore:
        marker = self.stored.values.get(path)
        if type(marker) is Container:
            if marker.kind in ("list", "tuple") and is_sequence(node):
                return self.rebuilt(path)
            if marker.kind in MAPPINGS and isinstance(node, MutableMapping):
                rebuilt = self.rebuilt(path)
                return lambda values: _refilled(node, rebuilt(values))
            detail = (
                f"stored as a {marker.kind} with tensors or mappings in it, but the target is a {type(node).__name__}"
            )
            name = self._where(path)
            raise MismatchError(f"{name}: {detail}; put an empty dict (or list) there", [("value", name, detail)])
        self._request(path, skip=skip)
        if path in self.stored.values:
            value_like(node, self.stored.values[path], self._where(path))  # raises before anything changes

        where = self._where(path)
        return lambda values: _refilled(node, value_like(node, values[path], where)) if path in values else node

    def _empty_mapping(self, node: Mapping[Any, Any], path: Path, *, skip: bool) -> Restore:
        if not isinstance(node, MutableMapping):
            return self._leaf(node, path, skip=skip)
        if not self._below(path):
            if type(self.stored.values.get(path)) is Container:  # the patterns of the load exclude what is below
                self.target.requested_values.add(path)
                return lambda values: node
            if not path and path not in self.stored.values:
                return lambda values: node
            return self._leaf(node, path, skip=skip)
        rebuilt = self.rebuilt(path)
        return lambda values: _refilled(node, rebuilt(values))

    def _tensor(self, tensor: torch.Tensor, fqn: str, *, skip: bool) -> Restore | None:
        if skip:
            self.target.optional.add(fqn)
        if not tensor.is_meta or fqn not in self.stored.metas or self.stored.metas[fqn].shape != tuple(tensor.shape):
            self._found.append((fqn, tensor))
            return None
        filled = with_memory(tensor, self.context.device)
        if isinstance(tensor, torch.nn.Parameter):
            filled = torch.nn.Parameter(filled, tensor.requires_grad)
        self._fill(fqn, filled)
        return lambda values: filled

    def _fill_found(self) -> None:
        """Fill the tensors that were found: all together if each has its own memory and name."""
        shards = describe_plain([fqn for fqn, _ in self._found], [tensor for _, tensor in self._found])
        if shards is not None:
            self.target.add({shard.fqn: shard.meta for shard in shards}, shards)
            return
        memory = SameMemory()
        ties: dict[str, list[str]] = {}
        firsts: list[tuple[str, torch.Tensor]] = []
        for fqn, tensor in self._found:
            first = memory.first_name(fqn, tensor, tensor_kind(tensor))
            if first is None:
                firsts.append((fqn, tensor))
            else:
                ties.setdefault(first, []).append(fqn)
        for fqn, tensor in firsts:
            names = [fqn, *ties.get(fqn, ())]
            chosen = choose_stored_name(names, self.target, self.context, self.stored)
            self._fill(chosen, tensor)
            self.target.aliases.update({name: chosen for name in names if name != chosen})

    def _fill(self, fqn: str, tensor: torch.Tensor) -> None:
        metas, shards = tensor_shards(fqn, tensor)
        self.target.add(metas, () if tensor.is_meta else shards)

    def _stateful(self, node: Any, path: Path, *, skip: bool) -> Restore:
        """Load the stored state with whatever keys it has; the object must accept states that grow or shrink."""
        if isinstance(node, DataLoaderState):
            return self._data_loader(node, path)
        capture = Capture(self.context)
        capture.visit(state_of(node, self._where(path)), path)
        templates = {where: tensor for where, tensor, _ in capture.found.values()}
        if path in self.stored.values and self.stored.values[path] == {}:
            self._request(path, skip=skip)
        elif not self._below(path):
            return self._absent(node, capture, path, skip=skip)
        rebuilt = self.rebuilt(path, templates, in_place=isinstance(node, torch.nn.Module))

        def restore(values: Values) -> Any:
            node.load_state_dict(rebuilt(values))
            self._record(node, path)
            return node

        return restore

    def _data_loader(self, node: DataLoaderState, path: Path) -> Restore:
        """Load this data-parallel rank's state, or all of them if they must be divided anew.

        Without tensors in them, they are checked and divided now, before anything changes.
        """
        if not self._below(path):
            self._request((*path, "dp_size"), skip=node.on_resize == "skip")
            return lambda values: node
        values, where = self.stored.values, self._where(path)
        saved = values.get((*path, "dp_size"))
        if not isinstance(saved, int):
            detail = "was not saved as a DataLoaderState"
            raise MismatchError(f"{where} {detail}; load it into the loader itself", [("data_loader", where, detail)])
        own = (*path, "ranks", str(node.dp_rank))
        everything = needs_all(node, saved, lambda keys: values.get((*own, "state", *keys)))
        if node.loader is None or (everything and node.on_resize == "skip"):
            self.target.ignorable.update(p for p in values if p[: len(path)] == path)
            self.target.ignorable.update(self._tensors_below(path))
            load = prepare(node, {"dp_size": saved}, where)
            return lambda values: self._loaded(node, path, load)
        at = path if everything else own
        rebuilt = self.rebuilt(at)
        self.target.requested_values.add((*path, "dp_size"))

        def prepared(values: Values) -> Callable[[], None]:
            tree = rebuilt(values)
            ranks = tree.get("ranks", {}) if everything else {str(node.dp_rank): tree}
            return prepare(node, {"dp_size": saved, "ranks": ranks}, where)

        if self._tensors_below(at):
            return lambda values: self._loaded(node, path, prepared(values))
        load = prepared(values)
        return lambda values: self._loaded(node, path, load)

    def _loaded(self, node: DataLoaderState, path: Path, load: Callable[[], None]) -> DataLoaderState:
        load()
        self._record(node, path)
        return node

    def _record(self, node: object, path: Path) -> None:
        """Add to the report what a loader or random generators did."""
        if isinstance(node, (DataLoaderState, RNGState)):
            for name, what in node.resumed.items():
                self.context.resumed[self._where((*path, name) if name else path)] = what

    def _absent(self, node: Any, state: Capture, path: Path, *, skip: bool) -> Restore:
        """Report everything in a stateful object as missing, since nothing is stored for it, and leave it unchanged."""
        for value_path, value in state.source.values.items():
            if type(value) is not Container:
                self._request(value_path, skip=skip or value_path == path)
        for fqn, (_, tensor, _) in state.found.items():
            self.target.add(tensor_shards(fqn, tensor)[0], ())
        self.target.optional.update(state.found if skip else ())
        return lambda values: node

    def _below(self, path: Path) -> bool:
        """Whether anything is stored below ``path``."""
        size = len(path)
        return any(len(p) > size and p[:size] == path for p in self.stored.values) or bool(self._tensors_below(path))

    def _tensors_below(self, path: Path) -> dict[str, Path]:
        index = PathIndex.of(self.stored.values, path)
        paths = {fqn: index.path_of(fqn) for fqn in self.stored.metas}
        return {fqn: p for fqn, p in paths.items() if len(p) > len(path) and p[: len(path)] == path}

    def rebuilt(
        self, path: Path, templates: Mapping[Path, torch.Tensor] | None = None, *, in_place: bool = False
    ) -> Restore:
        """Rebuild everything stored at and below ``path`` as a new tree.

        The templates give the layout of its tensors. A DTensor is filled itself; a plain tensor only with ``in_place``,
        since a tensor in a state dict may belong to another object that loads it.
        """
        size = len(path)
        stored = {p: value for p, value in self.stored.values.items() if p[:size] == path}
        self.target.requested_values.update(stored)
        containers = {p: value for p, value in stored.items() if type(value) is Container}
        tensors: dict[Path, torch.Tensor] = {}
        for fqn, tensor_path in self._tensors_below(path).items():
            tensors[tensor_path] = self._room(fqn, (templates or {}).get(tensor_path), in_place=in_place)
            self._fill(fqn, tensors[tensor_path])

        def restore(values: Values) -> Any:
            plain = [(p, values[p]) for p in stored if p in values and type(stored[p]) is not Container]
            return build_tree([*plain, *tensors.items()], containers, path, self.context.section)

        return restore

    def _room(self, fqn: str, template: torch.Tensor | None, *, in_place: bool) -> torch.Tensor:
        meta = self.stored.metas[fqn]
        if template is not None and template.is_meta:
            template = None
        if template is not None and (in_place or tensor_kind(template).is_distributed):
            return template
        device = self.context.device or (template.device if template is not None else None)
        return torch.empty(meta.shape, dtype=torch_dtype(meta), device=device or "cpu")

    def _request(self, path: Path, *, skip: bool) -> None:
        self.target.requested_values.add(path)
        if skip:
            self.target.optional.add(path)

    def _where(self, path: Path) -> str:
        return path_name((self.context.section, *path))


def choose_stored_name(names: Sequence[str], target: SectionTarget, context: Context, stored: StoredSection) -> str:
    """The name from which a tied tensor is filled, the first stored one. The target may ignore the others."""
    known = [name for name in names if name in stored.metas] if len(names) > 1 else []
    if not known:
        return names[0]
    target.ignorable.update(known[1:])
    sources = {name: stored.aliases.get(name, name) for name in known}
    separate = [name for name in known if sources[name] != sources[known[0]]]
    if separate:
        context.notes.append(
            f"{context.section}: {', '.join(names)} are one tensor here but were stored separately; it was filled from "
            f"{known[0]}, and {', '.join(separate)} were left unread"
        )
    return known[0]


def _refilled(node: Any, value: Any) -> Any:
    """What a load puts in the place of ``node``: a mapping keeps its identity and gets the items of another one."""
    if value is node or not (isinstance(node, MutableMapping) and isinstance(value, Mapping)):
        return value
    node.clear()
    node.update(value)
    return node
