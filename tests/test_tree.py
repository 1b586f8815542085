"""`Tree` against what its definition says, node by node in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from specattn.tree import Tree
from tests.cases import EAGLE_PARENTS, MEDUSA_PARENTS


def path_to(parents, node):
    """Return the nodes from the root to `node`."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@st.composite
def parent_lists(draw, batch=None, max_size=80):
    """Draw parents of one tree, or of a batch of one size; nodes may be padding."""
    size = draw(st.integers(1, max_size))
    rows = [_random_parents(draw, size) for _ in range(batch or 1)]
    return rows if batch else rows[0]


def _random_parents(draw, size):
    real, parents = [0], [-1]
    bushy = draw(st.booleans())
    for node in range(1, size):
        parent = draw(st.sampled_from([-1, *(real if bushy else real[-2:])]))
        parents.append(parent)
        if parent >= 0:
            real.append(node)
    return parents


def assert_is_as_defined(tree, parents):
    """Check every property of a single tree against its definition."""
    size = len(parents)
    is_padding = [node > 0 and parent < 0 for node, parent in enumerate(parents)]
    paths = [path_to(parents, node) for node in range(size)]
    children = [[n for n in range(size) if parents[n] == node] for node in range(size)]

    assert tree.size == size
    assert tree.max_depth == max(len(path) for path in paths) - 1
    assert tree.max_width == max(map(len, children))
    assert tree.valid.tolist() == [not p for p in is_padding]
    assert tree.depths.tolist() == [len(path) - 1 for path in paths]
    assert tree.depths.dtype == torch.int32
    assert tree.mask.tolist() == [[n in path for n in range(size)] for path in paths]
    assert tree.paths.tolist() == [
        ([] if padding else path) + [-1] * (tree.max_depth + 1 - (0 if padding else len(path)))
        for path, padding in zip(paths, is_padding, strict=True)
    ]
    assert tree.children.tolist() == [c + [-1] * (tree.max_width - len(c)) for c in children]
    assert tree.is_leaf.tolist() == [
        not c and not padding for c, padding in zip(children, is_padding, strict=True)
    ]
    for node, words in enumerate(tree.packed_mask.tolist()):
        bits = sum((word % 2**64) << (64 * w) for w, word in enumerate(words))
        assert bits == sum(1 << n for n in paths[node])


@given(parent_lists())
def test_a_tree_is_as_defined(parents):
    assert_is_as_defined(Tree(parents), parents)


@pytest.mark.parametrize(
    "parents",
    [[-1], EAGLE_PARENTS, MEDUSA_PARENTS, list(range(-1, 200)), [-1] + [0] * 130],
    ids=["root", "eagle", "medusa", "chain", "star"],
)
def test_well_known_trees_are_as_defined(parents):
    assert_is_as_defined(Tree(parents), parents)


@given(parent_lists(batch=3, max_size=20))
def test_a_batch_is_its_trees_side_by_side(rows):
    batch, singles = Tree(rows), [Tree(row) for row in rows]
    assert batch.batch_size == 3
    assert batch.max_depth == max(tree.max_depth for tree in singles)
    assert batch.max_width == max(tree.max_width for tree in singles)
    for name in ("valid", "depths", "mask", "packed_mask", "is_leaf"):
        expected = torch.stack([getattr(tree, name) for tree in singles])
        assert torch.equal(getattr(batch, name), expected)
    for name in ("paths", "children"):
        for b, tree in enumerate(singles):
            own, table = getattr(tree, name), getattr(batch, name)[b]
            assert torch.equal(table[:, : own.shape[1]], own)
            assert (table[:, own.shape[1] :] == -1).all()


@given(parent_lists(batch=2, max_size=70))
def test_the_kernels_see_the_same_depths(rows):
    """Kernels know a row's position only from the bits of its mask."""
    tree = Tree(rows)
    assert torch.equal(reference.tree_depths(tree.packed_mask), tree.depths)


@given(parent_lists(max_size=12), st.data())
def test_a_path_list_gives_back_its_tree(parents, data):
    real = [node for node in range(len(parents)) if node == 0 or parents[node] >= 0]
    rank = {n: sum(parents[m] == parents[n] for m in range(n)) for n in real}
    choices = {n: tuple(rank[m] for m in path_to(parents, n)[1:]) for n in real}
    order = sorted(real, key=lambda n: (len(choices[n]), choices[n]))
    expected = [-1] + [order.index(parents[n]) for n in order[1:]]
    listed = data.draw(st.permutations(list(choices.values())))
    assert Tree.from_paths(listed).parents.tolist() == expected
    leaves = [c for c in listed if not any(d[:-1] == c for d in listed if d)]
    assert Tree.from_paths(leaves).parents.tolist() == expected


def test_n_grams_with_a_common_beginning_share_nodes():
    tree = Tree.from_paths([(42, 7, 9), (42, 7, 3), (42, 5, 9)])
    assert tree.parents.tolist() == [-1, 0, 1, 1, 2, 3, 3]
    assert Tree.from_paths([]).size == 1


