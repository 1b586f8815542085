"""Values that are a view of their keys, or of another size, and lists of rows, in C++."""

import pytest
import torch
from specattn.reference import merge_state as reference_merge

import specattn
from specattn import reference
from tests.cases import assert_accurate, dense_attention, expected
from tests.cpu import calls
from tests.cpu.conftest import at_once, each
from tests.cpu.test_attention import DTYPES, LUCK, check_hybrid, tree_of
from tests.latents import make_latents
from tests.ragged import make_ragged

SHAPES = [  # D, Dv, whether V is a view of K
    pytest.param(576, 512, True, id="latents"),
    pytest.param(72, 40, True, id="odd"),
    pytest.param(192, 128, False, id="expanded"),
    pytest.param(64, 128, False, id="wide-values"),
    pytest.param(512, 512, False, id="wide-heads"),
]


def make(D, v_dim, shared, lengths=(130, 7), rows=3, **options):
    options = {"q_heads": 8, "scale": 0.5} | options
    return make_latents(lengths, rows, head_dim=D, v_dim=v_dim, shared=shared, **options)


@at_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 4, 16], ids="{} heads".format)
@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES)
def test_hybrid(isa, D, v_dim, shared, heads, dtype):
    p = make(D, v_dim, shared, q_heads=heads, dtype=dtype)
    sinks = torch.linspace(-1, 1, heads)
    check_hybrid(p, isa=isa)
    check_hybrid(p, paged=True, window=70, softcap=2.0, sinks=sinks, isa=isa)


