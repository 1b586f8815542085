"""Caches of 8 bits in C++ against the numbers they mean: attention, collecting, scores, writing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import _cpu, reference
from tests.cases import assert_accurate, expected, make_problem, problems
from tests.cpu import calls
from tests.cpu.conftest import at_once, each
from tests.cpu.test_attention import DTYPES, LUCK, exact_size, per_isa, tree_of
from tests.eight_bits import CODES, EIGHT_BITS, FORMS, forms, meant, nearest, quantise
from tests.reference.test_eight_bits import as_operators
from tests.writes import make_write

types = pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)


def check(p, form, *, paged=False, in_cache=False, seed=0, isa=None, **options):
    """Hybrid attention over 8 bits errs at most twice as much as torch over their numbers."""
    stored, scales = quantise(p, *form, seed=seed)
    numbers = meant(stored, scales)
    if in_cache:
        size = p.k_tree.shape[1]
        behind = [
            torch.stack([x[n : n + size] for x, n in zip(cache, p.cache_seqlens, strict=True)])
            for cache in (numbers.k_cache, numbers.v_cache)
        ]
        numbers = replace(numbers, k_tree=behind[0], v_tree=behind[1])
    exact, rough = expected(numbers, **options), expected(numbers.to(p.q.dtype), **options)
    for _ in each(isa or _cpu.isa()):
        out, lse = calls.hybrid_tree_attention(
            p.q,
            cache_seqlens=p.cache_seqlens,
            **stored.cache(paged),
            **tree_of(p, in_cache),
            **as_operators(scales[paged], p),
            **options,
        )
        assert_accurate(out, exact[0], rough[0], atol=LUCK)
        assert_accurate(lse, exact[1], rough[1], atol=5e-7 * max(1.0, exact_size(exact[1])))


@at_once
@per_isa
@given(
    p=problems(dtypes=DTYPES, head_dims=(8, 24, 64, 80, 128), tree_in_cache=True),
    form=forms(),
    data=st.data(),
)
def test_hybrid_on_random_problems(isa, p, form, data):
    paged, in_cache = data.draw(st.booleans()), data.draw(st.booleans())
    window = data.draw(st.sampled_from([None, 3, 20]))
    softcap = data.draw(st.sampled_from([0.0, 5.0]))
    options = {"window": window, "softcap": softcap, "paged": paged, "in_cache": in_cache}
    check(p, form[:2], seed=form[2], isa=isa, **options)


@at_once
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 33])
@types
def test_every_number_of_row_tiles(isa, stored, rows):
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 80}
    for dtype in DTYPES:
        p = make_problem((200, 0, 31), rows, **sizes, dtype=dtype, strided=True, tree_in_cache=True)
        check(p, (stored, "inline"), isa=isa)
        check(p, (stored, "tokens"), in_cache=True, paged=True, isa=isa)


@at_once
@types
def test_long_prefixes_are_split_and_merged(isa, stored, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for rows in (1, 16):
        p = make_problem((3000, 700), rows, parents="chain", dtype=torch.bfloat16, page_size=64)
        check(p, (stored, "tokens"), isa=isa)
        check(p, (stored, "heads"), paged=True, window=900, isa=isa)


@types
def test_every_code_is_read_as_torch_reads_it(isa, stored):
    """One key of weight 1 hands out its values; NaN is NaN."""
    codes = CODES.view(stored).view(1, 1, 2, 128)
    q = torch.zeros(1, 1, 2, 128)
    for rows in (1, 9):
        out, _ = calls.hybrid_tree_attention(
            q.expand(1, rows, 2, 128),
            k_cache=torch.zeros_like(codes),
            v_cache=codes,
            cache_seqlens=torch.tensor([1], dtype=torch.int32),
            k_tree=torch.zeros(1, rows, 2, 128),
            v_tree=torch.zeros(1, rows, 2, 128),
            tree_mask=torch.zeros(rows, rows, dtype=torch.bool),
        )
        torch.testing.assert_close(
            out, codes.float().expand_as(out), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("scales", [(2.0**-110,), (2.0**-110, 2.0**-112), (2.0**-110, 1.0)])
@types
def test_scales_of_values_far_from_one(isa, stored, scales):
    """Weights are rounded beside their values' scales, whatever these are; infinity is infinite."""
    keys, rows = len(scales), torch.ones(1, 1, 2, 128)
    codes = torch.linspace(1, 3, 128).round().expand(1, keys, 2, 128).to(stored)
    scale = torch.tensor(scales)[None, :, None].expand(1, keys, 2).contiguous()
    for count in (1, 9):
        given = {
            "q": 0 * rows.expand(1, count, 2, 128).bfloat16(),
            "k_cache": torch.zeros_like(codes),
            "v_cache": codes,
            "cache_seqlens": torch.tensor([keys], dtype=torch.int32),
            "k_tree": torch.zeros(1, count, 2, 128, dtype=torch.bfloat16),
            "v_tree": torch.zeros(1, count, 2, 128, dtype=torch.bfloat16),
            "tree_mask": torch.zeros(count, count, dtype=torch.bool),
        }
        out, _ = calls.hybrid_tree_attention(**given, v_scale=scale)
        exact = (codes.double() * scale[..., None].double()).mean(1, keepdim=True)
        torch.testing.assert_close(out.double(), exact.expand_as(out), rtol=2**-7, atol=0)
        scale[0, -1] = torch.inf
        out, _ = calls.hybrid_tree_attention(**given, v_scale=scale)
        assert (out == torch.inf).all()
        scale[0, -1] = scales[-1]


