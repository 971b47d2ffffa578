"""The conformance suite for framework adapters. Needs pytest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ..format.values.decoding import decode_value
from ..format.values.encoding import encode_value
from ..format.values.types import path_name
from ..frameworks.base import Adapter, Context
from ..frameworks.registry import adapter_names, find_adapter, parameter_layouts
from ..frameworks.sections import Section
from ..tensors.metadata import BasicMeta, Path
from ..tensors.shards import SectionSource, SectionTarget, Shard, StoredSection, torch_dtype


@dataclass(frozen=True, kw_only=True)
class AdapterCase:
    """An adapter, and objects to test it with.

    Attributes:
        adapter: The adapter under test.
        make: Creates an object. Objects of different seeds have the same structure and different content.
        content: Everything of an object that a save and a load must preserve, by name. Tensors are compared bit by bit,
            other values with ``==``. It must not change the object.
        state: The complete ``state`` argument of the save that contains the object, such as an optimizer's model. By
            default the object is the only section.
        section: The object's section in ``state``.
    """

    adapter: Adapter
    make: Callable[[int], Any]
    content: Callable[[Any], Mapping[str, Any]]
    state: Callable[[Any], Mapping[str, Any]] | None = None
    section: str = "section"

    def context(self, obj: Any) -> Context:
        """Return the context in which a job of one process saves or loads ``obj``."""
        state = {self.section: obj} if self.state is None else self.state(obj)
        return Context(self.section, state, layouts_of=parameter_layouts)

    def capture(self, obj: Any) -> SectionSource:
        """Return the captured section of ``obj``, with checked names, as in a save."""
        return Section(self.section, obj, self.adapter, self.context(obj)).capture()


class AdapterConformance:
    """The conformance suite for framework adapters, in one process.

    A subclass defines the fixture ``case``, which returns an ``AdapterCase``. The suite checks that ``capture`` returns
    views and changes nothing, that ``target`` changes nothing before ``apply`` except memory that the load fills, and
    that a load into another object restores the saved content. Sharded objects need further tests, which save and load
    with different numbers of ranks (see ``RankPool``).

    Example:
        >>> class TestMyAdapter(AdapterConformance):
        ...     @pytest.fixture
        ...     def case(self):
        ...         return AdapterCase(adapter=MyAdapter(), make=MyObject.random, content=MyObject.as_dict)
    """

    @pytest.fixture
    def case(self) -> Iterator[AdapterCase]:
        raise NotImplementedError("a subclass of AdapterConformance defines the fixture `case`")

    def test_recognizes_its_object_only(self, case: AdapterCase) -> None:
        assert case.adapter.recognizes(case.make(0))
        assert not case.adapter.recognizes(object())

    def test_name_selects_the_adapter(self, case: AdapterCase) -> None:
        assert case.adapter.name
        if case.adapter.name not in adapter_names():
            pytest.skip("the adapter is not registered")
        assert find_adapter(case.make(0), case.adapter.name).name == case.adapter.name

    def test_seeds_differ(self, case: AdapterCase) -> None:
        first, second = case.content(case.make(0)), case.content(case.make(1))
        assert first.keys() == second.keys()
        assert _differences(first, second), "objects of different seeds must differ, else a load cannot be checked"

    def test_capture_changes_nothing(self, case: AdapterCase) -> None:
        obj = case.make(0)
        before = _snapshot(case.content(obj))
        case.capture(obj)
        assert _differences(before, case.content(obj)) == []

    def test_capture_is_repeatable(self, case: AdapterCase) -> None:
        obj = case.make(0)
        first, second = case.capture(obj), case.capture(obj)
        assert list(first.metas.items()) == list(second.metas.items())
        assert [(shard.fqn, shard.box) for shard in first.shards] == [(shard.fqn, shard.box) for shard in second.shards]
        assert list(first.values) == list(second.values)
        assert first.aliases == second.aliases

    def test_capture_serves_several_threads(self, case: AdapterCase) -> None:
        objects = [case.make(seed) for seed in range(4)]
        expected = [list(case.capture(obj).metas) for obj in objects]
        with ThreadPoolExecutor(4) as pool:
            assert [list(source.metas) for source in pool.map(case.capture, objects)] == expected

    def test_shards_are_views_of_the_object(self, case: AdapterCase) -> None:
        obj = case.make(0)
        first, second = case.capture(obj), case.capture(obj)
        copies = [
            one.fqn
            for one, other in zip(first.shards, second.shards, strict=True)
            if one.tensor.numel() and one.tensor.data_ptr() != other.tensor.data_ptr()
        ]
        assert not copies, f"capture copied {copies}; return views of the object's own memory"

    def test_shards_tile_their_tensors(self, case: AdapterCase) -> None:
        source = case.capture(case.make(0))
        covered = dict.fromkeys(source.metas, 0)
        boxes: dict[str, list[Shard]] = {}
        for shard in source.shards:
            assert shard.meta == source.metas[shard.fqn], f"{shard.fqn}: the shard and the section differ in metadata"
            for other in boxes.setdefault(shard.fqn, []):
                assert shard.box.intersect(other.box) is None, f"{shard.fqn}: {shard.box} overlaps {other.box}"
            boxes[shard.fqn].append(shard)
            covered[shard.fqn] += shard.box.numel
        for fqn, meta in source.metas.items():
            assert covered[fqn] == meta.numel, f"{fqn}: the shards of one process have {covered[fqn]} of {meta.numel}"
        for alias, fqn in source.aliases.items():
            assert fqn in source.metas, f"{alias} is tied to {fqn}, which is not a tensor of the section"

    def test_values_are_plain(self, case: AdapterCase) -> None:
        source = case.capture(case.make(0))
        assert list(_stored_values(source)) == list(source.values)

    def test_target_changes_nothing_before_apply(self, case: AdapterCase) -> None:
        source, obj = case.capture(case.make(0)), case.make(1)
        before = _snapshot(case.content(obj))
        context = case.context(obj)
        case.adapter.target(obj, context, _stored_section(source))
        for undo in reversed(context.undo):
            undo()
        assert _differences(before, case.content(obj)) == []

    def test_target_matches_what_is_stored(self, case: AdapterCase) -> None:
        source, obj = case.capture(case.make(0)), case.make(1)
        target = case.adapter.target(obj, case.context(obj), _stored_section(source))
        for fqn, meta in target.metas.items():
            expected = source.metas.get(source.aliases.get(fqn, fqn))
            assert expected is not None or fqn in target.optional, f"the object needs {fqn}, which was not stored"
            assert expected is None or expected.shape == meta.shape, f"{fqn}: {meta.shape} is not the stored shape"
        for path in target.requested_values:
            assert path in source.values or path in target.optional, f"the object needs {path}, which was not stored"

    def test_load_restores_the_content(self, case: AdapterCase) -> None:
        saved, obj = case.make(0), case.make(1)
        expected = _snapshot(case.content(saved))
        _load(case, case.capture(saved), obj)
        assert _differences(expected, case.content(obj)) == []
        assert _differences(expected, case.content(saved)) == [], "the load changed the object that was saved"

    def test_loaded_object_can_be_saved_again(self, case: AdapterCase) -> None:
        first, second, third = (case.make(seed) for seed in range(3))
        _load(case, case.capture(first), second)
        _load(case, case.capture(second), third)
        assert _differences(case.content(first), case.content(third)) == []


def _stored_values(source: SectionSource) -> dict[Path, Any]:
    """The section's values after they were encoded and decoded."""
    encoded = {path: encode_value(value, path_name(path)) for path, value in source.values.items()}
    return {path: decode_value(data, where=path_name(path)) for path, data in encoded.items()}


