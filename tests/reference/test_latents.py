"""Values that are a view of the keys, or of another size: every primitive against float64."""

import pytest
import torch

from specattn import reference
from tests.cases import assert_accurate, dense_attention, expected
from tests.latents import make_latents

SHAPES = [  # D, Dv, whether V is a view of K
    pytest.param(576, 512, True, id="latents"),
    pytest.param(24, 16, True, id="small"),
    pytest.param(192, 128, False, id="expanded"),
    pytest.param(64, 128, False, id="wide-values"),
]


def make(D, v_dim, shared, **options):
    return make_latents(
        head_dim=D, v_dim=v_dim, shared=shared, **({"dtype": torch.float64, "q_heads": 4} | options)
    )


def tree(p):
    return {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_hybrid_agrees_with_dense_attention(D, v_dim, shared, paged):
    p = make(D, v_dim, shared)
    options = {"window": 4, "softcap": 3.0, "sinks": torch.linspace(-1, 1, 4).double()}
    out, lse = reference.hybrid_tree_attention(
        p.q, **p.cache(paged), cache_seqlens=p.cache_seqlens, **tree(p), **options
    )
    exact = expected(p, **options)
    assert out.shape == (2, 4, 4, v_dim)
    assert_accurate(out, exact[0])
    assert_accurate(lse, exact[1])


@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_the_tree_in_the_cache(D, v_dim, shared):
    p = make(D, v_dim, shared, tree_in_cache=True)
    for name in ("k", "v"):
        assert getattr(p, f"{name}_cache")[0, 5:9].isfinite().all()
    if not shared:  # its own values: those of the cache behind the prefix
        p.v_tree = torch.stack([p.v_cache[b, n : n + 4] for b, n in enumerate((5, 12))])
    out, _ = reference.hybrid_tree_attention(
        p.q, p.k_cache, p.v_cache, p.cache_seqlens, tree_mask=p.tree_mask
    )
    assert_accurate(out, expected(p)[0])


@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_what_is_collected_is_of_the_keys(D, v_dim, shared):
    p = make(D, v_dim, shared)
    given = {**p.cache(), "cache_seqlens": p.cache_seqlens}
    out, lse, scores = reference.verify_attention(p.q, **given, **tree(p), collect_rows=range(4))
    exact = expected(p)
    assert_accurate(out, exact[0])
    assert_accurate(lse, exact[1])
    assert_accurate(scores, reference.importance_scores(p.q, p.k_cache, p.cache_seqlens))


@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_gathered_and_tree_halves_merge_into_the_whole(D, v_dim, shared):
    p = make(D, v_dim, shared)
    everything = torch.arange(12, dtype=torch.int32).repeat(2, 1)
    out, lse = reference.sparse_gather_attention(
        p.q, p.k_cache, p.v_cache, everything, p.cache_seqlens
    )
    new = reference.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    merged = reference.merge_state(out, lse, *new)
    assert_accurate(merged[0], expected(p)[0])
    assert_accurate(merged[1], expected(p)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errs_at_most_twice_as_much_as_torch(dtype):
    p = make_latents((100, 7), 3, dtype=dtype, scale=0.3)
    out, lse = reference.hybrid_tree_attention(
        p.q, **p.cache(), cache_seqlens=p.cache_seqlens, **tree(p)
    )
    exact = expected(p.to(torch.float64))
    assert_accurate(out, exact[0], expected(p)[0], atol=1e-7)
    assert_accurate(lse, exact[1], expected(p.to(torch.float32))[1], atol=1e-6)


def test_absorbed_attention_is_attention_over_expanded_heads():
    """Heads that are expanded from latents see what absorbed queries see of the latents."""
    generator = torch.Generator().manual_seed(0)
    heads, rank, nope, rope, width, keys = 4, 32, 12, 8, 16, 9
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    latents, rope_keys = draw(1, keys, 1, rank), draw(1, keys, 1, rope)
    w_k, w_v = draw(heads, nope, rank), draw(heads, width, rank)
    q_nope, q_rope = draw(1, 1, heads, nope), draw(1, 1, heads, rope)
    k = torch.einsum("bnr,hdr->bnhd", latents[:, :, 0], w_k)
    k = torch.cat([k, rope_keys.expand(-1, -1, heads, -1)], -1)
    v = torch.einsum("bnr,hdr->bnhd", latents[:, :, 0], w_v)
    q = torch.cat([q_nope, q_rope], -1)
    exact = dense_attention(q, k, v, torch.ones(1, 1, keys, dtype=torch.bool))
    cache = torch.cat([latents, rope_keys], -1)
    absorbed = torch.cat([torch.einsum("bthd,hdr->bthr", q_nope, w_k), q_rope], -1)
    out, lse = reference.hybrid_tree_attention(
        absorbed,
        cache[:, :-1],
        cache[:, :-1, :, :rank],
        torch.tensor([keys - 1], dtype=torch.int32),
        cache[:, -1:],
        cache[:, -1:, :, :rank],
        softmax_scale=(nope + rope) ** -0.5,
    )
    assert_accurate(torch.einsum("bthr,hdr->bthd", out, w_v), exact[0])
    assert_accurate(lse, exact[1])
