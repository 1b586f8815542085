import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from tests.cases import assert_accurate, dense_attention


def random_state(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    return out, torch.randn(*shape, generator=generator, dtype=torch.float64)


@given(parts=st.integers(1, 5), keys=st.integers(1, 12), seed=st.integers(0, 99))
def test_parts_of_a_softmax_merge_into_the_whole(parts, keys, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, 2, 8, generator=generator, dtype=torch.float64) for n in (3, keys, keys)
    )
    owner = torch.randint(0, parts, (1, 3, keys), generator=generator)
    states = [dense_attention(q, k, v, owner == part) for part in range(parts)]
    merged = reference.merge_states(*map(torch.stack, zip(*states, strict=True)))
    whole = dense_attention(q, k, v, torch.ones_like(owner, dtype=torch.bool))
    for actual, exact in zip(merged, whole, strict=True):
        assert_accurate(actual, exact)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_states_merge_into_one(empty):
    outs, lses = torch.full((3, 2, 1, 4, 8), torch.nan), torch.full((3, 2, 1, 4), empty)
    out, lse = reference.merge_states(outs, lses)
    assert (out == 0).all()
    assert lse.isneginf().all()


@given(seed=st.integers(0, 99), shift=st.sampled_from([0.0, 1e4, -1e4]))
def test_order_does_not_matter_and_large_logits_do_not_overflow(seed, shift):
    outs, lses = random_state(3, 2, 2, 2, seed=seed)
    lses = lses + shift
    whole = reference.merge_states(outs, lses)
    pair = reference.merge_state(outs[2], lses[2], outs[0], lses[0])
    chained = reference.merge_state(outs[1], lses[1], *pair)
    for actual, exact in zip(chained, whole, strict=True):
        assert_accurate(actual, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtype_is_kept_and_sums_are_float32(dtype):
    outs, lses = random_state(4, 2, 2, 2)
    outs, lses = outs.to(dtype), lses.float()
    out, lse = reference.merge_states(outs, lses)
    exact_out, exact_lse = reference.merge_states(outs.double(), lses.double())
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_accurate(out, exact_out, exact_out.to(dtype), atol=1e-6)
    assert_accurate(lse, exact_lse, lses.logsumexp(0), atol=1e-6)
