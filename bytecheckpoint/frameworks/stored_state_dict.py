"""Read a stored state dict of an optimizer as if the optimizer itself had been saved.

A state dict is stored as a tree. Its parameters have names (``get_optimizer_state_dict``, also flattened) or numbers
(``Optimizer.state_dict``). Numbers count the parameters of the groups in order, so they identify the parameters of a
target whose groups have the same sizes, as in ``Optimizer.load_state_dict``. Shapes that contradict this are an error.
A target with other groups needs shapes that allow only one way of dividing the model's parameters among the stored
groups, in the model's order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import MismatchError
from ..format.values.types import Container, is_number, path_name
from ..runtime.messages import listed
from ..tensors.shards import Path, SectionTarget, StoredSection, torch_dtype
from .base import Context
from .module_tree import clean_name, modules_of, named_slots
from .optimizer_groups import group_path, groups_of
from .optimizer_params import NamedParam
from .optimizer_state import TENSOR_LEAF, empty_state_path, split_entry, state_path
from .tensors import tensor_shards
from .tree_paths import PathIndex, build_tree

_MAX_STATES = 1 << 12  # more ways than this that fit a part of the model are not followed

Shape = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)


def only_division(
    groups: Sequence[Sequence[Key]], shapes: Mapping[Key, Shape], params: Iterable[tuple[str, Shape]]
) -> dict[Key, str] | None:
    """Return the name of each key, or None if the shapes allow no division, or several.

    Scripts split a model's parameters into groups, such as those with and without weight decay, and keep the model's
    order inside each group. So each group is a subsequence of the model's parameters. If their shapes allow only one
    way of dividing the model's parameters among the groups, the names are known, whatever rule the script applied.

    Args:
        groups: The keys of each group, in the model's order.
        shapes: The shape of each key's parameter; a key whose shape is unknown fits every parameter.
        params: Names and shapes of the model's parameters, in its order.

    Returns:
        Each key's name.
    """
    # By the number of keys used of each group: in how many ways (1, or 2 for several), and the last of them.
    ways: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(groups): (1, ())}
    steps: list[tuple[str, dict[tuple[int, ...], tuple[int, tuple[int, ...]]]]] = []
    for name, shape in params:
        following: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (count, _) in ways.items():
            for number, group in enumerate(groups):
                if used[number] < len(group) and shapes.get(group[used[number]], shape) == shape:
                    after = (*used[:number], used[number] + 1, *used[number + 1 :])
                    following[after] = (min(2, count + following.get(after, (0, ()))[0]), used)
        if len(following) > _MAX_STATES:
            return None
        ways = following
        steps.append((name, ways))
    at = tuple(map(len, groups))
    if ways.get(at, (0, ()))[0] != 1:
        return None
    found: dict[Key, str] = {}
    for name, reached in reversed(steps):
        before = reached[at][1]
        number = next(i for i, (now, then) in enumerate(zip(at, before, strict=True)) if now != then)
        found[groups[number][before[number]]] = name
        at = before
    return found


_STATE, _GROUPS = "state", "param_groups"
_NESTED = "__bnb_optimizer_quant_state__"
"""Where ``state_dict()`` of bitsandbytes puts the entries of a parameter that FSDP must not gather."""

_ADVICE = (
    "Save the optimizer itself, or get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint, which "
    "identify parameters by name"
)


def is_stored_state_dict(values: Mapping[Path, Any]) -> bool:
    """Whether a section is a state dict of an optimizer that was stored as a tree."""
    for path in values:
        if len(path) > 1 and path[0] == _GROUPS and type(path[1]) is int:
            return True
        if len(path) == 1 and str(path[0]).startswith(f"{_GROUPS}."):
            return True
    return False


def is_numbered(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the parameters of a state dict's groups have numbers and no names."""
    return any(names_of_group(group) is None for group in groups)


def names_of_group(group: Mapping[str, Any]) -> list[str] | None:
    """The names of the parameters in a group of a state dict; None if they have numbers only."""
    keys = group["params"]
    if all(isinstance(key, str) for key in keys):
        return [clean_name(key) for key in keys]
    given = group.get("param_names")
    if isinstance(given, (list, tuple)) and len(given) == len(keys):
        return [clean_name(str(name)) for name in given]
    return None


@dataclass
class _Contents:
    """Hyper-parameters and state by the stored key of the parameter; ``groups`` are those of a nested state dict."""

    options: dict[Any, dict[str, Any]] = field(default_factory=dict)
    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


