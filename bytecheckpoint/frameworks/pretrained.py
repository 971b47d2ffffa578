"""Names that a module may lack in a checkpoint, or does not need from one.

Models of transformers list patterns of such names as attributes. Each list applies to the names below the module that
has it. From version 5 on, transformers also renames some stored tensors when it loads. Models with adapters of PEFT
have the adapter's name in the names of its tensors, which PEFT's files leave out. Neither library need be installed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..runtime.messages import listed
from ..tensors.metadata import BasicMeta
from ..tensors.shards import SectionSource, SectionTarget, StoredSection
from .base import Context
from .joined import divide_target, find_joined, original_model, transformers_models
from .module_tree import Slot, named_slots, named_submodules

_log = logging.getLogger(__name__)

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
_MISSING = "_keys_to_ignore_on_load_missing"
_TIED = "_tied_weights_keys"
_ADAPTERS = "peft_config"
_PEFT_PREFIX = "base_model.model."
_DORA_SUFFIX = ".lora_magnitude_vector.weight"  # in PEFT's files, the vector has the name that was its layer's
# Buffers that old versions stored. Models compute them, and transformers drops them whatever the lists contain.
_STALE = (r"(^|\.)position_ids$", r"(^|\.)rotary_emb\.inv_freq$")

_Rule = tuple[str, Callable[[str], Any]]
"""The prefix of a module's names, and a test of the rest of a name."""


def target_of_stored_names(
    modules: Sequence[nn.Module],
    context: Context,
    stored: StoredSection,
    make_target: Callable[[StoredSection], SectionTarget],
) -> SectionTarget:
    """The target that ``make_target`` makes of what is stored, filled from the names that transformers and PEFT store.

    The target ignores stored names that the modules do not need, and names that the modules call optional are added to
    ``target.optional``. The caller learns from notes what is left unread, and what has other names.
    """
    slots = named_slots(modules)
    names = {slot.fqn for slot in slots if slot.persistent}
    adapters = _adapter_sources(modules, names, stored)
    converted = _converted_sources(modules, names, stored)
    sources = {**converted, **adapters}
    layouts = context.layouts_of(context.state[context.section]).values() if stored.metas.keys() - names else ()
    shapes = {fqn: shape for layout in layouts for fqn, shape in layout.fqns.items()}
    lacking = {fqn: shape for fqn, shape in shapes.items() if fqn not in stored.metas and fqn not in sources}
    joined = find_joined(modules, lacking, stored.metas.keys() - names - shapes.keys(), context)
    seen = stored
    if sources or joined:
        metas = {name: stored.metas[source] for name, source in sources.items()}
        for name, parts in joined.items():
            metas[name] = BasicMeta(stored.metas[parts[0].name].dtype, shapes[name])
        seen = replace(stored, metas={**stored.metas, **metas})
    target = make_target(seen)
    divide_target(target, joined)
    target.ignorable.update(source for name, source in sources.items() if name in target.ignorable)
    _read_from(target, {name: source for name, source in sources.items() if name in target.metas})
    if converted:
        (name, source), *others = converted.items()
        more = f" and {len(others)} more" if others else ""
        context.notes.append(
            f"{context.section}: stored under names that transformers renames when it loads: {source} is {name}{more}"
        )
    _apply_lists(modules, target, context, stored, slots)
    if adapters:  # whose files have no tensors of the base model
        named = _adapter_names(modules)
        target.optional.update(name for name in target.metas if not named.intersection(name.split(".")))
    return target


def _apply_lists(
    modules: Sequence[nn.Module], target: SectionTarget, context: Context, stored: StoredSection, slots: Sequence[Slot]
) -> None:
    lacking = [name for name in target.metas if name not in stored.metas]
    extra = [name for name in stored.metas.keys() - target.metas.keys() if name not in target.aliases]
    extra = [name for name in extra if name not in target.ignorable]
    if lacking:
        _fill_tied(modules, target, stored, lacking)
        rules = list(_rules(modules, _MISSING))
        target.optional.update(name for name in lacking if _applies(rules, name))
    if extra:
        rules = list(_rules(modules, _UNEXPECTED, always=_STALE))
        computed = {slot.fqn for slot in slots if not slot.persistent}
        unread = sorted(name for name in extra if name in computed or _applies(rules, name))
        if unread:
            target.ignorable.update(unread)
            context.notes.append(
                f"{context.section}: left unread, because the model computes or ignores them: {listed(unread)}"
            )


