import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn import reference

from tests.cases import random_parents, tree_mask_of


@given(size=st.integers(1, 200), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_packing_is_reversible(size, rows, seed):
    mask = torch.rand(2, rows, size, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = reference.pack_tree_mask(mask)
    assert packed.shape == (2, rows, -(-size // 64))
    assert packed.dtype == torch.int64
    assert torch.equal(reference.unpack_tree_mask(packed, size), mask)


@pytest.mark.parametrize("key", [0, 1, 62, 63, 64, 127, 128])
def test_bit_j_of_word_w_is_key_64w_plus_j(key):
    mask = torch.zeros(1, 129, dtype=torch.bool)
    mask[0, key] = True
    words = [word % 2**64 for word in reference.pack_tree_mask(mask)[0].tolist()]
    assert sum(word << 64 * w for w, word in enumerate(words)) == 1 << key


@given(size=st.integers(1, 90), seed=st.integers(0, 99))
def test_depths_and_windows_follow_the_path(size, seed):
    parents = random_parents(size, torch.Generator().manual_seed(seed))
    mask = tree_mask_of(parents)
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depths = [len(path) - 1 for path in paths]
    assert reference.tree_depths(mask).tolist() == depths
    assert reference.tree_depths(reference.pack_tree_mask(mask)).tolist() == depths
    for window in (1, 2, 5):
        trimmed = reference.trim_tree_mask(mask, window)
        assert [row.nonzero().flatten().tolist() for row in trimmed] == [
            path[-window:] for path in paths
        ]