class StoredStateDict:
    """A stored state dict. ``section`` has the names and paths of an optimizer's section (``docs/sections.md``)."""

    def __init__(
        self,
        stored: StoredSection,
        params: Sequence[NamedParam],
        context: Context,
    ) -> None:
        self._stored, self._params, self._context = stored, params, context
        index = PathIndex.of(stored.values)
        self._paths = {name: index.path_of(name) for name in stored.metas}
        # Hyper-parameters that are tensors, such as a learning rate on a device.
        self._rooms = {
            name: torch.zeros(meta.shape, dtype=torch_dtype(meta))
            for name, meta in stored.metas.items()
            if name.startswith(f"{_GROUPS}.")
        }
        contents = self._contents(stored.values)
        # The stored names of tensors by key of the parameter, and path in its state.
        self._tensors = {
            key: {own: self._stored_name(key, own) for own in _tensors_in(entries, ())}
            for key, entries in contents.state.items()
        }
        self._names = self._parameter_names(contents)
        self._stored_names = {
            path_name((_STATE, name, *own)): source
            for key, name in self._names.items()
            for own, source in self._tensors.get(key, {}).items()
        }
        if contents.groups and is_numbered(contents.groups):
            self._check_shapes()
        metas = {name: stored.metas[source] for name, source in self._stored_names.items()}
        self.section = StoredSection(metas, self._by_name(contents), {})

    def restored(self, target: SectionTarget) -> SectionTarget:
        """A target for ``section`` under the names and paths that are stored."""
        fill, known = target.apply, self.section.values

        def apply(values: Mapping[Path, Any]) -> None:
            fill(self._by_name(self._contents(values)))

        target.rename(self._stored_names)
        target.requested_values = {
            *(path for path in target.requested_values if path not in known),
            *self._stored.values,
        }
        target.apply = apply
        for name, room in self._rooms.items():
            target.add(*tensor_shards(name, room))
        return target

    # ------------------------------------------------------------------------------------------------------ contents

    def _contents(self, values: Mapping[Path, Any]) -> _Contents:
        if not any(path[:1] == (_GROUPS,) and len(path) > 1 for path in values):
            return self._flat_contents(values)
        groups = self._tree(values, _GROUPS)
        contents = _Contents(state=self._tree(values, _STATE), groups=groups)
        for entries in contents.state.values():
            entries.update(entries.pop(_NESTED, {}))
        if is_numbered(groups):  # DCP turns the keys of mappings into text
            contents.state = {_as_number(key): entries for key, entries in contents.state.items()}
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            contents.options.update(dict.fromkeys(group["params"], options))
        return contents

    def _tree(self, values: Mapping[Path, Any], root: str) -> Any:
        below = {path: value for path, value in values.items() if path[:1] == (root,)}
        leaves = [(path, value) for path, value in below.items() if type(value) is not Container]
        leaves += [
            (path, self._rooms.get(name, TENSOR_LEAF)) for name, path in self._paths.items() if path[:1] == (root,)
        ]
        containers = {path: value for path, value in below.items() if type(value) is Container}
        return build_tree(leaves, containers, (root,), self._context.section)

    def _stored_name(self, key: Any, own: Path) -> str:
        name = path_name((_STATE, key, *own))
        return name if name in self._stored.metas else path_name((_STATE, key, _NESTED, *own))

    def _flat_contents(self, values: Mapping[Path, Any]) -> _Contents:
        """A flattened state dict has one entry ``state.<fqn>.<key>`` or ``param_groups.<fqn>.<key>`` for each value."""
        contents = _Contents()
        known = {name for named in self._params for name in named.names}
        leaves = {path_name(path): value for path, value in values.items() if type(value) is not Container}
        for name, value in (*leaves.items(), *((n, self._rooms.get(n, TENSOR_LEAF)) for n in self._stored.metas)):
            root, _, rest = name.partition(".")
            fqn, key = split_entry(rest, known)
            if fqn and root in (_STATE, _GROUPS):
                part = contents.state if root == _STATE else contents.options
                part.setdefault(fqn, {})[key] = value
        return contents

    def _by_name(self, contents: _Contents) -> dict[Path, Any]:
        """The plain values under the paths of an optimizer's section."""
        values: dict[Path, Any] = {}
        for key, options in contents.options.items():
            fqn = self._names.get(key, key)
            values[group_path(fqn)] = options
            if not contents.state.get(key):
                values[empty_state_path(fqn)] = {}
        for number, group in enumerate(contents.groups):
            if not group["params"]:
                values["empty_groups", 0, number] = {k: v for k, v in group.items() if k != "params"}
        for key, entries in contents.state.items():
            if key not in self._names:
                values["shared", 0, key] = entries
            else:
                plain = {name: value for name, value in entries.items() if value is not TENSOR_LEAF}
                values.update({state_path(self._names[key], name): value for name, value in plain.items()})
        return values

    # --------------------------------------------------------------------------------------------------------- names

    def _parameter_names(self, contents: _Contents) -> dict[Any, str]:
        groups = contents.groups
        if not groups:
            return {name: name for named in self._params for name in named.names}
        if not is_numbered(groups):
            return {
                key: name
                for group in groups
                for key, name in zip(group["params"], names_of_group(group) or (), strict=True)
            }
        # By name: a flat parameter of DeepSpeed's optimizers has several, which the saved optimizer stepped one by one.
        names = [names for _, names in groups_of(self._params)]
        theirs, ours = [len(group["params"]) for group in groups if group["params"]], [len(some) for some in names]
        if theirs != ours:
            divided = only_division([group["params"] for group in groups], self._shapes(), self._ordered())
            if divided is not None:
                self._context.notes.append(
                    f"{self._context.section}: the checkpoint has a state dict that numbers its parameters, in other "
                    "groups; in the model's order, their shapes allow only one assignment, which was used"
                )
                return divided
            raise MismatchError(
                f"section {self._context.section!r}: the checkpoint has a state dict that numbers its parameters, in "
                f"groups of {theirs}, and the target has groups of {ours}. In the model's order, their shapes do not "
                f"allow exactly one assignment, so it is unknown which parameter is which. {_ADVICE}",
                [("value", f"{self._context.section}.{_GROUPS}", f"groups of {theirs}, now {ours}")],
            )
        self._context.notes.append(
            f"{self._context.section}: the checkpoint has a state dict that numbers its parameters; they were assigned "
            "to the target's in order"
        )
        keys = [key for group in groups for key in group["params"]]
        return dict(zip(keys, (name for some in names for name in some), strict=True))

    def _shapes(self) -> dict[Any, tuple[int, ...]]:
        """The shape of each parameter whose entries have one shape in common."""
        found: dict[Any, tuple[int, ...]] = {}
        for key, tensors in self._tensors.items():
            shapes = {self._stored.metas[source].shape for own, source in tensors.items() if len(own) == 1} - {()}
            if len(shapes) == 1:
                (found[key],) = shapes
        return found

    def _ordered(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the target's parameters in the model's order; empty if that is unknown.

        FSDP-1's flat parameters do not show the model's order.
        """
        shapes = {fqn: shape for named in self._params for fqn, shape in named.layout.fqns.items()}
        order: dict[str, tuple[int, ...]] = {}
        for value in self._context.state.values():
            names = [slot.fqn for slot in named_slots(modules_of(value)) if slot.is_parameter]
            order.update((fqn, shapes[fqn]) for fqn in names if fqn in shapes)
        return list(order.items()) if order.keys() == shapes.keys() else []

    def _check_shapes(self) -> None:
        """Entries that have the parameter's shape for some parameters must have it for all of them."""
        shapes = {fqn: shape for named in self._params for fqn, shape in named.layout.fqns.items()}
        fits: dict[str, dict[str, bool]] = {}
        for key, fqn in self._names.items():
            for own, source in self._tensors.get(key, {}).items():
                stored = self._stored.metas[source].shape
                if stored:
                    # Matrices in lists may be factors of any shape, even by chance the parameter's.
                    kind = str(own[0]) if len(own) == 1 else ""
                    fits.setdefault(kind, {})[path_name((_STATE, fqn, *own))] = len(own) == 1 and stored == shapes[fqn]
        usual = [found for found in fits.values() if any(found.values())]
        wrong = [name for found in usual or fits.values() for name, is_fit in found.items() if not is_fit]
        if wrong:
            raise MismatchError(
                f"section {self._context.section!r}: the checkpoint has a state dict that numbers its parameters, and "
                f"{len(wrong)} entries do not have the shapes of the target's parameters in order: "
                f"{listed(wrong)}. {_ADVICE}",
                [("shape", name, "stored by number, with another shape") for name in wrong],
            )


def _as_number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and is_number(key) else key


def _tensors_in(entries: Any, path: Path) -> Iterator[Path]:
    """The paths of the tensors in nested containers."""
    if entries is TENSOR_LEAF:
        yield path
    elif isinstance(entries, Mapping):
        for key, item in entries.items():
            yield from _tensors_in(item, (*path, key))
    elif isinstance(entries, (list, tuple)):
        for number, item in enumerate(entries):
            yield from _tensors_in(item, (*path, number))
