"""Ragged queries in the reference, against the oracle on each request alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from tests.cases import assert_accurate, dense_attention, expected
from tests.ragged import make_ragged, ragged_batches

masks = st.sampled_from(["bool", "packed"])


def assert_same(actual, exact):
    for x, y in zip(actual, exact, strict=True):
        assert_accurate(x, y)


def assert_same_bits(actual, expected):
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@given(
    r=ragged_batches(),
    mask=masks,
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_agrees_with_dense_attention(r, mask, paged, window, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, r.q.shape[1], dtype=torch.float64) if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    found = reference.hybrid_tree_attention(**r.arguments(paged=paged, mask=mask), **options)
    assert found[0].shape == r.q.shape
    assert found[1].shape == r.q.shape[:2]
    for _, rows, p in r.requests():
        assert_same([x[None, rows] for x in found], expected(p, **options))


@given(r=ragged_batches(parents="chain"), window=st.sampled_from([None, 1, 2, 9]))
def test_no_mask_is_a_causal_chain_per_request(r, window):
    found = reference.hybrid_tree_attention(**r.arguments(mask=None), window=window)
    for _, rows, p in r.requests():
        assert_same([x[None, rows] for x in found], expected(p, window=window))


@given(r=ragged_batches(tree_in_cache=True), paged=st.booleans(), window=st.sampled_from([None, 3]))
def test_tree_in_the_cache_is_the_tree_given(r, paged, window):
    found, given_apart = (
        reference.hybrid_tree_attention(**r.arguments(paged=paged, in_cache=inside), window=window)
        for inside in (True, False)
    )
    assert_same_bits(found, given_apart)


@given(
    r=ragged_batches(),
    chosen=st.lists(st.integers(-5, 5), min_size=1, max_size=3),
    paged=st.booleans(),
    window=st.sampled_from([None, 3]),
    form=st.sampled_from(
        [{"collect": "logits"}, {"collect": "scores"}, {"collect": "scores", "per_head": False}]
    ),
)
def test_collected_rows_are_those_of_each_request(r, chosen, paged, window, form):
    collect = {**form, "collect_rows": chosen, "window": window}
    *state, collected = reference.verify_attention(**r.arguments(paged=paged), **collect)
    plain = reference.hybrid_tree_attention(**r.arguments(paged=paged), window=window)
    assert_same_bits(state, plain)
    assert len(collected) == len(r.rows)
    for index, _, p in r.requests():
        last = r.rows[index] - 1
        rows = [min(row, last) if row >= 0 else max(last + 1 + row, 0) for row in chosen]
        tree = {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
        lengths = {"cache_seqlens": p.cache_seqlens, "window": window}
        alone = reference.verify_attention(
            p.q, **p.cache(paged), **lengths, **tree, **form, collect_rows=rows
        )
        assert torch.equal(collected[index : index + 1], alone[2])
    for index, count in enumerate(r.rows):
        assert count > 0 or collected[index].isneginf().all()


@given(r=ragged_batches(), paged=st.booleans(), per_head=st.booleans(), new=st.booleans())
def test_gathered_lists_and_whole_prefixes(r, paged, per_head, new):
    generator = torch.Generator().manual_seed(len(r.q))
    lengths, heads = r.whole.cache_seqlens, r.k_tree.shape[1]
    lists = torch.full((len(lengths), heads if per_head else 1, 4), 2**30, dtype=torch.int32)
    counts = torch.zeros(lists.shape[:2], dtype=torch.int32)
    for b, h in torch.ones_like(counts).nonzero().tolist():
        order = torch.randperm(int(lengths[b]), generator=generator)[:4].int()
        lists[b, h, : len(order)] = order
        counts[b, h] = -1 if torch.rand((), generator=generator) < 0.5 else len(order)
    arguments = r.arguments(paged=paged, in_cache=not new, new=True)
    arguments |= {} if new else {"tree_mask": None}
    found = reference.sparse_gather_attention(
        indices=lists if per_head else lists[:, 0],
        index_lengths=counts if per_head else counts[:, 0],
        cache_seqlens=lengths,
        **arguments,
    )
    for b, rows, p in r.requests():
        for head in range(heads):
            places = lists[b, head if per_head else 0].long()
            count = int(counts[b, head if per_head else 0])
            places = torch.arange(int(lengths[b])) if count < 0 else places[:count]
            k, v = (
                torch.cat([cache[:, places, head], tree[:, :, head]], 1)[:, :, None]
                for cache, tree in ((p.k_cache, p.k_tree), (p.v_cache, p.v_tree))
            )
            seen = torch.ones(1, p.q.shape[1], len(places), dtype=torch.bool)
            visible = torch.cat([seen, p.tree_mask & new], -1)
            exact = dense_attention(p.q.chunk(heads, 2)[head], k, v, visible)
            assert_same([x[None, rows].chunk(heads, 2)[head] for x in found], exact)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_length_of_minus_one_is_the_list_of_all_positions(paged):
    r = make_ragged((2, 2), (5, 12), dtype=torch.float64)
    p = r.whole
    new = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask, **p.cache(paged)}
    everything = torch.arange(12, dtype=torch.int32).expand(2, -1)
    listed = reference.sparse_gather_attention(
        p.q, indices=everything, index_lengths=p.cache_seqlens, **new
    )
    minus_one = reference.sparse_gather_attention(
        p.q,
        indices=everything[:, :3] * 0 + 2**30,
        index_lengths=torch.full((2,), -1, dtype=torch.int32),
        cache_seqlens=p.cache_seqlens,
        **new,
    )
    assert_same_bits(minus_one, listed)
