"""The combine kernel as the public merges: empty states, any stride, error bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specattn
from specattn import reference
from tests.cases import assert_accurate, restride

from .conftest import DEVICE, interpreted

EMPTY = (-torch.inf, torch.inf)


def states(count, batch, rows, heads, head_dim, dtype, seed, empty=0.4):
    """Return random states of which some are empty, with NaN where an empty one's output is."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, batch, rows, heads, head_dim, generator=generator).to(dtype)
    lses = torch.randn(count, batch, rows, heads, generator=generator) * 8
    kind = torch.rand(lses.shape, generator=generator)
    lses = lses.masked_fill(kind < empty, -torch.inf).masked_fill(kind < empty / 2, torch.inf)
    return outs.masked_fill(lses.isinf()[..., None], torch.nan), lses


@interpreted(20)
@given(
    count=st.integers(1, 5),
    rows=st.integers(1, 5),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_merge_states(count, rows, heads, head_dim, dtype, strided, seed):
    outs, lses = states(count, 2, rows, heads, head_dim, dtype, seed)
    exact_out, exact_lse = reference.merge_states(outs.double(), lses.double())
    given_outs = restride(outs) if strided else outs
    out, lse = specattn.merge_states(given_outs.to(DEVICE), lses.to(DEVICE))
    assert out.dtype == dtype
    by_torch = reference.merge_states(outs, lses)
    assert_accurate(out.cpu(), exact_out, by_torch[0], atol=1e-6)
    assert_accurate(lse.cpu(), exact_lse, by_torch[1], atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_state_is_merge_states_of_two(dtype):
    """Up to rounding: in variants of a kernel a compiler may fuse other products into sums."""
    outs, lses = states(2, 3, 5, 4, 64, dtype, seed=1)
    exact_out, exact_lse = reference.merge_states(outs.double(), lses.double())
    by_torch = reference.merge_states(outs, lses)
    outs, lses = outs.to(DEVICE), lses.to(DEVICE)
    for out, lse in (
        specattn.merge_state(outs[0], lses[0], outs[1], lses[1]),
        specattn.merge_states(outs, lses),
    ):
        assert_accurate(out.cpu(), exact_out, by_torch[0], atol=1e-6)
        assert_accurate(lse.cpu(), exact_lse, by_torch[1], atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("left", EMPTY)
@pytest.mark.parametrize("right", EMPTY)
def test_two_empty_states_merge_into_one(left, right, dtype):
    nothing = torch.full((1, 2, 3, 64), torch.nan, dtype=dtype, device=DEVICE)
    lses = [torch.full((1, 2, 3), value, device=DEVICE) for value in (left, right)]
    out, lse = specattn.merge_state(nothing, lses[0], nothing, lses[1])
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("value", EMPTY)
def test_merging_an_empty_state_changes_nothing(value):
    out = torch.randn(1, 2, 3, 64, device=DEVICE)
    lse = torch.randn(1, 2, 3, device=DEVICE)
    empty = torch.full_like(lse, value)
    merged = specattn.merge_state(out, lse, torch.full_like(out, torch.nan), empty)
    assert torch.equal(merged[0], out)
    torch.testing.assert_close(merged[1], lse, rtol=0, atol=1e-6)
