"""Caches of 8 bits: what they mean, how numbers are rounded to them, and what odd scales do."""

import pytest
import torch
from hypothesis import given
from specattn.reference._eight_bits import LEAST_SCALE, MOST, dynamic_scale, quantised

from specattn import reference
from tests.cases import assert_accurate, expected, make_problem, problems
from tests.eight_bits import EIGHT_BITS, forms, meant, nearest, quantise, representable

types = pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)


@given(problems(tree_in_cache=True), forms())
def test_attention_is_that_to_the_numbers_that_are_meant(p, form):
    stored, scales = quantise(p, *form[:2], seed=form[2])
    numbers = meant(stored, scales)
    want, lse = expected(numbers)
    for paged in (False, True):
        call = {
            **stored.cache(paged),
            "cache_seqlens": p.cache_seqlens,
            **as_operators(scales[paged], p),
        }
        call |= {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
        out, got = reference.hybrid_tree_attention(p.q, **call)
        assert_accurate(out, want)
        assert_accurate(got, lse)
        plain = {**numbers.cache(paged), "cache_seqlens": p.cache_seqlens}
        keys = {
            n: x
            for n, x in call.items()
            if n in ("k_cache", "k_scale", "cache_seqlens", "block_table")
        }
        plain_keys = {n: x for n, x in plain.items() if n != "v_cache"}
        scores = reference.importance_scores(p.q, **keys)
        assert_accurate(scores, reference.importance_scores(p.q, **plain_keys))


def as_operators(scales, p):
    """Return scales as an operator takes them."""
    heads = p.k_tree.shape[2]
    return {
        name: x if x is None or getattr(x, "ndim", 0) else torch.tensor(float(x)).expand(heads)
        for name, x in scales.items()
    }


@types
def test_rounds_to_the_nearest_number_and_to_even_on_ties(dtype):
    table = representable(dtype)
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat([table, middles, middles.nextafter(table[1:]), middles.nextafter(table[:-1])])
    x = torch.cat([x, torch.randn(4096, dtype=torch.float64) * 50, x.new_tensor([1e30, -1e30])])
    x = x.float()
    got = quantised(x[:, None], None, dtype)[:, 0]
    assert torch.equal(got.double(), nearest(x, dtype).double())


@types
def test_what_is_no_number_or_too_large(dtype):
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38]])
    got = quantised(x, None, dtype).double()[0]
    most = MOST[dtype]
    assert got[0] == got[3] == most
    assert got[1] == -most
    assert got[2] == 0 if dtype == torch.int8 else got[2].isnan()
    assert quantised(x[:, 3:], torch.zeros(1), dtype).double() == most


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float8_e4m3fn, 0.0258), (torch.float8_e5m2, 0.0514)], ids=str
)
def test_rows_of_unit_normals(dtype, error):
    """A store that truncates has twice the error, and sums 4.5% low."""
    x = torch.randn(2**13, 128, generator=torch.Generator().manual_seed(0))
    scale = dynamic_scale(x, dtype)
    got = quantised(x, scale, dtype).float() * scale[:, None]
    assert (got - x).square().mean().sqrt() <= error
    assert abs(got.abs().sum() / x.abs().sum() - 1) <= 0.003


@types
def test_dynamic_scales_reach_the_largest_number(dtype):
    x = torch.randn(7, 3, 64) * torch.logspace(0, 3, 7)[:, None, None]
    scale = dynamic_scale(x, dtype)
    stored = quantised(x, scale, dtype).double()
    assert torch.equal(stored.abs().amax(-1), torch.full((7, 3), MOST[dtype], dtype=torch.float64))
    assert dynamic_scale(torch.zeros(1, 8), dtype) == LEAST_SCALE
    for odd in (torch.nan, torch.inf):
        row = torch.ones(1, 8)
        row[0, 3] = odd
        scale = dynamic_scale(row, dtype)
        assert (quantised(row, scale, dtype).float() * scale[:, None])[0, :4].isnan().any()


@pytest.mark.parametrize("form", ["heads", "tokens", "inline"])
@types
def test_rows_that_see_a_scale_of_nan_say_nan_and_no_others(dtype, form):
    p = make_problem((6, 9), 2, dtype=torch.float64)
    stored, scales = quantise(p, dtype, form)
    scales = {n: x.clone() for n, x in scales[False].items()}
    scales["v_scale"][0 if form == "heads" else (0, 5)] = torch.nan
    out, _ = reference.hybrid_tree_attention(
        p.q,
        **stored.cache(),
        cache_seqlens=p.cache_seqlens,
        k_tree=p.k_tree,
        v_tree=p.v_tree,
        **scales,
    )
    group = out.unflatten(2, (2, 2))
    wrong = group[:, :, 0] if form == "heads" else group[0]
    assert wrong.isnan().all()
    assert not (group[:, :, 1] if form == "heads" else group[1]).isnan().any()
