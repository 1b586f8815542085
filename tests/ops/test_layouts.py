import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.ops import lse_from_log2, lse_heads_first, lse_heads_last, lse_to_log2

from tests.cases import dense_attention, make_problem


def test_base_two_is_what_powers_of_two_sum_to():
    p = make_problem((0,), 4, dtype=torch.float64)
    _, lse = dense_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    k = p.k_tree.repeat_interleave(2, 2)
    logits = torch.einsum("bthd,bmhd->bthm", p.q, k) * 64**-0.5 * math.log2(math.e)
    weights = torch.exp2(logits).masked_fill(~p.tree_mask[:, :, None], 0)
    assert torch.allclose(lse_to_log2(lse), weights.sum(-1).log2())


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1))
def test_bases_are_inverse(values):
    lse = torch.tensor([*values, -math.inf, math.inf])
    assert torch.allclose(lse_from_log2(lse_to_log2(lse)), lse, rtol=1e-6)


def test_layouts_are_inverse_and_contiguous():
    lse = torch.randn(2, 5, 3)
    first = lse_heads_first(lse)
    assert first.is_contiguous()
    assert torch.equal(first[1, 2], lse[1, :, 2])
    assert torch.equal(lse_heads_last(first), lse)
