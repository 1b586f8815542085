"""Candidates merged into trees, against sets of prefixes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.trie import draft_of_paths, followed

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12)


def prefixes(paths):
    return {tuple(path[:length]) for path in paths for length in range(len(path) + 1)} | {()}


def read(draft, request):
    """Return the path of tokens of every node that is not padding, by walking up its parents."""
    parents = draft.tree.parents.expand(len(draft.tokens), -1)[request].tolist()
    tokens, paths = draft.tokens[request].tolist(), [()]
    for node, parent in enumerate(parents[1:], start=1):
        if parent >= 0:
            paths.append((*paths[parent], tokens[node]))
    return paths


@given(st.lists(PATHS, min_size=1, max_size=4))
def test_every_prefix_is_one_node(candidates):
    root = torch.arange(100, 100 + len(candidates))
    draft = draft_of_paths(root, candidates)
    assert draft.probs is None
    assert draft.tokens[:, 0].tolist() == root.tolist()
    assert draft.tree.size == max(len(prefixes(paths)) for paths in candidates)
    for request, paths in enumerate(candidates):
        nodes = read(draft, request)
        assert len(nodes) == len(set(nodes))
        assert set(nodes) == prefixes(paths)


def test_ngrams_share_the_nodes_of_the_heads_tree():
    heads = list(itertools.product([7], [1, 2, 3], [4, 5, 6], [7, 8, 9]))
    ngrams = [(7, 1, 4, 7), (7, 1, 4, 0), (7, 9, 9, 9)]
    draft = draft_of_paths(torch.tensor([5]), [heads + ngrams])
    assert draft.tree.size == 1 + (1 + 3 + 9 + 27) + 1 + 3
    assert draft.tree.max_depth == 4


def test_requests_of_one_shape_share_a_tree():
    draft = draft_of_paths(torch.tensor([5, 6]), [[[1, 2]], [[3, 4]]])
    assert draft.tree.batch_size is None
    assert draft.tokens.tolist() == [[5, 1, 2], [6, 3, 4]]


@pytest.mark.parametrize(
    ("path", "count"), [([], 0), ([5], 1), ([6, 8, 9], 2), ([5, 8], 1), ([8, 8], 0), ([6, 8], 2)]
)
def test_a_tree_is_followed_as_far_as_it_goes(path, count):
    assert followed([-1, 0, 0, 1, 2], [4, 5, 6, 7, 8], path) == count
