"""Leave out what the caller does not want to save, and record it in the checkpoint.

Each name that is left out becomes a value ``LEFT_OUT`` at its path (for a tensor: its name), so that a load can
distinguish it from a name that the checkpoint should contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..checkpoint.selection import Selection, SimilarNames
from ..errors import UsageError
from ..format.values.types import LEFT_OUT, Container, path_name
from ..frameworks.module_tree import modules_of
from ..frameworks.sections import Section
from ..tensors.shards import SectionSource
from .options import SaveRequest


def unmatched_options(
    sections: Sequence[Section], sources: Mapping[str, SectionSource], options: SaveRequest
) -> list[list[str]]:
    """The options ``[argument, value]`` that select nothing on this rank. It is an error if no rank uses one of
    them."""
    found: list[list[str]] = []
    if not options.selection.selects_all:
        found += options.selection.unmatched(sources, full_names(sources))
    if options.trainable_only and not any(
        parameter.requires_grad
        for section in sections
        for module in modules_of(section.obj)
        for parameter in module.parameters()
    ):
        found.append(["trainable_only", "True"])
    return found


def raise_unmatched(by_rank: Iterable[Sequence[Sequence[str]]], names: Iterable[str]) -> None:
    """Raise ``UsageError`` if an option selects nothing on any rank. ``names`` are suggested."""
    useless = set.intersection(*({(argument, value) for argument, value in of_rank} for of_rank in by_rank))
    if not useless:
        return
    similar = SimilarNames(names)
    lines = []
    for argument, value in sorted(useless):
        if argument == "trainable_only":
            lines.append("  trainable_only: no module of the state has a parameter that requires a gradient")
        else:
            hint = similar.nearest(value) if argument in ("include", "exclude") else ""
            lines.append(f"  {argument}: {value!r}{hint}")
    raise UsageError("\n".join(["these arguments of save select nothing in the state; nothing was saved:", *lines]))


def full_names(sources: Mapping[str, SectionSource]) -> Iterator[str]:
    """The full names of all tensors and values that patterns may select."""
    for section, source in sources.items():
        for name in (*source.metas, *source.aliases):
            yield f"{section}.{name}"
        for path in (*source.values, *source.left_out):
            if type(source.values.get(path)) is not Container:
                yield f"{section}.{path_name(path)}"


def select_source(section: str, source: SectionSource, selection: Selection) -> SectionSource:
    """Return the selected part of a section, with ``LEFT_OUT`` for everything else."""
    selected = source
    if not selection.selects_all:
        selected = _select_tensors(section, source, selection)
        _select_values(section, source, selection, selected)
    selected.values.update(dict.fromkeys(sorted(selected.left_out, key=path_name), LEFT_OUT))
    return selected


def _select_tensors(section: str, source: SectionSource, selection: Selection) -> SectionSource:
    """Return the tensors of which at least one name is selected, under the first such name."""
    names = {fqn: [fqn] for fqn in source.metas}
    for alias, fqn in source.aliases.items():
        names[fqn].append(alias)
    kept = {fqn: [one for one in tied if selection.selects(f"{section}.{one}")] for fqn, tied in names.items()}
    selected = source.tensors({fqn: some[0] for fqn, some in kept.items() if some})
    selected.aliases = {alias: some[0] for some in kept.values() for alias in some[1:]}
    left_out = [name for fqn, tied in names.items() for name in tied if name not in kept[fqn]]
    selected.left_out = source.left_out | {(name,) for name in left_out}
    return selected


def _select_values(section: str, source: SectionSource, selection: Selection, selected: SectionSource) -> None:
    for path, value in source.values.items():
        is_branch = type(value) is Container and value.kind != "tensor"  # not a name
        if is_branch or selection.selects(f"{section}.{path_name(path)}"):
            selected.values[path] = value
            if path in source.per_rank:
                selected.per_rank.add(path)
        elif type(value) is not Container:
            selected.left_out.add(path)
