import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn import reference

from tests.cases import assert_accurate, dense_attention, make_problem, problems


def random_indices(p, seed, per_head):
    """Return indices, garbage behind their lengths, and the bool [B, Hk, N] that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    heads = p.k_tree.shape[2] if per_head else 1
    chosen = torch.rand(len(p.q), heads, p.k_cache.shape[1], generator=generator) < 0.4
    chosen &= torch.arange(p.k_cache.shape[1]) < p.cache_seqlens[:, None, None]
    lengths = chosen.sum(-1).int()
    indices = torch.full((*chosen.shape[:2], int(lengths.max()) + 2), 2**30, dtype=torch.int32)
    indices[..., -1] = -1
    for b, h, position in chosen.nonzero().tolist():
        indices[b, h, int(chosen[b, h, :position].sum())] = position
    if per_head:
        return indices, lengths, chosen
    return indices[:, 0], lengths[:, 0], chosen.expand(-1, p.k_tree.shape[2], -1)


@given(
    p=problems(),
    paged=st.booleans(),
    per_head=st.booleans(),
    new_keys=st.booleans(),
    seed=st.integers(0, 99),
)
def test_agrees_with_dense_attention(p, paged, per_head, new_keys, seed):
    indices, lengths, chosen = random_indices(p, seed, per_head)
    sinks = torch.linspace(-1, 1, p.q.shape[2], dtype=torch.float64)
    new = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask} if new_keys else {}
    out, lse = reference.sparse_gather_attention(
        p.q,
        indices=indices,
        index_lengths=lengths,
        sinks=sinks,
        softcap=3.0,
        **p.cache(paged),
        **new,
    )
    group = p.q.shape[2] // p.k_tree.shape[2]
    for head in range(p.k_tree.shape[2]):
        heads = slice(head * group, (head + 1) * group)
        visible = chosen[:, head, None].expand(-1, p.q.shape[1], -1)
        visible = torch.cat([visible, p.tree_mask & new_keys], -1)
        k, v = (
            torch.cat([cache, tree], 1)[:, :, head : head + 1]
            for cache, tree in ((p.k_cache, p.k_tree), (p.v_cache, p.v_tree))
        )
        exact = dense_attention(p.q[:, :, heads], k, v, visible, sinks=sinks[heads], softcap=3.0)
        assert_accurate(out[:, :, heads], exact[0])
        assert_accurate(lse[:, :, heads], exact[1])


@given(p=problems(), paged=st.booleans())
def test_all_positions_are_the_whole_prefix(p, paged):
    capacity = p.k_cache.shape[1]
    everything = torch.arange(capacity, dtype=torch.int32).expand(len(p.q), -1)
    tree = {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
    new = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    cache = p.cache(paged)
    sparse = reference.sparse_gather_attention(
        p.q, indices=everything, index_lengths=p.cache_seqlens, **cache, **new
    )
    whole = reference.hybrid_tree_attention(p.q, cache_seqlens=p.cache_seqlens, **cache, **tree)
    for actual, exact in zip(sparse, whole, strict=True):
        assert_accurate(actual, exact)


@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "per head"])
def test_nothing_selected_is_the_empty_state(heads):
    p = make_problem(dtype=torch.float64)
    indices = torch.full((2, *heads, 3), -1, dtype=torch.int32)
    lengths = torch.zeros(2, *heads, dtype=torch.int32)
    out, lse = reference.sparse_gather_attention(p.q, p.k_cache, p.v_cache, indices, lengths)
    assert (out == 0).all()
    assert lse.isneginf().all()
