"""Norms of rows, sums with them and gates: against torch's own operators in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels.rms_norm import add_norm, gate, rms_norm

from specattn.blocks import TORCH, Norm
from tests.layer_steps import DTYPES, check_rows, rows_of

from .conftest import DEVICE, interpreted, mostly

EPS = 1e-5
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "sigmoid"]
shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 200)),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 16, 40, 96, 128, 1001])),
)


def normed(x, weight):
    return TORCH.norm(x, Norm(weight, EPS))


def added(x, more, weight, factor):
    return TORCH.add(x, more if weight is None else normed(more, weight), factor)


@interpreted(60)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_norm_against_float64(shape, dtype, strided, in_place, seed):
    x, weight = rows_of(shape, dtype, seed, strided=strided, count=1)
    given_x = x.to(DEVICE).clone() if not strided else on_device(x)
    out = rms_norm(given_x, weight.to(DEVICE), EPS, given_x if in_place else None)
    assert (out is given_x) == in_place
    check_rows(out.cpu(), normed, x, weight)
    if not in_place:
        assert torch.equal(given_x.cpu(), x)
    elif strided:
        assert given_x._base.isnan().sum() == x._base.isnan().sum()


@interpreted(60)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    weighted=st.booleans(),
    factor=st.sampled_from([1.0, 0.22, -3.0]),
    seed=st.integers(0, 2**16),
)
def test_sum_against_float64(shape, dtype, strided, weighted, factor, seed):
    x, more, weight = rows_of(shape, dtype, seed, strided=strided)
    weight = weight if weighted else None
    given_x = on_device(x) if strided else x.to(DEVICE).clone()
    given_weight = None if weight is None else weight.to(DEVICE)
    out = add_norm(given_x, more.to(DEVICE), factor, given_weight, EPS)
    assert out is given_x
    check_rows(out.cpu(), lambda *tensors: added(*tensors, factor), x, more, weight)


@interpreted(60)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**16),
)
def test_gate_against_float64(shape, dtype, strided, activation, seed):
    x, gates, _ = rows_of(shape, dtype, seed, strided=strided)
    out = gate(*(on_device(t) if strided else t.to(DEVICE) for t in (x, gates)), activation)
    assert out.is_contiguous()
    check_rows(out.cpu(), lambda a, b: TORCH.gate(a, b, activation), x, gates)


def on_device(x):
    """Return a copy of a view with all that is around it."""
    return x._base.to(DEVICE).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def test_parts_of_rows_are_normed_where_they_lie():
    """As `Ops.norm_parts` needs it: some columns of each row, the others untouched."""
    x, _ = rows_of((2, 3, 96), torch.bfloat16, count=1)
    weight = torch.linspace(0.5, 2, 40).bfloat16()
    room = x.to(DEVICE).clone()
    part = room[..., 16:56]
    rms_norm(part, weight.to(DEVICE), EPS, out=part)
    check_rows(room[..., 16:56].cpu(), normed, x[..., 16:56], weight)
    assert torch.equal(room[..., :16].cpu(), x[..., :16])
    assert torch.equal(room[..., 56:].cpu(), x[..., 56:])


@pytest.mark.parametrize("dtype", mostly(*DTYPES[::-1]), ids=str)
def test_a_row_has_the_same_bits_among_any_others(dtype):
    x, more, weight = (t.to(DEVICE) for t in rows_of((7, 200), dtype))
    whole = [rms_norm(x, weight, EPS), gate(x, more, "gelu")]
    whole.append(add_norm(x.clone(), more, 0.5, weight, EPS))
    for row in (0, 5):
        a, b = x[None, row].clone(), more[None, row].clone()
        alone = [rms_norm(a, weight, EPS), gate(a, b, "gelu"), add_norm(a, b, 0.5, weight, EPS)]
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, whole, strict=True))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's words for these
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_everywhere(activation):
    ends = [0.0, -0.0, 1e-30, 90.0, -90.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan]
    x = torch.cat([torch.linspace(-14, 14, 118), torch.tensor(ends)])[None]
    out = gate(torch.ones_like(x).to(DEVICE), x.to(DEVICE), activation).cpu()
    exact = TORCH.gate(torch.ones_like(x).double(), x.double(), activation)
    assert torch.allclose(out.double(), exact, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_three_strides_are_refused():
    x = torch.randn(2, 3, 4, 5, 6, device=DEVICE)[:, :2, :3, :4]
    with pytest.raises(ValueError, match="x: expected rows of two strides at most"):
        rms_norm(x, torch.ones(6, device=DEVICE), EPS)


def test_nothing_at_all():
    x = torch.empty(2, 0, 8, device=DEVICE)
    assert rms_norm(x, torch.ones(8, device=DEVICE), EPS).shape == x.shape
    assert gate(x, x, "silu").shape == x.shape
