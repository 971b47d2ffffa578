"""Names that a module may lack in a checkpoint, or does not need from one.

Models of transformers list patterns of such names as attributes. Each list applies to the names below the module that
has it. Models with adapters of PEFT have the adapter's name in the names of its tensors, which PEFT's files leave out.
Neither library need be installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..tensors.shards import SectionTarget, StoredSection
from .base import Context
from .module_tree import named_slots, named_submodules

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
_MISSING = "_keys_to_ignore_on_load_missing"
_TIED = "_tied_weights_keys"
_ADAPTERS = "peft_config"
_PEFT_PREFIX = "base_model.model."
# Buffers that old versions stored. Models compute them, and transformers drops them whatever the lists contain.
_STALE = (r"(^|\.)position_ids$", r"(^|\.)rotary_emb\.inv_freq$")
_MAX_LISTED = 5

_Rule = tuple[str, Callable[[str], Any]]
"""The prefix of a module's names, and a test of the rest of a name."""


def apply_name_rules(
    modules: Sequence[nn.Module], target: SectionTarget, context: Context, stored: StoredSection
) -> None:
    """Let ``target`` ignore stored names that the modules do not need, and fill tied names from what is stored.

    Names that the modules call optional are added to ``target.optional``. The caller learns from a note what is left
    unread.
    """
    lacking = [name for name in target.metas if name not in stored.metas]
    extra = [name for name in stored.metas.keys() - target.metas.keys() if name not in target.aliases]
    extra = [name for name in extra if name not in target.ignorable]
    if not lacking and not extra:
        return
    if lacking:
        _fill_tied(modules, target, stored, lacking)
        _fill_adapters(modules, target, stored, lacking)
        rules = list(_rules(modules, _MISSING))
        target.optional.update(name for name in lacking if _applies(rules, name))
    if extra:
        rules = list(_rules(modules, _UNEXPECTED, always=_STALE))
        computed = {slot.fqn for slot in named_slots(modules) if not slot.persistent}
        unread = sorted(name for name in extra if name in computed or _applies(rules, name))
        if unread:
            target.ignorable.update(unread)
            more = f" and {len(unread) - _MAX_LISTED} more" if len(unread) > _MAX_LISTED else ""
            context.notes.append(
                f"{context.section}: left unread, because the model computes or ignores them: "
                f"{', '.join(unread[:_MAX_LISTED])}{more}"
            )


def _fill_tied(
    modules: Sequence[nn.Module], target: SectionTarget, stored: StoredSection, lacking: Iterable[str]
) -> None:
    """Fill tied names that are separate tensors here (after tensor parallelism) from the name that is stored."""
    sources = dict(_tied_sources(modules))
    for name in lacking:
        source = sources.get(name)
        meta = stored.metas.get(source) if source is not None else None
        if source is None or meta is None or meta.shape != target.metas[name].shape:
            continue
        if any(shard.fqn == name and shard.tensor.is_meta for shard in target.shards):
            continue
        _read_from(target, {name: source})


def _fill_adapters(
    modules: Sequence[nn.Module], target: SectionTarget, stored: StoredSection, lacking: Iterable[str]
) -> None:
    """Fill adapters from the names in PEFT's files, which have no tensors of the base model."""
    adapters = {str(name) for _, module in _named(modules) for name in vars(module).get(_ADAPTERS) or ()}
    if not adapters:
        return
    sources: dict[str, str] = {}
    base: list[str] = []
    for name in lacking:
        plain = [found for adapter in adapters if (found := _without_adapter(name, adapter)) != name]
        if not plain:
            base.append(name)
        # A model of transformers with an adapter has PEFT's prefix only in its files.
        candidates = [prefix + one for one in plain for prefix in ("", _PEFT_PREFIX)]
        source = next((one for one in candidates if one in stored.metas and one not in target.metas), None)
        if source is not None:
            sources[name] = source
    if sources:
        _read_from(target, sources)
        target.optional.update(base)


def _without_adapter(name: str, adapter: str) -> str:
    parts = name.split(".")
    if adapter not in parts:
        return name
    at = parts.index(adapter)
    start = at - 1 if parts[at - 1 : at] == ["modules_to_save"] else at
    return ".".join((*parts[:start], *parts[at + 1 :]))


def _read_from(target: SectionTarget, sources: Mapping[str, str]) -> None:
    """Let the target read tensors from the stored ones of other names."""
    for name, source in sources.items():
        target.metas.setdefault(source, target.metas.pop(name))
    target.aliases.update(sources)
    target.shards[:] = [replace(one, fqn=sources.get(one.fqn, one.fqn)) for one in target.shards]


def _tied_sources(modules: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    """``(tied name, name of the input embedding or of the listed source)`` of models configured to tie them."""
    for prefix, module in _named(modules):
        tied = _attribute(module, _TIED)
        if not tied or not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        if isinstance(tied, Mapping):
            yield from ((prefix + str(name), prefix + str(source)) for name, source in tied.items())
            continue
        find = getattr(module, "get_input_embeddings", None)
        embedding = getattr(find(), "weight", None) if callable(find) else None
        names = [slot.fqn for slot in named_slots([module]) if slot.tensor is embedding]
        yield from ((prefix + str(name), prefix + source) for name in tied for source in names[:1])


def _rules(modules: Sequence[nn.Module], attribute: str, always: Sequence[str] = ()) -> Iterator[_Rule]:
    for prefix, module in _named(modules):
        patterns = _attribute(module, attribute)
        if patterns is _ABSENT:
            continue
        for pattern in (*(patterns or ()), *always):
            if isinstance(pattern, str):
                yield prefix, re.compile(pattern).search


_ABSENT = object()


def _attribute(module: nn.Module, name: str) -> Any:
    # Not getattr: wrappers forward attributes to the module that they wrap, whose names differ.
    return vars(module).get(name, getattr(type(module), name, _ABSENT))


def _named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for root in modules:
        for name, module in named_submodules(root):
            yield (f"{name}." if name else ""), module


def _applies(rules: Iterable[_Rule], name: str) -> bool:
    return any(name.startswith(prefix) and test(name[len(prefix) :]) for prefix, test in rules)
