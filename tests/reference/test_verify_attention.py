import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from tests.cases import assert_accurate, make_problem, problems


def verify(p, paged=False, **options):
    return reference.verify_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        k_tree=p.k_tree,
        v_tree=p.v_tree,
        tree_mask=p.tree_mask,
        **p.cache(paged),
        **options,
    )


options = {
    "paged": st.booleans(),
    "window": st.sampled_from([None, 3]),
    "softcap": st.sampled_from([0.0, 2.0]),
}


@given(p=problems(), with_sinks=st.booleans(), **options)
def test_weights_of_a_row_sum_to_one(p, with_sinks, paged, window, softcap):
    sinks = torch.linspace(-1, 1, p.q.shape[2], dtype=torch.float64) if with_sinks else None
    rows = tuple(range(p.q.shape[1]))
    _, lse, logits = verify(
        p, paged, window=window, softcap=softcap, sinks=sinks, collect="logits", collect_rows=rows
    )
    mask = p.tree_mask if window is None else reference.trim_tree_mask(p.tree_mask, window)
    _, tree_lse = reference.tree_attention(p.q, p.k_tree, p.v_tree, mask, softcap=softcap)
    weight = (logits - lse[..., None]).exp().sum(-1) + (tree_lse - lse).exp()
    if with_sinks:
        weight += (sinks - lse).exp()
    assert_accurate(weight, torch.ones_like(weight))


@given(p=problems(), rows=st.lists(st.integers(-1, 0), min_size=1, max_size=3), **options)
def test_scores_are_the_mean_of_logits(p, rows, paged, window, softcap):
    same = {"window": window, "softcap": softcap, "collect_rows": rows}
    *state, scores = verify(p, paged, collect="scores", **same)
    *_, logits = verify(p, paged, collect="logits", **same)
    heads = p.k_tree.shape[2]
    assert logits.shape[:3] == (*p.q.shape[:1], len(rows), p.q.shape[2])
    assert_accurate(scores, logits.unflatten(2, (heads, -1)).mean((1, 3)))
    assert_accurate(verify(p, paged, per_head=False, **same)[2], logits.mean((1, 2)))
    hybrid = reference.hybrid_tree_attention(
        p.q,
        **p.cache(paged),
        cache_seqlens=p.cache_seqlens,
        k_tree=p.k_tree,
        v_tree=p.v_tree,
        tree_mask=p.tree_mask,
        window=window,
        softcap=softcap,
    )
    assert all(torch.equal(x, y) for x, y in zip(state, hybrid, strict=True))


@given(p=problems(), paged=st.booleans(), window=st.sampled_from([None, 1, 4]))
def test_unseen_positions_are_minus_infinity(p, paged, window):
    *_, logits = verify(p, paged, window=window, collect="logits", collect_rows=(-1,))
    capacity = p.block_table.shape[1] * p.k_pages.shape[1]
    positions = torch.arange(capacity)
    lengths = p.cache_seqlens[:, None]
    seen = positions < lengths
    if window is not None:
        seen &= positions > lengths + p.row_depths[:, -1:] - window
    assert logits.shape[-1] == capacity
    assert torch.equal(logits.isneginf(), ~seen[:, None, None].expand_as(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_what_is_collected(dtype):
    p = make_problem(dtype=dtype)
    assert verify(p, collect="scores")[2].dtype == torch.float32
    assert verify(p, collect="logits")[2].dtype == torch.bfloat16
