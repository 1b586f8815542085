import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from specattn import reference
from specattn.reference import _attention

from tests.cases import (
    EAGLE_PARENTS,
    MEDUSA_PARENTS,
    assert_accurate,
    expected,
    make_problem,
    problems,
)


def hybrid(p, paged=False, **options):
    return reference.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        k_tree=p.k_tree,
        v_tree=p.v_tree,
        tree_mask=p.tree_mask,
        **p.cache(paged),
        **options,
    )


def assert_same(actual, exact):
    for x, y in zip(actual, exact, strict=True):
        assert_accurate(x, y)


@given(
    p=problems(),
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_agrees_with_dense_attention(p, paged, window, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, p.q.shape[2], dtype=torch.float64) if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    assert_same(hybrid(p, paged, **options), expected(p, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_errs_at_most_twice_as_much_as_torch(dtype, head_dim):
    p = make_problem((100, 7), 5, head_dim=head_dim, dtype=dtype)
    out, lse = hybrid(p)
    exact_out, exact_lse = expected(p.to(torch.float64))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_accurate(out, exact_out, expected(p)[0], atol=1e-7)
    assert_accurate(lse, exact_lse, expected(p.to(torch.float32))[1], atol=1e-6)


@pytest.mark.parametrize("parents", [EAGLE_PARENTS, MEDUSA_PARENTS], ids=["eagle", "medusa"])
@pytest.mark.parametrize("window", [None, 2])
def test_published_trees(parents, window):
    p = make_problem((9, 0), len(parents), parents=parents, head_dim=8, dtype=torch.float64)
    assert_same(hybrid(p, window=window), expected(p, window=window))


@pytest.mark.parametrize(("rows", "tree_size"), [(65, 65), (128, 128), (3, 130), (1, 64)])
@pytest.mark.parametrize("packed", [False, True], ids=["bool", "packed"])
def test_masks_of_many_words(rows, tree_size, packed):
    p = make_problem((5, 3), rows, tree_size=tree_size, head_dim=8, dtype=torch.float64)
    exact = expected(p)
    if packed:
        p.tree_mask = reference.pack_tree_mask(p.tree_mask)
    assert_same(hybrid(p), exact)


@given(p=problems(parents="chain", max_length=20), window=st.sampled_from([None, 2]))
def test_no_mask_is_a_causal_chain(p, window):
    exact = expected(p, window=window)
    p.tree_mask = None
    assert_same(hybrid(p, window=window), exact)


def test_chain_is_causal_attention_over_the_whole_text():
    p = make_problem((0,), 12, parents="chain", q_heads=4, kv_heads=2, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k_tree, p.v_tree))
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for cached in range(12):
        out, _ = reference.hybrid_tree_attention(
            p.q[:, cached:],
            p.k_tree,
            p.v_tree,
            torch.tensor([cached], dtype=torch.int32),
            p.k_tree[:, cached:],
            p.v_tree[:, cached:],
        )
        assert_accurate(out, causal.transpose(1, 2)[:, cached:])


@given(p=problems(tree_in_cache=True), paged=st.booleans(), window=st.sampled_from([None, 3]))
def test_tree_in_the_cache_is_the_tree_given(p, paged, window):
    given_apart = hybrid(p, paged, window=window)
    p.k_tree = p.v_tree = None
    in_cache = hybrid(p, paged, window=window)
    assert all(torch.equal(x, y) for x, y in zip(given_apart, in_cache, strict=True))


@given(p=problems(max_length=30), cut=st.integers(0, 32))
def test_whole_is_the_merge_of_parts(p, cut):
    batch = p.q.shape[0]
    cut = min(cut, p.k_cache.shape[1])
    head = reference.sparse_gather_attention(
        p.q,
        p.k_cache,
        p.v_cache,
        torch.arange(cut, dtype=torch.int32).expand(batch, -1),
        p.cache_seqlens.clamp(max=cut),
    )
    rest = reference.hybrid_tree_attention(
        p.q,
        p.k_cache[:, cut:],
        p.v_cache[:, cut:],
        (p.cache_seqlens - cut).clamp(min=0),
        p.k_tree,
        p.v_tree,
        p.tree_mask,
    )
    assert_same(reference.merge_state(*head, *rest), hybrid(p))


def test_depths_may_be_given():
    p = make_problem((20, 9), 6, dtype=torch.float64)
    depths = reference.tree_depths(p.tree_mask)
    with_depths = hybrid(p, window=4, depths=depths)
    assert all(torch.equal(x, y) for x, y in zip(with_depths, hybrid(p, window=4), strict=True))
    shifted = hybrid(p, window=4, depths=depths + 4)
    tree_only = reference.tree_attention(
        p.q, p.k_tree, p.v_tree, reference.trim_tree_mask(p.tree_mask, 4)
    )
    assert_same(shifted, tree_only)


def test_rows_that_see_nothing_give_the_empty_state():
    p = make_problem((0, 6), 4, dtype=torch.float64)
    p.tree_mask[:, 2] = False
    out, lse = hybrid(p)
    assert (out[0, 2] == 0).all()
    assert lse[0, 2].isneginf().all()
    assert_same((out, lse), expected(p))


def test_row_with_only_a_sink_has_no_value():
    p = make_problem((0,), 1, dtype=torch.float64)
    p.tree_mask[:] = False
    sinks = torch.tensor([-1.0, 0.0, 2.0, 300.0])
    out, lse = hybrid(p, sinks=sinks)
    assert (out == 0).all()
    assert torch.equal(lse[0, 0], sinks.double())


def test_hidden_tree_keys_may_be_nan():
    p = make_problem((3, 4), 4, dtype=torch.float64)
    p.tree_mask[:, :, 3] = False
    exact = expected(p)
    p.k_tree[:, 3] = p.v_tree[:, 3] = torch.nan
    assert_same(hybrid(p), exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_single_key_with_a_very_low_logit(dtype):
    p = make_problem((1,), 1, q_heads=1, kv_heads=1, head_dim=8, dtype=dtype)
    p.q[:], p.k_cache[:, 0], p.tree_mask[:] = 1, -62500, False
    out, lse = hybrid(p, softmax_scale=1.0)
    assert torch.equal(out[0, 0], p.v_cache[0, 0])
    assert lse.item() == -5e5


def test_block_size_of_rows_does_not_matter(monkeypatch):
    p = make_problem((30, 11), 9, dtype=torch.float64)
    whole = hybrid(p, window=7)
    monkeypatch.setattr(_attention, "LOGITS_PER_BLOCK", 1)
    monkeypatch.setattr(_attention, "LEAST_ROWS_PER_BLOCK", 2)
    assert_same(hybrid(p, window=7), whole)