@at_once
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (1, torch.float32),
        (9, torch.bfloat16),
        (1, torch.float16),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((1, torch.bfloat16), (9, torch.float32), (9, torch.float16))
        ),
    ],
    ids=str,
)
def test_128_heads_in_the_cache(isa, rows, dtype):
    p = make(576, 512, True, (700,), rows, q_heads=128, tree_in_cache=True, dtype=dtype, scale=0.2)
    check_hybrid(p, in_cache=True, isa=isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_latents_in_one_row(isa, dtype):
    p = make(80, 64, True, kv_heads=3, q_heads=6, dtype=dtype)
    check_hybrid(p, paged=True)


@at_once
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("heads", [4, 40], ids="{} heads".format)
def test_scores_are_of_whole_keys(isa, heads, per_head):
    p = make(576, 512, True, (130, 7), 4, q_heads=heads, dtype=torch.bfloat16)
    given = {**p.cache(), "cache_seqlens": p.cache_seqlens, **tree_of(p)}
    exact, rough = expected(p.to(torch.float64)), expected(p)
    means = [
        reference.importance_scores(x.q, x.k_cache, x.cache_seqlens, per_head)
        for x in (p.to(torch.float64), p)
    ]
    for _ in each(isa):
        out, lse, scores = calls.verify_attention(
            p.q, **given, collect_rows=range(4), per_head=per_head
        )
        assert_accurate(out, exact[0], rough[0], atol=LUCK)
        assert_accurate(scores, *means, atol=2e-5)
        got = calls.importance_scores(p.q, p.k_cache, p.cache_seqlens, per_head)
        assert_accurate(got, *means, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_of_whole_keys(isa, dtype):
    p = make(576, 512, True, dtype=dtype)
    given = {**p.cache(), "cache_seqlens": p.cache_seqlens, **tree_of(p)}
    _, _, logits = calls.verify_attention(p.q, **given, collect="logits")
    exact = torch.einsum(
        "brhd,bnd->brhn", *(x.double() for x in (p.q[:, [0, -1]], p.k_cache[:, :, 0]))
    )
    live = (torch.arange(exact.shape[-1]) < p.cache_seqlens[:, None])[:, None, None]
    exact = (exact * 576**-0.5).masked_fill(~live, -torch.inf)
    assert_accurate(logits, exact, exact.bfloat16(), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_values_merge(isa, dtype):
    p = make(576, 512, True, dtype=dtype)
    everything = torch.arange(130, dtype=torch.int32).repeat(2, 1)
    chosen = calls.sparse_gather_attention(p.q, p.k_cache, p.v_cache, everything, p.cache_seqlens)
    tree = calls.tree_attention(p.q, p.k_tree, p.v_tree, p.tree_mask)
    merged = calls.merge_state(*chosen, *tree)
    exact = reference_merge(*(x.double() for x in (*chosen, *tree)))
    rough = reference_merge(*chosen, *tree)
    assert_accurate(merged[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(merged[1], exact[1], rough[1], atol=LUCK)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("heads", [2, 16], ids="{} heads".format)
def test_latents_of_8_bits(isa, heads, dtype):
    p = make(576, 512, True, q_heads=heads, dtype=torch.bfloat16)
    stored = p.k_cache.nan_to_num(0).float().mul(20).round().to(dtype)
    scale = torch.rand(p.k_cache.shape[:-1]) * 0.05 + 0.02
    options = {"k_scale": scale, "v_scale": scale}
    got = specattn.hybrid_tree_attention(
        p.q, stored, stored[..., :512], p.cache_seqlens, p.k_tree, p.v_tree, p.tree_mask, **options
    )
    p.k_cache = stored.double() * scale.double()[..., None]
    p.v_cache = p.k_cache[..., :512]
    exact = expected(p.to(torch.float64))
    assert_accurate(got[0], exact[0], expected(p.to(torch.bfloat16))[0], atol=LUCK)


def row_lists(p, size=40):
    generator = torch.Generator().manual_seed(3)
    shape = (*p.q.shape[:2], size)
    indices = torch.full(shape, 2**30, dtype=torch.int32)
    counts = torch.zeros(shape[:2], dtype=torch.int32)
    for b, t in torch.ones(shape[:2]).nonzero().tolist():
        cached = int(p.cache_seqlens[b])
        count = min(size, cached) - t
        indices[b, t, :count] = torch.randperm(cached, generator=generator)[:count].int()
        counts[b, t] = count
    return indices, counts


def of_rows(p, indices, counts, **options):
    """Return what PyTorch makes of each row's own keys."""
    N, rows = p.k_cache.shape[1], p.q.shape[1]
    taken = torch.zeros(len(p.q), rows, N, dtype=torch.bool)
    for b, t in counts.nonzero().tolist():
        count = int(counts[b, t])
        places = indices[b, t, :count].long() if count > 0 else slice(int(p.cache_seqlens[b]))
        taken[b, t, places] = True
    k, v = torch.cat([p.k_cache, p.k_tree], 1), torch.cat([p.v_cache, p.v_tree], 1)
    return dense_attention(p.q, k, v, torch.cat([taken, p.tree_mask], -1), **options)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("parents", [None, "chain"], ids=["tree", "chain"])
@pytest.mark.parametrize(("D", "v_dim", "shared"), SHAPES[:2])
def test_lists_of_rows(isa, D, v_dim, shared, parents, paged):
    p = make(D, v_dim, shared, tree_size=5, parents=parents)
    indices, counts = row_lists(p)
    counts[0, 1] = -1  # the whole prefix
    cache = p.cache(paged)
    got = specattn.sparse_gather_attention(
        p.q, cache["k_cache"], cache["v_cache"], indices, counts, p.k_tree, p.v_tree,
        p.tree_mask if parents is None else None, block_table=cache.get("block_table"),
        cache_seqlens=p.cache_seqlens, per_row=True,
    )  # fmt: skip
    exact, rough = (of_rows(x, indices, counts) for x in (p.to(torch.float64), p))
    assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(got[1], exact[1], rough[1], atol=2e-6)


def test_lists_of_ragged_rows(isa):
    r = make_ragged((3, 1, 0, 5))
    tokens = len(r.q)
    generator = torch.Generator().manual_seed(0)
    owner = [b for b, count in enumerate(r.rows) for _ in range(count)]
    counts = torch.tensor([min(4, int(r.whole.cache_seqlens[b])) for b in owner]).int()
    indices = torch.zeros(tokens, 4, dtype=torch.int32)
    for row, b in enumerate(owner):
        order = torch.randperm(int(r.whole.cache_seqlens[b]), generator=generator)
        indices[row, : counts[row]] = order[: counts[row]].int()
    given = r.arguments(paged=True, new=True)
    got = specattn.sparse_gather_attention(
        **given, indices=indices, index_lengths=counts, per_row=True
    )
    for index, rows, p in r.requests():
        lists = {"indices": indices[None, rows], "index_lengths": counts[None, rows]}
        alone = specattn.sparse_gather_attention(
            p.q, p.k_cache, p.v_cache, **lists, k_new=p.k_tree, v_new=p.v_tree,
            tree_mask=p.tree_mask, per_row=True,
        )  # fmt: skip
        assert torch.equal(got[0][rows], alone[0][0]), index
        exact = of_rows(p.to(torch.float64), *lists.values())
        assert_accurate(got[0][None, rows], exact[0], of_rows(p, *lists.values())[0], atol=LUCK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": 999}, "indices: expected values from 0 to"),
        ({"index_lengths": 41}, "index_lengths: expected values from 0 to 40"),
        ({"index_lengths": -1}, "index_lengths: expected values from 0 to 40 without"),
    ],
)
def test_wrong_lists_of_rows(isa, change, message):
    p = make(72, 40, True)
    indices, counts = row_lists(p)
    lists = {"indices": indices, "index_lengths": counts}
    for name, value in change.items():
        lists[name][1, 2] = value
        if name == "indices":
            counts[1, 2] = 3
    with pytest.raises(IndexError, match=message):
        specattn.sparse_gather_attention(p.q, p.k_cache, p.v_cache, **lists, per_row=True)
