"""The attention kernel family against dense float64 attention, through the public primitives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import _configs

import specattn
from tests.cases import (
    EAGLE_PARENTS,
    MEDUSA_PARENTS,
    assert_accurate,
    dense_attention,
    expected,
    make_problem,
    problems,
    restride,
)

from .conftest import DEVICE, WHOLE, interpreted, mostly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hybrid(p, *, paged=False, tree_in_cache=False, **options):
    p = p.to(device=DEVICE)
    tree = (None, None) if tree_in_cache else (p.k_tree, p.v_tree)
    return specattn.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        k_tree=tree[0],
        v_tree=tree[1],
        **{"tree_mask": p.tree_mask} | p.cache(paged) | options,
    )


def assert_as_good_as_torch(actual, p, **options):
    """Bound the error of a state by twice that of eager PyTorch in the same dtype."""
    exact_out, exact_lse = expected(p.to(torch.float64), **options)
    torch_out, _ = expected(p, **options)
    _, torch_lse = expected(p.to(torch.float32), **options)
    out, lse = (x.cpu() for x in actual)
    assert out.dtype == p.q.dtype
    assert_accurate(out, exact_out, torch_out, atol=1e-6)
    assert_accurate(lse, exact_lse, torch_lse, atol=2e-6)


@interpreted(20)
@given(
    p=problems(max_length=70, dtypes=DTYPES),
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_hybrid_agrees_with_dense_attention(p, paged, window, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, p.q.shape[2]) if with_sinks else None
    options = {"window": window, "softcap": softcap}
    on_device = options | {"sinks": sinks.to(DEVICE) if with_sinks else None}
    assert_as_good_as_torch(hybrid(p, paged=paged, **on_device), p, **options, sinks=sinks)


@interpreted(10)
@given(
    p=problems(max_length=70, dtypes=DTYPES, tree_in_cache=True),
    paged=st.booleans(),
    window=st.sampled_from([None, 2]),
)
def test_the_tree_may_lie_in_the_cache(p, paged, window):
    actual = hybrid(p, paged=paged, tree_in_cache=True, window=window)
    assert_as_good_as_torch(actual, p, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", mostly(80, 64, 96, 128, 256))
def test_head_dimensions(dtype, head_dim):
    p = make_problem((50, 7), 5, head_dim=head_dim, dtype=dtype)
    assert_as_good_as_torch(hybrid(p), p)


@pytest.mark.parametrize("parents", [EAGLE_PARENTS, MEDUSA_PARENTS], ids=["eagle", "medusa"])
@pytest.mark.parametrize("window", mostly(3, None))
def test_published_trees(parents, window):
    p = make_problem((40, 0), len(parents), parents=parents, kv_heads=1, dtype=torch.bfloat16)
    assert_as_good_as_torch(hybrid(p, window=window), p, window=window)


@pytest.mark.parametrize(
    ("rows", "tree_size"),
    [(3, 130), pytest.param(69, 69, marks=WHOLE), pytest.param(1, 64, marks=WHOLE)],
)
@pytest.mark.parametrize("packed", mostly(True, False), ids=["packed", "bool"])
def test_masks_of_many_words(rows, tree_size, packed):
    p = make_problem((20, 33), rows, tree_size=tree_size, kv_heads=1, dtype=torch.bfloat16)
    mask = specattn.reference.pack_tree_mask(p.tree_mask) if packed else p.tree_mask
    assert_as_good_as_torch(hybrid(p, tree_mask=mask.to(DEVICE)), p)


@pytest.mark.parametrize(
    ("rows", "in_cache"),
    [
        pytest.param(37, True, id="drafted-in_cache"),
        pytest.param(_configs.DRAFTED + 70, False, id="prompt-apart"),
        pytest.param(37, False, id="drafted-apart", marks=WHOLE),
        pytest.param(_configs.DRAFTED + 70, True, id="prompt-in_cache", marks=WHOLE),
    ],
)
@pytest.mark.parametrize("window", mostly(5, None, 60))
def test_no_mask_is_a_causal_chain(rows, window, in_cache):
    p = make_problem((40, 3), rows, parents="chain", dtype=torch.float16, tree_in_cache=in_cache)
    options = {"tree_mask": None, "window": window, "paged": in_cache}
    assert_as_good_as_torch(hybrid(p, tree_in_cache=in_cache, **options), p, window=window)


def test_a_prompt_may_follow_keys_of_its_own():
    rows = _configs.DRAFTED + 1
    p = make_problem((40, 3), rows, tree_size=rows + 9, kv_heads=1, dtype=torch.bfloat16)
    ahead = torch.arange(rows + 9) <= torch.arange(rows)[:, None] + 9
    p.tree_mask = ahead.expand(2, -1, -1)
    assert_as_good_as_torch(hybrid(p, tree_mask=None), p)


def test_rows_that_see_nothing_are_empty_states():
    p = make_problem((0, 5), 4)
    p.tree_mask[:, 1] = False
    out, lse = hybrid(p)
    assert (out[0, 1] == 0).all()
    assert lse[0, 1].isneginf().all()
    assert_as_good_as_torch((out, lse), p)


@pytest.mark.parametrize("dtype", mostly(*DTYPES), ids=str)
def test_one_key_with_an_extreme_logit(dtype):
    p = make_problem((1,), 1, kv_heads=1, dtype=dtype)
    q = torch.full_like(p.q, 255.0)
    p.q, p.k_cache[:, 0] = q, -255.0
    p.tree_mask[:] = False
    out, lse = hybrid(p, softmax_scale=0.125)
    assert torch.equal(out.cpu(), p.v_cache[:, :1].expand_as(out))
    torch.testing.assert_close(lse.cpu(), torch.full_like(lse.cpu(), -(255.0**2) * 64 / 8))


def test_a_request_does_not_depend_on_its_neighbours():
    p = make_problem((70, 3, 41), 4, dtype=torch.bfloat16)
    together = hybrid(p)
    for b in range(3):
        alone = hybrid(p.request(b))
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x[b : b + 1], y)


def test_results_land_in_the_buffers_that_are_given():
    p = make_problem((40, 9), 3, strided=True, dtype=torch.bfloat16).to(device=DEVICE)
    out = restride(torch.zeros_like(p.q))
    lse = torch.zeros(p.q.shape[:2] + (p.q.shape[2] + 3,), device=DEVICE)[..., : p.q.shape[2]]
    results = hybrid(p, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_as_good_as_torch(results, p.to(device="cpu"))


@interpreted(12)
@given(p=problems(max_length=0, dtypes=DTYPES), softcap=st.sampled_from([0.0, 2.0]))
def test_tree_attention_agrees_with_dense_attention(p, softcap):
    on_device = p.to(device=DEVICE)
    tensors = (on_device.q, on_device.k_tree, on_device.v_tree, on_device.tree_mask)
    actual = specattn.tree_attention(*tensors, softcap=softcap)
    assert_as_good_as_torch(actual, p, prefix=False, softcap=softcap)


@interpreted(20)
@given(
    p=problems(max_length=60, dtypes=DTYPES),
    each=st.sampled_from(["row", "head", "request"]),
    paged=st.booleans(),
    with_tree=st.booleans(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sparse_gather_agrees_with_dense_attention(p, each, paged, with_tree, with_sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    (batch, capacity, kv_heads), group = p.k_cache.shape[:3], p.q.shape[2] // p.k_cache.shape[2]
    lists = {"row": p.q.shape[1], "head": kv_heads, "request": 1}[each]
    live = torch.arange(capacity) < p.cache_seqlens[:, None, None]
    chosen = live & (torch.rand(batch, lists, capacity, generator=generator) < 0.6)
    lengths = chosen.sum(-1).int()
    never_read = 2**30
    indices = torch.where(chosen, torch.arange(capacity), never_read).sort(-1).values.int()
    if each == "request":
        indices, lengths = indices[:, 0], lengths[:, 0]
    sinks = torch.linspace(-2, 3, p.q.shape[2]) if with_sinks else None

    on_device = p.to(device=DEVICE)
    tree = (on_device.k_tree, on_device.v_tree, on_device.tree_mask) if with_tree else ()
    out, lse = specattn.sparse_gather_attention(
        on_device.q,
        on_device.cache(paged)["k_cache"],
        on_device.cache(paged)["v_cache"],
        indices.to(DEVICE),
        lengths.to(DEVICE),
        *tree,
        block_table=on_device.cache(paged).get("block_table"),
        sinks=sinks.to(DEVICE) if with_sinks else None,
        per_row=each == "row",
    )

    def oracle(dtype, head):
        x, h = p.to(dtype), slice(head * group, (head + 1) * group)
        k = torch.cat([x.k_cache, x.k_tree], 1)[:, :, head : head + 1]
        v = torch.cat([x.v_cache, x.v_tree], 1)[:, :, head : head + 1]
        in_prefix = chosen
        if each != "row":
            in_prefix = chosen[:, min(head, lists - 1), None].expand(-1, p.q.shape[1], -1)
        visible = torch.cat([in_prefix, p.tree_mask & with_tree], -1)
        own_sinks = sinks[h].to(dtype) if with_sinks else None
        return dense_attention(x.q[:, :, h], k, v, visible, sinks=own_sinks)

    for head in range(kv_heads):
        h = slice(head * group, (head + 1) * group)
        exact_out, exact_lse = oracle(torch.float64, head)
        assert_accurate(out[:, :, h].cpu(), exact_out, oracle(p.q.dtype, head)[0], atol=1e-6)
        assert_accurate(lse[:, :, h].cpu(), exact_lse, oracle(torch.float32, head)[1], atol=2e-6)


@pytest.mark.parametrize("block_m", mostly(32, 16, 128))
def test_tiles_do_not_change_the_result(block_m):
    p = make_problem((70, 12), 11, q_heads=8, kv_heads=2, dtype=torch.bfloat16)
    with _configs.forced(block_m=block_m, block_n=32, split_size=64):
        assert_as_good_as_torch(hybrid(p), p)
