import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn import reference

from tests.cases import assert_accurate, make_problem, problems


@given(p=problems(), paged=st.booleans())
def test_mean_logit_is_the_logit_of_the_mean_query(p, paged):
    scale = 0.3
    cache = p.cache(paged)
    del cache["v_cache"]
    scores = reference.importance_scores(
        p.q, cache_seqlens=p.cache_seqlens, softmax_scale=scale, **cache
    )
    mean_query = p.q.unflatten(2, (p.k_tree.shape[2], -1)).mean((1, 3))
    exact = scale * torch.einsum("bhd,bnhd->bhn", mean_query, p.k_cache)
    live = torch.arange(p.k_cache.shape[1]) < p.cache_seqlens[:, None]
    assert_accurate(scores, exact.masked_fill(~live[:, None], -torch.inf))
    over_all_heads = reference.importance_scores(
        p.q, cache_seqlens=p.cache_seqlens, softmax_scale=scale, per_head=False, **cache
    )
    assert_accurate(over_all_heads, scores.mean(1))


def test_low_precision_queries_are_scored_in_float32():
    p = make_problem((50, 3), dtype=torch.bfloat16)
    scores = reference.importance_scores(p.q, p.k_cache, p.cache_seqlens)
    p64 = p.to(torch.float64)
    exact = reference.importance_scores(p64.q, p64.k_cache, p.cache_seqlens)
    p32 = p.to(torch.float32)
    mean_query = p32.q.unflatten(2, (2, -1)).mean((1, 3)) * 64**-0.5
    by_torch = torch.einsum("bhd,bnhd->bhn", mean_query, p32.k_cache)
    assert scores.dtype == torch.float32
    assert_accurate(scores, exact, by_torch, atol=1e-6)


@given(st.integers(1, 5))
def test_equal_rows_score_as_one(rows):
    p = make_problem((7, 2), 1, dtype=torch.float64)
    one = reference.importance_scores(p.q, p.k_cache, p.cache_seqlens)
    many = reference.importance_scores(p.q.repeat(1, rows, 1, 1), p.k_cache, p.cache_seqlens)
    assert_accurate(many, one)