def _stored_section(source: SectionSource) -> StoredSection:
    metas = {**source.metas, **{alias: source.metas[fqn] for alias, fqn in source.aliases.items()}}
    return StoredSection(metas, _stored_values(source), source.aliases)


def _load(case: AdapterCase, source: SectionSource, obj: Any) -> SectionTarget:
    """Load ``source`` into ``obj`` as the library does, without storage."""
    stored = {fqn: _assembled(fqn, meta, source.shards) for fqn, meta in source.metas.items()}
    section = _stored_section(source)
    target = case.adapter.target(obj, case.context(obj), section)
    with torch.no_grad():
        for shard in target.shards:
            fqn = source.aliases.get(shard.fqn, shard.fqn)
            if fqn in stored:
                shard.tensor.copy_(stored[fqn][shard.box.slices()])
    target.apply(section.values)
    return target


def _assembled(fqn: str, meta: BasicMeta, shards: list[Shard]) -> torch.Tensor:
    whole = torch.empty(meta.shape, dtype=torch_dtype(meta))
    for shard in shards:
        if shard.fqn == fqn:
            whole[shard.box.slices()] = shard.tensor.detach().cpu()
    return whole


def _snapshot(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in content.items()
    }


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    names = sorted(expected.keys() ^ found.keys())
    return names + [name for name in expected.keys() & found.keys() if not _is_equal(expected[name], found[name])]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return not one.numel() or torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    return bool(one == other)
