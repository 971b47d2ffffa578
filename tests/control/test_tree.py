from __future__ import annotations

import pytest

from bytecheckpoint.control.tree import Tree

SHAPES = [(1, 1), (2, 1), (2, 2), (5, 2), (6, 2), (6, 3), (7, 3), (64, 64), (100, 8), (1000, 32), (16384, 128)]


@pytest.mark.parametrize(("world_size", "group_size"), SHAPES)
def test_children_and_branches_fit_together(world_size, group_size):
    tree = Tree.of(world_size, group_size)
    seen = [0]
    for rank in range(world_size):
        children = tree.children(rank)
        assert [tree.parent(child) for child in children] == [rank] * len(children)
        assert [rank, *(one for child in children for one in tree.branch(child))] == list(tree.branch(rank))
        seen += children
    assert sorted(seen) == list(range(world_size)), "every rank but 0 is the child of one rank"
    assert list(tree.branch(0)) == list(range(world_size))
    assert tree.parent(0) == 0


@pytest.mark.parametrize(("world_size", "group_size"), SHAPES)
def test_depth_counts_the_levels_up_to_rank_0(world_size, group_size):
    tree = Tree.of(world_size, group_size)
    for rank in range(1, world_size):
        assert tree.depth(rank) == tree.depth(tree.parent(rank)) + 1 <= 2
    assert tree.depth(0) == 0


def test_small_jobs_are_flat_and_large_ones_are_not():
    assert Tree.of(1).children(0) == []
    assert Tree.of(64).children(0) == list(range(1, 64))
    assert [rank for rank in Tree.of(65).children(0) if rank > 15] == [16, 32, 48, 64]
    assert Tree.of(16384).group_size == 128
    assert max(len(Tree.of(16384).children(rank)) for rank in range(16384)) == 254


@pytest.mark.parametrize("world_size", [65, 100, 1000, 4096, 10000, 16384])
def test_no_rank_has_many_children(world_size):
    tree = Tree.of(world_size)
    assert max(len(tree.children(rank)) for rank in range(world_size)) < 2 * world_size**0.5 + 16
    assert tree.group_size % 8 == 0, "hosts of eight ranks are not split"


def test_a_last_group_of_one_has_no_children():
    tree = Tree.of(5, 2)
    assert tree.children(0) == [1, 2, 4]
    assert tree.children(2) == [3]
    assert tree.children(4) == []


@pytest.mark.parametrize(("world_size", "group_size"), [(0, None), (4, 0)])
def test_invalid_sizes_raise(world_size, group_size):
    with pytest.raises(ValueError, match="cannot be in groups"):
        Tree.of(world_size, group_size)
