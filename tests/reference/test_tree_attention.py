import pytest
import torch
from hypothesis import given
from specattn import reference

from tests.cases import assert_accurate, expected, make_problem, problems


@given(p=problems())
def test_agrees_with_dense_attention(p):
    result = reference.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    for actual, exact in zip(result, expected(p, prefix=False), strict=True):
        assert_accurate(actual, exact)


@given(p=problems())
def test_one_mask_for_all_requests(p):
    shared = p.tree_mask[0]
    alone = reference.tree_attention(p.q, p.k_tree, p.v_tree, shared)
    repeated = reference.tree_attention(p.q, p.k_tree, p.v_tree, shared.expand_as(p.tree_mask))
    assert all(torch.equal(x, y) for x, y in zip(alone, repeated, strict=True))


def test_rows_that_see_nothing_give_the_empty_state():
    p = make_problem(rows=3, dtype=torch.float64)
    p.tree_mask[1, 2] = False
    out, lse = reference.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    assert (out[1, 2] == 0).all()
    assert lse[1, 2].isneginf().all()
    assert lse.isfinite().sum() == lse.numel() - lse.shape[-1]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_last_row_of_a_chain_sees_every_key(rows):
    p = make_problem(rows=rows, tree_size=5, parents="chain", dtype=torch.float64)
    result = reference.tree_attention(p.q, p.k_tree, p.v_tree)
    for actual, exact in zip(result, expected(p, prefix=False), strict=True):
        assert_accurate(actual, exact)


@given(p=problems())
def test_siblings_do_not_see_each_other(p):
    before, _ = reference.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    last = p.q.shape[1] - 1
    p.k_tree[:, last], p.v_tree[:, last] = 7, 9
    after, _ = reference.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    assert torch.equal(before[:, :last], after[:, :last])