def test_chain_counts_drafted_tokens():
    for n in (0, 1, 6):
        assert_is_as_defined(Tree.chain(n), list(range(-1, n)))


def test_full_counts_children_of_each_node():
    assert Tree.full([]).size == 1
    tree = Tree.full([2, 3])
    assert_is_as_defined(tree, [-1, 0, 0, 1, 1, 1, 2, 2, 2])
    assert Tree.full([1, 3, 3, 3]).size == 1 + 40  # TokenSwift's default
    assert Tree.full([4, 16, 16]).size == 1 + 4 + 64 + 1024


def test_stack_pads_to_one_size():
    batch = Tree.stack([Tree.chain(2), Tree.full([3]), Tree.chain(0)])
    assert batch.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, 0, 0], [-1, -1, -1, -1]]
    assert Tree.stack([Tree.chain(2)], size=5).parents.tolist() == [[-1, 0, 1, -1, -1]]
    with pytest.raises(ValueError, match="at least the largest tree's, 3, got 2"):
        Tree.stack([Tree.chain(2)], size=2)
    with pytest.raises(ValueError, match="none of which is a batch"):
        Tree.stack([batch])


@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([0, 0], ValueError, r"root, whose parent must be -1; got parents\[0\] = 0"),
        ([-1, 1], ValueError, r"come before its children; got parents\[1\] = 1"),
        ([-1, 2, 0], ValueError, r"come before its children; got parents\[1\] = 2"),
        ([-1, 0, -2], ValueError, r"-1 for padding; got parents\[2\] = -2"),
        ([-1, -1, 1], ValueError, r"nothing may follow padding; got parents\[2\] = 1"),
        ([[-1, 0], [-1, 7]], ValueError, r"got parents\[1, 1\] = 7"),
        ([], ValueError, r"must be \[T\] or \[B, T\], not empty, got \[0\]"),
        ([[[-1]]], ValueError, r"must be \[T\] or \[B, T\]"),
        ([-1.0, 0.0], TypeError, "must be int32 or int64, got torch.float32"),
        ([True], TypeError, "got torch.bool"),
    ],
)
def test_what_is_no_tree_is_named(parents, error, message):
    with pytest.raises(error, match=message):
        Tree(parents)


def test_bounds_may_be_larger_than_the_tree_but_not_smaller():
    tree = Tree([-1, 0, 0], max_depth=3, max_width=4)
    assert tree.paths.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1]]
    assert tree.children.tolist() == [[1, 2, -1, -1], [-1] * 4, [-1] * 4]
    with pytest.raises(ValueError, match="max_depth must be at least the tree's own, 2, got 1"):
        Tree([-1, 0, 1], max_depth=1)
    with pytest.raises(ValueError, match="max_width must be at least the tree's own, 2, got 1"):
        Tree([-1, 0, 0], max_width=1)


def test_a_trusted_trees_values_are_looked_at_where_that_is_asked_for(monkeypatch):
    given = {"parents": [-1, 5], "max_depth": 1, "max_width": 1, "trusted": True}
    assert Tree(**given).parents.tolist() == [-1, 5]
    monkeypatch.setenv("SPECATTN_CHECK", "1")
    with pytest.raises(ValueError, match="a parent must come before its children"):
        Tree(**given)


def test_a_tree_keeps_its_own_parents():
    parents = torch.tensor([-1, 0, 1], dtype=torch.int32)
    tree = Tree(parents)
    parents[2] = 0
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.parents.dtype == torch.int64
    assert tree.to("cpu") is tree


def test_with_bounds_nothing_waits_for_the_device():
    """Tensors on `meta` have shapes but no values: reading one would raise."""
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -1]], device="meta")
    tree = Tree(parents, max_depth=2, max_width=2)
    shapes = {
        "valid": [2, 4],
        "depths": [2, 4],
        "mask": [2, 4, 4],
        "packed_mask": [2, 4, 1],
        "paths": [2, 4, 3],
        "children": [2, 4, 2],
        "is_leaf": [2, 4],
    }
    for name, shape in shapes.items():
        assert list(getattr(tree, name).shape) == shape


def test_a_tree_names_itself():
    assert repr(Tree.chain(2)) == "Tree(size=3, max_depth=2, max_width=1, device=cpu)"
    assert "batch_size=2" in repr(Tree([[-1], [-1]]))


def test_trees_are_counted_on_the_host():
    tree = Tree([[-1, 0, 0, 2], [-1, 0, -1, -1]])
    assert tree.parent_lists == [[-1, 0, 0, 2], [-1, 0, -1, -1]]
    assert tree.drafted_and_depth == [(3, 2), (1, 1)]
    assert Tree.chain(0).drafted_and_depth == [(0, 0)]
    assert Tree.full([2, 3]).drafted_and_depth == [(8, 2)]
