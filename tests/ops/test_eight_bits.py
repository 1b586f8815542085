"""Caches of 8 bits through the public functions, on every backend that is there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specattn
from tests.cases import assert_accurate, expected, make_problem, problems
from tests.eight_bits import EIGHT_BITS, forms, meant, quantise
from tests.ops.calls import valid_calls

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=25)
@given(problems(dtypes=FLOATING, tree_in_cache=True), forms(), st.booleans(), st.booleans())
def test_attention_is_that_to_the_numbers_that_are_meant(p, form, paged, in_cache):
    stored, scales = quantise(p, *form[:2], seed=form[2])
    numbers = meant(stored, scales)
    call = {"q": p.q, **stored.cache(paged), "cache_seqlens": p.cache_seqlens, **scales[paged]}
    call |= {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
    exact = numbers
    if in_cache:
        call |= {"k_tree": None, "v_tree": None}
        k, v = (_behind(x, p) for x in (numbers.k_cache, numbers.v_cache))
        exact = numbers.__class__(**{**vars(numbers), "k_tree": k, "v_tree": v})
    want, lse = expected(exact)
    plain, plain_lse = expected(exact.to(p.q.dtype))
    out, got = specattn.hybrid_tree_attention(**call)
    assert_accurate(out, want, plain, atol=1e-6)
    assert_accurate(got, lse, plain_lse, atol=1e-6)


def _behind(cache, p):
    """Return the tokens of the tree, which lie behind each prefix."""
    size = p.k_tree.shape[1]
    return torch.stack([x[n : n + size] for x, n in zip(cache, p.cache_seqlens, strict=True)])


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_bytes_of_uint8_caches_are_what_is_said(dtype):
    stored, scales = quantise(make_problem(), dtype, "tokens")
    for name in ("hybrid_tree_attention", "importance_scores", "sparse_gather_attention"):
        function, arguments = valid_calls(stored)[name]
        used = {n: x for n, x in scales[False].items() if f"{n[0]}_cache" in arguments}
        as_bytes = {
            n: x.view(torch.uint8) if n in ("k_cache", "v_cache") else x
            for n, x in arguments.items()
        }
        for x, y in zip(
            function(**arguments, **used),
            function(**as_bytes, **used, cache_dtype=dtype),
            strict=True,
        ):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"v_cache": lambda x: x.view(torch.float8_e5m2)},
            TypeError,
            "v_cache: expected torch.int8 as k_cache, got torch.float8_e5m2",
        ),
        (
            {"k_scale": lambda x: x[:, :4]},
            ValueError,
            r"k_scale: expected shape \[\] or \[Hk=2\] or \[B=2, N=16, Hk=2\], got",
        ),
        ({"v_scale": lambda x: x.double()}, TypeError, "v_scale: expected torch.float32, got"),
        (
            {"k_cache": lambda x: x.view(torch.uint8)},
            TypeError,
            "k_cache: expected torch.float32 or torch.int8 or .*, got torch.uint8",
        ),
    ],
)
def test_wrong_arguments(change, error, message):
    stored, scales = quantise(make_problem(), torch.int8, "tokens")
    function, arguments = valid_calls(stored)["hybrid_tree_attention"]
    arguments |= scales[False]
    arguments |= {name: wrong(arguments[name]) for name, wrong in change.items()}
    with pytest.raises(error, match=f"^{message}"):
        function(**arguments)