def _converted_sources(modules: Sequence[nn.Module], names: Collection[str], stored: StoredSection) -> dict[str, str]:
    """By name of a model of transformers, the stored name that ``from_pretrained`` would rename to it.

    Names of tensors that it computes, such as those of fused experts, are not among them.
    """
    extra = sorted(stored.metas.keys() - names)
    if not extra or not names - stored.metas.keys():
        return {}
    found: dict[str, list[str]] = {}
    for prefix, model in transformers_models(modules):
        rename = _conversion(model)
        for source in extra:
            name = prefix + rename(source[len(prefix) :]) if source.startswith(prefix) else source
            if name in names and name not in stored.metas:
                found.setdefault(name, []).append(source)
    return {name: one[0] for name, one in found.items() if len(one) == 1}


def _conversion(model: Any) -> Callable[[str], str]:
    """The renaming with which transformers, from version 5 on, loads into a model."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        found = get_model_conversion_mapping(original_model(model))
    except Exception as error:  # noqa: BLE001 - an older version, or a model without a configuration
        _log.debug("names are used as they are: transformers has no conversion of %s: %s", type(model).__name__, error)
        return lambda name: name
    renamings = [one for one in found if isinstance(one, WeightRenaming)]
    converters = [one for one in found if isinstance(one, WeightConverter)]

    def rename(name: str) -> str:
        new, computed_by = rename_source_key(name, renamings, converters)
        return name if computed_by else str(new)

    return rename


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


def _adapter_names(modules: Sequence[nn.Module]) -> set[str]:
    return {str(name) for _, module in _named(modules) for name in vars(module).get(_ADAPTERS) or ()}


def _adapter_sources(modules: Sequence[nn.Module], names: Collection[str], stored: StoredSection) -> dict[str, str]:
    """By name of an adapter's tensor, its name in PEFT's files."""
    sources: dict[str, str] = {}
    adapters = _adapter_names(modules)
    for name in names if adapters else ():
        plain = [found for adapter in adapters if (found := _without_adapter(name, adapter)) != name]
        # A model of transformers with an adapter has PEFT's prefix only in its files.
        candidates = [prefix + one for one in plain for prefix in ("", _PEFT_PREFIX)]
        source = next((one for one in candidates if one in stored.metas and one not in names), None)
        if source is not None and name not in stored.metas:
            sources[name] = source
    return sources


def under_names_of_peft(modules: Sequence[nn.Module], source: SectionSource) -> SectionSource:
    """Return the source of a model with one adapter under the names that PEFT's files have."""
    (adapter,) = _adapter_names(modules)
    names = {fqn: _PEFT_PREFIX + _without_adapter(fqn, adapter).removeprefix(_PEFT_PREFIX) for fqn in source.metas}
    found = source.tensors(names)
    found.values, found.left_out = source.values, source.left_out
    found.per_rank |= source.per_rank - names.keys()
    found.aliases = {alias: names[fqn] for alias, fqn in source.aliases.items()}
    return found


def _without_adapter(name: str, adapter: str) -> str:
    parts = name.split(".")
    if adapter not in parts:
        return name
    at = parts.index(adapter)
    start = at - 1 if parts[at - 1 : at] == ["modules_to_save"] else at
    plain = ".".join((*parts[:start], *parts[at + 1 :]))
    return plain.removesuffix(".weight") if plain.endswith(_DORA_SUFFIX) else plain


def _read_from(target: SectionTarget, sources: Mapping[str, str]) -> None:
    """Let the target read tensors from the stored ones of other names."""
    target.rename(sources)
    target.aliases.update({name: sources[one] for name, one in target.aliases.items() if one in sources})
    target.aliases.update(sources)


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
        if not hasattr(type(module), attribute) and attribute not in vars(module):
            continue
        for pattern in (*(_attribute(module, attribute) or ()), *always):
            if isinstance(pattern, str):
                yield prefix, re.compile(pattern).search


def _attribute(module: nn.Module, name: str) -> Any:
    # Not getattr: wrappers forward attributes to the module that they wrap, whose names differ.
    return vars(module).get(name, getattr(type(module), name, None))


def _named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in named_submodules(modules):
        yield (f"{name}." if name else ""), module


def _applies(rules: Iterable[_Rule], name: str) -> bool:
    return any(name.startswith(prefix) and test(name[len(prefix) :]) for prefix, test in rules)