@per_isa
@given(
    rows=st.sampled_from([1, 2, 3, 9, 33]),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from(EIGHT_BITS),
    form=st.sampled_from(["tokens", "inline"]),
    odd=st.lists(
        st.tuples(
            st.sampled_from(["k_scale", "v_scale"]),
            st.sampled_from([0.0, 1e-42, 1e-38, 1e-20, torch.nan]),
            st.integers(0, 69),
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_odd_scales(isa, rows, dtype, stored, form, odd):
    """Rows of the request that has them say what the reference says, and others nothing else."""
    p = make_problem((6, 70), rows, dtype=dtype)
    cached, scales = quantise(p, stored, form)
    scales = {n: x.clone() for n, x in scales[False].items()}
    for name, value, token in odd:
        scales[name][1, token] = value
    given = {"cache_seqlens": p.cache_seqlens, **tree_of(p, False)}
    found = calls.hybrid_tree_attention(p.q, **cached.cache(), **given, **scales)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    exact = reference.hybrid_tree_attention(p.q.double(), **cached.cache(), **wide, **scales)
    for x, y in zip(found, exact, strict=True):
        assert x.isnan().equal(y.isnan())
        assert x[0].isfinite().all()
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2, equal_nan=True)


@at_once
@pytest.mark.parametrize("form", FORMS)
@types
def test_what_is_collected_and_scored(isa, stored, form):
    for rows, dtype in ((2, torch.bfloat16), (9, torch.float32)):
        p = make_problem((150, 0, 31), rows, dtype=dtype, tree_in_cache=True)
        kept, scales = quantise(p, stored, form)
        numbers, scale = meant(kept, scales), as_operators(scales[False], p)
        for collect in ("scores", "logits"):
            mask = {"collect": collect, "cache_seqlens": p.cache_seqlens, **tree_of(p)}
            exact = reference.verify_attention(
                numbers.q, **numbers.cache(), **mask | tree_of(numbers)
            )[2]
            rounded = numbers.to(dtype)
            torch_s = reference.verify_attention(
                rounded.q, **rounded.cache(), **mask | tree_of(rounded)
            )[2]
            for _ in each(isa):
                got = calls.verify_attention(p.q, **kept.cache(), **mask, **scale)[2]
                assert_accurate(got, exact, torch_s, atol=1e-6)
        exact = reference.importance_scores(numbers.q, numbers.k_cache, p.cache_seqlens)
        torch_s = reference.importance_scores(p.q, rounded.k_cache, p.cache_seqlens)
        for _ in each(isa):
            given = p.q, kept.k_cache, p.cache_seqlens
            got = calls.importance_scores(*given, k_scale=scale["k_scale"])
            assert_accurate(got, exact, torch_s, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 6])
@types
def test_gathered_tokens(isa, stored, rows):
    p = make_problem((150, 0, 31), rows, dtype=torch.bfloat16, page_size=16)
    indices = torch.arange(0, 30, 3, dtype=torch.int32).repeat(3, 1)
    lists = {"indices": indices, "index_lengths": torch.tensor([10, 0, 7], dtype=torch.int32)}
    for form, paged in (("tokens", True), ("inline", False), ("heads", True)):
        kept, scales = quantise(p, stored, form)
        numbers = meant(kept, scales)
        new = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
        out, _ = calls.sparse_gather_attention(
            p.q, **kept.cache(paged), **lists, **new, **as_operators(scales[paged], p)
        )
        both = []
        for dtype in (torch.float64, torch.bfloat16):
            x = numbers.to(dtype)
            new |= {"k_new": x.k_tree, "v_new": x.v_tree}
            both.append(reference.sparse_gather_attention(x.q, **x.cache(paged), **lists, **new)[0])
        assert_accurate(out, *both, atol=LUCK)


@types
def test_ragged_rows_are_their_requests(isa, stored):
    p = make_problem((150, 0, 31), 5, dtype=torch.bfloat16, tree_in_cache=True)
    kept, scales = quantise(p, stored, "tokens")
    scale, lengths = as_operators(scales[False], p), p.cache_seqlens
    starts = torch.tensor([0, 5, 10, 15], dtype=torch.int32)
    ragged = {"cu_seqlens_q": starts, "max_seqlen_q": 5}
    whole = {**kept.cache(), "cache_seqlens": lengths, **scale}
    out, lse = calls.hybrid_tree_attention(p.q.flatten(0, 1), **whole, **ragged)
    plain, plain_lse = calls.hybrid_tree_attention(p.q, **whole)
    assert torch.equal(out.view_as(plain), plain)
    assert torch.equal(lse.view_as(plain_lse), plain_lse)


@types
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_as_the_reference_does(isa, stored, dtype):
    for scale in (1.0, 1e-3, 3e4):
        write = make_write((3, 40), 8, 16, heads=3, head_dim=24, dtype=dtype, scale=scale)
        write.k[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, 0.0])
        write.k[0, 1, 0, 0] = torch.nan
        given = torch.rand(8, 16, 3) * 2
        for scales in (
            (None, None, None, None),
            (torch.rand(3), given, None, None),
            (None, None, torch.ones(8, 16, 3), torch.ones(8, 16, 3, 5)[..., 2]),
        ):
            results = []
            for kernel in (lambda *a: calls.run("write_kv", *a), reference.write_kv):
                caches = torch.zeros(2, 8, 16, 3, 24).to(stored)
                own = [x if x is None else x.clone() for x in scales]
                kernel(write.k, write.v, *caches, write.slots, *own)
                results.append([*caches, *[x for x in own if x is not None]])
            for x, y in zip(*results, strict=True):
                torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)


@types
def test_conversion_of_every_kind_of_float(stored):
    x = torch.randint(-(2**31), 2**31 - 1, (1, 1, 1, 2**14), dtype=torch.int32).view(torch.float32)
    x = torch.where(x.isnan(), 0.0, x)
    small = torch.randn(1, 1, 1, 2**14) * torch.logspace(-6, 6, 2**14)
    table = CODES.view(stored).float().nan_to_num(0.0, 0.0, 0.0)
    ties = (table[1:] + table[:-1])[None, None, None] / 2
    for values in (x, small, ties):
        caches = torch.zeros(2, 1, 1, 1, values.shape[-1]).to(stored)
        slots = torch.zeros(1, 1, dtype=torch.int64)
        _cpu.write_kv(values, values, *caches, slots, *[None] * 4, 1)
        assert torch.equal(caches[0].double(), nearest(values, stored).double())
