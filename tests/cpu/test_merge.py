"""Merging states in C++ against the reference, empty states and infinities included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import reference
from tests.cases import assert_accurate, restride
from tests.cpu import calls

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LUCK = 3e-7
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def states(count, heads, head_dim, dtype, seed):
    """Return random states, some of which are empty in either notation."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, 2, 3, heads, head_dim, generator=generator).to(dtype)
    lses = torch.randn(count, 2, 3, heads, generator=generator) * 5
    draw = torch.rand(lses.shape, generator=generator)
    lses[draw < 0.3] = -torch.inf
    lses[draw < 0.1] = torch.inf
    outs[lses.isinf()] = 0
    return outs, lses


@per_isa
@given(
    count=st.integers(1, 9),
    heads=st.sampled_from([1, 5, 16, 37]),
    head_dim=st.sampled_from([8, 40, 64, 256]),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_merging(isa, count, heads, head_dim, dtype, strided, seed):
    outs, lses = states(count, heads, head_dim, dtype, seed)
    exact = reference.merge_states(outs.double(), lses.double())
    rough = reference.merge_states(outs, lses)
    if strided:
        outs = torch.stack([restride(x) for x in outs]) if count == 1 else restride(outs)
    got = calls.merge_states(outs, lses)
    assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(got[1], exact[1], rough[1], atol=2e-6)
    if count == 2:
        pair = calls.merge_state(outs[0], lses[0], outs[1], lses[1])
        assert torch.equal(pair[0], got[0])
        assert torch.equal(pair[1], got[1])


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_an_empty_state_changes_nothing(isa, empty):
    outs, lses = torch.randn(2, 1, 2, 3, 64), torch.randn(2, 1, 2, 3)
    outs[1], lses[1] = 0, empty
    out, lse = calls.merge_state(outs[0], lses[0], outs[1], lses[1])
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


def test_two_empty_states_make_one(isa):
    zero, empty = torch.zeros(1, 2, 3, 64), torch.full((1, 2, 3), -torch.inf)
    out, lse = calls.merge_state(zero, empty, zero, -empty)
    assert (out == 0).all()
    assert lse.isneginf().all()
